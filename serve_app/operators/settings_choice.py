"""Which settings of both roles the times of operators ask for, each with its reason."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autoscale.engines.profile import EngineProfile
from autoscale.operators.engine_profile import MemoryShortageError
from autoscale.operators.pair_search import Sized, size_pair
from autoscale.operators.role_settings import Chosen, RoleEngines
from autoscale.operators.step_times import EngineSettings
from deployments.config import ServiceConfig
from deployments.pool_config import RoleConfig
from deployments.profile_match import policy_profiles
from kvtransfer.topology import Role
from serve_app.checks.yaml_checks import ConfigError
from serve_app.operators.settings_check import SettingsCheck
from serve_app.operators.settings_config import RoleState, Setting

# Largest tensor parallel size that is looked at: the GPUs of one node.
_MOST_PARALLEL = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Both roles as chosen, before the simulator has seen them.

    ``engines``: the engine of each role with its reasons. ``notes``: what could not be chosen, and why.
    """

    sized: Sized
    engines: Mapping[Role, Chosen]
    states: Mapping[Role, RoleState]
    notes: tuple[str, ...]


def choose(
    service: ServiceConfig,
    before: Mapping[Role, RoleState],
    engines: RoleEngines,
    check: SettingsCheck,
    most_gpus: int | None,
) -> Choice:
    """Engines and counts of both roles by their predicted effect.

    Raises:
        NoEngineError: no engine of a role serves the requests, or the GPUs are too few for any pair.
    """
    notes, chosen = list[str](), dict[Role, list[Chosen]]()
    for role, choose_engine in ((Role.PREFILL, engines.prefill), (Role.DECODE, engines.decode)):
        sizes, note = _parallel_sizes(service, before[role], role, engines)
        notes += note
        context = service.engine_kwargs_of(_pool(service, role)).get("max_model_len")
        chosen[role], note = _fitting(choose_engine, before[role].engine, sizes, context)
        notes += [f"{role}.{each}" for each in note]
    profiles = {role: [each.profile for each in found] for role, found in chosen.items()}
    sized = size_pair(
        profiles[Role.PREFILL], profiles[Role.DECODE], check.load, check.rule, check.objectives, most_gpus
    )
    pair = sized.pair
    best = {
        Role.PREFILL: _of(chosen[Role.PREFILL], pair.prefill),
        Role.DECODE: _of(chosen[Role.DECODE], pair.decode),
    }
    counts = {Role.PREFILL: pair.prefill_replicas, Role.DECODE: pair.decode_replicas}
    states = {role: RoleState(replicas=counts[role], engine=best[role].settings) for role in Role}
    return Choice(sized=sized, engines=best, states=states, notes=tuple(notes))


def _pool(service: ServiceConfig, role: Role) -> RoleConfig:
    return next(pool for key, pool in service.groups[0].pools().items() if key.role is role)


def _parallel_sizes(
    service: ServiceConfig, state: RoleState, role: Role, engines: RoleEngines
) -> tuple[list[int], list[str]]:
    """Tensor parallel sizes that are compared; one alone where the config depends on it."""
    own = state.engine.parallel
    if state.engine.expert_load > 1.0:
        return [own], [f"{role}.tensor_parallel_size stays {own}: enable_expert_parallel spreads experts over it"]
    if _pool(service, role).profile is not None or _has_profiled_policy(service):
        return [own], [
            f"{role}.tensor_parallel_size stays {own}: a profile in the config was measured at that size "
            "(`tandem profile` measures another)"
        ]
    return [size for size in engines.graph.parallel_sizes() if size <= _MOST_PARALLEL], []


def _has_profiled_policy(service: ServiceConfig) -> bool:
    return any(policy_profiles(service.autoscale, service.groups[0]))


