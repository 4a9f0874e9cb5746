"""The private parts of Ray Serve that deployments use, and the environment of Serve's processes.

Enters: Ray Serve of exactly the pinned version. Leaves: functions that say what they need of Serve and what happens
without it (``docs/seams.md`` lists them). No other room reaches into Ray's private parts, except files named ``ray_*``.
"""
