"""The second shell of the controller: a virtual cluster under a virtual clock, and comparisons on it (pure).

Enters: a SimConfig and a trace. Leaves: runs, their outcomes, and the bounds that policies are compared with. Decisions
come from ``autoscale.decide`` and routes from ``router``: the simulator has no copy of any rule of theirs.
"""
