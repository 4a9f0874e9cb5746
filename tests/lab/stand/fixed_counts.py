"""A Serve YAML of ours with fixed counts instead of an autoscaler, for benchmarks and drills on this machine."""

from pathlib import Path
from typing import Any

from serve_app.checks.yaml_checks import load_serve_yaml
from serve_app.local.quickstart import without_keys

ROOT = Path(__file__).parents[3]


def fixed_counts(name: str, replicas: int, **emulator: Any) -> dict[str, Any]:
    """``configs/NAME.yaml`` without an autoscaler and keys, and with absolute paths.

    Args:
        name: name of the file, which has one group of pools.
        replicas: replicas of each role.
        emulator: settings of emulated engines that replace the file's.
    """
    document = without_keys(load_serve_yaml(ROOT / "configs" / f"{name}.yaml"))
    application = document["applications"][0]
    application.pop("autoscaling_policy", None)
    args = application["args"]
    args.pop("autoscale", None)
    if args["model"]["source"].startswith("./"):
        args["model"]["source"] = str(ROOT / args["model"]["source"])
    for role in ("prefill", "decode"):
        pool = args["groups"][0][role]
        pool.pop("max_replicas", None)
        pool["replicas"] = replicas
        if "emulator" in pool:
            pool["emulator"] |= {"profile": str(ROOT / pool["emulator"]["profile"]), **emulator}
    return document
