"""Write the golden logs again: ``python -m tests.autoscale.record_golden``, when a rule was changed on purpose."""

from pathlib import Path

from autoscale.config import AutoscaleConfig
from tests.autoscale.recording import recorded

_POLICIES = {
    "heteroscale": {"kind": "heteroscale", "target": 100.0},
    "queue_depth": {"kind": "queue_depth", "decode_requests_per_s": 2.0},
    "periodic": {
        "kind": "periodic",
        "periods": [{"begins": "*/2 * * * *", "decode": 3}, {"begins": "1-59/2 * * * *", "decode": 7}],
    },
}

if __name__ == "__main__":
    for name, policy in _POLICIES.items():
        config = AutoscaleConfig.model_validate({"pd_ratio": "1:3", "policy": policy, "gate": {"observation_s": 6.0}})
        (Path(__file__).parent / "replay" / f"{name}.jsonl").write_text("\n".join(recorded(config)) + "\n")
