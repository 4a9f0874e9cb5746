"""A policy and a collector of one's own in a live application: they decide, they fail, and requests are answered."""

import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from autoscale.decide.decision_log import load_lines, replay
from autoscale.traces.trace import TraceRequest
from autoscale.types import PolicyFault
from serve_app.checks.yaml_checks import ConfigError
from tests.engines.endpoint import forked_yaml
from tests.engines.test_autoscale import DECODE, PREFILL, QUICK, Seen, load, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
SHORT = TraceRequest(at_s=0.0, input_tokens=100, output_tokens=4)
OWN_POLICY = """
import time

from pydantic import Field

from autoscale.policies.policy import Policy
from autoscale.types import Decision
from kvtransfer.strict_config import StrictConfig
from kvtransfer.topology import Role


class SteeredConfig(StrictConfig):
    kind: str
    mode: str = "scale"
    replicas: float = Field(1.0, gt=0.0)


class Steered(Policy[SteeredConfig]):
    config_class = SteeredConfig

    def decide(self, snapshot):
        wanted = dict.fromkeys(Role, self._config.replicas)
        if self._config.mode == "raise":
            1 / 0
        if self._config.mode == "block":
            time.sleep(10.0)
        if self._config.mode == "nan":
            wanted[Role.DECODE] = float("nan")
        return Decision(wanted=wanted, reason=f"steered to {self._config.replicas:g}", is_step=True)
"""
OWN_COLLECTOR = """
import time

from autoscale.observe.collected import Collected
from autoscale.observe.collectors import Collector, SourceConfig


class LyingConfig(SourceConfig):
    kind: str
    mode: str = "good"


class Lying(Collector[LyingConfig]):
    config_class = LyingConfig

    def collect(self):
        if self._config.mode == "block":
            time.sleep(3600.0)
        age_s = 3600.0 if self._config.mode == "stale" else 0.0
        service = {"requests_per_s": -3.0 if self._config.mode == "negative" else 77.0, "ttft_s": 0.25}
        return Collected(service=service, observed_s=time.time() - age_s)
"""


class Steered(Seen):
    """The application, whose policy and collector are changed by ``tandem tune``."""

    def policy(self, **fields: Any) -> None:
        self.control.tune({"policy": fields}, "test")

    def reason(self) -> str:
        return str(self.last().plan.decision.reason)

    def wait_for_reason(self, words: str) -> None:
        wait_until(lambda: words in self.reason(), self.reason)

    def wait_for_fault(self, words: str) -> None:
        wait_until(lambda: words in str(self.last().collector_faults), self.last)


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One application of emulated engines, with a package of one's own on the path of every process of its cluster."""
    from serve_app.sdk import deploy

    package = tmp_path_factory.mktemp("path") / "live_package"
    package.mkdir()
    (package / "policies.py").write_text(OWN_POLICY)
    (package / "collectors.py").write_text(OWN_COLLECTOR)
    document = forked_yaml("extended")
    application = document["applications"][0]
    group = application["args"]["groups"][0]
    for role in ("prefill", "decode"):
        group[role]["max_replicas"] = 3
        group[role]["emulator"] |= {"start_s": 0.0, "profile": str(ROOT / group[role]["emulator"]["profile"])}
    application["args"]["autoscale"] = {
        **QUICK,
        "pd_ratio": "1:1",
        "policy": {"kind": "live_package.policies:Steered", "replicas": 1},
        "slo": {"ttft_s": 30.0, "tpot_s": 5.0},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(package.parent))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(package.parent), os.environ.get("PYTHONPATH")))))
        with deploy(document) as app:
            yield app


@pytest.fixture
def steered(app: Any) -> Steered:
    """The application as deployed."""
    steered = Steered("extended")
    steered.control.tune({}, "test")
    wait_until(lambda: steered.serving() == (1, 1), steered.status)
    return steered


