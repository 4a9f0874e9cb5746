"""The live half of `tandem pressure-test`: it loads a running application step by step, and gives everything back.

It sets counts by hand through the coordinator, sends requests with the lengths of a trace at rates that rise, and
reads what the autoscaler observed. Which step comes next is decided in ``autoscale.pressure``.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from autoscale.pressure.live_test import Limits, PressureTest
from autoscale.pressure.steps import Step, StepResult, Verdict
from autoscale.traces.trace import TraceRequest
from kvtransfer.topology import Role
from serve_app.checks.yaml_checks import ConfigError
from serve_app.cli.pressure_plan import LiveOptions, LivePlan, plan_of, summary
from serve_app.cli.terminal import console, errors
from serve_app.load.generator import LoadGenerator
from serve_app.local.cluster import DeployError
from serve_app.running.fixed_counts import FixedCounts
from serve_app.running.process_signals import signals_handled
from serve_app.running.step import StepRunner, StopTestError

# Time between two looks at replicas that start, seconds.
_POLL_S = 1.0
# Time for sending and ending a step beside its span, seconds, in the estimate of a step's time: answers that still run.
_END_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveResult:
    """A pressure test that has ended; ``stopped``: the error or signal that ended it, ``None``: it ended by itself."""

    plan: LivePlan
    test: PressureTest
    stopped: BaseException | None


def run_live(options: LiveOptions, whole_trace: Sequence[TraceRequest], trace_name: str) -> LiveResult:
    """Test a running application.

    Raises:
        ConfigError: the application is not as the test needs it, or the user did not agree; nothing was changed.
        DeployError: the cluster, the coordinator or the endpoint does not answer; nothing was changed.
    """
    plan = plan_of(options, whole_trace)
    runner = StepRunner(
        LoadGenerator(plan.url, plan.service, seed=None, api_key=options.api_key),
        plan.fixed,
        plan.trace,
        measured_s=options.step_s,
        is_beside_traffic=options.is_beside_traffic,
        most_errors=options.limits.most_errors,
    )
    test = PressureTest(
        plan.counts,
        room=plan.room,
        limits=options.limits,
        quantile_frac=plan.config.slo.quantile_frac,
        first_requests_per_s=options.first_requests_per_s,
        tolerance_frac=options.tolerance_frac,
    )
    _confirm(summary(plan, options, trace_name), options)
    # These signals end the test in order, as Ctrl-C does, so that counts are given back.
    with signals_handled((signal.SIGTERM, signal.SIGHUP), _end):
        stopped = _run(test, runner, plan.fixed, options.limits)
    return LiveResult(plan=plan, test=test, stopped=stopped)


def _confirm(text: str, options: LiveOptions) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
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


def _end(received: int) -> None:
    raise SystemExit(128 + received)  # as a shell reports it
