"""The figures of a run and the worst of several, by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from autoscale.ratio import PdRatio
from autoscale.report import RequestRecord, Slo
from kvtransfer.topology import Role
from tests.lab.demo.figures import Run, Sample, plot, summary
from tests.lab.stand.static_search import StaticCounts

P, D = Role.PREFILL, Role.DECODE


def sample(at_s: float, prefill: int, decode: int, held: tuple[int, int] | None = None) -> Sample:
    counts = {P: prefill, D: decode}
    gpus = {P: held[0], D: held[1]} if held else counts
    return Sample(at_s=at_s, serving=counts, ready=counts, planned=gpus, held_gpus=gpus)


def record(sent_s: float, ttft_s: float, error: str | None = None) -> RequestRecord:
    return RequestRecord(
        sent_s=sent_s,
        first_token_s=sent_s + ttft_s,
        last_token_s=sent_s + ttft_s + 0.2,
        input_tokens=10,
        output_tokens=11,
        error=error,
    )


@pytest.fixture
def run() -> Run:
    return Run(
        service="chat",
        ratio=PdRatio(1, 3),
        first_ready=P,
        kind="day",
        day_s=240.0,
        samples=[sample(0, 1, 3), sample(60, 1, 3, (2, 6)), sample(120, 3, 4, (3, 9)), sample(240, 2, 6)],
        records=[record(0.0, 0.5), record(10.0, 3.0)],
        slos=[Slo(ttft_s=1.0, tpot_s=0.05)] * 2,
        cpu_busy_frac=0.5,
    )


def test_figures_by_hand(run: Run) -> None:
    figures = run.figures()
    # 3P4D is 1.67 prefill replicas off 1:3, the other samples are inside.
    assert figures["ratio_within_band_frac"] == 0.75
    # 60 s of 4, 60 s of 8 and 120 s of 12 GPUs: 2,160 GPU-seconds of a day of 240 s.
    assert figures["gpu_hours"] == pytest.approx(2160 / 240 * 24)
    assert figures["scale_events"] == 3
    assert figures["slo_attainment_frac"] == 0.5
    assert figures["replicas_peak"] == 8


def test_the_worst_run_counts(run: Run) -> None:
    other = replace(run, service="code", samples=[sample(0, 1, 3), sample(240, 1, 3)])
    surge = replace(run, kind="gate_on", samples=[sample(0, 1, 3), sample(10, 1, 3)])
    ungated = replace(run, kind="gate_off", cpu_busy_frac=0.9)
    fixed = replace(run, kind="static_3P9D", records=[record(0.0, 0.5)] * 3, slos=run.slos[:1] * 3)
    fewer = replace(run, kind="static_2P9D", records=[record(0.0, 3.0)] * 3, slos=run.slos[:1] * 3)
    runs = [run, other, surge, ungated, fixed, fewer]
    peers = {
        run.name: StaticCounts(prefill=3, decode=9, attainment_frac=0.6),
        other.name: StaticCounts(prefill=2, decode=6, attainment_frac=0.7),
    }
    result = summary([entry.figures() for entry in runs], peers)
    assert result["gpu_hours_saved_frac"] == pytest.approx(1 - 9 / 12)
    assert result["gpu_hours_static_peak"] == 12 * 24
    assert result["slo_attainment_static_frac"] == 1.0  # as it was live; the model's stays with the run
    assert result["runs"][0]["slo_attainment_static_model_frac"] == 0.6
    assert result["ratio_within_band_frac"] == 0.75
    assert result["cpu_busy_frac"] == 0.9
    assert len(result["invalid"]) == 1
    assert "90% busy" in result["invalid"][0]
    assert result["runs"][0]["static_counts"] == "3P9D"
    missed = "\n".join(result["missed"])
    assert "saved 25.0% of the GPU-hours of 3P9D, not 30%" in missed
    assert "75.0% of the time" in missed
    assert "8 replicas at its peak, not 12" in missed
    assert "gate off: as near" not in missed  # it was outside the band for a quarter of its time
    assert "static 2P9D" not in missed
    fewer = replace(fewer, records=run.records, slos=run.slos)
    result = summary([entry.figures() for entry in [*runs[:-1], fewer]], peers)
    assert any("static 2P9D: serves 0.500, as much as" in text for text in result["missed"])


def test_the_picture_is_a_picture(run: Run, tmp_path: Path) -> None:
    plot([run, run], tmp_path / "sub" / "demo.png")
    assert (tmp_path / "sub" / "demo.png").read_bytes().startswith(b"\x89PNG")
