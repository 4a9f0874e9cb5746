"""The live half of `tandem pressure-test`: it loads a running application step by step, and gives everything back.

It sets counts by hand through the coordinator, sends requests with the lengths of a trace at rates that rise, and
reads what the autoscaler observed. Which step comes next is decided in ``autoscale.pressure``.
"""

import asyncio
import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.status import ServiceStatus
from autoscale.decide.tuning import deployed_room
from autoscale.pressure.counts import counts_at, gpus_of, neighbours
from autoscale.pressure.live_test import Limits, PressureTest
from autoscale.pressure.steps import Step, StepResult, Verdict
from autoscale.ratio import PdRatio, Room, pd_text
from autoscale.traces.trace import TraceRequest, scale_trace
from kvtransfer.topology import Role
from serve_app.checks.yaml_checks import ConfigError
from serve_app.cli.terminal import console, errors
from serve_app.load.generator import LoadGenerator
from serve_app.local.cluster import DeployError
from serve_app.running.fixed_counts import FixedCounts
from serve_app.running.ray_control import Control
from serve_app.running.ray_serve import connect, endpoint_url
from serve_app.running.step import StepRunner, StopTestError

# Other traffic before the test that counts as none, as a share of the first rate.
_QUIET_FRAC = 0.05
# Longest wait for the endpoint's list of models, seconds.
_ANSWER_S = 10.0
# Time between two looks at replicas that start, seconds.
_POLL_S = 1.0
# Time for sending and ending a step beside its span, seconds, in the estimate of a step's time: answers that still run.
_END_S = 10.0


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
class LiveResult:
    """A pressure test that has ended; ``stopped``: the error or signal that ended it, ``None``: it ended by itself."""

    service: str
    url: str
    config: AutoscaleConfig
    room: Room
    test: PressureTest
    trace: Sequence[TraceRequest]
    stopped: BaseException | None


