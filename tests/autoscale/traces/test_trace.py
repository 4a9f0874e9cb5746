"""Laws of traces."""

import gzip
import random
import re
from pathlib import Path

import pytest

from autoscale.traces.trace import TraceRequest, cut, load_trace, scale_rate, scale_trace

HEADER = "timestamp_s,input_tokens,output_tokens\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def test_committed_sample_loads_and_starts_at_zero() -> None:
    sample = load_trace(Path(__file__).parents[3] / "configs" / "traces" / "azure_conv_60s.csv")
    assert len(sample) == 265
    assert sample[0].at_s == 0.0
    assert sample[-1].at_s < 60.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n0,1,1\n",
            "line 1: no column timestamp_s in 'TIMESTAMP,ContextTokens,GeneratedTokens': expected timestamp_s",
        ),
        ("timestamp_s,input_tokens,timestamp_s,output_tokens\n0,1,1,1\n", "line 1: 2 columns timestamp_s: keep one"),
        ("", "it is empty: expected timestamp_s, input_tokens, output_tokens"),
        (HEADER, "no requests after its first line"),
        (HEADER + "0," + "x" * 5000 + ",1\n", "line 2: input_tokens is 'xxxx"),
        (HEADER + "0," + "9" * 6000 + ",1\n", "line 2: input_tokens is '9999"),
        (HEADER + "0,x,1\n", "line 2: input_tokens is 'x': expected a whole number"),
        (HEADER + "0,1,1.5\n", "line 2: output_tokens is '1.5': expected a whole number"),
        (HEADER + "x,1,1\n", "line 2: timestamp_s is 'x': expected a number"),
        (HEADER + "1,1,1\n0,1,1\n", "line 3: timestamp_s is 0: time runs backwards"),
        (HEADER + "-1,1,1\n", "line 2: timestamp_s is -1: expected seconds from the start"),
        (HEADER + "nan,1,1\n", "line 2: timestamp_s is nan: expected seconds from the start"),
        (HEADER + "0,1,1\ninf,1,1\n", "line 3: timestamp_s is inf: expected seconds from the start"),
        (HEADER + "0,0,1\n", "line 2: input_tokens is 0: expected at least 1"),
        (HEADER + "0,1,-3\n", "line 2: output_tokens is -3: expected at least 1"),
        (HEADER + "0,1\n", "line 2: 2 values for 3 columns"),
        (HEADER.strip() + ",hash_ids\n0,1,1,3 -4\n", "line 2: hash_ids has -4: expected 0 or more"),
        (HEADER.strip() + ",hash_ids\n0,1,1,1 b\n", "line 2: hash_ids is '1 b': expected whole numbers"),
    ],
)
def test_a_wrong_file_is_named_with_its_line_and_field(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=re.escape(f"{path}: {says}")):
        load_trace(path)


