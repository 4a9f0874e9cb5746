"""Laws of synthetic traces."""

import gzip
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoscale.traces.arrivals import Floats
from autoscale.traces.synthesis import WorkloadConfig, save_trace, synthesize
from autoscale.traces.trace import TraceRequest, load_trace

ROOT = Path(__file__).parents[3]
LENGTHS = ("input_tokens", "output_tokens")
ONE = {"kind": "constant", "requests_per_s": 1.0}
SHORT: dict[str, Any] = {"kind": "separate"} | {k: {"kind": "constant", "tokens": 9} for k in LENGTHS}
LOGNORMAL: dict[str, Any] = {"kind": "lognormal", "median_tokens": 500, "sigma": 1.0}


def workload(rate: dict[str, Any] | None = None, duration_s: float = 1000.0, **changes: Any) -> WorkloadConfig:
    document = {"duration_s": duration_s, "arrivals": {"kind": "poisson", "rate": rate or ONE}, "lengths": SHORT}
    return WorkloadConfig.parse({**document, **changes}, "test")


def bursts(*states: tuple[float, float]) -> dict[str, Any]:
    listed = [{"rate_factor": factor, "mean_sojourn_s": sojourn_s} for factor, sojourn_s in states]
    return {"kind": "mmpp", "rate": ONE, "states": listed}


def made(config: WorkloadConfig, seed: int = 0) -> tuple[TraceRequest, ...]:
    return synthesize(config, np.random.default_rng(seed))


def times(config: WorkloadConfig, seed: int = 0) -> Floats:
    return np.array([request.at_s for request in made(config, seed)])


def counted(config: WorkloadConfig, bin_s: float, seed: int = 0) -> Floats:
    """Arrivals in each bin."""
    edges = np.arange(0.0, config.duration_s + bin_s / 2.0, bin_s)
    return np.histogram(times(config, seed), edges)[0].astype(float)


def lengths(config: dict[str, Any], requests: int = 20_000) -> Floats:
    """About this number of prompt lengths."""
    rate = {"kind": "constant", "requests_per_s": requests / 100.0}
    both = {"kind": "separate", "input_tokens": config, "output_tokens": {"kind": "constant", "tokens": 1}}
    return np.array([request.input_tokens for request in made(workload(rate, 100.0, lengths=both))])


def test_poisson_has_its_rate_and_exponential_gaps() -> None:
    at_s = times(workload({"kind": "constant", "requests_per_s": 20.0}))
    assert len(at_s) == pytest.approx(20_000, abs=3 * 20_000**0.5)
    gaps_s = np.diff(at_s)
    # The CV of n exponential gaps has a standard error of 1 / sqrt(n); P(gap > 2 means) = exp(-2).
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(1.0, abs=3 / 20_000**0.5)
    assert (gaps_s > 2.0 * gaps_s.mean()).mean() == pytest.approx(np.exp(-2.0), abs=0.01)


def test_counts_of_poisson_vary_as_their_mean_does() -> None:
    counts = counted(workload({"kind": "constant", "requests_per_s": 20.0}, 10_000.0), 10.0)
    # Of 1000 bins the ratio has a standard error of sqrt(2 / 1000).
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=3 * (2 / 1000) ** 0.5)


def test_mmpp_has_the_mean_and_the_dispersion_of_its_states() -> None:
    # 1 /s for 90 s, 19 /s for 10 s: mean m = 2.8, variance of the rate v = 0.9 * 0.1 * 18^2, which fades with
    # r = 1 / 90 + 1 / 10. Arrivals in 10 s disperse by 1 + 2 v / (m r) (1 - (1 - exp(-10 r)) / (10 r)) (Fischer &
    # Meier-Hellstern 1993, "The Markov-modulated Poisson process cookbook").
    counts = counted(workload(duration_s=100_000.0, arrivals=bursts((1.0, 90.0), (19.0, 10.0))), 10.0)
    m, v, r = 2.8, 0.9 * 0.1 * 18.0**2, 1 / 90 + 1 / 10
    dispersion = 1.0 + 2.0 * v / (m * r) * (1.0 - (1.0 - np.exp(-10.0 * r)) / (10.0 * r))
    assert dispersion > 70.0
    # 1000 bursts of exponential length: about 3 % of the mean, and 10 % of the variance.
    assert counts.mean() / 10.0 == pytest.approx(m, rel=0.09)
    assert counts.var() / counts.mean() == pytest.approx(dispersion, rel=0.25)


