"""A compressed day on a cluster that grows and shrinks, through real Ray Serve: ``make demo-elastic``.

Ray's autoscaler v2 adds and removes nodes, which are processes of this machine. One service, on emulated engines,
sleeps at first, follows the load of a day and sleeps again. No node of its cheapest type ever comes, and a node of the
next one is taken away with notice in the busiest hours. A second service, on a real engine, is rarely used: its model
is at zero, or its engine sleeps, when a request comes.
"""

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from autoscale.engines.profile import EngineProfile
from autoscale.traces.trace import TraceRequest
from deployments.machine.claims import free_ports
from kvtransfer.topology import Role
from serve_app.checks.yaml_checks import load_serve_yaml
from serve_app.load.generator import LoadGenerator
from serve_app.load.metrics_page import scrape
from serve_app.local.cluster import NodeSpec, driver_environment
from serve_app.local.tiny_model import build_tiny_model
from serve_app.output import write_file
from tests.lab.demo.day import CHAT, objectives
from tests.lab.demo.elastic_figures import Day, Sample, Wake, plot
from tests.lab.demo.sampling import sampling
from tests.lab.stand.elastic_cluster import ElasticCluster
from tests.lab.stand.forked_worker import forked
from tests.lab.stand.spot import give_notice

_ROOT = Path(__file__).parents[3]
_PROFILE = _ROOT / "configs" / "profiles" / "h100_llama70b_fp8_tp1.json"
_KIND, _GPU, _ALWAYS = "example.com/kind", "gpu_h100", "head"
_GPUS_PER_NODE = 2
# Prices of a GPU hour, and most nodes of each type. No node of the first type ever comes.
_PRICES = {"cheapest": 0.8, "spot": 1.2, "reserved": 4.0}
_MOST = {"cheapest": 0, "spot": 2, "reserved": 3}
# Declared longest wait for a node, in seconds; short, as the day is.
_NODE_START_S = 15.0
# Ray's autoscaler removes a node that has been empty for this time, in seconds.
_NODE_IDLE_S = 10.0
_ENGINE_START_S = 5.0
# Every third request of the other demonstration's day, whose quietest hour comes first.
_EVERY, _QUIETEST_FRAC = 3, 0.5
DAY_S = 420.0
# The notice comes at this share of the day, in its busiest hours, and the node goes after this time, in seconds.
_NOTICE_AT_FRAC, _NOTICE_S = 0.62, 60.0
# Requests of the rarely used model, as shares of the day: from zero, while it is awake or its engine sleeps, from zero.
_RARE_AT_FRAC = (0.08, 0.17, 0.45, 0.54, 0.90)
# The engine of that model sleeps after this time without a request, and its replica ends after that one; in seconds.
_SLEEP_AFTER_S, _ZERO_AFTER_S = 15.0, 60.0
# The service on emulated engines goes to zero after this time without a request, in seconds.
_CHAT_ZERO_AFTER_S = 20.0
# All nodes must be given back this long after the day, in seconds.
_GIVEN_BACK_S = 240.0
_SAMPLE_S = 1.0


