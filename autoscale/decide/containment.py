"""Contains the errors of a policy: a decision that fails becomes one that keeps the counts and names the cause (pure).

The same code holds live, in the simulator and in a replay. It catches every error, because policies may be of one's
own, and an error of one service must not keep the other services of its application from being decided.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from numbers import Real
from typing import Any, TypeVar

from autoscale.decide.config import AutoscaleConfig
from autoscale.extension import Extension, ExtensionError, error_text
from autoscale.policies.policy import Policy
from autoscale.ratio import PdRatio
from autoscale.types import ControllerState, Decision, PolicyFault, Shown, Snapshot
from kvtransfer.topology import Role

T = TypeVar("T", Snapshot, ControllerState)
# Longest reason of a decision, characters: it is one line of a log.
_REASON_CHARS = 500
# Most numbers that a policy may remember. All of them are sent and logged with each decision, 1 MB of JSON at this
# number; the built-in policies remember a few thousand.
_MOST_REMEMBERED = 50_000

# A call of a policy, whose argument is bound.
Call = Callable[[], Decision]
# Runs a call, and returns its decision. The live shell limits the time of the call.
Run = Callable[[Call], Decision]


class PolicyLate(Exception):  # noqa: N818 (lateness is a state, not a fault of the code)
    """A runner raises it if the policy has not decided in time; the message says for how long it has been computing."""


class _WrongAnswer(Exception):  # noqa: N818
    """The policy's answer cannot be followed."""


def directly(call: Call) -> Decision:
    """The runner without a limit of time."""
    return call()


class PolicyCall:
    """The policy of one configuration. The first call builds it, so that an error then is an error of that call."""

    def __init__(self, config: AutoscaleConfig, run: Run = directly) -> None:
        self._config = config
        self._run = run
        self._policy: Policy[Any] | None = None

    def decide(self, snapshot: Snapshot) -> Any:
        """The answer of the policy, whatever it is. Raises whatever the policy raises, or PolicyLate."""
        return self._run(lambda: self._answer(snapshot))

    def _answer(self, snapshot: Snapshot) -> Any:
        config = self._config
        if isinstance(config.policy, Extension):
            snapshot = _copied(snapshot)
        if self._policy is None:
            policy_class, settings = config.policy_settings()
            self._policy = policy_class(settings, ratio=config.pd_ratio, slo=config.slo)
        return self._policy.decide(snapshot)


def _copied(snapshot: Snapshot) -> Snapshot:
    """A snapshot without a mapping of the tick's own: a policy may change what it gets.

    Not a copy of everything: that takes 7 ms with 50 groups, and this 0.4 ms. The other values cannot be changed.
    """
    pools = tuple(
        replace(pool, on=dict(pool.on), limits=replace(pool.limits, demand=copy.deepcopy(pool.limits.demand)))
        for pool in snapshot.pools
    )
    return replace(_with_own_mappings(snapshot), pools=pools, state=_with_own_mappings(snapshot.state))


def _with_own_mappings(value: T) -> T:
    values = {field.name: getattr(value, field.name) for field in fields(value)}
    mappings: dict[str, Any] = {name: dict(each) for name, each in values.items() if isinstance(each, Mapping)}
    return replace(value, **mappings)


def contained(decide: Callable[[Snapshot], Any], snapshot: Snapshot, config: AutoscaleConfig) -> Decision:
    """The policy's decision; if it fails, a decision that keeps the counts, with the policy and the cause as reason."""
    try:
        return _checked(decide(snapshot), config.pd_ratio)
    except PolicyLate as late:
        fault, cause = PolicyFault.LATE, str(late)
    except _WrongAnswer as wrong:
        fault, cause = PolicyFault.INVALID, str(wrong)
    except ExtensionError as error:
        return Decision(wanted=None, reason=f"{error}; the counts stay", fault=PolicyFault.RAISED)
    except (Exception, SystemExit) as error:  # also sys.exit of a policy, which would end the process
        fault, cause = PolicyFault.RAISED, f"raised {error_text(error)}"
    return Decision(wanted=None, reason=f"policy {config.policy.kind} {cause}; the counts stay", fault=fault)


def _checked(answer: Any, configured: PdRatio) -> Decision:
    """The answer as a decision of plain values. Raises _WrongAnswer, or any error that odd values cause."""
    if not isinstance(answer, Decision):
        raise _WrongAnswer(f"returned {answer!r:.80}, which is no Decision")
    if not isinstance(answer.reason, str):
        raise _WrongAnswer(f"gave a reason that is no text: {answer.reason!r:.80}")
    if answer.ratio is not None and not configured.is_aggregated:  # an aggregated service ignores it
        _check_ratio(answer.ratio)
    return replace(
        answer,
        wanted=None if answer.wanted is None else _checked_counts(answer.wanted, configured),
        reason=answer.reason[:_REASON_CHARS],
        is_step=bool(answer.is_step),
        is_urgent=bool(answer.is_urgent),
        shown=tuple(_checked_signal(shown) for shown in answer.shown),
        memory=None if answer.memory is None else _checked_memory(answer.memory),
    )


def _checked_counts(wanted: Any, configured: PdRatio) -> dict[Role, float]:
    roles = {Role.DECODE} if configured.is_aggregated else set(Role)
    if not isinstance(wanted, Mapping) or not roles <= set(wanted) <= set(Role):
        raise _WrongAnswer(f"wants {wanted!r:.80}; it must give a count of each role, {' and '.join(sorted(roles))}")
    for role, count in wanted.items():
        if not _is_number(count) or not 0 <= count < math.inf:
            raise _WrongAnswer(f"wants {count!r:.80} {role} replicas; a count must be finite and at least 0")
    return {Role(role): float(count) for role, count in wanted.items()}


def _check_ratio(ratio: Any) -> None:
    if not isinstance(ratio, PdRatio):
        raise _WrongAnswer(f"gave the ratio {ratio!r:.80}, which is no PdRatio")
    if not all(_is_number(part) and 0 < part < math.inf for part in (ratio.prefill, ratio.decode)):
        raise _WrongAnswer(f"gave the ratio {ratio}, whose parts must be finite numbers above 0")


def _checked_signal(shown: Any) -> Shown:
    if not isinstance(shown, Shown) or not (_is_finite(shown.value) and _is_finite(shown.target)):
        raise _WrongAnswer(f"shows {shown!r:.120}, which is no signal with finite numbers")
    return Shown(name=str(shown.name), value=float(shown.value), target=float(shown.target))


def _checked_memory(memory: Any) -> dict[str, tuple[float, ...]]:
    if not isinstance(memory, Mapping):
        raise _WrongAnswer(f"remembers {memory!r:.80}, which is no mapping from names to series of numbers")
    series = {str(name): tuple(map(float, numbers)) for name, numbers in memory.items()}
    for name, numbers in series.items():
        if not all(map(math.isfinite, numbers)):
            raise _WrongAnswer(f"remembers a number that is not finite in its series {name!r:.80}")
    if (remembered := sum(map(len, series.values()))) > _MOST_REMEMBERED:
        raise _WrongAnswer(f"remembers {remembered} numbers; at most {_MOST_REMEMBERED} are stored")
    return series


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)