def test_mmpp_is_as_busy_in_its_first_second_as_later() -> None:
    config = workload(duration_s=1.0, arrivals=bursts((1.0, 90.0), (19.0, 10.0)))
    counts = [len(made(config, seed)) for seed in range(1000)]
    # The standard deviation is sqrt(2.8 + 29.2); if both states began equally often, the mean would be 10.
    assert np.mean(counts) == pytest.approx(2.8, abs=3 * (32.0 / 1000) ** 0.5)


def test_each_state_of_mmpp_takes_its_share_of_time() -> None:
    # Rates so far apart that the counts of a second tell the state.
    counts = counted(workload(duration_s=30_000.0, arrivals=bursts((0.0, 50.0), (5.0, 30.0), (50.0, 20.0))), 1.0)
    # 300 visits of each state: three times sqrt(2 / 300) of its share, and the seconds in which it ends.
    assert (counts == 0).mean() == pytest.approx(0.5, abs=0.08)
    assert (counts > 25).mean() == pytest.approx(0.2, abs=0.05)


def test_states_multiply_a_rate_that_varies() -> None:
    stairs = {"kind": "stairs", "stairs_requests_per_s": [1.0, 10.0]}
    arrivals = bursts((0.5, 1.0), (1.5, 1.0)) | {"rate": stairs}
    low, high = counted(workload(duration_s=8000.0, arrivals=arrivals), 4000.0)
    # 4000 seconds of alternating states: the mean factor is 1, give or take 2 %.
    assert low == pytest.approx(4000.0, rel=0.1)
    assert high == pytest.approx(40_000.0, rel=0.06)


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        ({"kind": "constant", "requests_per_s": 40}, [40] * 10),
        ({"kind": "ramp", "first_requests_per_s": 0, "last_requests_per_s": 100}, [5 + 10 * n for n in range(10)]),
        ({"kind": "stairs", "stairs_requests_per_s": [10, 50, 0, 90, 20]}, [10, 10, 50, 50, 0, 0, 90, 90, 20, 20]),
        ({"kind": "stairs", "stairs_requests_per_s": [10, 50], "stair_s": 200}, [10, 10] + [50] * 8),
        (
            {"kind": "spikes", "base_requests_per_s": 10, "spike_requests_per_s": 110}
            | {"spike_s": 50, "every_s": 400, "first_s": 100},
            [10, 60, 10, 10, 10, 60, 10, 10, 10, 60],
        ),
        (
            {"kind": "sine", "mean_requests_per_s": 50, "amplitude_frac": 1, "period_s": 400, "peak_s": 50},
            # Over the quarter of a period around its peak a cosine is 2 sqrt(2) / pi on average.
            [50 * (1 + wave * 8**0.5 / np.pi) for wave in (1, 0, -1, 0, 1, 0, -1, 0, 1, 0)],
        ),
        (
            {"kind": "curve", "points_requests_per_s": [0, 100], "period_s": 400},
            [25, 75, 75, 25, 25, 75, 75, 25, 25, 75],
        ),
    ],
)
def test_each_tenth_of_a_trace_has_the_rate_of_its_shape(rate: dict[str, Any], expected: list[float]) -> None:
    counts = counted(workload(rate), 100.0)
    for count, requests_per_s in zip(counts, expected, strict=True):
        # Four standard deviations of a Poisson count: one in ten thousand is further off.
        assert abs(count - 100.0 * requests_per_s) <= 4.0 * (100.0 * requests_per_s) ** 0.5


def test_a_sine_begins_at_its_mean_and_rises_to_the_peak_of_a_day_by_itself() -> None:
    config = workload({"kind": "sine", "mean_requests_per_s": 10, "amplitude_frac": 0.8})
    at_s = np.array([0.0, 21_600.0, 64_800.0])
    assert config.arrivals.rate.at(at_s, 86_400.0)[0] == pytest.approx([10.0, 18.0, 2.0])


@pytest.mark.parametrize("arrivals", [{"kind": "poisson", "rate": ONE}, bursts((0.0, 3.0), (5.0, 0.1), (1.0, 9.0))])
def test_arrivals_are_in_order_inside_the_trace_and_repeat_with_their_seed(arrivals: dict[str, Any]) -> None:
    config = workload(duration_s=500.0, arrivals=arrivals)
    for seed in range(20):
        at_s = times(config, seed)
        assert (np.diff(at_s) >= 0.0).all()
        assert at_s[0] >= 0.0 and at_s[-1] <= 500.0
    assert made(config, 7) == made(config, 7)
    assert made(config, 7) != made(config, 8)