def document() -> dict[str, Any]:
    """One application with both services."""
    made = forked(load_serve_yaml(_ROOT / "configs" / "cpu_tiny.yaml"))
    made["http_options"]["port"] = free_ports(1)[0]
    application = made["applications"][0]
    application["autoscaling_policy"] = {"policy_function": "autoscale.ray_policy:JointPolicy"}
    engine_kwargs = application["args"]["engine_kwargs"]
    pool = {
        "replicas": 0,
        "max_replicas": 8,
        "emulator": {"profile": str(_PROFILE), "start_s": _ENGINE_START_S, "chunk_s": 0.5},
        "placement": {"accelerator_type": "H100", "cpus_per_worker": 0.05, "cpus_per_replica": 0.05},
    }
    timing = {
        "guard": {"cooldown_out_s": 3.0, "cooldown_in_s": 10.0, "shortfall_replicas": 0.5},
        "gate": {"observation_s": 5.0},
        "interval_s": 1.0,
        "window_s": 12.0,
        "no_node_s": 10.0,
    }
    chat = {
        "model": {"id": "chat", "source": "emulated/llama-70b"},
        "engine_kwargs": {"max_model_len": 8192},
        "groups": [{"name": "chat", "prefill": pool, "decode": pool}],
        "autoscale": {
            "pd_ratio": str(CHAT.ratio),
            "policy": {"kind": "heteroscale", "signal": "decode_tps", "target": CHAT.target},
            "slo": {"ttft_s": CHAT.ttft_s, "tpot_s": 0.05},
            "idle_to_zero_s": _CHAT_ZERO_AFTER_S,
            **timing,
        },
    }
    engine = {
        "replicas": 0,
        "max_replicas": 1,
        "engine_sleep": {"after_s": _SLEEP_AFTER_S, "level": 1},
        "placement": {"cpus_per_worker": 0.5, "cpus_per_replica": 0.25, "node_labels": {_KIND: _ALWAYS}},
    }
    rare = {
        "model": {"id": "tiny", "source": str(_ROOT / "models" / "tiny")},
        "engine_kwargs": engine_kwargs,
        "groups": [{"name": "rare", "prefill": None, "decode": engine}],
        "autoscale": {
            "pd_ratio": "0:1",
            "policy": {"kind": "wva"},
            "slo": {"ttft_s": 60.0, "tpot_s": 1.0},
            "idle_to_zero_s": _ZERO_AFTER_S,
            **timing,
        },
    }
    types = {
        name: {
            "labels": {_KIND: name},
            "gpu_type": "H100",
            "gpus": _GPUS_PER_NODE,
            "cpus": 2,
            "max_nodes": max(2, most),
            "cost_per_gpu_hour": _PRICES[name],
            "start_s": _NODE_START_S,
            "retry_s": 3600.0,
        }
        for name, most in _MOST.items()
    }
    application["args"] = {
        "services": [chat, rare],
        "ingress": {"replicas": 1, "cpus_per_replica": 0.25, "metrics_port": free_ports(1)[0]},
        "start_hosts": {"per_node": 1},
        "topology": {"gpu_resources": {"H100": _GPU}, "cost_per_gpu_hour": {"H100": 4.0}, "node_types": types},
    }
    return made


def day(day_s: float) -> list[TraceRequest]:
    """The requests of the service on emulated engines; the quietest hours come first."""
    shift_s = _QUIETEST_FRAC * day_s
    turned = [replace(one, at_s=(one.at_s - shift_s) % day_s) for one in CHAT.day(day_s)[::_EVERY]]
    return sorted(turned, key=lambda one: one.at_s)


