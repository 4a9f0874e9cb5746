"""Derives the shipped operator tables from public measurements: ``python -m tests.lab.operators.derive_tables DATA``.

``DATA`` is a folder with ``profiles/aiconfigurator_*.csv.gz`` and ``measured/rtxpro6000_*.csv.gz``, in the
columns that the README of ``configs/operators/tables`` names. The pointwise operators of the H100 come from
``h100_80gb`` beside this file.
"""

import argparse
import csv
import gzip
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from autoscale.operators.saved_tables import save_operator_table
from tests.lab.operators.thinning import thinned

OUT = Path("configs/operators/tables")
OWN = Path(__file__).parent / "h100_80gb" / "operators.csv"
Row = dict[str, str]
Key = tuple[str | int, ...]
Points = dict[Key, dict[float, float]]

_AICONFIGURATOR = {"H100": "h100_sxm", "H200": "h200_sxm", "A100": "a100_sxm"}
_DTYPE = {"bfloat16": "bf16", "fp8": "fp8"}
# vLLM's layers on RTX PRO 6000: file, hidden, heads, KV heads and intermediate of one rank.
_RTX = (
    ("rtxpro6000_llama-31-8b_tp1", 4096, 32, 8, 14336, 128256),
    ("rtxpro6000_qwen3-32b_tp2", 5120, 32, 4, 12800, 75968),
)
_HEAD_DIM = 128
# New tokens of the prompt in mixed batches: the other sizes are close to their neighbours.
_MIXED_CHUNKS = (64, 256, 512, 1024, 2048)


def rows_of(path: Path) -> Iterator[Row]:
    """The rows of a CSV, gzipped or not."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    yield from csv.DictReader(io.StringIO(text))


def gathered(rows: Iterable[Row], key: Callable[[Row], Key], axis: str, time_us: Callable[[Row], float]) -> Points:
    """Microseconds over one axis, by key; of repeated points the shortest, as the fastest kernel is used."""
    found: Points = {}
    for row in rows:
        curve, at = found.setdefault(key(row), {}), float(row[axis])
        curve[at] = min(time_us(row), curve.get(at, float("inf")))
    return found


def write(folder: Path, name: str, curves: Points) -> int:
    """Write a table of thinned curves; returns its rows."""
    return save_operator_table(
        folder,
        name,
        (
            (*key, int(at), time_us)
            for key in sorted(curves)
            for at, time_us in thinned(curves[key], in_logs=name in ("prompt_attention", "chunk_attention")).items()
        ),
    )


def _latency_us(row: Row) -> float:
    return 1e3 * float(row["latency_ms"])


def _heads(row: Row) -> Key:
    kv_dtype = _DTYPE[row["kv_cache_dtype"]]
    return kv_dtype, int(row["num_heads"]), int(row["num_key_value_heads"]), _HEAD_DIM


def aiconfigurator_tables(data: Path, gpu: str) -> dict[str, Points]:
    """Products, attention and all-reduces of one GPU type."""

    def rows(name: str) -> Iterator[Row]:
        path = data / "profiles" / f"aiconfigurator_{name}.csv.gz"
        return (row for row in rows_of(path) if row["gpu"] == _AICONFIGURATOR[gpu])

    reduces = (
        row | {"message_bytes": str(2 * int(row["message_size"]))}
        for row in rows("comm")
        if row["op"] == "all_reduce" and row["source"].endswith("_graph")
    )
    # A row has the tokens before the step; a step attends to its own token too.
    decodes = (row | {"context_tokens": str(int(row["past_kv_tokens"]) + 1)} for row in rows("generation_attention"))
    return {
        "gemm": gathered(
            rows("gemm"), lambda row: (_DTYPE[row["gemm_dtype"]], int(row["n"]), int(row["k"])), "m", _latency_us
        ),
        "prompt_attention": gathered(
            rows("context_attention"), lambda row: (*_heads(row), int(row["batch_size"])), "isl", _latency_us
        ),
        "decode_attention": gathered(
            decodes, lambda row: (*_heads(row), int(row["batch_size"])), "context_tokens", _latency_us
        ),
        "all_reduce": gathered(reduces, lambda row: (int(row["num_gpus"]),), "message_bytes", _latency_us),
    }


def own_pointwise() -> Points:
    """Pointwise operators of the H100 that we measured: fused kernels, as engines run them.

    Norms are left out: torch's is one kernel for the norm and one for the residual, where engines run one for both.
    """
    widths = {"rope": ("rotary", 2 * 40 * 128), "silu_mul": ("activation", 3 * 14336)}
    widths |= {"embedding": ("embedding", 2 * 4096), "argmax": ("sampler", 128256 + 1)}
    fused = {"rope": "inductor", "silu_mul": "inductor", "embedding": "eager", "argmax": "eager"}
    rows = (
        row
        for row in rows_of(OWN)
        if row["model"] == "llama-3-8b" and row["tp"] == "1" and fused.get(row["operator"]) == row["backend"]
    )
    return gathered(rows, lambda row: widths[row["operator"]], "tokens", lambda row: float(row["median_us"]))


def vllm_layer_tables(data: Path) -> dict[str, Points]:
    """vLLM's layers on RTX PRO 6000."""
    tables: dict[str, Points] = {}
    for file, hidden, heads, kv_heads, intermediate, vocab in _RTX:
        head_key = ("bf16", heads, kv_heads, _HEAD_DIM)
        rotated = 2 * (heads + kv_heads) * _HEAD_DIM
        shapes: Mapping[str, Key] = {
            "qkv_proj": ("bf16", (heads + 2 * kv_heads) * _HEAD_DIM, hidden),
            "o_proj": ("bf16", hidden, heads * _HEAD_DIM),
            "gate_up_proj": ("bf16", 2 * intermediate, hidden),
            "down_proj": ("bf16", hidden, intermediate),
            "lm_head": ("bf16", vocab, hidden),
        }
        widths: Mapping[str, Key] = {
            "layernorm": ("norm", 4 * hidden),
            "qk_norm": ("qk_norm", rotated),
            "rotary_emb": ("rotary", rotated),
            "act_fn": ("activation", 3 * intermediate),
            "embedding": ("embedding", 2 * hidden),
            # All ranks gather the logits of the whole vocabulary.
            "sampler": ("sampler", (128256 if vocab == 128256 else 2 * vocab) + 1),
        }
        dense = list(rows_of(data / "measured" / f"{file}_dense.csv.gz"))
        dense += [
            row | {"tokens": row["sequences"]} for row in rows_of(data / "measured" / f"{file}_per_sequence.csv.gz")
        ]
        for name, keys in (("gemm", shapes), ("pointwise", widths)):
            chosen = (row for row in dense if row["layer"] in keys)
            tables.setdefault(name, {}).update(gathered(chosen, _by_layer(keys), "tokens", _time_us))
        for name, found in _attention(data / "measured" / f"{file}_attention.csv.gz", head_key).items():
            tables.setdefault(name, {}).update(found)
    return tables