def test_a_rounded_arrival_does_not_leave_the_trace() -> None:
    # In a trace of a tenth of a microsecond each time rounds to 0 or beyond its end.
    config = workload({"kind": "constant", "requests_per_s": 1e9}, 9e-7)
    assert {request.at_s for request in made(config)} <= {0.0, 9e-7}


def test_other_lengths_leave_the_times_as_they_are() -> None:
    longer = {"kind": "separate"} | {k: {"kind": "normal", "mean_tokens": 9, "deviation_tokens": 2} for k in LENGTHS}
    assert (times(workload()) == times(workload(lengths=longer))).all()


def test_a_rate_of_zero_gives_no_requests() -> None:
    assert made(workload({"kind": "constant", "requests_per_s": 0.0})) == ()


def test_lognormal_has_its_median_and_spread() -> None:
    values = np.log(lengths({"kind": "lognormal", "median_tokens": 1000, "sigma": 0.5}))
    # The median of 20,000 has a standard error of 1.25 sigma / sqrt(n).
    assert np.median(values) == pytest.approx(np.log(1000.0), abs=3 * 1.25 * 0.5 / 20_000**0.5)
    assert values.std() == pytest.approx(0.5, rel=0.02)


def test_lengths_outside_their_bounds_are_drawn_again() -> None:
    bounds = {"lowest_tokens": 100, "highest_tokens": 150}
    for kind in ({"kind": "normal", "mean_tokens": 100, "deviation_tokens": 20}, LOGNORMAL | {"median_tokens": 100}):
        values = lengths(kind | bounds)
        assert values.min() >= 100 and values.max() <= 150
        # Cut off, half of them would be 100.
        assert (values == 100).mean() < 0.03


def test_half_a_normal_has_its_own_mean() -> None:
    half = {"kind": "normal", "mean_tokens": 1000, "deviation_tokens": 100, "lowest_tokens": 1000}
    # The mean of a half-normal is sigma sqrt(2 / pi).
    assert lengths(half).mean() == pytest.approx(1000.0 + 100.0 * (2.0 / np.pi) ** 0.5, abs=2.0)


def test_the_tail_of_pareto_falls_as_its_power_and_ends_at_its_bound() -> None:
    values = lengths({"kind": "pareto", "lowest_tokens": 100, "highest_tokens": 100_000, "alpha": 1.2})
    assert values.min() == 100 and values.max() <= 100_000
    for tokens in (200.5, 1000.5, 10_000.5):  # between two whole lengths
        share = ((100 / tokens) ** 1.2 - 0.001**1.2) / (1.0 - 0.001**1.2)
        assert (values > tokens).mean() == pytest.approx(share, abs=4 * (share / 20_000) ** 0.5 + 1e-3)


def test_lengths_of_a_trace_are_drawn_together() -> None:
    path = ROOT / "configs" / "traces" / "azure_conv_60s.csv"
    rate = {"kind": "constant", "requests_per_s": 20.0}
    trace = made(workload(rate, lengths={"kind": "trace", "trace": str(path)}))
    there, here = ({(r.input_tokens, r.output_tokens) for r in requests} for requests in (load_trace(path), trace))
    assert here <= there
    assert len(here) > 0.95 * len(there)


def test_the_trace_of_a_configuration_is_looked_for_beside_it(tmp_path: Path) -> None:
    save_trace(tmp_path / "lengths.csv", [TraceRequest(at_s=0.0, input_tokens=7, output_tokens=5)])
    (tmp_path / "workload.yaml").write_text(
        "duration_s: 10\n"
        "arrivals: {kind: mmpp, rate: {kind: constant, requests_per_s: 2}, states: [\n"
        "  {rate_factor: 0.5, mean_sojourn_s: 60}, {rate_factor: 4, mean_sojourn_s: 5}]}\n"
        "lengths: {kind: trace, trace: lengths.csv}\n"
    )
    trace = made(WorkloadConfig.load(tmp_path / "workload.yaml"))
    assert {(request.input_tokens, request.output_tokens) for request in trace} == {(7, 5)}


