"""What a worker reads of its GPU; the driver is a stand-in, as no machine of the tests has one."""

# ruff: noqa: N802
# NVML's own names.
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.vllm


class Driver:
    """NVML's surface as ``gpu_stats`` uses it: one device, half busy, whose SM activity is the number of its sample."""

    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_GPM_METRIC_SM_UTIL = 2

    class NVMLError(Exception):
        """The error class, with NVML's own name."""

    def __init__(self, *, has_gpm: bool = True) -> None:
        self.has_gpm, self.is_lost, self.is_gpm_lost = has_gpm, False, False
        self.samples: list[SimpleNamespace] = []
        self.freed: list[int] = []

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1":
            raise self.NVMLError("not found")
        return uuid

    def nvmlGpmQueryDeviceSupport(self, device: str) -> Any:
        return SimpleNamespace(isSupportedDevice=int(self.has_gpm))

    def nvmlDeviceGetUtilizationRates(self, device: str) -> Any:
        if self.is_lost:
            raise self.NVMLError("lost")
        return SimpleNamespace(gpu=50)

    def nvmlGpmSampleAlloc(self) -> Any:
        self.samples.append(SimpleNamespace(number=len(self.samples), is_taken=False))
        return self.samples[-1]

    def nvmlGpmSampleGet(self, device: str, sample: Any) -> None:
        sample.is_taken = True

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        self.freed.append(sample.number)

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        return SimpleNamespace(metrics=[SimpleNamespace(metricId=0, value=0.0)])

    def nvmlGpmMetricsGet(self, wanted: Any) -> None:
        if self.is_gpm_lost:
            raise self.NVMLError("no SM activity")
        assert wanted.sample1.is_taken
        assert wanted.sample2.is_taken
        assert wanted.metrics[0].metricId == self.NVML_GPM_METRIC_SM_UTIL
        wanted.metrics[0].value = 10.0 * (wanted.sample1.number + wanted.sample2.number)


def read(monkeypatch: pytest.MonkeyPatch, driver: Driver, uuid: str | None = "GPU-1") -> Any:
    from deployments.vllm_seam.worker_extension import GpuStats

    monkeypatch.setattr("vllm.third_party.pynvml", driver)
    return GpuStats(uuid)


def test_a_report_has_utilisation_and_the_sm_activity_since_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    stats = read(monkeypatch, driver)
    assert stats.report() == {"gpu_utilization_frac": 0.5, "sm_activity_frac": pytest.approx(0.1)}
    assert stats.report()["sm_activity_frac"] == pytest.approx(0.3)
    assert driver.freed == [0, 1]


def test_before_hopper_there_is_no_sm_activity(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, Driver(has_gpm=False)).report() == {"gpu_utilization_frac": 0.5}


def test_a_gpu_that_is_lost_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    stats = read(monkeypatch, driver)
    driver.is_lost = True
    assert stats.report() == {}


def test_utilisation_is_reported_though_the_sm_activity_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    stats = read(monkeypatch, driver)
    driver.is_gpm_lost = True
    assert stats.report() == {"gpu_utilization_frac": 0.5}
    driver.is_gpm_lost = False
    assert stats.report()["sm_activity_frac"] == pytest.approx(0.3)  # samples 1 and 2


@pytest.mark.parametrize("uuid", [None, "GPU-2"])
def test_a_worker_without_a_known_device_reports_no_figures(monkeypatch: pytest.MonkeyPatch, uuid: str | None) -> None:
    assert read(monkeypatch, Driver(), uuid).report() == {}


def test_a_worker_names_its_device_as_nvml_does(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from deployments.vllm_seam.worker_extension import WorkerExtension, _gpu_uuid

    given = SimpleNamespace(uuid="0a1b")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: given)
    assert _gpu_uuid(torch.device("cuda:0")) == "GPU-0a1b"
    assert _gpu_uuid(torch.device("cpu")) is None
    worker = WorkerExtension()
    worker.device = torch.device("cpu")
    assert worker.tandem_gpu() == {}


def test_an_engine_reports_the_mean_of_what_all_its_workers_can_read() -> None:
    from deployments.replicas.engine_host import _means

    both = {"gpu_utilization_frac": 0.2, "sm_activity_frac": 0.1}
    assert _means([both, {"gpu_utilization_frac": 0.6}]) == {"gpu_utilization_frac": pytest.approx(0.4)}
    assert _means([both, both]) == {name: pytest.approx(value) for name, value in both.items()}
    assert _means([{}, both]) == _means([]) == {}
