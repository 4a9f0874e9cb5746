"""The requests of a trace as arrays, in windows of time, for predictions without a simulation (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from autoscale.engines.lengths import Lengths
from autoscale.traces.trace import TraceRequest

Floats = NDArray[np.float64]

# Longest window, seconds. Shorter ones see the chance of single arrivals as a change of the rate.
_WINDOW_S = 30.0
# Most requests whose lengths are looked at one by one; of a longer trace, requests at equal distances are taken.
_MOST_SAMPLES = 2_000


@dataclass(frozen=True, kw_only=True)
class PairLoad:
    """What arrives at a pair of pools.

    Attributes:
        rates_per_s: requests per second in each window.
        window: index of the window of each sampled request.
        input_tokens: prompt of each sampled request.
        output_tokens: answer of each sampled request.
        lengths: of all requests.
        window_s: length of a window, seconds.
    """

    rates_per_s: Floats
    window: NDArray[np.int64]
    input_tokens: Floats
    output_tokens: Floats
    lengths: Lengths
    window_s: float

    @classmethod
    def of_requests(cls, requests: Sequence[TraceRequest]) -> Self:
        """The load of a trace.

        Raises:
            ValueError: there are fewer than two requests, or all arrive at once: they have no rate.
        """
        if len(requests) < 2 or requests[-1].at_s <= requests[0].at_s:
            raise ValueError(
                f"{len(requests)} request(s) within {requests[-1].at_s - requests[0].at_s if requests else 0:g} s have "
                "no rate: give a longer trace, or --requests-per-s with --input-tokens and --output-tokens"
            )
        span_s = requests[-1].at_s - requests[0].at_s
        windows = max(1, int(span_s // _WINDOW_S))
        window_s = span_s / windows
        at_s = np.array([request.at_s for request in requests]) - requests[0].at_s
        index = np.minimum((at_s / window_s).astype(np.int64), windows - 1)
        step = max(1, len(requests) // _MOST_SAMPLES)
        return cls(
            rates_per_s=np.bincount(index, minlength=windows) / window_s,
            window=index[::step],
            input_tokens=np.array([float(request.input_tokens) for request in requests[::step]]),
            output_tokens=np.array([float(request.output_tokens) for request in requests[::step]]),
            lengths=Lengths.of_requests((request.input_tokens, request.output_tokens) for request in requests),
            window_s=window_s,
        )

    @property
    def requests_per_s(self) -> float:
        """Mean rate."""
        return float(self.rates_per_s.mean())

    @property
    def busiest_per_s(self) -> float:
        """Rate of the busiest window."""
        return float(self.rates_per_s.max())

    def input_quantile(self, frac: float) -> float:
        """Tokens of the prompt that a share of the prompts do not exceed."""
        return float(np.quantile(self.input_tokens, frac))