@pytest.mark.parametrize("name", ["trace.csv", "new/folder/trace.csv.gz"])
def test_a_saved_trace_is_loaded_unchanged(tmp_path: Path, name: str) -> None:
    trace = made(workload(lengths={"kind": "separate"} | dict.fromkeys(LENGTHS, LOGNORMAL)))
    save_trace(tmp_path / name, trace)
    assert load_trace(tmp_path / name) == trace


def test_prefixes_and_odd_times_are_saved_too(tmp_path: Path) -> None:
    trace = (
        TraceRequest(at_s=1e-7, input_tokens=1000, output_tokens=2, hash_ids=(7, 8)),
        TraceRequest(at_s=1 / 3, input_tokens=3, output_tokens=4),
    )
    save_trace(tmp_path / "trace.csv", trace)
    assert load_trace(tmp_path / "trace.csv") == trace


def test_the_same_trace_is_the_same_file(tmp_path: Path) -> None:
    trace = made(workload())
    for name in ("a.csv.gz", "b.csv.gz"):
        save_trace(tmp_path / name, trace)
    assert (tmp_path / "a.csv.gz").read_bytes() == (tmp_path / "b.csv.gz").read_bytes()
    assert (tmp_path / "a.csv.gz").read_bytes()[4:8] == bytes(4)  # the time in gzip's header
    assert gzip.decompress((tmp_path / "a.csv.gz").read_bytes()).startswith(b"timestamp_s,input_tokens,output_tokens\n")


def test_a_trace_that_cannot_be_saved_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'a.csv'}: not written: there are no requests")):
        save_trace(tmp_path / "a.csv", ())
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}: cannot be written: Is a directory")):
        save_trace(tmp_path, made(workload()))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"duration_s": 0}, "duration_s: Input should be greater than 0, got 0"),
        (
            {"lengths": {"kind": "separate", "input_tokens": {"kind": "constant", "tokens": 10**20}}},
            "lengths.input_tokens.tokens: Input should be less than or equal to 10000000",
        ),
        (
            {"duration_s": 1e9},
            "1,000,000,000 requests or changes of state, more than 10,000,000: lower duration_s or the highest",
        ),
        ({"rate": {"kind": "constant", "requests_per_s": -1}}, "arrivals.rate.requests_per_s: Input should be greater"),
        ({"rate": {"kind": "steps"}}, "arrivals.rate: Input tag 'steps' found using 'kind' does not match any"),
        ({"rate": {"kind": "ramp", "first_requests_per_s": 1}}, "arrivals.rate.last_requests_per_s: Field required"),
        ({"arrivals": bursts((1.0, 1.0))}, "arrivals.states: Tuple should have at least 2 items"),
        ({"arrivals": bursts((1.0, 1e-6), (2.0, 1e-6))}, "1,000,000,000 requests or changes of state"),
        ({"arrivals": {"kind": "poisson"}}, "arrivals.rate: Field required"),
        ({"lengths": {"kind": "separate", "input_tokens": 5}}, "lengths.input_tokens: "),
        ({"lengths": {"kind": "trace", "trace": "none.csv"}}, "lengths.trace: none.csv: cannot be read"),
        ({"speed": 1}, "speed: Extra inputs are not permitted, got 1"),
        (
            {
                "rate": {
                    "kind": "spikes",
                    "base_requests_per_s": 1,
                    "spike_requests_per_s": 2,
                    "spike_s": 5,
                    "every_s": 5,
                }
            },
            "arrivals.rate: spike_s (5) is not less than every_s (5)",
        ),
        (
            {
                "lengths": SHORT
                | {"input_tokens": {"kind": "pareto", "lowest_tokens": 5, "highest_tokens": 5, "alpha": 1}}
            },
            "lengths.input_tokens: highest_tokens (5) is not more than lowest_tokens (5)",
        ),
        (
            {"lengths": SHORT | {"input_tokens": LOGNORMAL | {"highest_tokens": 3}}},
            "lengths.input_tokens: 0.00% of all lengths are from lowest_tokens (1) to highest_tokens (3)",
        ),
    ],
)
def test_a_wrong_value_is_named_with_its_field(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"test: {says}")):
        workload(**changes)


@pytest.mark.parametrize(
    ("text", "says"),
    [("a: [", "not YAML: "), ("- 1", "expected duration_s, arrivals and lengths"), (None, "cannot be read")],
)
def test_a_file_that_is_no_workload_is_named(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "workload.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"{path}: {says}")):
        WorkloadConfig.load(path)
