"""``OperatorCosts`` of one model in one phase on one GPU type, from its graph and the GPU's tables (pure)."""

from autoscale.operators.attention import Attention
from autoscale.operators.costs import Phase, TimeSource
from autoscale.operators.graph import OperatorGraph
from autoscale.operators.kinds import Operator, Pass
from autoscale.operators.times import OperatorTimes, Timed


class OperatorWorkError(ValueError):
    """A parallel size, a length or a batch for which an operator has no time."""


class ModelCosts:
    """Implements ``OperatorCosts``; see there for shapes and units.

    Args:
        graph: the model's operators.
        times: those of the GPU.
        phase: prefill or decode. Decode leaves out the vision encoder, which only prompts pass through.
        image_tokens: tokens of each prompt that come from an image, at most its length; of use with a vision encoder.
    """

    def __init__(self, graph: OperatorGraph, times: OperatorTimes, phase: Phase, image_tokens: int = 0) -> None:
        self._times, self._phase, self._image_tokens = times, phase, image_tokens
        is_decode = phase is Phase.DECODE
        self._operators = {each.name: each for each in graph.operators if not (is_decode and _is_vision(each))}
        self.names = tuple(self._operators)
        self._timed: dict[tuple[str, int, int, int], Timed] = {}

    def parallel_sizes(self, name: str) -> tuple[int, ...]:
        """Tensor parallel sizes that the operator's shape allows, ascending."""
        return self._operator(name).parallel_sizes()

    def time_s(self, name: str, *, parallel: int, length_tokens: int, batch: int) -> float:
        """Seconds of one pass through all copies.

        Raises:
            OperatorWorkError: no operator has the name, its shape has no such parallel size, or the work is below 1.
        """
        return self._read(name, parallel, length_tokens, batch).seconds * self._operators[name].copies

    def source(self, name: str, *, parallel: int, length_tokens: int, batch: int) -> TimeSource:
        """Where ``time_s`` of the same arguments comes from; raises as it."""
        return self._read(name, parallel, length_tokens, batch).source

    def weight_bytes(self, name: str) -> float:
        """Bytes of the weights of all copies, over all GPUs."""
        operator = self._operator(name)
        return operator.weight_bytes * operator.copies

    def transient_bytes(self, name: str, *, parallel: int, length_tokens: int, batch: int) -> float:
        """Bytes of input and output of one copy, and for attention of the KV in all layers, over all GPUs.

        With more ranks than KV heads, each rank holds a copy of one head.
        """
        operator, step = self._operator(name), self._pass(length_tokens, batch)
        activations = operator.input_bytes(step) + operator.output_bytes(step)
        if not isinstance(operator, Attention):
            return activations
        held_frac = operator.rank_heads(parallel)[1] * parallel / operator.kv_heads
        kv_bytes = operator.kv_tokens(step) * operator.kv_bytes_per_token() * operator.copies
        return activations + kv_bytes * held_frac

    def output_bytes(self, name: str, *, length_tokens: int, batch: int) -> float:
        """Bytes that one copy sends to the next operator."""
        return self._operator(name).output_bytes(self._pass(length_tokens, batch))

    def copies(self, name: str) -> int:
        """How often one pass computes the operator."""
        return self._operator(name).copies

    def pass_s(self, *, parallel: int, length_tokens: int, batch: int) -> float:
        """Seconds of all operators, one after the other: Eq. 3 of the paper without waiting and transfers."""
        return sum(
            self.time_s(name, parallel=parallel, length_tokens=length_tokens, batch=batch) for name in self.names
        )

    def _operator(self, name: str) -> Operator:
        if name not in self._operators:
            raise OperatorWorkError(f"no operator is named {name!r}: there are {', '.join(self.names)}")
        return self._operators[name]

    def _pass(self, length_tokens: int, batch: int) -> Pass:
        if length_tokens < 1 or batch < 1:
            raise OperatorWorkError(f"{batch} sequences of {length_tokens} tokens: both must be at least 1")
        if self._phase is Phase.DECODE:
            return Pass(decoding=batch, context_tokens=length_tokens)
        return Pass(prompts=batch, new_tokens=length_tokens, image_tokens=self._image_tokens)

    def _read(self, name: str, parallel: int, length_tokens: int, batch: int) -> Timed:
        """Times are stored: a planner reads the same points often."""
        key = (name, parallel, length_tokens, batch)
        if key not in self._timed:
            operator = self._operator(name)
            if parallel not in operator.parallel_sizes():
                sizes = ", ".join(map(str, operator.parallel_sizes()))
                raise OperatorWorkError(f"{name} cannot be divided over {parallel} GPUs: its shape allows {sizes}")
            self._timed[key] = self._times.time(operator, self._pass(length_tokens, batch), parallel)
        return self._timed[key]


def _is_vision(operator: Operator) -> bool:
    return operator.name.startswith("vision_")
