"""The JSON file of ``tandem operators plan``: every figure of its answers."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from autoscale.operators.comparison import OperatorRow, saved
from autoscale.operators.energy import mean_power_w
from serve_app.operators.answer import PhaseAnswer
from serve_app.operators.inputs import Subject, objective_text


def plans_document(answers: Sequence[PhaseAnswer]) -> dict[str, Any]:
    """The answers of all phases for one demand."""
    return {**subject_document(answers[0].subject), "phases": {str(one.phase): _phase(one) for one in answers}}


def subject_document(subject: Subject) -> dict[str, Any]:
    """What was planned, and with which assumptions."""
    platform = subject.platform
    return {
        "model": subject.name,
        "dtype": subject.dtype,
        "gpu": platform.gpu.name,
        "most_parallel": platform.most_parallel,
        "has_sm_shares": platform.shares is not None,
        "sharing": platform.sharing_text,
        "power": platform.power_text,
    }


def _phase(answer: PhaseAnswer) -> dict[str, Any]:
    return {
        "passes_per_s": answer.demand.passes_per_s,
        "length_tokens": answer.demand.length_tokens,
        "fixed_gpus": answer.fixed_gpus,
        "objective": {
            "slo_s": answer.objective.slo_s,
            "is_default": answer.objective.parallel is not None,
            "text": objective_text(answer.phase, answer.objective, answer.demand.length_tokens),
        },
        "best": answer.best,
        "planners": {name: _plan(answer, name) for name in answer.plans},
        "refusals": dict(answer.refusals),
        "estimated": {name: str(kind) for name, kind in answer.estimated.items()},
        "notes": list(answer.notes),
    }


def _plan(answer: PhaseAnswer, name: str) -> dict[str, Any]:
    plan, model = answer.plans[name], answer.plans.get("model")
    judged = plan.evaluation
    return {
        "passes_per_s": answer.rates.get(name, answer.demand.passes_per_s),
        "gpus": plan.gpus,
        "memory_bytes": plan.memory_bytes,
        "weight_bytes": plan.weight_bytes,
        "power_w": mean_power_w(plan, answer.power),
        "latency_s": judged.latency_s,
        "meets_objective": judged.meets(answer.objective.slo_s),
        "fill_s": judged.fill_s,
        "gpu_busy_frac": plan.busy_gpus / plan.gpus,
        "bottleneck": plan.bottleneck,
        "saved": None if model is None else asdict(saved(plan, model, answer.power)),
        "operators": [row_document(row) for row in answer.rows[name]],
    }


def row_document(row: OperatorRow) -> dict[str, Any]:
    """One operator of a plan."""
    return {
        "name": row.name,
        **asdict(row.setting),
        "busy_frac": row.busy_frac,
        "time_s": row.time_s,
        "source": str(row.source),
        "wait_s": row.wait_s,
        "transfer_s": row.transfer_s,
        "energy_j": row.energy_j,
        "is_bottleneck": row.is_bottleneck,
    }
