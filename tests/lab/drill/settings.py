"""What a person sets by hand before everything dies, and what is left of it afterwards."""

import time
from typing import Any

from serve_app.local.cluster import DeployError
from serve_app.sdk import App

_NODE = "cordoned-by-the-drill"  # no node has this name, so the cordon changes nothing else
_COOLDOWN_S = 77.0  # no configuration has this value
# Longest time until a coordinator answers again, seconds.
_ANSWER_S = 240.0
_POLL_S = 0.5


def set_by_hand(app: App) -> None:
    """Scale, tune, cordon and pause. The counts are those that run, so that nothing else changes."""
    control = app.control
    last = control.status().last
    assert last is not None  # it runs, so the autoscaler has decided
    prefill, decode = (
        sum(len(names) for key, names in last.running.items() if key.role == role) for role in ("prefill", "decode")
    )
    control.scale(prefill, decode)
    control.pause()
    # Not the ratio: the counts of the drill's groups are fixed. tests/engines/test_comes_back.py tunes it too.
    control.tune({"guard": {"cooldown_in_s": _COOLDOWN_S}}, "drill")
    control.cordon(_NODE)


def settings(app: App) -> dict[str, Any]:
    """What is set by hand now, for comparison; waits for a coordinator that starts."""
    from serve_app.running.ray_control import status_of

    until_s = time.monotonic() + _ANSWER_S
    while True:
        try:
            status, config = status_of(app.name), app.control.status().config
            break
        except DeployError:
            if time.monotonic() > until_s:
                return {}
            time.sleep(_POLL_S)
    return {
        "paused": config.is_paused,
        "scaled": None if config.override is None else [config.override.prefill, config.override.decode],
        "tuned": config.guard.cooldown_in_s,
        "cordoned": list(status.cordoned),
    }


def unset(app: App) -> None:
    """Return to what was deployed."""
    control = app.control
    control.resume()
    control.tune({}, "after the drill")
    control.cordon(_NODE, is_cordoned=False)
