"""What Tandem adds to vLLM's workers: methods that ``collective_rpc`` runs between two engine steps."""

from collections.abc import Sequence
from typing import Any

METHOD_UNREAD_KV = "tandem_unread_kv_requests"
METHOD_PULLS = "tandem_pulls"
METHOD_FORGET_PEER = "tandem_forget_peer"
METHOD_GPU = "tandem_gpu"
METHOD_PARAMETERS = "tandem_parameters"
METHOD_FLOPS = "tandem_matmul_flops_per_s"
IMPORT_PATH = "deployments.worker_extension.WorkerExtension"


class WorkerExtension:
    """Mixed into vLLM's worker class by ``worker_extension_cls``; each name must be new to that class."""

    device: Any
    model_runner: Any

    def tandem_unread_kv_requests(self) -> int:
        """Prompts whose KV this worker keeps for decode engines that have not pulled it (private in vLLM 0.29)."""
        return len(getattr(_nixl_worker(), "_reqs_to_send", ()))

    def tandem_pulls(self, known: Sequence[str] = ()) -> tuple[dict[str, str], dict[str, str]]:
        """KV that is being pulled, and pulls that have failed: prefill's request -> its engine.

        A pull that is through, and waits for a step to see that, is not being pulled.

        Args:
            known: failures that have been told, and are forgotten now: an answer may not arrive.
        """
        worker = _nixl_worker()
        if worker is None:
            return {}, {}
        failed = _failed_pulls(worker)
        for name in known:
            failed.pop(name, None)
        running = {}
        for req_id, handles in list(worker._recving_transfers.items()):
            remote = worker._recving_metadata[req_id].remote
            if any(_is_running(worker, handle) for handle in handles):
                running[remote.request_id] = remote.engine_id
        return running, dict(failed)

    def tandem_forget_peer(self, engine_id: str) -> bool:
        """Drop the link to a prefill engine, so that the next pull makes a new one; its pulls fail.

        Returns:
            ``False`` while a pull waits for that engine's handshake: then nothing is dropped.
        """
        worker = _nixl_worker()
        if worker is None:
            return True
        with worker._handshake_lock:
            if engine_id not in worker._remote_agents:
                return True
            metas = {
                name: meta for name, meta in worker._recving_metadata.items() if meta.remote.engine_id == engine_id
            }
            pulls = [name for name in metas if name in worker._recving_transfers]
            ready = {name for name, _ in list(worker._ready_requests.queue)}
            if any(name in ready or (any(meta.local_block_ids) and name not in pulls) for name, meta in metas.items()):
                return False
            for name in pulls:
                for handle in worker._recving_transfers.pop(name):
                    worker.nixl_wrapper.release_xfer_handle(handle)
                type(worker)._handle_failed_transfer(worker, name, None)  # past the notes: who asks knows
            worker._cleanup_remote_engine(engine_id)
        return True

    def tandem_gpu(self) -> dict[str, float]:
        """How busy this worker's GPU is (``gpu_stats``); empty on CPU."""
        from deployments.gpu_stats import GpuStats

        stats: GpuStats | None = getattr(self, "_tandem_gpu_stats", None)
        if stats is None:
            stats = self._tandem_gpu_stats = GpuStats(_gpu_uuid(self.device))
        return stats.report()

    def tandem_parameters(self) -> int:
        """Parameters of the model that this worker holds."""
        return sum(parameter.numel() for parameter in self.model_runner.model.parameters())

    def tandem_matmul_flops_per_s(self) -> float:
        """Floating-point operations per second of a large matrix product in the model's type, best of five."""
        import time

        import torch

        size, kind = 1024, next(self.model_runner.model.parameters())
        left = torch.ones(size, size, dtype=kind.dtype, device=kind.device)
        best_s = float("inf")
        for _ in range(5):
            started_s = time.perf_counter()
            product = left @ left
            float(product[0, 0])  # waits for the device
            best_s = min(best_s, time.perf_counter() - started_s)
        return 2.0 * size**3 / best_s


def _nixl_worker() -> Any:
    """The connector's worker side (private in vLLM 0.29); ``None`` where this engine has none."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return getattr(get_kv_transfer_group(), "connector_worker", None) if has_kv_transfer_group() else None


def _failed_pulls(worker: Any) -> dict[str, str]:
    """Where a worker's failed pulls are noted; the first call has it note them.

    vLLM counts them without saying whose they are. A hand-over that is only refused pulls no blocks; vLLM's own
    method fails for those, on the thread that shakes hands.
    """
    failed: dict[str, str] | None = getattr(worker, "_tandem_failed_pulls", None)
    if failed is None:
        failed = worker._tandem_failed_pulls = {}
        handle_failure = worker._handle_failed_transfer

        def note(req_id: str, handle: int | None) -> None:
            meta = worker._recving_metadata.get(req_id)
            if meta is not None and any(meta.local_block_ids):
                failed[meta.remote.request_id] = meta.remote.engine_id
            handle_failure(req_id, handle)

        worker._handle_failed_transfer = note
    return failed


def _is_running(worker: Any, handle: int) -> bool:
    try:
        return bool(worker.nixl_wrapper.check_xfer_state(handle) == "PROC")
    except Exception:  # it has failed, which vLLM sees at its next step
        return False


def _gpu_uuid(device: Any) -> str | None:
    """As NVML writes it."""
    if device is None or device.type != "cuda":
        return None
    import torch

    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
