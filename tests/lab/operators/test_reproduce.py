"""The rows of ``make reproduce-operators``, from a cut-down version of each part."""

import json
from dataclasses import asdict
from pathlib import Path

from autoscale.operators.costs import Phase
from autoscale.operators.demand import Demand
from autoscale.traces.trace import load_trace
from tests.lab.operators.gap import DECODE
from tests.lab.operators.model_costs import model_costs
from tests.lab.operators.paper_figures import DENSE, curves, length_rows, rate_rows
from tests.lab.operators.paper_oracle import oracle_rows
from tests.lab.operators.paper_plots import draw
from tests.lab.operators.paper_row import PaperRow, Result
from tests.lab.operators.paper_traces import CLAIMS, SHIPPED, rows_of
from tests.lab.operators.readings import GPU, GPU_TIME, OWN_QUEUES, bare_s, readings, saved, table_of
from tests.lab.operators.reproduce import ASSUMPTIONS, markdown, shown


def test_figures_have_a_row_for_each_reading_and_a_picture(tmp_path: Path) -> None:
    found = curves(lengths=(1024,), rates=(5.0,), models=(DENSE,))
    rows = [*length_rows(found), *rate_rows(found)]
    assert {row.source for row in rows} == {"Fig. 10a", "Fig. 10b", "Fig. 10c", "Fig. 11a", "Fig. 11b", "Fig. 11c"}
    assert all(set(row.results) == {OWN_QUEUES, GPU_TIME} for row in rows)
    draw(found, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_the_papers_accounting_saves_gpus_that_have_no_time() -> None:
    """40 prompts/s of 1,024 tokens: as printed, GPUs are planned for more than a second of work in a second."""
    costs = model_costs(DENSE, GPU.name, Phase.PREFILL)
    demand = Demand(passes_per_s=40.0, length_tokens=1024, slo_s=4.0 * bare_s(costs, 1024))
    table = table_of(costs, Phase.PREFILL, demand)
    least_gpus = sum(40.0 * float(one.gpu_s.min()) for one in table.operators)
    own, shared = (saved([table], readings()[name]) for name in (OWN_QUEUES, GPU_TIME))
    assert own is not None
    assert shared is not None
    assert own.gpus < least_gpus < shared.gpus


def test_a_trace_and_the_oracle_give_rows() -> None:
    trace = [one for one in load_trace(SHIPPED) if one.at_s < 20.0]
    rows = [*rows_of(CLAIMS[0], trace), *oracle_rows(most_cases=1, families=(DECODE,))]
    assert [row.source for row in rows] == ["Fig. 12"] * 7 + ["section 4.3"] * 3
    json.dumps([asdict(claim) for row in rows for claim in row.claims(ASSUMPTIONS)])
    assert shown(rows).row_count == len(rows)


def test_a_row_that_does_not_come_out_has_its_reason() -> None:
    row = PaperRow(
        source="Fig. 1",
        what="savings",
        claimed="40 %",
        tolerance="30 to 50 %",
        results={
            OWN_QUEUES: Result(ours="41%", is_reproduced=True),
            GPU_TIME: Result(ours="3%", is_reproduced=False),
        },
        reason={OWN_QUEUES: "never shown", GPU_TIME: "GPUs have no more time."},
    )
    text = markdown([row])
    assert "| Fig. 1 | savings | 40 % | 41%: yes | 3%: no |" in text
    assert "GPU time: GPUs have no more time. Rows: Fig. 1 (savings)." in text
    assert "never shown" not in text
    assert [claim.is_reproduced for claim in row.claims("as stated.")] == [True, False]
    assert row.claims("as stated.")[1].assumption == "as stated. GPUs have no more time."
