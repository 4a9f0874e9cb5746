"""What will arrive: the load one start ahead, from the load so far (pure).

Enters: the traffic of each tick. Leaves: a ``LoadForecast``, which a shell puts into the snapshot, so that a log
replays. A *step* is a fixed time, and a *point* is the mean load of one step. The shells are ``autoscale.sim.serve``
and ``autoscale.ray_forecasts``; the second one fits in a process of its own.
"""
