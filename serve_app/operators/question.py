"""Which demand, phases and planners ``tandem operators plan`` is asked about, and which options exclude each other."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoscale.operators.costs import Phase
from autoscale.operators.planners import PLANNERS
from autoscale.traces.trace import TraceRequest
from serve_app.checks.yaml_checks import config_errors
from serve_app.operators.answer import PhaseAnswer, answer_for_gpus, answer_for_load
from serve_app.operators.inputs import Subject
from serve_app.operators.trace import Replanning, TraceAnswer, answer_for_trace

_DEFAULT_PLANNERS = ("model", "greedy", "search")
_PHASES = {**{str(phase): (phase,) for phase in Phase}, "both": tuple(Phase)}
Tokens = tuple[int, int | None]  # of a prompt and of an answer


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is planned. ``slos``: objectives that were given, seconds; ``gpus``: fixed GPUs, instead of a load."""

    phases: tuple[Phase, ...]
    planners: tuple[str, ...]
    slos: Mapping[Phase, float | None]
    gpus: int | None
    requests_per_s: float | None

    def at_one_point(self, what: Subject, tokens: Tokens) -> list[PhaseAnswer]:
        """The answers for a load, or for fixed GPUs."""
        rate = self._rate()
        answers = []
        for phase in self.phases:
            slo_s = self.slos[phase]
            with config_errors(f"{phase}: "):
                if self.gpus is None:
                    each = answer_for_load(what, phase, self.planners, requests_per_s=rate, tokens=tokens, slo_s=slo_s)
                else:
                    each = answer_for_gpus(what, phase, self.planners, gpus=self.gpus, tokens=tokens, slo_s=slo_s)
            answers.append(each)
        return answers

    def over_time(self, what: Subject, trace: Sequence[TraceRequest], replanning: Replanning) -> list[TraceAnswer]:
        """The answers for a trace."""
        answers = []
        for phase in self.phases:
            with config_errors(f"{phase}: "):
                answers.append(answer_for_trace(what, phase, self.planners, trace, replanning, self.slos[phase]))
        return answers

    def check_trace(self, lengths: tuple[int | None, int | None]) -> None:
        """Refuse options that a trace replaces."""
        for option, value in (
            ("--gpus", self.gpus),
            ("--requests-per-s", self.requests_per_s),
            ("--input-tokens", lengths[0]),
            ("--output-tokens", lengths[1]),
        ):
            if value is not None:
                raise ValueError(f"{option} {value:g}: --trace gives the load and the lengths: leave one of them out")

    def tokens(self, lengths: tuple[int | None, int | None]) -> Tokens:
        """Lengths of a prompt and of an answer, checked together with the load."""
        self._rate()
        prompt, output = lengths
        if prompt is None:
            raise ValueError("the length of prompts is not given: add --input-tokens, or --trace")
        if output is None and Phase.DECODE in self.phases:
            raise ValueError("decode needs the length of answers: add --output-tokens, or --phase prefill")
        for option, tokens in (("--input-tokens", prompt), ("--output-tokens", output)):
            if tokens is not None and tokens < 1:
                raise ValueError(f"{option} {tokens}: give a number of tokens, 1 or more")
        return prompt, output

    def _rate(self) -> float:
        """Requests per second; 0 with fixed GPUs."""
        rate = self.requests_per_s
        if self.gpus is not None:
            if rate is not None:
                raise ValueError(f"--gpus {self.gpus} asks for the highest rate: leave --requests-per-s {rate:g} out")
            if len(self.phases) > 1:
                raise ValueError(f"--gpus {self.gpus} are those of one phase: add --phase prefill or --phase decode")
            return 0.0
        if rate is None:
            raise ValueError("no load is given: add --requests-per-s, --gpus or --trace")
        if not 0.0 <= rate < math.inf:
            raise ValueError(f"--requests-per-s {rate:g}: give a number from 0")
        return rate


def phases_of(name: str) -> tuple[Phase, ...]:
    """The phases of --phase. Raises ValueError: no phase has the name."""
    if name not in _PHASES:
        raise ValueError(f"--phase {name}: give one of {', '.join(_PHASES)}")
    return _PHASES[name]


def planners_of(names: Sequence[str] | None) -> tuple[str, ...]:
    """The planners of --planner, each once. Raises ValueError: no planner has a name."""
    for name in names or ():
        if name not in PLANNERS:
            raise ValueError(f"--planner {name}: give one of {', '.join(PLANNERS)}")
    return tuple(dict.fromkeys(names or _DEFAULT_PLANNERS))
