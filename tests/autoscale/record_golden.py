"""Write the golden logs again: ``python -m tests.autoscale.record_golden``, when a rule was changed on purpose."""

from pathlib import Path

from autoscale.sim.config import SimAutoscaleConfig, needs_profiles
from tests.autoscale.recording import PROFILE, recorded, simulated

_POLICIES = {
    "heteroscale": {"kind": "heteroscale", "target": 100.0},
    "queue_depth": {"kind": "queue_depth", "decode_requests_per_s": 2.0},
    "periodic": {
        "kind": "periodic",
        "periods": [{"begins": "*/2 * * * *", "decode": 3}, {"begins": "1-59/2 * * * *", "decode": 7}],
    },
}

_SIMULATED = {
    "default": {},
    "dopd": {"interval_s": 20.0},
    "dynamo": {"adjustment_s": 30.0},
    "dynamo_sla": {"adjustment_s": 30.0},
    "hpa": {},
    "llmd_token_aware": {},
    "ray_baseline": {"prefill_ongoing_requests": 4, "decode_ongoing_requests": 60, "downscale_delay_s": 60},
    "static": {"prefill": 3, "decode": 2},
    "token_velocity": {},
    "wva": {},
}

# As _SIMULATED, of a ratio that follows the requests.
_AUTO = {
    "pd_ratio": "auto",
    "auto_ratio": {"prefill": str(PROFILE), "decode": str(PROFILE), "interval_s": 20.0, "least_requests": 50},
    "policy": {"kind": "heteroscale", "target": 500.0},
    "gate": {"observation_s": 10.0},
}

if __name__ == "__main__":
    following = SimAutoscaleConfig.model_validate(_AUTO)
    (Path(__file__).parent / "replay" / "auto_ratio.jsonl").write_text("\n".join(simulated(following)) + "\n")
    for name, policy in _POLICIES.items():
        config = SimAutoscaleConfig.model_validate(
            {"pd_ratio": "1:3", "policy": policy, "gate": {"observation_s": 6.0}}
        )
        (Path(__file__).parent / "replay" / f"{name}.jsonl").write_text("\n".join(recorded(config)) + "\n")
    for name, fields in _SIMULATED.items():
        profiles = {"prefill": str(PROFILE), "decode": str(PROFILE)} if needs_profiles(name) else {}
        document = {"policy": {"kind": name, **profiles, **fields}, "gate": {"observation_s": 10.0}}
        if name == "dopd":
            document["forecast"] = {"step_s": 10.0, "season_s": None}
        config = SimAutoscaleConfig.model_validate(document)
        (Path(__file__).parent / "replay" / f"{name}.jsonl").write_text("\n".join(simulated(config)) + "\n")
