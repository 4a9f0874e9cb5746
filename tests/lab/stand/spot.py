"""A notice that a node will be taken away, as clouds give for spot nodes."""

import time


def give_notice(node_id: str, leaves_in_s: float) -> None:
    """Tell Ray that a node leaves, as ``ray drain-node`` does; raises RuntimeError if Ray refuses."""
    import ray
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    client = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    is_accepted, why = client.drain_node(node_id, reason, "spot", int((time.time() + leaves_in_s) * 1000))
    if not is_accepted:
        raise RuntimeError(f"Ray does not accept that node {node_id} leaves: {why}")
