"""Writes docs/engine_arguments.md from the table of vLLM's arguments: ``make docs``."""

from pathlib import Path

from deployments.argument_table import INSTEAD, OF_ENGINE, OF_SERVER

PAGE = Path(__file__).parents[2] / "docs" / "engine_arguments.md"

HEADER = """\
# Which arguments of vLLM can I give?

This page is generated from `deployments/argument_table.py`. Run `make docs` to write it again. A test keeps the two
equal, and another one fails if the pinned vLLM has an argument that is not here.

`engine_kwargs` takes vLLM's arguments by the names of `vllm serve`, with `_` for `-`. vLLM gets one unchanged if
it acts on the engine, or on the part of vLLM's server that a replica runs. All others are refused with what to write
instead. Some of them belong to Tandem. The rest are for vLLM's process that listens to clients, which does not run
here. `tandem validate`, the SDK and Serve refuse the same.

- A mapping, such as `compilation_config`, has vLLM's own names inside. `tandem validate` names a wrong one with its
  path.
- `tandem validate` asks vLLM about values too, if the engine is on CPU and the model's folder is on this machine.
- Give whole paths: replicas start in another folder.

## Refused

| argument | instead |
|---|---|
"""

_SERVER = """
## Taken: arguments of vLLM's server

They shape what a replica answers and logs. Give them for both roles, above `groups`.

"""

_ENGINE = """
## Taken: arguments of the engine

"""


def page() -> str:
    """The whole page."""
    rows: dict[str, list[str]] = {}
    for name, remedy in INSTEAD.items():
        rows.setdefault(remedy, []).append(name)
    refused = "".join(f"| {_listed(names)} | {_sentence(remedy)} |\n" for remedy, names in rows.items())
    return f"{HEADER}{refused}{_SERVER}{_listed(OF_SERVER)}.\n{_ENGINE}{_listed(OF_ENGINE)}.\n"


def _listed(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _sentence(remedy: str) -> str:
    return f"{remedy if remedy.startswith('vLLM') else remedy[0].upper() + remedy[1:]}."


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