def test_a_policy_of_ones_own_scales_and_holds_while_it_fails(steered: Steered, app: Any) -> None:
    def requests_are_answered() -> None:
        assert load(app.url, "llama-70b", SHORT, requests=10, concurrency=2).requests_failed == 0
        assert steered.serving() == (2, 2)

    steered.policy(replicas=2)
    wait_until(lambda: steered.serving() == (2, 2), steered.status)
    assert steered.reason() == "steered to 2"
    name = "policy live_package.policies:Steered"
    steered.policy(mode="raise", replicas=3)
    steered.wait_for_reason(f"{name} raised ZeroDivisionError: division by zero; the counts stay")
    requests_are_answered()
    steered.policy(mode="block")
    steered.wait_for_reason(f"{name} has been computing for ")
    assert steered.last().plan.decision.fault is PolicyFault.LATE
    ticked_s = steered.last().plan.state.ticked_s
    wait_until(lambda: steered.last().plan.state.ticked_s > ticked_s + 2.0, steered.status)  # ticks go on
    requests_are_answered()
    steered.policy(mode="nan")
    steered.wait_for_reason(f"{name} wants nan decode replicas; a count must be finite and at least 0; the counts stay")
    requests_are_answered()
    with pytest.raises(ConfigError, match=r"policy\.replicas: Input should be greater than 0"):
        steered.policy(replicas=-1)
    with pytest.raises(ConfigError, match="policy no_such_package:Mine cannot be imported"):
        steered.policy(kind="no_such_package:Mine")
    steered.policy(mode="scale", replicas=1)
    wait_until(lambda: steered.ready() == (1, 1), steered.status)
    log = load_lines(Path(_log_path()))
    assert set(replay(log)) == {None}
    held = [json.loads(line)["plan"]["decision"] for line in log if '"plan"' in line]
    assert {decision["fault"] for decision in held} >= {None, "raised", "late", "invalid"}


def _log_path() -> str:
    from serve_app.running.ray_control import status_of

    return status_of("extended").log_path


def test_a_collector_of_ones_own_is_believed_only_while_its_figures_can_be_true(steered: Steered, app: Any) -> None:
    def collector(**fields: Any) -> None:
        kind = "live_package.collectors:Lying"
        steered.control.tune({"collector": {"kind": kind, "timeout_s": 0.5, "most_age_s": 10.0, **fields}}, "test")

    collector()
    wait_until(lambda: steered.last().traffic.requests_per_s == 77.0, steered.status)
    assert steered.last().latency.ttft_s == 0.25
    collector(mode="negative")
    steered.wait_for_fault("requests_per_s is -3.0: it is negative")
    assert steered.last().traffic.requests_per_s != -3.0
    assert steered.last().latency.ttft_s == 0.25  # the other figure counts
    collector(mode="stale")
    steered.wait_for_fault("its last answer is older than 10 s (most_age_s)")
    assert steered.last().traffic.requests_per_s != 77.0
    collector(mode="block")
    steered.wait_for_fault("takes longer than 0.5 s (timeout_s)")
    ticked_s = steered.last().plan.state.ticked_s
    wait_until(lambda: steered.last().plan.state.ticked_s > ticked_s + 2.0, steered.status)
    assert load(app.url, "llama-70b", SHORT, requests=10, concurrency=2).requests_failed == 0
    assert steered.serving() == (1, 1)


@pytest.fixture
def prometheus() -> Iterator[Any]:
    """A server that answers queries as Prometheus does; ``value`` is the answer to each, ``delay_s`` its delay."""

    class Handler(BaseHTTPRequestHandler):
        value, delay_s = "42", 0.0

        def do_GET(self) -> None:
            time.sleep(Handler.delay_s)
            result = [{"metric": {"replica": "x"}, "value": [time.time(), Handler.value]}]
            body = {"status": "success", "data": {"resultType": "vector", "result": result}}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Handler.url = f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
    yield Handler
    server.shutdown()
    server.server_close()


def test_prometheus_gives_arrivals_and_latencies_and_a_slow_one_delays_no_tick(
    steered: Steered, app: Any, prometheus: Any
) -> None:
    names = ("requests_per_s", "input_tokens_mean", "output_tokens_mean", "tpot_s")
    queries = dict(zip(names, names, strict=True))
    fields = {"kind": "prometheus", "url": prometheus.url, "service_queries": queries}
    steered.control.tune({"collector": {**fields, "timeout_s": 5.0, "most_age_s": 10.0}}, "test")
    wait_until(lambda: steered.last().traffic.output_tokens_mean == 42.0, steered.status)
    assert steered.last().latency.tpot_s == 42.0
    prometheus.value = "NaN"
    steered.wait_for_fault("requests_per_s is nan: it is not finite")
    prometheus.value, prometheus.delay_s = "42", 60.0
    steered.wait_for_fault("timed out")
    ticks = set()
    began_s = time.monotonic()
    while time.monotonic() - began_s < 5.0:
        ticks.add(steered.last().plan.state.ticked_s)
        time.sleep(0.2)
    assert len(ticks) >= 3  # one each second; a tick that waited for the queries would take 5 s
    assert load(app.url, "llama-70b", SHORT, requests=10, concurrency=2).requests_failed == 0
    assert steered.last().running.keys() == {PREFILL, DECODE}
