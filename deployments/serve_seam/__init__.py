"""The private parts of Ray Serve that deployments use, and the environment of Serve's processes.

Enters: Ray Serve of exactly the pinned version. Leaves: functions that name the parts they need, and what happens
without them (``docs/seams.md``). No other room uses private parts of Ray, except files named ``ray_*``.
"""
