"""Decisions about one application at one instant: replica counts of each role and group, and the replicas that serve.

Enters: snapshots (``autoscale.types``), configuration, nodes and their topology, and the wish of a policy of
``autoscale.policies``. Leaves: plans, and lines of the decision log. Everything here is pure: no clock, no Ray, no file
but the log that is replayed. ``cycle`` decides about all services of an application, ``controller`` about one, by
stages that stand beside their rules. Each stage takes a ``Draft`` and nothing else, so it can be tested alone.
``status`` has the messages between processes. Cooldowns, limits, budgets and placement are here and nowhere else.
"""
