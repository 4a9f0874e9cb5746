"""A Serve YAML of ours with fixed counts instead of an autoscaler, for benchmarks and drills on this machine."""

from pathlib import Path
from typing import Any

from deployments.machine.claims import free_ports
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


def one_autoscaled_engine(**decode: Any) -> dict[str, Any]:
    """One aggregated pool of at most one real engine on a free port, which its policy sizes without cooldowns.

    ``decode``: fields of the pool that replace the file's.
    """
    document = fixed_counts("cpu_tiny", 1)
    document["http_options"]["port"] = free_ports(1)[0]
    application = document["applications"][0]
    application["autoscaling_policy"] = {"policy_function": "autoscale.ray_policy:JointPolicy"}
    args = application["args"]
    args["groups"][0] |= {"prefill": None}
    args["groups"][0]["decode"] |= {"max_replicas": 1, **decode}
    args["autoscale"] = {
        "pd_ratio": "0:1",
        "policy": {"kind": "wva"},
        "slo": {"ttft_s": 60.0, "tpot_s": 1.0},
        "guard": {"cooldown_out_s": 0.0, "cooldown_in_s": 0.0},
        "gate": {"observation_s": 0.0},
        "interval_s": 1.0,
    }
    return document
