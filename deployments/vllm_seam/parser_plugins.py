"""Parsers of tool calls and of reasoning, also from a file of the user."""

from collections.abc import Mapping
from typing import Any

from deployments.explain import did_you_mean


def import_parser_plugins(kwargs: Mapping[str, Any]) -> None:
    """Import the files that ``tool_parser_plugin`` and ``reasoning_parser_plugin`` name, which register their parsers.

    vLLM's own server imports both at its start (vllm/entrypoints/launchers/launcher.py:254). Ray Serve LLM does not.

    Needs: ``ToolParserManager.import_tool_parser`` and ``ReasoningParserManager.import_reasoning_parser``.
    Without it: no replica with such an argument starts, since vLLM does not know the parser's name.
    """
    if plugin := kwargs.get("tool_parser_plugin"):
        from vllm.tool_parsers import ToolParserManager

        ToolParserManager.import_tool_parser(plugin)
    if plugin := _reasoning_plugin(kwargs):
        from vllm.reasoning import ReasoningParserManager

        ReasoningParserManager.import_reasoning_parser(plugin)


def check_parsers(kwargs: Mapping[str, Any], *, has_plugins: bool) -> None:
    """Refuse parsers that vLLM does not have. vLLM's own server refuses them too, and lists all parsers.

    ``has_plugins``: whether plugins are imported here. If not, any name passes beside a plugin.

    Needs: ``ToolParserManager.list_registered`` and ``ReasoningParserManager.list_registered``.
    Without it: no configuration passes ``tandem validate``; it names the import that failed.

    Raises ValueError: a parser is unknown; the message has the most similar name.
    """
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for argument, plugin, names in (
        ("tool_call_parser", kwargs.get("tool_parser_plugin"), ToolParserManager.list_registered()),
        ("reasoning_parser", _reasoning_plugin(kwargs), ReasoningParserManager.list_registered()),
    ):
        name = kwargs.get(argument)
        if name and name not in names and (has_plugins or not plugin):
            raise ValueError(f"engine_kwargs.{argument}: vLLM has no parser {name!r}{did_you_mean(str(name), names)}")


def _reasoning_plugin(kwargs: Mapping[str, Any]) -> str | None:
    outputs = kwargs.get("structured_outputs_config")
    nested = outputs.get("reasoning_parser_plugin") if isinstance(outputs, Mapping) else None
    return kwargs.get("reasoning_parser_plugin") or nested
