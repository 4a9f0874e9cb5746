"""GPU utilisation and SM activity of an engine worker's own device, through NVML; nothing where there is no GPU.

Utilisation says that some kernel ran; SM activity (NVML's GPM, Hopper and later) says how many SMs had work: the two
are different candidates of HeteroScale section 4.2. It runs in the worker: a Serve replica sees no GPU of its own, and
a worker may be on another node.
"""

import logging
from typing import Any

logger = logging.getLogger(__name__)


class GpuStats:
    """One device, by its UUID as NVML knows it; ``None`` for a worker without one."""

    def __init__(self, uuid: str | None) -> None:
        self._nvml: Any = None
        self._device: Any = None
        self._before: Any = None
        if uuid is None:
            return
        try:
            from vllm.third_party import pynvml

            pynvml.nvmlInit()
            self._device = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            self._nvml = pynvml
            if bool(pynvml.nvmlGpmQueryDeviceSupport(self._device).isSupportedDevice):
                self._before = self._sample()
        except Exception as error:  # no driver, an older library or GPU: a machine without (all of) these figures
            logger.info("no GPU statistics, or no SM activity, of %s: %s", uuid, error)

    def report(self) -> dict[str, float]:
        """Utilisation, and SM activity since the last call, 0..1; without what cannot be read."""
        if self._nvml is None:
            return {}
        try:
            figures = {"gpu_utilization_frac": self._nvml.nvmlDeviceGetUtilizationRates(self._device).gpu / 100.0}
            if self._before is not None:
                figures["sm_activity_frac"] = self._sm_activity()
            return figures
        except self._nvml.NVMLError as error:
            logger.debug("GPU statistics cannot be read: %s", error)
            return {}

    def _sample(self) -> Any:
        sample = self._nvml.nvmlGpmSampleAlloc()
        self._nvml.nvmlGpmSampleGet(self._device, sample)
        return sample

    def _sm_activity(self) -> float:
        nvml = self._nvml
        before, self._before = self._before, self._sample()
        wanted = nvml.c_nvmlGpmMetricsGet_t()
        wanted.version = nvml.NVML_GPM_METRICS_GET_VERSION
        wanted.numMetrics = 1
        wanted.sample1, wanted.sample2 = before, self._before
        wanted.metrics[0].metricId = nvml.NVML_GPM_METRIC_SM_UTIL
        try:
            nvml.nvmlGpmMetricsGet(wanted)
        finally:
            nvml.nvmlGpmSampleFree(before)
        return float(wanted.metrics[0].value) / 100.0