def run_live(options: LiveOptions, whole_trace: Sequence[TraceRequest], trace_name: str) -> LiveResult:
    """Test a running application.

    Raises:
        ConfigError: the application is not as the test needs it, or the user did not agree; nothing was changed.
        DeployError: the cluster, the coordinator or the endpoint does not answer.
    """
    connect(options.address)
    control = Control(options.app, options.service)
    counts = FixedCounts(control)
    status = control.status()
    config, room = status.config, deployed_room(status.config, status.pools)
    _check_mode(config, options)
    _check_quiet(status, options)
    url = (options.url or endpoint_url()).rstrip("/")
    trace = _fitting(whole_trace, options, _context_tokens(url, control.service, options.api_key))
    plan = _plan(config, room, options)
    runner = StepRunner(
        LoadGenerator(url, control.service, seed=None, api_key=options.api_key),
        counts,
        trace,
        measured_s=options.step_s,
        is_beside_traffic=options.is_beside_traffic,
        most_errors=options.limits.most_errors,
    )
    test = PressureTest(
        plan,
        room=room,
        limits=options.limits,
        quantile_frac=config.slo.quantile_frac,
        first_requests_per_s=options.first_requests_per_s,
        tolerance_frac=options.tolerance_frac,
    )
    _confirm(_summary(options, control.service, url, config, room, plan, trace, trace_name, counts), options)
    with _ends_on_signals():
        stopped = _run(test, runner, counts, options.limits)
    return LiveResult(
        service=control.service, url=url, config=config, room=room, test=test, trace=trace, stopped=stopped
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


def _fitting(trace: Sequence[TraceRequest], options: LiveOptions, context_tokens: int | None) -> list[TraceRequest]:
    """The trace's lengths as they are sent: scaled, and cut to the model's context."""
    scaled = scale_trace(trace, length_factor=options.length_factor, max_total_tokens=context_tokens)
    return list(scaled)


def _plan(config: AutoscaleConfig, room: Room, options: LiveOptions) -> list[dict[Role, int]]:
    """The counts to test.

    Raises:
        ConfigError: no counts at a ratio fit the bounds and the GPUs.
    """
    if options.ratios is None:
        ratios, is_chosen = neighbours(config.pd_ratio), False
    else:
        ratios, is_chosen = [_ratio(text) for text in options.ratios.split(",")], True
    plan = []
    for ratio in dict.fromkeys(ratios):
        counts = counts_at(ratio, room, options.limits.most_gpus)
        if counts is not None:
            plan.append(counts)
        elif is_chosen or ratio == config.pd_ratio:
            raise ConfigError(
                f"no counts at the ratio {ratio} lie between {pd_text(room.lowest)} and {pd_text(room.highest)} and "
                f"take at most {options.limits.most_gpus:g} GPUs (a replica without GPUs counts as one): give other "
                "--ratios or more --gpus"
            )
    return plan


def _ratio(text: str) -> PdRatio:
    try:
        return PdRatio.parse(text.strip())
    except ValueError as error:
        raise ConfigError(f"--ratios: {error}") from None


def _summary(
    options: LiveOptions,
    service: str,
    url: str,
    config: AutoscaleConfig,
    room: Room,
    plan: Sequence[Mapping[Role, int]],
    trace: Sequence[TraceRequest],
    trace_name: str,
    counts: FixedCounts,
) -> str:
    """What the test will do, and its limits."""
    inputs = sum(request.input_tokens for request in trace) / len(trace)
    outputs = sum(request.output_tokens for request in trace) / len(trace)
    limits, slo = options.limits, config.slo
    most_gpus = max(gpus_of(each, room) for each in plan)
    per_token = f" or {slo.ttft_s_per_input_token:g} s a prompt token" if slo.ttft_s_per_input_token else ""
    beside = "; others may send requests too, and get these counts" if options.is_beside_traffic else ""
    return (
        f"Pressure test of {options.app} ({service}) at {url}: it loads a running application.\n"
        f"  requests  {len(trace)} of {trace_name}, {inputs:.0f} input and {outputs:.0f} output tokens on average\n"
        f"  counts    {', '.join(map(pd_text, plan))}, at most {most_gpus:g} GPUs; set by hand, and given back at the "
        f"end{beside}\n"
        f"  rates     from {options.first_requests_per_s:g} to at most {limits.most_requests_per_s:g} requests/s\n"
        f"  good      {slo.quantile_frac:.0%} of the requests within TTFT {slo.ttft_s:g} s{per_token} and TPOT "
        f"{slo.tpot_s:g} s\n"
        f"  ends      after at most {limits.most_s / 60:g} minutes; a step after {limits.most_errors} failed requests\n"
        f"If this process is killed, `{counts.command_back}` gives the counts back."
    )


def _confirm(summary: str, options: LiveOptions) -> None:
    console.print(summary, highlight=False, markup=False, soft_wrap=True)
    if not options.is_confirmed and not typer.confirm("Start?"):
        raise ConfigError("not started; --yes starts it without a question")


def _run(test: PressureTest, runner: StepRunner, counts: FixedCounts, limits: Limits) -> BaseException | None:
    """Run all steps; returns the error or signal that ended the test, ``None``: it ended by itself."""
    began_s = time.monotonic()

    def left_s() -> float:
        return limits.most_s - (time.monotonic() - began_s)

    def step_s(rate: float) -> float:
        return runner.span_s(rate) + _END_S

    with _progress() as progress:
        task = progress.add_task("", total=None, left="")

        def show(step: Step, text: str, span_s: float, step_left_s: float) -> None:
            progress.update(
                task,
                description=f"{_name(step)} {text}",
                completed=span_s - step_left_s,
                total=span_s,
                left=f"{step_left_s:.0f} s of the step, at most {max(0.0, left_s()) / 60:.0f} min of the test",
            )

        try:
            with counts:
                present: tuple[int, int] | None = None
                while (step := test.next_step(limits.most_s - left_s(), step_s)) is not None:
                    if (step.prefill, step.decode) != present:
                        present = (step.prefill, step.decode)
                        _set_counts(counts, step, left_s, partial(show, step, "replicas start", 1.0, 1.0))
                    text, span_s = f"{step.requests_per_s:.3g} requests/s", runner.span_s(step.requests_per_s)
                    result = asyncio.run(runner.run(step, partial(show, step, text, span_s)))
                    progress.console.print(_line(result, test.add(result)), highlight=False)
                progress.update(task, description="the load ends", left="")
                counts.rest(runner.window_s)
        except (DeployError, ConfigError, KeyboardInterrupt, SystemExit) as error:
            test.end()
            return error
    return None


def _set_counts(counts: FixedCounts, step: Step, left_s: Callable[[], float], on_wait: Callable[[], None]) -> None:
    """Set the counts of a step, and wait until they serve.

    Raises:
        StopTestError: the time of the test is over.
    """
    counts.set({Role.PREFILL: step.prefill, Role.DECODE: step.decode})
    while not counts.is_ready(counts.status().last):
        if left_s() <= 0.0:
            raise StopTestError(f"{_name(step)} did not serve within the time of the test: `tandem top` shows why")
        on_wait()
        time.sleep(_POLL_S)


def _name(step: Step) -> str:
    return f"{step.prefill}P{step.decode}D"


def _line(result: StepResult, outcome: Verdict) -> str:
    """A step in one line."""
    step = result.step
    cut = "at most " if result.is_cut else ""
    failed = f", {result.failed} failed" if result.failed else ""
    again = ", repeated" if outcome is Verdict.UNCLEAR else ""
    return (
        f"{_name(step)} {step.requests_per_s:7.3g} requests/s: {outcome}, {cut}{result.attainment_frac:.1%} of "
        f"{result.requests} within the objectives{failed}{again}"
    )


def _progress() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}")
    return Progress(SpinnerColumn(), *columns, console=errors, transient=True)


@contextmanager
def _ends_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block in order, as Ctrl-C does, so that counts are given back."""

    def end(received: int, _: object) -> None:
        raise SystemExit(128 + received)  # as a shell reports it

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
