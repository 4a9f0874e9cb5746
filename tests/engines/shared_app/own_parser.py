"""A parser of tool calls that vLLM does not have: its Hermes parser under a name of its own."""

from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser


@ToolParserManager.register_module("own_hermes")
class OwnHermesParser(Hermes2ProToolParser):
    """The parser that the application of these tests names."""
