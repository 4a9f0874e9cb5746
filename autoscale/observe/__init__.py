"""From reports of replicas and nodes to the figures of a snapshot (pure, but for files named ``ray_*``).

Enters: counters and gauges of replicas, answers of Prometheus, Ray's nodes. Leaves: ReplicaStats, Latency, Traffic and
Nodes. Nothing is decided here. A report of a replica has gauges, and counters since the replica's start. Figures are
over a window: the last ``window_s`` seconds before the snapshot.
"""
