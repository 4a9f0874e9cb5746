"""What NVML says of the GPU: power, energy, clocks. Nothing is ever set."""

import importlib
from collections.abc import Callable
from typing import Any, Protocol

# NVML_FI_DEV_POWER_INSTANT: power now in milliwatts, where nvmlDeviceGetPowerUsage averages a second.
_POWER_INSTANT_FIELD = 186


class Meter(Protocol):
    """Readings of one GPU; None where it gives none."""

    def power_w(self) -> float | None:
        """Power now, in watts."""

    def energy_mj(self) -> float | None:
        """Energy since the driver was loaded, in millijoules."""

    def sm_clock_mhz(self) -> float | None:
        """Clock of the SMs now."""

    def max_sm_clock_mhz(self) -> float | None:
        """Highest clock of the SMs."""

    def throttle_mask(self) -> int | None:
        """Reasons for a lower clock, as NVML's bits (4: power cap; 32, 64: heat)."""

    def facts(self) -> dict[str, Any]:
        """Names and limits, for the metadata."""


class NoMeter:
    """A machine without NVML.

    Args:
        reason: Why there are no readings.
    """

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def power_w(self) -> float | None:
        """None."""
        return None

    def energy_mj(self) -> float | None:
        """None."""
        return None

    def sm_clock_mhz(self) -> float | None:
        """None."""
        return None

    def max_sm_clock_mhz(self) -> float | None:
        """None."""
        return None

    def throttle_mask(self) -> int | None:
        """None."""
        return None

    def facts(self) -> dict[str, Any]:
        """The reason alone."""
        return {"nvml": self._reason}


class NvmlMeter:
    """Readings by pynvml of the first GPU.

    Args:
        nvml: The module pynvml.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        self._gpu = nvml.nvmlDeviceGetHandleByIndex(0)
        self._has_instant_power = self._instant_power_w() is not None

    def _read(self, read: Callable[[], Any]) -> Any:
        """A reading, None where this GPU or this pynvml has none."""
        try:
            return read()
        except (self._nvml.NVMLError, AttributeError, TypeError, ValueError, OSError):
            return None

    def _instant_power_w(self) -> float | None:
        values = self._read(lambda: self._nvml.nvmlDeviceGetFieldValues(self._gpu, [_POWER_INSTANT_FIELD]))
        if not values or values[0].nvmlReturn != 0:
            return None
        return float(values[0].value.uiVal) / 1e3 or None

    def power_w(self) -> float | None:
        """Power now, in watts; NVML's mean of a second where the GPU has no reading of this instant."""
        if self._has_instant_power:
            return self._instant_power_w()
        milliwatts = self._read(lambda: self._nvml.nvmlDeviceGetPowerUsage(self._gpu))
        return None if milliwatts is None else milliwatts / 1e3

    def energy_mj(self) -> float | None:
        """Energy since the driver was loaded, in millijoules."""
        value = self._read(lambda: self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu))
        return None if value is None else float(value)

    def sm_clock_mhz(self) -> float | None:
        """Clock of the SMs now."""
        value = self._read(lambda: self._nvml.nvmlDeviceGetClockInfo(self._gpu, self._nvml.NVML_CLOCK_SM))
        return None if value is None else float(value)

    def max_sm_clock_mhz(self) -> float | None:
        """Highest clock of the SMs."""
        value = self._read(lambda: self._nvml.nvmlDeviceGetMaxClockInfo(self._gpu, self._nvml.NVML_CLOCK_SM))
        return None if value is None else float(value)

    def throttle_mask(self) -> int | None:
        """Reasons for a lower clock, as NVML's bits (4: power cap; 32, 64: heat)."""
        nvml = self._nvml
        read = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        read = read or getattr(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None)
        value = None if read is None else self._read(lambda: read(self._gpu))
        return None if value is None else int(value)

    def facts(self) -> dict[str, Any]:
        """Names and limits, for the metadata."""
        nvml, gpu = self._nvml, self._gpu
        reads: dict[str, Callable[[], Any]] = {
            "nvml_name": lambda: str(nvml.nvmlDeviceGetName(gpu)),
            "driver": lambda: str(nvml.nvmlSystemGetDriverVersion()),
            "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3,
            "memory_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
            "max_memory_clock_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_MEM),
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            "pcie_generation": lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu),
            "pcie_width": lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu),
        }
        found = {name: self._read(read) for name, read in reads.items()}
        found |= {"sm_clock_mhz": self.sm_clock_mhz(), "max_sm_clock_mhz": self.max_sm_clock_mhz()}
        return found | {"power_reading": "instant" if self._has_instant_power else "mean of a second"}


def open_meter(device: str) -> Meter:
    """NVML where there is a GPU and pynvml, else a meter that reads nothing."""
    if device == "cpu":
        return NoMeter("no GPU in this run")
    try:
        return NvmlMeter(importlib.import_module("pynvml"))
    except Exception as error:  # whatever NVML lacks here, the times can still be measured
        return NoMeter(f"{type(error).__name__}: {error}")
