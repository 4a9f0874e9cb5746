"""Methods that Tandem adds to vLLM's workers, called by ``collective_rpc`` between two steps, and a GPU's counters."""

import logging
from collections.abc import Sequence
from typing import Any

logger = logging.getLogger(__name__)

# Names of the methods below, as ``collective_rpc`` takes them.
METHOD_UNREAD_KV = "tandem_unread_kv_requests"
METHOD_PULLS = "tandem_pulls"
METHOD_FORGET_PEER = "tandem_forget_peer"
METHOD_GPU = "tandem_gpu"
METHOD_PARAMETERS = "tandem_parameters"
METHOD_FLOPS = "tandem_matmul_flops_per_s"
METHOD_KV_BYTES = "tandem_kv_bytes"
# Value of vLLM's engine argument ``worker_extension_cls``.
IMPORT_PATH = "deployments.vllm_seam.worker_extension.WorkerExtension"


class GpuStats:
    """Utilisation and SM activity of a worker's GPU, candidate signals of HeteroScale section 4.2.

    Utilisation is the share of time in which any kernel ran. SM activity (NVML's GPM, Hopper and later) is the share of
    SMs that had work. ``uuid``: as NVML writes it; ``None``: the worker has no GPU.

    Needs: ``vllm.third_party.pynvml``.
    Without it: these two signals are not observed; the worker's log says so.
    """

    def __init__(self, uuid: str | None) -> None:
        self._nvml: Any = None  # ``None``: nothing can be read
        self._device: Any = None
        self._before: Any = None  # GPM sample of the last report; ``None``: SM activity cannot be read
        if uuid is None:
            return
        try:
            from vllm.third_party import pynvml

            pynvml.nvmlInit()
            self._device = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            self._nvml = pynvml
            if bool(pynvml.nvmlGpmQueryDeviceSupport(self._device).isSupportedDevice):
                self._before = self._sample()
        except Exception as error:  # no driver, an older library, or an older GPU
            logger.info("GPU statistics or SM activity of %s cannot be read: %s", uuid, error)

    def report(self) -> dict[str, float]:
        """Utilisation, and SM activity since the last call, each 0..1; figures that cannot be read are left out."""
        figures: dict[str, float] = {}
        if self._nvml is None:
            return figures
        try:
            figures["gpu_utilization_frac"] = self._nvml.nvmlDeviceGetUtilizationRates(self._device).gpu / 100.0
            if self._before is not None:
                figures["sm_activity_frac"] = self._sm_activity()
        except self._nvml.NVMLError as error:
            logger.debug("GPU statistics cannot be read: %s", error)
        return figures

    def _sample(self) -> Any:
        sample = self._nvml.nvmlGpmSampleAlloc()
        self._nvml.nvmlGpmSampleGet(self._device, sample)
        return sample

    def _sm_activity(self) -> float:
        nvml = self._nvml
        before, self._before = self._before, self._sample()
        query = nvml.c_nvmlGpmMetricsGet_t()
        query.version = nvml.NVML_GPM_METRICS_GET_VERSION
        query.numMetrics = 1
        query.sample1, query.sample2 = before, self._before
        query.metrics[0].metricId = nvml.NVML_GPM_METRIC_SM_UTIL
        try:
            nvml.nvmlGpmMetricsGet(query)
        finally:
            nvml.nvmlGpmSampleFree(before)
        return float(query.metrics[0].value) / 100.0