def _by_layer(keys: Mapping[str, Key]) -> Callable[[Row], Key]:
    return lambda row: keys[row["layer"]]


def _time_us(row: Row) -> float:
    return float(row["time_us"])


def _attention(path: Path, head_key: Key) -> dict[str, Points]:
    rows = list(rows_of(path))
    chunks = [row for row in rows if row["n_decode"] == "0"]
    decodes = [row for row in rows if row["prefill_chunk"] == "0"]
    mixed = [
        row
        for row in rows
        if row["n_decode"] != "0" and row["kv_prefill"] == "0" and int(row["prefill_chunk"]) in _MIXED_CHUNKS
    ]
    return {
        "chunk_attention": gathered(chunks, lambda row: (*head_key, int(row["kv_prefill"])), "prefill_chunk", _time_us),
        "decode_attention": gathered(decodes, lambda row: (*head_key, int(row["n_decode"])), "kv_decode", _time_us),
        "mixed_attention": gathered(
            mixed,
            lambda row: (*head_key, int(row["prefill_chunk"]), int(row["n_decode"])),
            "kv_decode",
            _time_us,
        ),
    }


def main() -> None:
    """Derive all tables and print their rows."""
    parser = argparse.ArgumentParser(description="Derive the shipped operator tables.")
    parser.add_argument("data", type=Path, help="folder with profiles/ and measured/")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the tables")
    options = parser.parse_args()
    tables = {gpu: aiconfigurator_tables(options.data, gpu) for gpu in _AICONFIGURATOR}
    tables["H100"]["pointwise"] = own_pointwise()
    tables["RTX-PRO-6000"] = vllm_layer_tables(options.data)
    for gpu, each in tables.items():
        for name, curves in each.items():
            before = sum(map(len, curves.values()))
            print(f"{gpu} {name}: {write(options.out / gpu, name, curves)} of {before} points")


if __name__ == "__main__":
    main()
