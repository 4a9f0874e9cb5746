"""A model at zero starts in a process that waits with everything imported, and an idle engine sleeps; real engines."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from serve_app.sdk import App, deploy
from tests.engines.endpoint import WAIT_S, replica_processes
from tests.lab.stand.fixed_counts import one_autoscaled_engine
from tests.lab.stand.processes import is_start_host, title

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]

# Bytes that a sleeping engine frees at least: what a prompt has touched of the KV cache, and some weights.
FREED_BYTES = 25e6
PROMPT = "The engine sleeps, and this prompt wakes it."


def until(holds: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (found := holds()):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    return found


def answers(app: App, number: int) -> list[str]:
    """The texts of requests that come together."""
    texts: list[str] = []

    def ask() -> None:
        made = app.client().completions.create(model="tiny", prompt=PROMPT, max_tokens=8, temperature=0.0, timeout=300)
        texts.append(made.choices[0].text)

    askers = [threading.Thread(target=ask) for _ in range(number)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    return texts


class TestStartHosts:
    @pytest.fixture(scope="class")
    def app(self) -> Iterator[App]:
        made = one_autoscaled_engine(replicas=0)
        args = made["applications"][0]["args"]
        args["start_hosts"] = {"per_node": 1}
        args["autoscale"]["idle_to_zero_s"] = 5.0
        with deploy(made) as app:
            yield app

    def host(self, app: App) -> psutil.Process | None:
        """A process that waits with everything imported."""
        return next(filter(is_start_host, app.processes()), None)

    def test_a_replica_runs_in_the_process_that_waited_and_no_request_is_lost(self, app: App) -> None:
        waiting = until(lambda: self.host(app))
        assert len(answers(app, 8)) == 8
        assert {process.pid for process in replica_processes(app, "decode")} == {waiting.pid}

    def test_a_host_that_dies_is_replaced(self, app: App) -> None:
        dying = until(lambda: self.host(app))
        dying.send_signal(signal.SIGKILL)
        until(lambda: (host := self.host(app)) is not None and host.pid != dying.pid)

    def test_a_request_is_answered_though_the_host_dies_as_it_is_taken(self, app: App) -> None:
        until(lambda: not replica_processes(app, "decode"))
        waiting = until(lambda: self.host(app))
        asking = threading.Thread(target=lambda: texts.extend(answers(app, 4)))
        texts: list[str] = []
        asking.start()
        until(lambda: "ServeReplica" in title(waiting))
        waiting.send_signal(signal.SIGKILL)
        asking.join()
        assert len(texts) == 4


@pytest.mark.parametrize("level", [1, 2])
def test_an_idle_engine_gives_memory_back_and_answers_the_same_when_it_wakes(level: int) -> None:
    with deploy(one_autoscaled_engine(engine_sleep={"after_s": 2, "level": level})) as app:

        def engine_bytes() -> int:
            return sum(process.memory_info().rss for process in app.processes() if "EngineCore" in title(process))

        (before,) = answers(app, 1)
        awake = engine_bytes()
        until(lambda: engine_bytes() < awake - FREED_BYTES)
        assert answers(app, 8) == [before] * 8
