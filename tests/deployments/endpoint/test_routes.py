"""The tables of routes against those of vLLM."""

import re

from deployments.endpoint.routes import ABSENT, CHAT, COMPLETIONS, NATIVE, OWN
from tests.installed_source import installed_path

_ROUTE = re.compile(r'@router\.(?:get|post|websocket)\(\s*"([^"]+)"')


def vllm_paths() -> set[str]:
    sources = [path.read_text(encoding="utf-8") for path in installed_path("vllm/entrypoints").rglob("*.py")]
    return {path for source in sources for path in _ROUTE.findall(source)}


def test_each_route_of_vllm_is_served_or_absent_with_a_reason() -> None:
    paths = vllm_paths()
    assert len(paths) > 60
    served = {route.path for route in (CHAT, COMPLETIONS, *NATIVE)}
    own = {place.partition(" ")[2] for place in OWN}
    assert paths - served - own - ABSENT.keys() == set()
    assert served - paths == set()
    assert ABSENT.keys() - paths == set()
    assert ABSENT.keys() & served == set()


def test_names_and_places_are_unique() -> None:
    routes = (CHAT, COMPLETIONS, *NATIVE)
    assert len({route.name for route in routes}) == len({(route.path, route.method) for route in routes}) == len(routes)
