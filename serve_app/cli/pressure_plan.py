"""What a live pressure test will do, and the applications that it refuses, before anything is changed."""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.status import ServiceStatus
from autoscale.decide.tuning import deployed_room
from autoscale.pressure.counts import counts_at, gpus_of, neighbours
from autoscale.pressure.live_test import Limits
from autoscale.ratio import PdRatio, pd_text
from autoscale.room import Room
from autoscale.traces.trace import TraceRequest, scale_trace
from kvtransfer.topology import Role
from serve_app.checks.yaml_checks import ConfigError
from serve_app.local.cluster import DeployError
from serve_app.running.fixed_counts import FixedCounts
from serve_app.running.ray_control import Control
from serve_app.running.ray_serve import connect, endpoint_url

# Other traffic before the test that counts as none, as a share of the first rate.
_QUIET_FRAC = 0.05
# Longest wait for the endpoint's list of models, seconds.
_ANSWER_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions:
    """The options of `tandem pressure-test --live`."""

    app: str
    service: str | None
    address: str
    url: str | None
    api_key: str | None
    ratios: str | None
    first_requests_per_s: float
    step_s: float
    tolerance_frac: float
    length_factor: float
    limits: Limits
    is_beside_traffic: bool
    is_despite_override: bool
    is_confirmed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePlan:
    """A test that may begin.

    Attributes:
        url: the endpoint, without /v1.
        config: settings of the service before the test.
        room: bounds of its counts.
        counts: counts to test, in order.
        trace: requests whose lengths are sent.
        fixed: sets the counts, and gives them back.
    """

    service: str
    url: str
    config: AutoscaleConfig
    room: Room
    counts: Sequence[Mapping[Role, int]]
    trace: Sequence[TraceRequest]
    fixed: FixedCounts


def plan_of(options: LiveOptions, whole_trace: Sequence[TraceRequest]) -> LivePlan:
    """Look at the application, and plan a test.

    Raises:
        ConfigError: the application is not as the test needs it.
        DeployError: the cluster, the coordinator or the endpoint does not answer.
    """
    connect(options.address)
    control = Control(options.app, options.service)
    fixed, status = FixedCounts(control), control.status()
    config, room = status.config, deployed_room(status.config, status.pools)
    _check_mode(config, options)
    _check_quiet(status, options)
    url = (options.url or endpoint_url()).rstrip("/")
    context_tokens = _context_tokens(url, control.service, options.api_key)
    return LivePlan(
        service=control.service,
        url=url,
        config=config,
        room=room,
        counts=_counts(config, room, options),
        trace=scale_trace(whole_trace, length_factor=options.length_factor, max_total_tokens=context_tokens),
        fixed=fixed,
    )


def _check_mode(config: AutoscaleConfig, options: LiveOptions) -> None:
    """Refuse an application whose counts are not the policy's to set."""
    if config.is_observing:
        raise ConfigError(
            "is_observing is on, so counts cannot be set by hand: run `tandem tune is_observing=false` first"
        )
    if options.is_despite_override:
        return
    if config.override is not None:
        raise ConfigError(
            f"the counts were set to {pd_text(config.override.counts)} by hand: run `tandem scale --resume` first, or "
            "give --despite-override; they are given back at the end"
        )
    if config.is_paused:
        raise ConfigError(
            "the application is paused: run `tandem scale --resume` first, or give --despite-override; it is paused "
            "again at the end"
        )


def _check_quiet(status: ServiceStatus, options: LiveOptions) -> None:
    """Refuse an application that serves others now."""
    rate = None if status.last is None else status.last.traffic.requests_per_s
    most = _QUIET_FRAC * options.first_requests_per_s
    if rate is not None and rate > most and not options.is_beside_traffic:
        raise ConfigError(
            f"the application serves {rate:.3g} requests/s now, more than {_QUIET_FRAC:.0%} of the first rate "
            f"({options.first_requests_per_s:g}/s): the test would load it further, with other counts. Run it when the "
            "application is idle, or give --beside-traffic"
        )


