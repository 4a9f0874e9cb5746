"""How many replicas of each role run, on which nodes, and when that changes.

Enter: counters and gauges of replicas, nodes, a configuration. Leave: plans. Pure except files named ``ray_*``. The
modules here are values that all rooms share, and ``ray_policy``, through which Ray Serve's controller calls us.
``decide`` explains the terms: pool, tick, leader and follower, held, warm, withdrawn, victim, claim.
"""
