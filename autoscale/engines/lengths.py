"""The lengths of requests as distributions, and the mean request that engines see (pure).

A distribution is pairs: a length in tokens, and the share of the requests that have it. A mean length is a distribution
of one point. The mean alone hides work: the time of a prompt is convex in its length (DOPD Eq. 6-8), and a request with
a long answer stays in the batch for longer.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from autoscale.engines.profile import EngineProfile

Distribution = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths of prompts and of answers.

    Attributes:
        inputs: lengths of prompts, tokens, each with its share of the requests.
        outputs: lengths of answers, in the same form.
        decoding_input_tokens: mean prompt of the requests in a batch. A request counts there once for each output
            token: E[I O] / E[O]. It is the mean prompt, unless long answers come with long prompts.
    """

    inputs: Distribution
    outputs: Distribution
    decoding_input_tokens: float

    @classmethod
    def independent(cls, inputs: Sequence[tuple[float, float]], outputs: Sequence[tuple[float, float]]) -> Self:
        """Prompts and answers whose lengths do not depend on each other.

        Raises:
            ValueError: there is no length, or one of a positive share is not above 0.
        """
        inputs, outputs = _checked("input", inputs), _checked("output", outputs)
        return cls(inputs=inputs, outputs=outputs, decoding_input_tokens=_mean(inputs))

    @classmethod
    def fixed(cls, input_tokens: float, output_tokens: float) -> Self:
        """The same lengths for all requests; a ValueError unless both are above 0."""
        return cls.independent(((input_tokens, 1.0),), ((output_tokens, 1.0),))

    @classmethod
    def of_requests(cls, requests: Iterable[tuple[int, int]]) -> Self:
        """The lengths of recorded requests, pairs of input and output tokens.

        Raises:
            ValueError: there is no request, or a length is not above 0.
        """
        counts = Counter(requests)
        total, answers = counts.total(), math.fsum(outputs * count for (_, outputs), count in counts.items())
        inputs, outputs = Counter[int](), Counter[int]()
        for (prompt, answer), count in counts.items():
            inputs[prompt] += count
            outputs[answer] += count
        own = cls.independent(
            tuple((float(tokens), count / total) for tokens, count in sorted(inputs.items())),
            tuple((float(tokens), count / total) for tokens, count in sorted(outputs.items())),
        )
        products = math.fsum(prompt * answer * count for (prompt, answer), count in counts.items())
        return cls(inputs=own.inputs, outputs=own.outputs, decoding_input_tokens=products / answers)

    @property
    def input_tokens(self) -> float:
        """Mean prompt (ISL)."""
        return _mean(self.inputs)

    @property
    def output_tokens(self) -> float:
        """Mean answer (OSL)."""
        return _mean(self.outputs)

    @property
    def context_tokens(self) -> float:
        """Mean KV of the requests in a batch, tokens: E[I O]/E[O] + E[O^2]/(2 E[O]).

        For one length of prompts and of answers it is ISL + OSL/2 (Eq. 13).
        """
        squared = math.fsum(tokens * tokens * share for tokens, share in self.outputs)
        return self.decoding_input_tokens + squared / (2.0 * self.output_tokens)

    @property
    def longest_input_tokens(self) -> float:
        """The longest prompt."""
        return max(tokens for tokens, _ in self.inputs)

    @property
    def longest_output_tokens(self) -> float:
        """The longest answer."""
        return max(tokens for tokens, _ in self.outputs)

    def means(self) -> Self:
        """What the mean lengths alone say: all requests have them."""
        return self.fixed(self.input_tokens, self.output_tokens)

    def scaled(self, input_tokens: float, output_tokens: float) -> Self:
        """The same distributions with other means, tokens."""
        longer, more = input_tokens / self.input_tokens, output_tokens / self.output_tokens
        return type(self)(
            inputs=tuple((tokens * longer, share) for tokens, share in self.inputs),
            outputs=tuple((tokens * more, share) for tokens, share in self.outputs),
            decoding_input_tokens=self.decoding_input_tokens * longer,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanRequest:
    """What a request asks of the engines in the mean.

    Attributes:
        input_tokens: its prompt (ISL).
        output_tokens: its answer (OSL).
        context_tokens: mean KV of the requests in a decode batch.
        prefill_s: time that its prompt takes of a prefill engine, seconds: E[T_p(I)].
        beyond_frac: share of the prompts whose time lies beyond the points of the profile.
    """

    input_tokens: float
    output_tokens: float
    context_tokens: float
    prefill_s: float
    beyond_frac: float = 0.0

    @classmethod
    def of(cls, lengths: Lengths, profile: EngineProfile, cached_frac: float = 0.0) -> Self:
        """The mean request on prefill engines of a profile.

        ``cached_frac``: share of each prompt, at its beginning, that prefix caches hold.

        Raises:
            ValueError: a prompt takes no time by the profile.
        """
        curve = profile.prefill

        def prompt_s(tokens: float) -> float:
            # The last token is always computed: its logits give the first output token.
            cached_tokens = max(0.0, min(cached_frac * tokens, tokens - 1.0))
            return min(curve.seconds_for(tokens), curve.step_s + curve.chunk_s(cached_tokens, tokens))

        prefill_s = math.fsum(prompt_s(tokens) * share for tokens, share in lengths.inputs)
        if prefill_s <= 0.0:
            raise ValueError(
                f"profile {profile.name}: {lengths.input_tokens:g} tokens take no time: measure it again with "
                "`tandem profile`"
            )
        return cls(
            input_tokens=lengths.input_tokens,
            output_tokens=lengths.output_tokens,
            context_tokens=lengths.context_tokens,
            prefill_s=prefill_s,
            beyond_frac=math.fsum(share for tokens, share in lengths.inputs if not curve.covers(tokens)),
        )


def _checked(name: str, pairs: Sequence[tuple[float, float]]) -> Distribution:
    """The pairs with a share; a ValueError unless there is one, and all lengths are above 0."""
    checked = tuple((tokens, share) for tokens, share in pairs if share > 0.0)
    if not checked:
        raise ValueError(f"no {name} length is given: give at least one")
    if wrong := [tokens for tokens, _ in checked if not (0.0 < tokens < math.inf)]:
        raise ValueError(f"{wrong[0]:g} {name} tokens: a length must be above 0")
    return checked


def _mean(pairs: Distribution) -> float:
    return math.fsum(tokens * share for tokens, share in pairs)