def _context_tokens(url: str, model: str, api_key: str | None) -> int | None:
    """Tokens that a prompt and its answer may have; ``None``: the endpoint does not tell.

    Raises:
        DeployError: the endpoint does not answer.
        ConfigError: it has no such model.
    """
    request = urllib.request.Request(f"{url}/v1/models")  # noqa: S310
    if api_key is not None:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as response:  # noqa: S310
            cards = json.load(response)["data"]
        contexts: dict[str, int | None] = {card["id"]: card.get("max_model_len") for card in cards}
    except urllib.error.HTTPError as error:
        hint = ": give --api-key" if error.code in (401, 403) else ""
        raise DeployError(f"{url}/v1/models answers {error.code}{hint}") from None
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        raise DeployError(f"no endpoint answers at {url}: {error}: give --url") from None
    if model not in contexts:
        raise ConfigError(f"{url} has no model {model}: it has {', '.join(contexts)}; give another --url")
    return contexts[model]


def _counts(config: AutoscaleConfig, room: Room, options: LiveOptions) -> list[dict[Role, int]]:
    """The counts to test.

    Raises:
        ConfigError: no counts at a ratio fit the bounds and the GPUs.
    """
    if options.ratios is None:
        ratios, is_chosen = neighbours(config.ratio), False
    else:
        ratios, is_chosen = [_ratio(text) for text in options.ratios.split(",")], True
    plan = []
    for ratio in dict.fromkeys(ratios):
        counts = counts_at(ratio, room, options.limits.most_gpus)
        if counts is not None:
            plan.append(counts)
        elif is_chosen or ratio == config.ratio:
            raise _no_counts(ratio, room, options)
    if not plan:  # the first ratio of one that follows the requests may be of fractions
        raise _no_counts(config.ratio, room, options)
    return plan


def _no_counts(ratio: PdRatio, room: Room, options: LiveOptions) -> ConfigError:
    return ConfigError(
        f"no counts at the ratio {ratio} lie between {pd_text(room.lowest)} and {pd_text(room.highest)} and "
        f"take at most {options.limits.most_gpus:g} GPUs (a replica without GPUs counts as one): give other "
        "--ratios or more --gpus"
    )


def _ratio(text: str) -> PdRatio:
    try:
        return PdRatio.parse(text.strip())
    except ValueError as error:
        raise ConfigError(f"--ratios: {error}") from None


def summary(plan: LivePlan, options: LiveOptions, trace_name: str) -> str:
    """What the test will do, and its limits."""
    trace, room, counts = plan.trace, plan.room, plan.counts
    inputs = sum(request.input_tokens for request in trace) / len(trace)
    outputs = sum(request.output_tokens for request in trace) / len(trace)
    limits, slo = options.limits, plan.config.slo
    most_gpus = max(gpus_of(each, room) for each in counts)
    per_token = f" or {slo.ttft_s_per_input_token:g} s a prompt token" if slo.ttft_s_per_input_token else ""
    beside = "; others may send requests too, and get these counts" if options.is_beside_traffic else ""
    return (
        f"Pressure test of {options.app} ({plan.service}) at {plan.url}: it loads a running application.\n"
        f"  requests  {len(trace)} of {trace_name}, {inputs:.0f} input and {outputs:.0f} output tokens on average\n"
        f"  counts    {', '.join(map(pd_text, counts))}, at most {most_gpus:g} GPUs; set by hand, and given back at "
        f"the end{beside}\n"
        f"  rates     from {options.first_requests_per_s:g} to at most {limits.most_requests_per_s:g} requests/s\n"
        f"  good      {slo.quantile_frac:.0%} of the requests within TTFT {slo.ttft_s:g} s{per_token} and TPOT "
        f"{slo.tpot_s:g} s\n"
        f"  ends      after at most {limits.most_s / 60:g} minutes; a step after {limits.most_errors} failed requests\n"
        f"If this process is killed, `{plan.fixed.command_back}` gives the counts back."
    )