def test_gzip_and_prefixes_are_read_and_other_columns_are_not(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write("user,timestamp_s,input_tokens,output_tokens,hash_ids\nx,0.5,1000,2,7 8\ny,1,3,4,\n")
    assert load_trace(path) == (
        TraceRequest(at_s=0.5, input_tokens=1000, output_tokens=2, hash_ids=(7, 8)),
        TraceRequest(at_s=1.0, input_tokens=3, output_tokens=4),
    )


def test_a_file_that_is_no_gzip_or_a_broken_one_says_so(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    whole = gzip.compress((HEADER + "0,1,1\n" * 1000).encode())
    for content in (HEADER.encode(), whole[:-9], whole[:20] + b"x" * 20 + whole[40:]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{path}: cannot be read"):
            load_trace(path)


def test_a_file_that_a_spreadsheet_saved_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "0,1,1\n", encoding="utf-8-sig")
    assert load_trace(path) == (TraceRequest(at_s=0.0, input_tokens=1, output_tokens=1),)


def test_a_long_value_is_cut_in_the_message(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + "0," + "x" * 5000 + ",1\n")
    with pytest.raises(ValueError) as error:
        load_trace(path)
    assert len(str(error.value)) < len(str(path)) + 200


def test_prefixes_stay_as_long_as_the_prompt_does() -> None:
    trace = [TraceRequest(at_s=1.0, input_tokens=1000, output_tokens=2, hash_ids=(7, 8))]
    assert scale_trace(trace, time_factor=2.0)[0].hash_ids == (7, 8)
    assert scale_trace(trace, max_total_tokens=500)[0].hash_ids == ()


def test_a_missing_file_is_a_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        load_trace(tmp_path / "none.csv")


def test_scaling_keeps_prompt_and_output_inside_the_context() -> None:
    trace = [
        TraceRequest(at_s=2.0, input_tokens=4000, output_tokens=600),
        TraceRequest(at_s=3.0, input_tokens=1, output_tokens=1),
    ]
    scaled = scale_trace(trace, time_factor=0.5, length_factor=0.5, max_total_tokens=1000)
    assert scaled == (
        TraceRequest(at_s=1.0, input_tokens=700, output_tokens=300),
        TraceRequest(at_s=1.5, input_tokens=1, output_tokens=1),
    )
    assert len(scale_trace(trace, limit=1)) == 1


def made(count: int, gap_s: float = 1.0) -> list[TraceRequest]:
    return [TraceRequest(at_s=gap_s * n, input_tokens=10 + n, output_tokens=1 + n) for n in range(count)]


def test_scaling_the_rate_keeps_the_trace_inside_and_its_order_and_repeats_with_its_seed() -> None:
    trace = made(200)
    scaled = scale_rate(trace, 3.5, random.Random(1))
    assert scaled == scale_rate(trace, 3.5, random.Random(1))
    assert len(scaled) == pytest.approx(700, rel=0.05)
    assert [r.at_s for r in scaled] == sorted(r.at_s for r in scaled)
    assert scaled[0].at_s >= 0.0
    assert scaled[-1].at_s <= trace[-1].at_s
    assert set(trace) <= set(scaled)


def test_scaling_the_rate_below_one_thins_it() -> None:
    assert len(scale_rate(made(1000), 0.25, random.Random(0))) == pytest.approx(250, rel=0.2)


def test_scaling_the_rate_keeps_the_curve_over_minutes() -> None:
    busy, idle = made(600, 0.1), [TraceRequest(at_s=60.0 + 6.0 * n, input_tokens=5, output_tokens=5) for n in range(20)]
    scaled = scale_rate([*busy, *idle], 10.0, random.Random(0))
    assert sum(r.at_s >= 100.0 for r in scaled) == pytest.approx(10 * sum(r.at_s >= 100.0 for r in idle), rel=0.15)


def test_one_heavy_request_is_spread_until_its_copies_come_once_a_second() -> None:
    trace = [
        TraceRequest(at_s=float(n), input_tokens=9000 if n == 300 else 10, output_tokens=1, hash_ids=(n,))
        for n in range(600)
    ]

    def copies_s(factor: float) -> list[float]:
        return sorted(r.at_s for r in scale_rate(trace, factor, random.Random(0)) if r.input_tokens == 9000)

    few, many = copies_s(40.0), copies_s(240.0)
    assert (len(few), len(many)) == (40, 240)
    assert few[0] >= 270.0 and few[-1] <= 330.0
    assert 180.0 <= many[0] < 190.0 and 410.0 < many[-1] <= 420.0


@pytest.mark.parametrize("factor", [60.0, 400.0])
def test_a_level_load_stays_level_up_to_the_ends(factor: float) -> None:
    scaled = scale_rate(made(600), factor, random.Random(0))
    for begin_s in range(0, 590, 30):
        within = sum(begin_s <= r.at_s < begin_s + 30.0 for r in scaled)
        assert within == pytest.approx(30.0 * factor, rel=5 / (30.0 * factor) ** 0.5)


def test_copies_share_prefixes_only_with_each_other() -> None:
    trace = [TraceRequest(at_s=float(n), input_tokens=1024, output_tokens=1, hash_ids=(0, n + 1)) for n in range(20)]
    scaled = scale_rate(trace, 2.0, random.Random(0))
    assert len(scaled) == 40
    assert {r.hash_ids[0] for r in scaled} == {0, 21}
    assert len({r.hash_ids for r in scaled}) == 40
    assert all(r.input_tokens == 1024 for r in scaled)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_is_scaled_only_by_a_finite_number_above_zero(factor: float) -> None:
    with pytest.raises(ValueError, match="cannot be scaled"):
        scale_rate(made(3), factor, random.Random(0))


def test_a_part_of_a_trace_begins_at_its_own_start() -> None:
    assert [r.at_s for r in cut(made(10), 3.0, 4.0)] == [0.0, 1.0, 2.0, 3.0]
    assert [r.at_s for r in cut(made(10), 8.0)] == [0.0, 1.0]
