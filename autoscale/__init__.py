"""How many replicas, where and when.

Enter: counters and gauges of replicas, nodes, a configuration. Leave: a plan. Pure except files named ``ray_*``; the
modules here are the nouns that all rooms share, and Serve's door, ``ray_policy``.
"""
