"""What ``tandem operators settings`` prints, and its JSON file."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from autoscale.operators.pool_pair import Effect
from serve_app.cli.terminal import console, figures_table
from serve_app.operators.settings_check import Compared, Judged
from serve_app.operators.settings_config import Setting
from serve_app.operators.settings_result import SettingsResult

_HEADS = ("GPUs", "TTFT p90 s", "TPOT p90 ms", "within objectives")


def show(result: SettingsResult, notes: Sequence[str]) -> None:
    """Print each setting with its reason and its effect, and the config before and after."""
    for judged in result.judged:
        _print(_setting_text(result, judged))
    for setting in result.written:
        if setting.role is None or setting.name == "max_replicas":
            _print(f"{setting.label}: {setting.before} -> {setting.after}: {setting.why}")
    _print_table(result)
    for text in (*notes, *result.notes):
        _print(f"note: {text}")
    if result.refusal is not None:
        _print(f"note: the config as it is cannot run: {result.refusal}. Are --model and --dtype those of the config?")
    if not result.written:
        _print("nothing is written: the simulator shows nothing better than the config as it is")


def _setting_text(result: SettingsResult, judged: Judged) -> str:
    setting = judged.setting
    default = "left out" if setting.default is None else f"{setting.default} (vLLM's)"
    old = default if setting.before is None else setting.before
    line = f"{setting.label}: {old} -> {setting.after}: {setting.why}"
    if judged.without is None:
        return f"{line}\n    without it, the other settings cannot run: {_fate(result, setting)}"
    without = judged.without
    return (
        f"{line}\n    without it: {_effect_text(without.predicted)} predicted, {_effect_text(without.simulated)} "
        f"simulated; {_VERDICTS[judged.verdict]}, so it is {_fate(result, setting)}"
    )


_VERDICTS = {1: "leaving it out is worse", 0: "leaving it out changes nothing", -1: "leaving it out is better"}


def _fate(result: SettingsResult, setting: Setting) -> str:
    if setting in result.written:
        return "written"
    if setting.name == "replicas" and any(each.role is None for each in result.written):
        return "written as pd_ratio"
    return "not written"


def _effect_text(effect: Effect) -> str:
    return (
        f"{effect.gpus} GPUs, TTFT p90 {effect.ttft_p90_s:.3g} s, TPOT p90 {effect.tpot_p90_s * 1e3:.3g} ms, "
        f"{effect.attained_frac:.1%}"
    )


def _print_table(result: SettingsResult) -> None:
    objectives = result.check.objectives
    title = (
        f"{result.check.requests_per_s:.3g} requests/s; TTFT {objectives.ttft_s:g} s and TPOT "
        f"{objectives.tpot_s * 1e3:g} ms for {objectives.attained_frac:.1%} of the requests"
    )
    table = figures_table("", _HEADS, title=title)
    for name, compared in (("before", result.before), ("after", result.after)):
        if compared is None:
            continue
        for how, effect in (("predicted", compared.predicted), ("simulated", compared.simulated)):
            table.add_row(
                f"{name}, {how}",
                str(effect.gpus),
                f"{effect.ttft_p90_s:.3f}",
                f"{effect.tpot_p90_s * 1e3:.1f}",
                f"{effect.attained_frac:.1%}",
            )
    console.print(table, highlight=False)


def _print(text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def as_document(result: SettingsResult, notes: Sequence[str]) -> dict[str, Any]:
    """All figures, for --json."""
    return {
        "requests_per_s": result.check.requests_per_s,
        "objectives": asdict(result.check.objectives),
        "before": _compared(result.before),
        "refusal": result.refusal,
        "chosen": _compared(result.chosen),
        "after": _compared(result.after),
        "settings": [
            {
                "setting": judged.setting.label,
                "before": judged.setting.before,
                "default": judged.setting.default,
                "after": judged.setting.after,
                "why": judged.setting.why,
                "without": _compared(judged.without),
                "verdict": {1: "better", 0: "no difference", -1: "worse"}[judged.verdict],
                "fate": _fate(result, judged.setting),
            }
            for judged in result.judged
        ],
        "written": [{"setting": each.label, "after": each.after} for each in result.written],
        "notes": [*notes, *result.notes],
    }


def _compared(compared: Compared | None) -> dict[str, Any] | None:
    return None if compared is None else asdict(compared)
