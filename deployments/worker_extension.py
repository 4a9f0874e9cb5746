"""What Tandem adds to vLLM's workers: methods that ``collective_rpc`` runs between two engine steps."""

from typing import Any

METHOD_UNREAD_KV = "tandem_unread_kv_requests"
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
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        if not has_kv_transfer_group():
            return 0
        worker = getattr(get_kv_transfer_group(), "connector_worker", None)
        return len(getattr(worker, "_reqs_to_send", ()))

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


def _gpu_uuid(device: Any) -> str | None:
    """As NVML writes it."""
    if device is None or device.type != "cuda":
        return None
    import torch

    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
