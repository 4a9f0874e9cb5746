"""Which files of an adapter are loaded, and what is said of others."""

import json
from pathlib import Path
from typing import Any

import pytest

from deployments.replicas.adapter_files import AdapterError, load_checked, shape_fault
from router.adapters import FaultKind
from serve_app.local.tiny_model import Shape, build_tiny_model
from tests.lab.stand.tiny_adapter import build_adapter

Q = "base_model.model.model.layers.0.self_attn.q_proj"
BASE = {"model.layers.0.self_attn.q_proj.weight": (64, 32)}


def weights(a: tuple[int, ...] = (8, 32), b: tuple[int, ...] = (64, 8), module: str = Q) -> dict[str, tuple[int, ...]]:
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}


@pytest.mark.parametrize(
    ("adapter", "fault"),
    [
        (weights(), None),
        (weights(a=(8, 16)), "has 64 x 16 weights, and the model's has 64 x 32"),
        (weights(b=(128, 8)), "has 128 x 32 weights"),
        ({f"{Q}.lora_A.weight": (8, 32)}, "has no lora_B"),
        (weights() | weights(module=Q.replace(".0.", ".9.")), "the model has no model.layers.9.self_attn.q_proj"),
        (weights() | weights(module="base_model.model.lm_head"), None),  # tied weights are not in the model's file
        (weights(module=Q.replace("model.layers", "other.layers")), None),  # the model's file has other names
        ({"model.norm.weight": (32,)}, "it has no weight of LoRA"),
    ],
)
def test_every_matrix_must_be_of_the_models_size(adapter: Any, fault: str | None) -> None:
    found = shape_fault(adapter, BASE)
    assert found is None if fault is None else found is not None and fault in found


def test_the_same_files_have_the_same_digest_and_others_another(tmp_path: Path) -> None:
    build_tiny_model(tmp_path / "tiny")
    digests = [
        load_checked("red", build_adapter(tmp_path / name, seed=seed), most_rank=16, base=tmp_path / "tiny")
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("config", "kind", "why"),
    [
        ({"r": 32}, FaultKind.UNFIT, "has rank 32, and the engines take at most 16: set max_lora_rank"),
        ({"r": "8"}, FaultKind.UNFIT, "has no rank r: got '8'"),
        ([], FaultKind.UNFIT, "has no rank r"),
        ("{", FaultKind.UNFIT, "is no JSON"),
        (None, FaultKind.MISSING, "has no file adapter_config.json"),
    ],
)
def test_a_wrong_config_is_refused_by_name(tmp_path: Path, config: Any, kind: FaultKind, why: str) -> None:
    folder = build_adapter(tmp_path / "red", seed=1)
    path = folder / "adapter_config.json"
    path.unlink()
    if config is not None:
        path.write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(AdapterError, match=why) as caught:
        load_checked("red", folder, most_rank=16, base=None)
    assert caught.value.fault.kind is kind


def test_weights_must_be_safetensors_of_this_model(tmp_path: Path) -> None:
    build_tiny_model(tmp_path / "tiny")
    small = build_adapter(tmp_path / "small", seed=1, shape=Shape(hidden=128))
    with pytest.raises(AdapterError, match="is not of this model"):
        load_checked("red", small, most_rank=16, base=tmp_path / "tiny")
    pickled = build_adapter(tmp_path / "pickled", seed=1)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"has no file adapter_model\.safetensors"):
        load_checked("red", pickled, most_rank=16, base=None)
    for content in (b"", b"12345678", b"\xff" * 20, b"\2\0\0\0\0\0\0\0[]"):
        (small / "adapter_model.safetensors").write_bytes(content)
        with pytest.raises(AdapterError, match="is no safetensors file"):
            load_checked("red", small, most_rank=16, base=None)
