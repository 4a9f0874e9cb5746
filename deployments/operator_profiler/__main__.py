"""The same measurement on a machine that has torch and numpy alone: ``python -m deployments.operator_profiler``.

It takes a config.json instead of a model's name, and prints lines instead of a changing one.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from autoscale.operators.graph import OperatorPrecision, operator_graph
from autoscale.operators.kinds import wide_dtype
from deployments.operator_profiler.device import default_dtype
from deployments.operator_profiler.profile import profile_operators
from deployments.operator_profiler.series import Sizes

_EVERY_S = 5.0  # between two lines


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time the operators of a model on this machine.")
    parser.add_argument("config", type=Path, help="a config.json")
    parser.add_argument("--out", type=Path, required=True, help="folder of the tables")
    parser.add_argument("--device", default="cuda", help="cpu or cuda")
    parser.add_argument("--dtype", help="bf16, fp8 or fp32")
    parser.add_argument("--kernels", default="auto", help="auto, torch or vllm")
    parser.add_argument("--tp", type=int, nargs="+", default=[1], help="tensor parallel sizes")
    parser.add_argument("--budget-s", type=float, default=240.0, help="time for all measurements, seconds")
    parser.add_argument("--max-batch-tokens", type=int, default=2048)
    parser.add_argument("--max-running", type=int, default=128)
    parser.add_argument("--longest-tokens", type=int, default=16_384)
    return parser.parse_args(arguments)


class _Lines:
    """Progress as lines, not more often than one in some seconds."""

    def __init__(self) -> None:
        self._last_s = 0.0

    def __call__(self, text: str) -> None:
        if time.monotonic() - self._last_s >= _EVERY_S:
            self._last_s = time.monotonic()
            print(text, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print what the folder holds."""
    options = _parse(arguments)
    dtype = options.dtype or default_dtype(options.device)
    try:
        config = json.loads(options.config.read_text(encoding="utf-8"))
        outcome = profile_operators(
            operator_graph(config, OperatorPrecision(weights=dtype, kv=wide_dtype(dtype))),
            options.config.stem,
            options.device,
            sorted(options.tp),
            Sizes(
                max_batch_tokens=options.max_batch_tokens,
                max_running=options.max_running,
                longest_tokens=options.longest_tokens,
            ),
            options.budget_s,
            options.out,
            _Lines(),
            options.kernels,
        )
    except (OSError, ValueError) as error:
        raise SystemExit(f"{error}") from None
    print(
        f"{outcome.facts.name}: rows {outcome.rows}, left out {len(outcome.left_out)}, complete {outcome.is_complete}"
    )


if __name__ == "__main__":
    main()
