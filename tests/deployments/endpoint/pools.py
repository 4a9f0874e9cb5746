"""Decode pools that a test controls, and the part of an endpoint that calls them; Serve's handles are fakes."""

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from router.groups import GroupLoad


class Clock:
    """The machine's clock; a stream moves it forward instead of waiting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from deployments.endpoint import relay
        from deployments.wire import call

        self.ahead_s = 0.0
        self.time = time.time
        for module in (relay, call):
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        """The machine's time plus the seconds that streams added."""
        return time.monotonic() + self.ahead_s


class Stream:
    """A replica's answer: frames, seconds before the next frame, an error, or ``...`` for silence from there on."""

    def __init__(self, said: list[Any], clock: Clock) -> None:
        self._said, self._clock = said, clock
        self.is_cancelled = False

    async def __aiter__(self) -> AsyncIterator[Any]:
        for one in self._said:
            if isinstance(one, float):
                self._clock.ahead_s += one
            elif isinstance(one, Exception):
                raise one
            elif one is ...:
                await asyncio.sleep(60.0)
            else:
                yield one

    def cancel(self) -> None:
        """Note that the caller wants no more frames."""
        self.is_cancelled = True


class Handle:
    """Serve's handle of one pool: each request goes to the first replica in ``next``, and gets the answer there."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.next: list[tuple[str | None, list[Any]]] = []
        self.requests: list[Any] = []
        self.streams: list[Stream] = []

    def options(self, **_: Any) -> "Handle":
        """The handle itself: all calls are streams."""
        return self

    def remote(self, request: Any) -> Stream:
        """Send a request to the next replica, as the router does."""
        request.routing.choice.replica_id, said = self.next.pop(0)
        self.requests.append(request)
        self.streams.append(Stream(said, self.clock))
        return self.streams[-1]


class Pools:
    """One decode pool for each group, and a relay over them; replicas are named after their group."""

    def __init__(self, clock: Clock, groups: str = "a", *, retries: int = 2, timeout_s: float = 60.0) -> None:
        from deployments.endpoint.relay import Relay
        from deployments.endpoint.served_model import DecodeGroup, ServedModel
        from deployments.wire.call import CallWatch, PoolCaller
        from router.config import RouterConfig
        from router.ejection import OutlierConfig
        from router.ray_health import HealthFeed

        self.clock, self.timeout_s = clock, timeout_s
        self.handles = {name: Handle(clock) for name in groups}
        self.watch = CallWatch(lambda *_: True, lambda pool: False)
        made = []
        for name, handle in self.handles.items():
            health = HealthFeed("nobody", f"decode:test_endpoint:{name}", OutlierConfig())
            health._suspects = frozenset(f"{name}{number}" for number in range(9))  # every report is news
            for _ in range(20):
                health.usual_pace.is_slow(0.02, OutlierConfig().slow_tpot_s)
            one: Any = handle
            caller: Any = PoolCaller(
                one, "respond", health=health, watch=self.watch, is_whole=lambda frame: frame.is_last
            )
            made.append(DecodeGroup(name, caller, replicas=1, capacity=1.0))
        gate: Any = SimpleNamespace(has_objective=False, requests=0)
        config: Any = SimpleNamespace(
            model=SimpleNamespace(id="m", source="./models/m"),
            max_model_len=None,
            longest_context_tokens=None,
            router=RouterConfig(),
            autoscale=None,
            long_prompts=None,
        )
        self.model = ServedModel(config, made, gate, None, max_prompt_tokens=None)
        self.relay = Relay(retries)
        self.relay._rng = SimpleNamespace(random=lambda: 0.0)  # type: ignore[assignment]  # equals in the groups' order

    def request(self, body: dict[str, Any] | None = None, ago_s: float = 0.0) -> Any:
        """A request whose body has these fields; it arrived ``ago_s`` ago."""
        from deployments.endpoint.client_request import ClientRequest
        from deployments.endpoint.json_body import place_of, prompt_tokens
        from deployments.endpoint.requested_answer import requested_answer
        from deployments.endpoint.routes import COMPLETIONS
        from router.admission_config import Priority

        arrived_s = self.clock.monotonic() - ago_s
        held: Any = None
        request = ClientRequest(
            route=COMPLETIONS,
            request_id="r",
            arrived_s=arrived_s,
            arrived_at_s=0.0,
            deadline_s=arrived_s + self.timeout_s,
            key=None,
            priority=Priority.NORMAL,
            body=held,
        )
        request.raw, request.model = b"{}", self.model
        answer, prompts = requested_answer("completions", body or {}), prompt_tokens("completions", body or {})
        request.place = place_of(answer, prompts, None, Priority.NORMAL, None)
        return request

    def frames(self, body: dict[str, Any] | None = None, ago_s: float = 0.0) -> Any:
        """The frames of the answer to a request."""
        return self.relay.frames(self.request(body, ago_s))

    async def answer(self, body: dict[str, Any] | None = None, ago_s: float = 0.0) -> list[Any]:
        """All frames of the answer to a request."""
        async with asyncio.timeout(10.0):
            return [frame async for frame in self.frames(body, ago_s)]

    async def texts(self) -> list[str]:
        """All texts of the answer to a request."""
        return [frame.text for frame in await self.answer()]

    def reports(self, group: str = "a") -> list[tuple[str, str, bool]]:
        """The reports for the health board, in order: replica, measure, and whether it failed."""
        (health,) = (one.caller.health for one in self.model.groups if one.name == group)
        return [(one.replica_id, str(one.measure), one.has_failed) for one in health._unsent]

    def is_idle(self) -> bool:
        """Whether no call is left, and none is counted."""
        return not self.watch.calls and all(group.load == GroupLoad() for group in self.model.groups)


def know(monkeypatch: pytest.MonkeyPatch, **routed: list[str]) -> None:
    """Let this process know to which replicas of these groups requests go."""
    from router import known_pools

    routers = {
        f"decode:test_endpoint:{group}": [SimpleNamespace(curr_replicas=dict.fromkeys(names), routed=names.copy)]
        for group, names in routed.items()
    }
    monkeypatch.setattr(known_pools, "_ROUTERS", routers)


def event(token: int) -> Any:
    """One event of a stream."""
    from deployments.wire.messages import Frame

    return Frame(f"data: {token}\n\n", outputs=((token,),), tokens=1)


def whole(tokens: int = 20) -> Any:
    """An answer in one piece."""
    from deployments.wire.messages import Frame

    return Frame("{}", outputs=(tuple(range(tokens)),), tokens=tokens)


def done() -> Any:
    """The end of a stream."""
    from deployments.wire.messages import DONE, Frame

    return Frame(DONE)


def lost() -> Exception:
    """What Ray raises for a replica that is gone."""
    from ray.exceptions import RayError

    return RayError("gone")
