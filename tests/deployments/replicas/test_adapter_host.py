"""What an engine gets of the adapters that are wanted; the engine is a fake."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from router.adapters import AdapterNews, AdapterSpec, FaultKind
from tests.lab.stand.tiny_adapter import build_adapter

pytestmark = [pytest.mark.ray, pytest.mark.vllm]


class Engine:
    """An engine that keeps two adapters."""

    errored = False

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(lora_config=SimpleNamespace(max_lora_rank=16, max_cpu_loras=2))
        self.adapters: dict[int, str] = {}
        self.answered: list[Any] = []
        self.may_go_on = asyncio.Event()

    async def add_lora(self, request: Any) -> bool:
        if Path(request.lora_path).name == "refused":
            raise RuntimeError("Call to add_lora method failed: Worker failed with error 'no', please check the trace")
        self.adapters[request.lora_int_id] = request.lora_name
        return True

    async def remove_lora(self, number: int) -> bool:
        return self.adapters.pop(number) is not None

    async def generate(self, prompt: Any, lora_request: Any = None) -> AsyncIterator[Any]:
        self.answered.append(None if lora_request is None else lora_request.lora_name)
        yield "first"
        await self.may_go_on.wait()
        yield "last"


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    for seed, name in enumerate(("red", "blue", "green", "refused")):
        build_adapter(tmp_path / name, seed=seed)
    return tmp_path


def host(engine: Engine, folder: Path, **configured: str) -> Any:
    from deployments.replicas.adapter_host import AdapterHost, AdapterPlaces

    places = AdapterPlaces(configured=configured, folder=str(folder))
    return AdapterHost(engine, places, base=None, registry={})


def spec(name: str, path: str = "", revision: int = 1) -> AdapterSpec:
    return AdapterSpec(name=name, path=path or name, revision=revision)


async def want(adapters: Any, *specs: AdapterSpec) -> dict[str, str]:
    """The faults after news of these adapters."""
    await adapters._take(AdapterNews(wanted={"tiny": specs}), "tiny")
    await asyncio.sleep(0.01)  # removals
    report = adapters._report("tiny", "decode:g0", "d0")
    return {name: fault.kind for name, fault in report.faults.items()}


async def test_an_engine_has_what_is_wanted_and_no_more(folder: Path) -> None:
    engine = Engine()
    adapters = host(engine, folder)
    assert await want(adapters, spec("red"), spec("blue")) == {}
    assert list(adapters.held()) == ["red", "blue"] == list(adapters._registry)
    assert sorted(engine.adapters.values()) == sorted(adapters.held().values())
    assert await want(adapters, spec("blue")) == {}
    assert list(engine.adapters.values()) == [adapters.identity("blue")]
    assert list(adapters._registry) == ["blue"]


async def test_a_full_engine_refuses_and_never_drops_an_adapter(folder: Path) -> None:
    """vLLM would drop the oldest one, and read its files again for its next request, or end if they are gone."""
    engine = Engine()
    adapters = host(engine, folder)
    faults = await want(adapters, spec("red"), spec("blue"), spec("green"))
    assert faults == {"green": FaultKind.FULL}
    assert len(engine.adapters) == 2


async def test_a_refused_adapter_is_not_tried_again_until_it_has_another_revision(folder: Path) -> None:
    adapters = host(Engine(), folder)
    assert await want(adapters, spec("red", "refused")) == {"red": FaultKind.UNFIT}
    assert "refuses the adapter 'red': no" in adapters._faults["red"].message
    assert await want(adapters, spec("red", "red")) == {"red": FaultKind.UNFIT}
    assert await want(adapters, spec("red", "red", 2)) == {}
    assert await want(adapters, spec("blue", "../x")) == {"blue": FaultKind.OUTSIDE}


async def test_an_answer_keeps_the_adapter_that_it_began_with(folder: Path) -> None:
    engine = Engine()
    adapters = host(engine, folder)
    await want(adapters, spec("red"))
    first = adapters.identity("red")
    noted: list[Any] = []
    generate = adapters.generating(engine.generate, noted.append)
    outputs = generate("prompt", lora_request=SimpleNamespace(lora_name="red"))
    assert noted == [outputs]  # so that it can be ended with its client
    assert await anext(outputs) == "first"
    await want(adapters, spec("red", "blue", 2))  # loaded again from other files
    second = adapters.identity("red")
    assert second != first
    assert sorted(engine.adapters.values()) == sorted([first, second])
    engine.may_go_on.set()
    assert [output async for output in outputs] == ["last"]
    await asyncio.sleep(0.01)
    assert list(engine.adapters.values()) == [second]
    assert engine.answered == [first]


async def test_the_same_files_are_not_loaded_twice(folder: Path) -> None:
    engine = Engine()
    adapters = host(engine, folder)
    await want(adapters, spec("red"))
    await want(adapters, spec("red", revision=2))
    assert list(engine.adapters) == [1]


async def test_a_request_without_adapter_goes_straight_to_the_engine(folder: Path) -> None:
    engine = Engine()
    engine.may_go_on.set()
    outputs = host(engine, folder).generating(engine.generate, [].append)("prompt", lora_request=None)
    assert [output async for output in outputs] == ["first", "last"]
    assert engine.answered == [None]


async def test_a_replica_says_why_it_cannot_answer(folder: Path) -> None:
    adapters = host(Engine(), folder)
    await want(adapters, spec("red"))
    own = adapters.identity("red")
    assert adapters.refusal(own, is_resumed=True) is None
    assert adapters.refusal("red@other", is_resumed=False) is None
    assert "cannot continue" in adapters.refusal("red@other", is_resumed=True)
    assert "is not loaded" in adapters.refusal("blue@1", is_resumed=False)
    with adapters.use_identity(own) as used, adapters.use_identity("red@other") as other:
        assert (used.lora_name, other) == (own, None)


async def test_prefill_replicas_with_other_files_lack_the_adapter(folder: Path) -> None:
    adapters = host(Engine(), folder)
    pools = {"prefill:g0": {"p0": {"red": "red@1"}, "p1": {"red": "red@2"}, "p2": {}}}
    adapters.news = AdapterNews(held=pools)
    assert adapters.lacking("prefill:g0", "red@1") == {"p1", "p2"}
    assert adapters.lacking("prefill:g0", "red@3") is None


async def test_a_configured_adapter_that_cannot_be_loaded_stops_the_start(folder: Path) -> None:
    from deployments.replicas.adapter_files import AdapterError

    adapters = host(Engine(), folder / "empty", red=str(folder / "red"))
    await adapters.load_configured()  # it may be outside of the folder for adapters of clients
    assert list(adapters.held()) == ["red"]
    with pytest.raises(AdapterError, match="has no file"):
        await host(Engine(), folder, red=str(folder / "nothing")).load_configured()