class WorkerExtension:
    """Methods that vLLM mixes into its worker class (``worker_extension_cls``); the class must not have their names.

    Needs: ``device`` and ``model_runner.model`` of vLLM's worker.
    Without it: ``tandem profile`` and the GPU signals fail; each says so.
    """

    device: Any
    model_runner: Any

    def tandem_unread_kv_requests(self) -> int:
        """Number of prompts whose KV on this worker has not been pulled by a decode engine.

        Needs: ``_reqs_to_send`` of vLLM's NIXL worker.
        Without it: the count is unknown, so a prefill replica that ends waits until the leases of its KV are over.
        """
        worker = _nixl_worker()
        return 0 if worker is None else len(worker._reqs_to_send)

    def tandem_pulls(self, reported: Sequence[str] = ()) -> tuple[dict[str, str], dict[str, str]]:
        """Running pulls and failed pulls, each as prefill's request id -> prefill's engine id.

        A complete pull that no engine step has processed yet is neither. ``reported``: failures that the caller has
        received. A failure is kept until it is in ``reported``, since an answer may get lost.

        Needs: ``_recving_transfers``, ``_recving_metadata``, ``_handle_failed_transfer`` and ``nixl_wrapper`` of vLLM's
            NIXL worker.
        Without it: decode replicas do not notice broken links to prefill replicas; pulls end with their lease.
        """
        worker = _nixl_worker()
        if worker is None:
            return {}, {}
        failed = _failed_pulls(worker)
        for name in reported:
            failed.pop(name, None)
        running = {}
        for req_id, handles in list(worker._recving_transfers.items()):
            remote = worker._recving_metadata[req_id].remote
            if any(_is_running(worker, handle) for handle in handles):
                running[remote.request_id] = remote.engine_id
        return running, dict(failed)

    def tandem_forget_peer(self, engine_id: str) -> bool:
        """Drop the link to a prefill engine, so that the next pull makes a new one; pulls from that engine fail.

        ``False``: the link is kept. A pull from that engine has not begun yet, and vLLM cannot begin it without the
        link.

        Needs: ``_handshake_lock``, ``_remote_agents``, ``_ready_requests.queue``, ``_cleanup_remote_engine``,
            ``_recving_transfers``, ``_recving_metadata`` and ``_handle_failed_transfer`` of vLLM's NIXL worker.
        Without it: a broken link is not made anew; the decode replica avoids that prefill replica.
        """
        worker = _nixl_worker()
        if worker is None:
            return True
        with worker._handshake_lock:  # vLLM's thread for handshakes adds links under this lock
            if engine_id not in worker._remote_agents:
                return True
            metas = {
                name: meta for name, meta in worker._recving_metadata.items() if meta.remote.engine_id == engine_id
            }
            pulls = [name for name in metas if name in worker._recving_transfers]
            ready = {name for name, _ in list(worker._ready_requests.queue)}  # handshake done, pull not begun
            # A request without blocks pulls nothing. A pull with blocks is in ``_recving_transfers`` once it has begun.
            with_blocks = {name for name, meta in metas.items() if any(meta.local_block_ids)}
            if any(name in ready or (name in with_blocks and name not in pulls) for name in metas):
                return False
            for name in pulls:
                for handle in worker._recving_transfers.pop(name):
                    worker.nixl_wrapper.release_xfer_handle(handle)
                # The method of the class, which does not record the failure (``_failed_pulls``): the caller causes it.
                type(worker)._handle_failed_transfer(worker, name, None)
            worker._cleanup_remote_engine(engine_id)
        return True

    def tandem_gpu(self) -> dict[str, float]:
        """Utilisation and SM activity of this worker's GPU; empty on CPU.

        The replica cannot read them: it may have no GPU of its own, and a worker may be on another node.
        """
        stats: GpuStats | None = getattr(self, "_tandem_gpu_stats", None)
        if stats is None:
            stats = self._tandem_gpu_stats = GpuStats(_gpu_uuid(self.device))
        return stats.report()

    def tandem_parameters(self) -> int:
        """Number of the model's parameters on this worker."""
        return sum(parameter.numel() for parameter in self.model_runner.model.parameters())

    def tandem_kv_bytes(self) -> int:
        """Size of this worker's KV cache in bytes, by its tensors: so any type, layout and parallelism counts right.

        Needs: ``kv_caches`` of vLLM's model runner, a list of tensors or of lists of them.
        Without it: ``tandem profile`` fails.
        """
        pending, size = list(self.model_runner.kv_caches), 0
        while pending:
            cache = pending.pop()
            if isinstance(cache, list | tuple):
                pending += cache
            else:
                size += cache.numel() * cache.element_size()
        return int(size)

    def tandem_matmul_flops_per_s(self) -> float:
        """Floating-point operations per second of a product of two square matrices, the best of five.

        The matrices have the type of the model's first parameters, and 1,024 rows on CPU. On a GPU they have 8,192: a
        small product would take less time than its launch.
        """
        import time

        import torch

        parameter = next(self.model_runner.model.parameters())
        size = 1024 if parameter.device.type == "cpu" else 8192
        matrix = torch.ones(size, size, dtype=parameter.dtype, device=parameter.device)
        best_s = float("inf")
        for _ in range(5):
            started_s = time.perf_counter()
            product = matrix @ matrix
            float(product[0, 0])  # waits for the device
            best_s = min(best_s, time.perf_counter() - started_s)
        return 2.0 * size**3 / best_s  # a multiplication and an addition for each of size^3 products


def _nixl_worker() -> Any:
    """The worker side of the KV connector; ``None`` if this engine has no connector.

    Needs: ``vllm.distributed.kv_transfer`` (``get_kv_transfer_group``, ``has_kv_transfer_group``),
    ``connector_worker``.
    Without it: the methods above fail, with the consequences that they state.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return get_kv_transfer_group().connector_worker if has_kv_transfer_group() else None


def _failed_pulls(worker: Any) -> dict[str, str]:
    """A worker's failed pulls: prefill's request id -> prefill's engine id.

    vLLM only counts failed pulls, so the first call replaces vLLM's method by one that records them. A refused handoff
    pulls no blocks. If its handshake fails, vLLM's method raises in the handshake's thread, and nothing is recorded.
    """
    failed: dict[str, str] | None = getattr(worker, "_tandem_failed_pulls", None)
    if failed is None:
        failed = worker._tandem_failed_pulls = {}
        handle_failure = worker._handle_failed_transfer

        def record_failure(req_id: str, handle: int | None) -> None:
            meta = worker._recving_metadata.get(req_id)
            if meta is not None and any(meta.local_block_ids):
                failed[meta.remote.request_id] = meta.remote.engine_id
            handle_failure(req_id, handle)

        worker._handle_failed_transfer = record_failure
    return failed


def _is_running(worker: Any, handle: int) -> bool:
    try:
        return bool(worker.nixl_wrapper.check_xfer_state(handle) == "PROC")
    except Exception:  # the pull has failed; vLLM notices it at its next step
        return False


def _gpu_uuid(device: Any) -> str | None:
    """A device's UUID as NVML writes it; ``None``: it is no GPU."""
    if device is None or device.type != "cuda":
        return None
    import torch

    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
