"""Laws of traces."""

from pathlib import Path

import pytest

from autoscale.trace import TraceRequest, load_trace, scale_trace

HEADER = "timestamp_s,input_tokens,output_tokens\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def test_committed_sample_loads_and_starts_at_zero() -> None:
    sample = load_trace(Path(__file__).parents[2] / "configs" / "traces" / "azure_conv_60s.csv")
    assert len(sample) == 265
    assert sample[0].at_s == 0.0
    assert sample[-1].at_s < 60.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("time,input_tokens,output_tokens\n0,1,1\n", "timestamp_s"),
        (HEADER, "no requests"),
        (HEADER + "0,x,1\n", "line 2"),
        (HEADER + "1,1,1\n0,1,1\n", "backwards"),
        (HEADER + "0,1\n", "line 2"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        load_trace(write(tmp_path, text))


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
