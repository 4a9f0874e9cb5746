"""The optimal P/D ratio of observed requests, from the profiles of both roles (pure).

It serves the policies that keep a ratio; ``decide.follow_ratio`` limits its changes. Source: DOPD section IV-B.
"""

from dataclasses import replace

from autoscale.engines.lengths import Lengths, MeanRequest
from autoscale.engines.optimal_ratio import OptimalRatio, optimal_ratio, ratio_for
from autoscale.policies.policy import EnginesConfig, observed_lengths
from autoscale.types import ControllerState, RequestSums, Traffic


def with_requests(sums: RequestSums, traffic: Traffic, engines: EnginesConfig, seconds: float) -> RequestSums:
    """The sums with the requests that came in ``seconds``, at the rate and the lengths of the last window.

    Traffic that was not observed, or not all of it, adds nothing. Tokens in prefix caches cost no time.
    """
    lengths = observed_lengths(traffic)
    if not traffic.requests_per_s or lengths is None or not traffic.is_whole:
        return sums
    requests = traffic.requests_per_s * seconds
    mean = MeanRequest.of(lengths, engines.prefill, traffic.cached_frac or 0.0)
    output_tokens = requests * mean.output_tokens
    return replace(
        sums,
        requests=sums.requests + requests,
        prefill_s=sums.prefill_s + requests * mean.prefill_s,
        input_tokens=sums.input_tokens + requests * mean.input_tokens,
        output_tokens=sums.output_tokens + output_tokens,
        context_tokens=sums.context_tokens + output_tokens * mean.context_tokens,
    )


def ratio_of_sums(sums: RequestSums, engines: EnginesConfig, state: ControllerState, tpot_s: float) -> OptimalRatio:
    """The optimal ratio for the mean request of the sums, with link and decode steps as observed.

    ``sums``: of at least one request. ``tpot_s``: the objective, seconds.
    """
    request = MeanRequest(
        input_tokens=sums.input_tokens / sums.requests,
        output_tokens=sums.output_tokens / sums.requests,
        context_tokens=sums.context_tokens / sums.output_tokens,
        prefill_s=sums.prefill_s / sums.requests,
    )
    return ratio_for(request, engines.with_observed(state).decode, tpot_s=tpot_s)


def ratio_of_lengths(engines: EnginesConfig, input_tokens: float, output_tokens: float, tpot_s: float) -> OptimalRatio:
    """The optimal ratio for requests of one length; a ValueError if a prompt takes no time by its profile."""
    return optimal_ratio(engines.prefill, engines.decode, Lengths.fixed(input_tokens, output_tokens), tpot_s=tpot_s)
