"""How each operator reacts to length, batch, parallelism, share of SMs and rate: the paper's Figs. 2 to 8."""

from collections.abc import Callable, Sequence

from autoscale.operators.activity import Activity, Kind
from autoscale.operators.costs import Phase
from autoscale.operators.measured_costs import ModelCosts
from autoscale.operators.queueing import WAITS, least_stable_servers, wait_s
from autoscale.operators.sm_shares import SmShares
from serve_app.operators.inputs import UNITS, Subject
from serve_app.operators.panels import Curve, Figure, Panel

# The models of the paper's Table 1, as shipped.
TABLE_1 = ("qwen2-7b", "qwen2-57b-a14b", "llama-3-8b", "mixtral-8x7b", "qwen2.5-vl-32b")
_MOST_OPERATORS = 10
_LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_BATCHES = {Phase.PREFILL: (1, 2, 4, 8, 16), Phase.DECODE: (1, 4, 16, 64, 256)}
_RATES = {Phase.PREFILL: (1, 2, 5, 10, 20, 50, 100, 200), Phase.DECODE: (100, 500, 1000, 5000, 10_000, 50_000)}
# Sequences of a decode batch, and prompts of a prefill batch, where the batch is fixed.
_BATCH = {Phase.PREFILL: 1, Phase.DECODE: 32}
_SHARES = (10, 20, 30, 40, 50, 60, 70, 80, 90, 100)
# Names in an Activity that give its kind.
_KIND_NAMES = {
    Kind.PRODUCT: "qkv_proj",
    Kind.PREFILL_ATTENTION: "attention",
    Kind.DECODE_ATTENTION: "attention",
    Kind.NORM: "input_norm",
    Kind.POINTWISE: "rotary",
}


def sensitivity_figure(subject: Subject, phase: Phase, length_tokens: int, shares: SmShares) -> Figure:
    """Eight panels of one model in one phase."""
    reader = _Reader(subject.costs(phase), phase, length_tokens)
    unit = UNITS[phase]
    per = "prompts" if phase is Phase.PREFILL else "sequences"
    length_label = "tokens of the prompt" if phase is Phase.PREFILL else "tokens of context"
    panels = [
        reader.panel("Time by length (Fig. 2)", length_label, "time / time of the shortest", reader.by_length()),
        reader.panel("Time by batch (Fig. 4)", f"{per} in a batch", "time / time of batch 1", reader.by_batch()),
        reader.panel("Time by parallelism", "tensor parallel size", "time, ms", reader.by_parallel()),
        _share_panel(phase, shares, length_tokens),
        reader.panel("Memory by length (Fig. 3)", length_label, "weights and activations, GB", reader.memory()),
        reader.panel("Output by length (Fig. 7)", length_label, "data of one copy, MB", reader.outputs()),
        reader.panel("Replicas by rate (Fig. 6)", unit, "fewest stable replicas", reader.replicas()),
        reader.panel("Wait with them (Fig. 6)", unit, "wait, ms", reader.waits(), is_log_y=False),
    ]
    where = f"{subject.name}, {subject.platform.gpu.name}, {phase}"
    caption = (
        f"The {len(reader.names)} operators with the longest time. Where they are fixed: {length_tokens} tokens, batch "
        f"{_BATCH[phase]}, one GPU. Times are of all layers. Shares of SMs are measured by kind of kernel on an H100."
    )
    return Figure(title=f"Sensitivity of operators: {where}", caption=caption, panels=panels, columns=4)


