"""The command of vLLM's own server, to compare with."""

import json
import sys
from collections.abc import Mapping
from typing import Any

# As vLLM ships: without Tandem's plugin.
ENVIRONMENT = {"VLLM_PLUGINS": "", "VLLM_NO_USAGE_STATS": "1"}


def server_command(source: str, name: str, port: int, engine_kwargs: Mapping[str, Any]) -> list[str]:
    """The command that serves the model ``source`` as ``name`` on loopback, with these engine arguments."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", source]
    command += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)]
    for key, value in engine_kwargs.items():
        flag = key.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            command += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return command
