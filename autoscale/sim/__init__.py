"""The controller on a virtual cluster, under a virtual clock, and comparisons of policies there (pure).

Enters: a SimConfig and a trace. Leaves: runs, their outcomes, and the bounds that policies are compared with. Decisions
come from ``autoscale.decide`` and routes from ``router``: the simulator has no copy of their rules.

Words of this room:

- A scenario is a trace, the objectives of its requests, and a cluster. A run is one simulation of it.
- Counts are numbers of replicas by role. Fixed counts stay for the whole trace. A bin is one of the equal parts of
  time; the oracle's counts stay for a bin. ``autoscale.decide`` explains pool, tick, admitted and victim.
- The warm-up is the first part of a trace. It is not measured, since engines are empty when a run begins.
- A miss is a measured request that did not meet its objectives. Enough requests meet them if their share is at least
  ``least_frac``.
- A start is the time from the request for a replica until the replica is ready.
- A bound is a run that policies are compared with. The oracle knows the whole trace. The causal bound knows only
  requests that have arrived. The smallest static is the smallest fixed counts. Aggregated engines are decode replicas
  alone, which compute prompts too.
"""