class _Reader:
    """Reads costs at the points of the panels."""

    def __init__(self, costs: ModelCosts, phase: Phase, length_tokens: int) -> None:
        self._costs, self._phase, self._length, self._batch = costs, phase, length_tokens, _BATCH[phase]
        by_time = sorted(costs.names, key=self._time, reverse=True)
        chosen = [name for name in by_time if self._time(name) > 0.0][:_MOST_OPERATORS]
        self.names = tuple(name for name in costs.names if name in chosen)
        # Exchanges take time on several GPUs only; that after the MLP stands for all.
        self._collectives = tuple(name for name in costs.names if name in ("mlp_all_reduce", "experts_all_reduce"))

    def panel(self, title: str, x: str, y: str, curves: Sequence[Curve], *, is_log_y: bool = True) -> Panel:
        """A panel with logarithmic axes, as the paper's sensitivities are powers."""
        return Panel(title=title, x_label=x, y_label=y, curves=curves, is_log_x=True, is_log_y=is_log_y)

    def by_length(self) -> list[Curve]:
        """Multiples of the time at the shortest length."""
        return self._relative(_LENGTHS, lambda name, length: self._time(name, length=length))

    def by_batch(self) -> list[Curve]:
        """Multiples of the time of batch 1."""
        return self._relative(_BATCHES[self._phase], lambda name, batch: self._time(name, batch=batch))

    def by_parallel(self) -> list[Curve]:
        """Milliseconds at the sizes that an operator has, with exchanges between GPUs."""
        curves = []
        for name in dict.fromkeys((*self.names, *self._collectives)):
            sizes = self._costs.parallel_sizes(name)
            times = [self._time(name, parallel=size) * 1e3 for size in sizes]
            curves.append(Curve(name=name, x=sizes, y=[value if value > 0.0 else None for value in times]))
        return curves

    def memory(self) -> list[Curve]:
        """Gigabytes of weights, activations and KV by length."""

        def held(name: str, length: int) -> float:
            at = {"parallel": 1, "length_tokens": length, "batch": self._batch}
            return (self._costs.weight_bytes(name) + self._costs.transient_bytes(name, **at)) / 1e9

        return self._curves(_LENGTHS, held)

    def outputs(self) -> list[Curve]:
        """Megabytes that one copy sends to the next operator, by length."""

        def sent(name: str, length: int) -> float:
            return self._costs.output_bytes(name, length_tokens=length, batch=self._batch) / 1e6

        return self._curves(_LENGTHS, sent)

    def replicas(self) -> list[Curve]:
        """The fewest replicas that are stable, by rate of passes."""
        return self._curves(_RATES[self._phase], lambda name, rate: float(self._servers(name, rate)))

    def waits(self) -> list[Curve]:
        """Milliseconds of waiting with these replicas (Eq. 1, 2)."""

        def waited(name: str, rate: float) -> float:
            servers, each = self._servers(name, rate), rate / self._batch
            return float(wait_s(servers, each, self._time(name), WAITS["exponential"])) * 1e3

        return self._curves(_RATES[self._phase], waited)

    def _servers(self, name: str, rate: float) -> int:
        return max(1, int(least_stable_servers(rate / self._batch, self._time(name))))

    def _curves(self, points: Sequence[int], value: Callable[[str, int], float]) -> list[Curve]:
        return [Curve(name=name, x=points, y=[value(name, point) for point in points]) for name in self.names]

    def _relative(self, points: Sequence[int], value: Callable[[str, int], float]) -> list[Curve]:
        return [
            Curve(name=one.name, x=one.x, y=[each / one.y[0] for each in one.y if each and one.y[0]])
            for one in self._curves(points, value)
        ]

    def _time(self, name: str, *, length: int = 0, batch: int = 0, parallel: int = 1) -> float:
        at = {"length_tokens": length or self._length, "batch": batch or self._batch}
        return self._costs.time_s(name, parallel=parallel, **at)


def _share_panel(phase: Phase, shares: SmShares, length_tokens: int) -> Panel:
    """Time by share of the SMs, for the kinds of kernels that were measured."""
    other = Kind.DECODE_ATTENTION if phase is Phase.PREFILL else Kind.PREFILL_ATTENTION
    curves = []
    for kind in (one for one in Kind if one is not other):
        tokens = length_tokens * _BATCH[phase] if phase is Phase.PREFILL else _BATCH[phase]
        activity = Activity(name=_KIND_NAMES[kind], phase=phase, tokens=tokens, bandwidth_frac=0.0)
        curves.append(Curve(name=f"{kind} (kind)", x=_SHARES, y=[shares.slowdown(activity, one) for one in _SHARES]))
    return Panel(
        title="Time by share of SMs (Fig. 8a)",
        x_label="share of the SMs, %",
        y_label="time / time with all SMs",
        curves=curves,
    )
