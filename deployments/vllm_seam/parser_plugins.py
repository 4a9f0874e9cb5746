"""Parsers of tool calls and of reasoning, also from a file of the user."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from deployments.explain import did_you_mean


def import_parser_plugins(kwargs: Mapping[str, Any]) -> None:
    """Import the files that ``tool_parser_plugin`` and ``reasoning_parser_plugin`` name, which register their parsers.

    vLLM's own server imports both at its start (vllm/entrypoints/launchers/launcher.py:254). Ray Serve LLM does not.

    Needs: ``ToolParserManager.import_tool_parser`` and ``ReasoningParserManager.import_reasoning_parser``.
    Without it: no replica with such an argument starts, since vLLM does not know the parser's name.
    """
    outputs = kwargs.get("structured_outputs_config") or {}
    reasoning = kwargs.get("reasoning_parser_plugin") or outputs.get("reasoning_parser_plugin")
    if plugin := kwargs.get("tool_parser_plugin"):
        from vllm.tool_parsers import ToolParserManager

        ToolParserManager.import_tool_parser(plugin)
    if reasoning:
        from vllm.reasoning import ReasoningParserManager

        ReasoningParserManager.import_reasoning_parser(reasoning)


def check_parsers(args: Namespace) -> None:
    """Refuse parsers that vLLM does not have; ``args``: those of its server and engine.

    vLLM's own server does so too (``validate_api_server_args``), and lists all parsers.

    Needs: ``ToolParserManager.list_registered`` and ``ReasoningParserManager.list_registered``.
    Without it: no configuration passes ``tandem validate``; it names the import that failed.

    Raises ValueError: a parser is unknown; the message has the most similar name.
    """
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for argument, name, names in (
        ("tool_call_parser", args.tool_call_parser, ToolParserManager.list_registered()),
        ("reasoning_parser", args.structured_outputs_config.reasoning_parser, ReasoningParserManager.list_registered()),
    ):
        if name and name not in names:
            raise ValueError(f"engine_kwargs.{argument}: vLLM has no parser {name!r}{did_you_mean(name, names)}")
