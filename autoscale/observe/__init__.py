"""From reports of replicas and nodes to the figures of a snapshot (pure, but for files named ``ray_*``).

Enters: counters and gauges of replicas, answers of Prometheus, Ray's nodes. Leaves: ReplicaStats, Latency, Traffic and
Nodes. It knows no configuration of a service and decides nothing.
"""
