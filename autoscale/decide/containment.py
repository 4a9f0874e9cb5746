"""Contains the errors of a policy: a decision that fails becomes one that keeps the counts and names the cause (pure).

The same code holds live, in the simulator and in a replay. It catches every error, because policies may be of one's
own, and an error of one service must not keep the other services of its application from being decided.
"""

import copy
import math
from asyncio import CancelledError
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from itertools import islice
from numbers import Real
from typing import Any, TypeVar

from autoscale.decide.config import AutoscaleConfig
from autoscale.extension import Extension, ExtensionError, error_text, storable
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
# Most signals that a decision may show; a built-in policy shows fewer than ten.
_MOST_SHOWN = 100
# Most replicas of a role that a policy may want: more than any cluster has. Far larger numbers overflow in sums.
_MOST_REPLICAS = 1e6
# Largest P/D ratio, and the inverse of the smallest one.
_MOST_RATIO = 1e6

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
    """The policy of one configuration. A call builds it, so that an error then is an error of that call.

    It is built again only when the ratio changes.
    """

    def __init__(self, config: AutoscaleConfig, run: Run = directly) -> None:
        self._config = config
        self._run = run
        self._policy: Policy[Any] | None = None
        self._ratio: PdRatio | None = None  # of the policy

    def decide(self, snapshot: Snapshot, ratio: PdRatio) -> Decision:
        """The decision of the policy, which gets the service's ratio.

        Raises _WrongAnswer, PolicyLate, or whatever the policy raises.
        The answer is checked within the time of the call too, since reading it may run code of the policy.
        """
        return self._run(lambda: checked_decision(self._answer(snapshot, ratio), ratio))

    def _answer(self, snapshot: Snapshot, ratio: PdRatio) -> Any:
        config = self._config
        if isinstance(config.policy, Extension):
            snapshot = _copied(snapshot)
        if self._policy is None or self._ratio != ratio:
            policy_class, settings = config.policy_settings()
            self._policy, self._ratio = policy_class(settings, ratio=ratio, slo=config.slo), ratio
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


def contained(policy: PolicyCall, snapshot: Snapshot, config: AutoscaleConfig) -> Decision:
    """The policy's decision; if it fails, a decision that keeps the counts, with the policy and the cause as reason."""
    try:
        return policy.decide(snapshot, config.ratio)
    except PolicyLate as late:
        fault, cause = PolicyFault.LATE, str(late)
    except _WrongAnswer as wrong:
        fault, cause = PolicyFault.INVALID, str(wrong)
    except ExtensionError as error:
        return Decision(wanted=None, reason=f"{error}; the counts stay", fault=PolicyFault.RAISED)
    # sys.exit and a cancelled task of a policy would end Serve's controller.
    except (Exception, SystemExit, CancelledError) as error:
        fault, cause = PolicyFault.RAISED, f"raised {error_text(error)}"
    return Decision(wanted=None, reason=f"policy {config.policy.kind} {cause}; the counts stay", fault=fault)


def checked_decision(answer: Any, configured: PdRatio) -> Decision:
    """The answer of a policy as a decision of plain values. Raises _WrongAnswer, or any error that odd values cause."""
    if not isinstance(answer, Decision):
        raise _WrongAnswer(f"returned {answer!r:.80}, which is no Decision")
    if not isinstance(answer.reason, str):
        raise _WrongAnswer(f"gave a reason that is no text: {answer.reason!r:.80}")
    wanted = None if answer.wanted is None else _checked_counts(answer.wanted, configured)
    ratio = None if configured.is_aggregated else answer.ratio  # an aggregated service has no ratio
    shown = tuple(_checked_signal(each) for each in islice(answer.shown, _MOST_SHOWN + 1))
    if len(shown) > _MOST_SHOWN:
        raise _WrongAnswer(f"shows more than {_MOST_SHOWN} signals")
    return Decision(
        wanted=wanted,
        reason=storable(answer.reason[:_REASON_CHARS]),
        is_step=bool(answer.is_step),
        is_urgent=bool(answer.is_urgent),
        ratio=None if ratio is None else _checked_ratio(ratio),
        shown=shown,
        memory=None if answer.memory is None else _checked_memory(answer.memory),
    )


def _checked_counts(wanted: Any, configured: PdRatio) -> dict[Role, float]:
    roles = {Role.DECODE} if configured.is_aggregated else set(Role)
    if not isinstance(wanted, Mapping) or not roles <= set(wanted) <= set(Role):
        raise _WrongAnswer(f"wants {wanted!r:.80}; it must give a count of each role, {' and '.join(sorted(roles))}")
    for role, count in wanted.items():
        if not _is_number(count) or not 0 <= count < math.inf:
            raise _WrongAnswer(f"wants {count!r:.80} {role} replicas; a count must be finite and at least 0")
        if count > _MOST_REPLICAS:
            raise _WrongAnswer(f"wants {count!r:.80} {role} replicas; a count must be at most {_MOST_REPLICAS:g}")
    return {Role(role): float(count) for role, count in wanted.items()}


def _checked_ratio(ratio: Any) -> PdRatio:
    if not isinstance(ratio, PdRatio):
        raise _WrongAnswer(f"gave the ratio {ratio!r:.80}, which is no PdRatio")
    if not all(_is_number(part) and 0 < part <= _MOST_RATIO for part in (ratio.prefill, ratio.decode)):
        raise _WrongAnswer(f"gave the ratio {ratio}, whose parts must be numbers above 0, at most {_MOST_RATIO:g}")
    # Logs store whole numbers as such, and numbers of other types not at all.
    prefill, decode = (part if type(part) is int else float(part) for part in (ratio.prefill, ratio.decode))
    if not prefill <= _MOST_RATIO * decode or not decode <= _MOST_RATIO * prefill:
        raise _WrongAnswer(f"gave the ratio {ratio}, one part of which is more than {_MOST_RATIO:g} times the other")
    return PdRatio(prefill, decode)


def _checked_signal(shown: Any) -> Shown:
    if not isinstance(shown, Shown) or not (_is_finite(shown.value) and _is_finite(shown.target)):
        raise _WrongAnswer(f"shows {shown!r:.120}, which is no signal with finite numbers")
    return Shown(name=storable(str(shown.name)), value=float(shown.value), target=float(shown.target))


def _checked_memory(memory: Any) -> dict[str, tuple[float, ...]]:
    if not isinstance(memory, Mapping):
        raise _WrongAnswer(f"remembers {memory!r:.80}, which is no mapping from names to series of numbers")
    series, room = dict[str, tuple[float, ...]](), _MOST_REMEMBERED
    for name, numbers in memory.items():
        kept = tuple(map(float, islice(numbers, room + 1)))
        if (room := room - len(kept) - 1) < 0:  # a name takes as much of the log as some numbers
            raise _WrongAnswer(f"remembers more than {_MOST_REMEMBERED} numbers and names, which are the most")
        if not all(map(math.isfinite, kept)):
            raise _WrongAnswer(f"remembers a number that is not finite in its series {name!r:.80}")
        series[storable(str(name))] = kept
    return series


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)