def _fitting(
    choose_engine: Callable[[EngineSettings], Chosen], base: EngineSettings, sizes: list[int], context_tokens: Any
) -> tuple[list[Chosen], list[str]]:
    """The engines of the sizes whose GPUs have room; if none has room for the weights, the error of the largest.

    vLLM does not start an engine whose KV holds fewer tokens than ``max_model_len``, here ``context_tokens``. The size
    of the config stays: it serves already.

    Raises:
        MemoryShortageError, ConfigError: no size is left.
    """
    found, notes, shortage = list[Chosen](), list[str](), None
    least_tokens = context_tokens if isinstance(context_tokens, int) else 0
    for size in sizes:
        try:
            chosen = choose_engine(replace(base, parallel=size))
        except MemoryShortageError as error:
            shortage = error
            continue
        if size != base.parallel and chosen.profile.kv_tokens < least_tokens:
            notes.append(
                f"tensor_parallel_size {size} is left out: its KV has room for {chosen.profile.kv_tokens} tokens, and "
                f"vLLM does not start with less than max_model_len, {least_tokens}"
            )
            continue
        found.append(chosen)
    if not found and shortage is not None:
        raise shortage
    if not found:
        raise ConfigError("; ".join(notes))
    return found, notes


def _of(chosen: list[Chosen], profile: EngineProfile) -> Chosen:
    return next(each for each in chosen if each.profile is profile)


def settings_of(
    service: ServiceConfig,
    before: Mapping[Role, RoleState],
    after: Mapping[Role, RoleState],
    choice: Choice,
    check: SettingsCheck,
) -> list[Setting]:
    """The fields that change, in the order in which they are shown."""
    found = list[Setting]()
    for role in Role:
        pool, old, new = _pool(service, role), before[role].engine, after[role].engine
        engine = choice.engines[role]
        kwargs = service.engine_kwargs_of(pool)
        found += [
            _setting(role, "tensor_parallel_size", old.parallel, None, new.parallel, _size_reason(choice)),
            _setting(
                role,
                "max_num_batched_tokens",
                kwargs.get("max_num_batched_tokens"),
                old.max_batch_tokens,
                new.max_batch_tokens,
                engine.tokens_reason,
            ),
            _setting(
                role,
                "max_num_seqs",
                kwargs.get("max_num_seqs"),
                old.max_running,
                new.max_running,
                engine.requests_reason,
            ),
            _setting(
                role,
                "replicas",
                before[role].replicas,
                None,
                after[role].replicas,
                _count_reason(role, after, choice, check),
            ),
        ]
    return [setting for setting in found if setting.is_change]


def _setting(role: Role, name: str, before: int | None, default: int | None, after: int, why: str) -> Setting:
    return Setting(role=role, name=name, before=before, default=default, after=after, why=why)


def _size_reason(choice: Choice) -> str:
    pair = choice.sized.pair
    share = choice.sized.effect.attained_frac
    return (
        f"of all pairs of sizes, TP {pair.prefill.gpus} for prefill and TP {pair.decode.gpus} for decode take the "
        f"fewest GPUs ({pair.gpus}, {share:.1%} of requests within the objectives)"
    )


def _count_reason(role: Role, after: Mapping[Role, RoleState], choice: Choice, check: SettingsCheck) -> str:
    load, engine = check.load, choice.engines[role]
    if role is Role.PREFILL:
        each_s = engine.profile.prefill.seconds_for(load.lengths.input_tokens)
        rate = f"{load.busiest_per_s:.1f} come per second in the busiest window"
        return f"a prompt of mean length takes {each_s * 1e3:.0f} ms, and {rate}"
    need = load.busiest_per_s * load.lengths.output_tokens
    return f"{need:,.0f} tokens per second in the busiest window, in batches that keep TPOT"


def ratio_text(after: Mapping[Role, RoleState]) -> str:
    """The P/D ratio of the counts, in lowest terms."""
    prefill, decode = after[Role.PREFILL].replicas, after[Role.DECODE].replicas
    divisor = math.gcd(prefill, decode)
    return f"{prefill // divisor}:{decode // divisor}"
