"""A Serve YAML of ours with fixed counts in the place of its autoscaler, for benchmarks and drills on this machine."""

from pathlib import Path
from typing import Any

from serve_app.quickstart import without_keys
from serve_app.validate import load_serve_yaml

ROOT = Path(__file__).parents[1]


def fixed_counts(name: str, replicas: int, **emulator: Any) -> dict[str, Any]:
    """``configs/NAME.yaml`` without an autoscaler, without keys, and with paths that hold from everywhere.

    Args:
        name: of the file, whose one group of pools counts.
        replicas: of each role.
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
