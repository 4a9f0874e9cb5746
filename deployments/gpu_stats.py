"""GPU utilisation and SM activity of a replica's own devices, through NVML; nothing where there is no GPU.

Utilisation says that some kernel ran; SM activity (NVML's GPM, Hopper and later) says how many SMs had work: the two
are different candidates of HeteroScale section 4.2.
"""

import logging
import os
from typing import Any

logger = logging.getLogger(__name__)


class GpuStats:
    """The devices that this process and its engine see."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._devices: list[Any] = []
        self._samples: list[Any] = []
        try:
            from vllm.third_party import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._devices = [_device(pynvml, name) for name in _visible(pynvml)]
            if self._devices and all(_has_gpm(pynvml, device) for device in self._devices):
                self._samples = [self._sample(device) for device in self._devices]
        except Exception as error:  # no driver, no device, an older library: a machine without these figures
            logger.debug("no GPU statistics: %s", error)

    def report(self) -> dict[str, float]:
        """Means over the devices since the last call, 0..1; empty where nothing can be read."""
        if not self._devices:
            return {}
        nvml = self._nvml
        try:
            busy = [nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100.0 for device in self._devices]
            figures = {"gpu_utilization_frac": sum(busy) / len(busy)}
            if self._samples:
                activity = [self._sm_activity(index) for index in range(len(self._devices))]
                figures["sm_activity_frac"] = sum(activity) / len(activity)
            return figures
        except nvml.NVMLError as error:
            logger.debug("GPU statistics cannot be read: %s", error)
            return {}

    def _sample(self, device: Any) -> Any:
        sample = self._nvml.nvmlGpmSampleAlloc()
        self._nvml.nvmlGpmSampleGet(device, sample)
        return sample

    def _sm_activity(self, index: int) -> float:
        nvml = self._nvml
        before, self._samples[index] = self._samples[index], self._sample(self._devices[index])
        wanted = nvml.c_nvmlGpmMetricsGet_t()
        wanted.version = nvml.NVML_GPM_METRICS_GET_VERSION
        wanted.numMetrics = 1
        wanted.sample1, wanted.sample2 = before, self._samples[index]
        wanted.metrics[0].metricId = nvml.NVML_GPM_METRIC_SM_UTIL
        try:
            nvml.nvmlGpmMetricsGet(wanted)
        finally:
            nvml.nvmlGpmSampleFree(before)
        return float(wanted.metrics[0].value) / 100.0


def _visible(nvml: Any) -> list[str]:
    """The devices given to this process: indices or UUIDs."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return [str(index) for index in range(nvml.nvmlDeviceGetCount())]
    return [name.strip() for name in given.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]


def _device(nvml: Any, name: str) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)


def _has_gpm(nvml: Any, device: Any) -> bool:
    support = nvml.nvmlGpmQueryDeviceSupport(device)
    return bool(support.isSupportedDevice)
