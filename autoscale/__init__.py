"""How many replicas of each role run, on which nodes, and when that changes.

Enter: counters and gauges of replicas, nodes, a configuration. Leave: plans. Pure except files named ``ray_*``. The
modules here are nouns that all rooms share, and ``ray_policy``, the door for Serve.
"""
