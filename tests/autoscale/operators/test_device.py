"""The device of measured tables: its own facts, or those of a shipped type."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from autoscale.operators.device import DEVICE_FILE, DeviceError, DeviceFacts, load_device, load_gpu, save_device
from autoscale.operators.gpu import UnknownGpuError, UnsupportedDataTypeError, gpu_named
from autoscale.operators.roofline import GEMM

FACTS = DeviceFacts(
    kind="cpu",
    name="Some CPU",
    memory_bytes=8e9,
    reached_flops_per_s={"fp32": 7e10},
    reached_bytes_per_s=8e9,
    processors=2,
    link_bytes_per_s=4e9,
    link_latency_s=2e-5,
    idle_power_w=4.0,
    peak_power_w=16.0,
    assumed=("link_bytes_per_s",),
)


def test_facts_are_read_as_they_were_written(tmp_path: Path) -> None:
    save_device(tmp_path, FACTS)
    assert load_device(tmp_path) == FACTS


def test_rooflines_reach_what_was_measured(tmp_path: Path) -> None:
    save_device(tmp_path, FACTS)
    for name in ("cpu", "CPU", "some cpu"):
        gpu = load_gpu(name, tmp_path)
        # 7e10 reached, of which rooflines take 0.70, and 8e9 with 0.80.
        assert gpu.peak("fp32") * GEMM.compute_frac == pytest.approx(7e10)
        assert gpu.memory_bytes_per_s * GEMM.memory_frac == pytest.approx(8e9)
        assert (gpu.name, gpu.is_padding) == ("cpu", False)
    with pytest.raises(UnsupportedDataTypeError, match="cpu has no fp8 arithmetic here: give one of fp32"):
        gpu.peak("fp8")


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA RTX PRO 6000 Blackwell Server Edition"])
def test_a_shipped_type_keeps_its_data_sheet_and_gets_its_memory(tmp_path: Path, name: str) -> None:
    save_device(tmp_path, replace(FACTS, kind="cuda", name=name))
    shipped = gpu_named("H100" if "H100" in name else "RTX PRO 6000")
    for each in (shipped.name, name, "cuda"):
        assert load_gpu(each, tmp_path) == replace(shipped, memory_bytes=8e9)


def test_a_name_inside_another_word_is_not_that_type(tmp_path: Path) -> None:
    save_device(tmp_path, replace(FACTS, kind="cuda", name="NVIDIA XA100B"))
    assert load_gpu("cuda", tmp_path).name == "NVIDIA XA100B"


def test_tables_of_another_device_are_refused(tmp_path: Path) -> None:
    save_device(tmp_path, FACTS)
    with pytest.raises(DeviceError, match="are of Some CPU, not of H100: give one of Some CPU, cpu"):
        load_gpu("H100", tmp_path)


def test_a_folder_without_facts_is_of_a_shipped_type(tmp_path: Path) -> None:
    assert load_gpu("h100", tmp_path) is gpu_named("H100")
    with pytest.raises(UnknownGpuError):
        load_gpu("cpu", tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_bytes": -1}, "memory_bytes is -1: expected a number above 0"),
        ({"reached_flops_per_s": {"fp32": float("nan")}}, "fp32 is nan"),
        ({"processors": True}, "processors is True"),
        ({"assumed": None}, "cannot be read"),
    ],
)
def test_values_that_are_none_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    (tmp_path / DEVICE_FILE).write_text(json.dumps(asdict(FACTS) | change))
    with pytest.raises(DeviceError, match=message):
        load_device(tmp_path)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / DEVICE_FILE).write_text("{")
    with pytest.raises(DeviceError, match=r"device\.json: cannot be read"):
        load_gpu("cpu", tmp_path)