class Demo:
    """The application while the day goes through it."""

    def __init__(self, app: Any, day_s: float, console: Console) -> None:
        self._app, self._day_s, self._console = app, day_s, console
        self._notice: tuple[float, float | None] | None = None  # when it came and when the node was gone
        self._began_s = 0.0

    def run(self) -> Day:
        """Replay the day, and wait until all nodes are given back."""
        trace = day(self._day_s)
        self._console.print(f"{len(trace)} requests in {self._day_s:g} s; {len(_RARE_AT_FRAC)} for the rare model")
        self._began_s = time.monotonic()
        with sampling(self._sample, _SAMPLE_S) as samples, ThreadPoolExecutor(2) as threads:
            taken = threads.submit(self._take_a_node_away)
            wakes = threads.submit(self._use_the_rare_model)
            records = asyncio.run(LoadGenerator(self._app.url, "chat", seed=1).replay(trace))
            taken.result()
            self._until(lambda: not samples[-1].nodes, _GIVEN_BACK_S)
            return Day(
                day_s=self._day_s,
                records=records,
                slos=objectives(trace, dict.fromkeys(Role, EngineProfile.load(_PROFILE))),
                samples=samples,
                wakes=wakes.result(),
                notice_s=self._notice,
                prices={name: price * _GPUS_PER_NODE for name, price in _PRICES.items()},
            )

    def _at(self, frac: float) -> None:
        time.sleep(max(0.0, self._began_s + frac * self._day_s - time.monotonic()))

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    def _until(self, holds: Callable[[], bool], within_s: float) -> bool:
        until_s = time.monotonic() + within_s
        while not holds():
            if time.monotonic() > until_s:
                return False
            time.sleep(_SAMPLE_S)
        return True

    def _take_a_node_away(self) -> None:
        self._at(_NOTICE_AT_FRAC)
        spot = [node["NodeID"] for node in _nodes() if node["Labels"][_KIND] == "spot"]
        if not spot:
            return
        at_s = self._now_s()
        self._console.print(f"{at_s:.0f} s: a spot node will be taken away in {_NOTICE_S:g} s")
        give_notice(spot[0], _NOTICE_S)
        is_gone = self._until(lambda: spot[0] not in {node["NodeID"] for node in _nodes()}, 3 * _NOTICE_S)
        self._notice = at_s, self._now_s() if is_gone else None

    def _use_the_rare_model(self) -> list[Wake]:
        wakes: list[Wake] = []
        for frac in _RARE_AT_FRAC:
            self._at(frac)
            before = self._rare_state()
            load = LoadGenerator(self._app.url, "tiny", seed=len(wakes))
            at_s = self._now_s()
            (record,) = asyncio.run(load.replay([TraceRequest(at_s=0.0, input_tokens=20, output_tokens=8)]))
            wakes.append(Wake(at_s=at_s, before=before, ttft_s=record.ttft_s, error=record.error))
            self._console.print(f"{at_s:.0f} s: rare model {before}: first token after {record.ttft_s or 0.0:.1f} s")
        return wakes

    def _rare_state(self) -> str:
        last = self._app.control_of("tiny").status().last
        if last is None or not any(last.running.values()):
            return "at zero"
        is_asleep = any(sample.value for sample in scrape(self._app.metrics_url, "tandem_engine_asleep"))
        return "asleep" if is_asleep else "awake"

    def _sample(self, at_s: float) -> Sample:
        last = self._app.control_of("chat").status().last
        kinds = [node["Labels"][_KIND] for node in _nodes()]
        serving, planned, refused = dict.fromkeys(Role, 0), dict.fromkeys(Role, 0), ()
        if last is not None:
            admitted = set(last.plan.admitted)
            for key, names in last.running.items():
                serving[key.role] += len(admitted.intersection(names))
            for key, count in last.plan.counts.items():
                planned[key.role] += count
            refused = tuple(last.plan.state.refused)
        return Sample(
            at_s=at_s,
            nodes={name: kinds.count(name) for name in _PRICES if name in kinds},
            serving=serving,
            planned=planned,
            refused=refused,
        )


def _nodes() -> list[dict[str, Any]]:
    """The nodes that Ray's autoscaler has added."""
    import ray

    return [node for node in ray.nodes() if node["Alive"] and node["Labels"].get(_KIND) in _PRICES]


def main(
    day_s: Annotated[float, typer.Option(min=60.0, help="Seconds that the day takes.")] = DAY_S,
    out: Annotated[Path, typer.Option(help="Folder for the figures and the picture.")] = Path("reports"),
) -> None:
    """Run the day; print, write and plot."""
    console = Console()
    driver_environment()  # before anything imports ray
    from serve_app.sdk import deploy

    build_tiny_model(_ROOT / "models" / "tiny")
    types = {name: NodeSpec(cpus=2, labels={_KIND: name}, resources={_GPU: _GPUS_PER_NODE}) for name in _PRICES}
    head = NodeSpec(cpus=4, gpus=0, labels={_KIND: _ALWAYS})
    with (
        ElasticCluster(head, types, most=_MOST, idle_s=_NODE_IDLE_S) as cluster,
        deploy(document(), address=cluster.address) as app,
    ):
        result = Demo(app, day_s, console).run()
    figures = result.figures()
    write_file(out / "elastic_demo.json", json.dumps(figures, indent=1) + "\n", "--out")
    plot(result, out / "elastic_demo.png")
    table = Table("", "", box=SIMPLE_HEAD, show_header=False, padding=(0, 1, 0, 0))
    for name, text in result.rows():
        table.add_row(name, text)
    console.print(table)
    console.print(f"{out / 'elastic_demo.json'} and .png")
    complaints = result.complaints()
    for complaint in complaints:
        console.print(complaint, style="red")
    raise typer.Exit(1 if complaints else 0)


if __name__ == "__main__":
    typer.run(main)
