"""The decision about one application at one instant: how many replicas of each role, in which groups, which serve.

Enters: snapshots (``autoscale.types``), configuration, nodes and their topology, and what a policy of
``autoscale.policies`` wants. Leaves: plans, and lines of the decision log. Everything here is pure: no clock, no Ray,
no file but the log that is replayed. ``cycle`` decides about all services of an application, ``controller`` about one,
by stages that stand beside the rules which they apply: each takes a ``Draft`` and nothing else, so it can be tested
alone. ``status`` has what processes tell each other of it. Policies say what they want; cooldowns, limits, budgets and
placement are here and nowhere else.
"""
