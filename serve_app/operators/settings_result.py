"""Chooses settings, lets the simulator judge each of them, and keeps those that help."""

from collections.abc import Mapping
from dataclasses import dataclass

from autoscale.operators.role_settings import RoleEngines
from deployments.config import ServiceConfig
from kvtransfer.topology import Role
from serve_app.operators.settings_check import Compared, Judged, SettingsCheck
from serve_app.operators.settings_choice import choose, ratio_text, settings_of
from serve_app.operators.settings_config import RoleState, Setting, with_settings
from serve_app.operators.settings_experts import expert_settings, unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsResult:
    """What the command found.

    Attributes:
        before: the config as it is; ``None``: it cannot run, ``refusal`` says why.
        chosen: all chosen settings together.
        after: those that are written.
        judged: each chosen setting, by the run without it.
        written: settings that go into the config.
        notes: what was not chosen, and why.
    """

    check: SettingsCheck
    before: Compared | None
    refusal: str | None
    chosen: Compared
    after: Compared
    judged: tuple[Judged, ...]
    written: tuple[Setting, ...]
    notes: tuple[str, ...]


def found_settings(
    service: ServiceConfig,
    before: Mapping[Role, RoleState],
    engines: RoleEngines,
    check: SettingsCheck,
    most_gpus: int | None,
    skew: float | None = None,
) -> SettingsResult:
    """The settings of a service for a load; raises as ``choose``."""
    old, refusal = None, None
    try:
        old = check.compared(before)
    except ValueError as error:
        refusal = str(error)
    choice = choose(service, before, engines, check, most_gpus)
    after = check.refined(choice.states, most_gpus)
    settings = settings_of(service, before, after, choice, check)
    for role in Role:
        settings += expert_settings(role, before[role].engine, after[role].engine, engines.graph, skew)
    after = with_settings(before, settings)
    chosen, judged = check.compared(after), check.judged(before, settings)
    kept = _kept(check, before, old, judged, chosen)
    final = with_settings(before, kept)
    notes = [*choice.notes, *unavailable(engines, after, skew)]
    written, more = _for_autoscale(service, kept, final)
    return SettingsResult(
        check=check,
        before=old,
        refusal=refusal,
        chosen=chosen,
        after=chosen if len(kept) == len(settings) else check.compared(final) if kept or old else chosen,
        judged=tuple(judged),
        written=tuple(written),
        notes=(*notes, *more),
    )


def _kept(
    check: SettingsCheck,
    before: Mapping[Role, RoleState],
    old: Compared | None,
    judged: list[Judged],
    chosen: Compared,
) -> list[Setting]:
    """The settings that help, if they help together; else those that do not harm; else none."""
    for least in (1, 0):
        kept = [each.setting for each in judged if each.verdict >= least]
        effect = check.compared(with_settings(before, kept)).simulated if kept else None
        if effect is None or check.verdict(effect, chosen.simulated) < 0:
            continue
        if old is None or check.verdict(effect, old.simulated) > 0:
            return kept
    return []


def _for_autoscale(
    service: ServiceConfig, kept: list[Setting], final: Mapping[Role, RoleState]
) -> tuple[list[Setting], list[str]]:
    """With autoscale, counts are the autoscaler's: their ratio is written, and highest counts that are too low."""
    autoscale = service.autoscale
    counts = [setting for setting in kept if setting.name == "replicas"]
    if autoscale is None or not counts:
        return kept, []
    written = [setting for setting in kept if setting.name != "replicas"]
    for key, pool in service.groups[0].pools().items():
        wanted = final[key.role].replicas
        if pool.max_replicas is not None and pool.max_replicas < wanted:
            why = f"the load needs {wanted} in its mean"
            written.append(Setting(role=key.role, name="max_replicas", before=pool.max_replicas, after=wanted, why=why))
    sized = ", ".join(f"{setting.role} {setting.after}" for setting in counts)
    note = f"autoscale sizes the pools, so replicas ({sized}) are not written"
    if autoscale.ratio is None or autoscale.pd_ratio == "auto":
        return written, [note]
    ratio = ratio_text(final)
    if ratio != str(autoscale.ratio):
        written.append(
            Setting(role=None, name="autoscale.pd_ratio", before=str(autoscale.ratio), after=ratio, why=note)
        )
    return written, [f"{note}, but their ratio {ratio}"]
