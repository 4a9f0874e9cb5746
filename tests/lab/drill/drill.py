"""One drill: breaks a part under load and compares the whole output of every answer with an undisturbed run."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from deployments.machine.claims import free_ports
from kvtransfer.connector import ConnectorConfig
from serve_app.checks.yaml_checks import load_serve_yaml
from serve_app.local.cluster import NodeSpec, driver_environment
from serve_app.local.quickstart import without_keys
from serve_app.sdk import App
from tests.lab.drill.apis import OUTPUT_TOKENS, Answer
from tests.lab.drill.faults import (
    DECODE_FAULTS,
    FAULTS,
    FRONT_FAULTS,
    GATHER_S,
    LINK_FAULTS,
    NODE_LABEL,
    PART_LABEL,
    PREFILL_FAULTS,
    SETTINGS_FAULTS,
    DrillError,
    expire_lease,
)
from tests.lab.drill.load import INPUT_TOKENS, LONG_TOKENS, run_load
from tests.lab.drill.settings import set_by_hand, settings, unset
from tests.lab.drill.stacks import STACKS, faults_of
from tests.lab.drill.verdict import VERDICTS, verdict
from tests.lab.stand.processes import SINGLE_KINDS, count_kinds, count_running, replica_pids

# Nodes with engines, one of them spare. Each has room for one replica, so that a lost node takes no whole pool.
_ENGINE_NODES = 5
# CPUs of a node with engines: one replica.
_ENGINE_NODE_CPUS = 1
# The fault comes after this share of the load.
_FAULT_AT_FRAC = 0.4
# The front of a decode replica (its process, without the engine's) stands still longer than the lease by this, seconds.
_BEYOND_LEASE_S = 3.0
# When long prompts come, as shares of GATHER_S.
_LONG_PROMPTS_FRAC = (0.2, 0.3, 0.4, 0.5)
# Prompts that come just before the fault, in tokens, so that every replica has work on any machine.
_BURST = 2 * INPUT_TOKENS
# Time between the burst and the fault, in seconds.
_BURST_BEFORE_S = 0.3
# Prompts that are still in prefill's queue when it breaks, in tokens; the burst is computed by then.
_LONG_BURST = 4 * (LONG_TOKENS,)
# Everything must run again within this time, in seconds.
_RECOVERY_S = 240.0
# Time between two looks at the application, in seconds.
_POLL_S = 0.5
# Duration of the load that tests whether links carry KV again, in seconds.
_LOOK_S = 5.0
# Runs of a fault that met no request.
_TRIES = 3
_MUST_BE_ZERO = ("lost", "duplicated", "truncated", "wrong_tokens", "failed_undisturbed")
# Errors that differ in a request's id only are counted as one.
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

Say = Callable[[str], None]


def drill(
    config: Path,
    faults: Sequence[str],
    *,
    stack: str = "tandem",
    rate: float,
    seconds: float,
    say: Say,
    apis: Sequence[str] = ("completions",),
    on_answer: Callable[[], None] = lambda: None,
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """Run the faults one after the other on a local cluster; a fault that leaves something broken costs a new cluster.

    Args:
        config: a Serve YAML with one application.
        faults: names from ``FAULTS``; those that the stack cannot have are left out.
        stack: a name from ``STACKS``.
        rate: requests/s.
        seconds: duration of the load of each run; the fault comes after two fifths of it.
        say: called with a line for each step.
        apis: names of the APIs that the requests take in turn, from ``APIS``.
        on_answer: called after each answer.
        on_row: called with each row as soon as it is known.

    Raises:
        ConfigError: the config cannot be used.
        DrillError: some faults showed nothing; the other faults were drilled.
    """
    driver_environment()  # before anything imports ray
    document = _checked_document(config)
    args = document["applications"][0]["args"]
    lease_s = ConnectorConfig.model_validate(args.get("kv_transfer") or {}).lease_s
    break_part = FAULTS | {"expire-lease": partial(expire_lease, seconds=lease_s + _BEYOND_LEASE_S)}
    rows: list[dict[str, Any]] = []
    missed: list[str] = []
    tries = Counter[str]()
    remaining = faults_of(stack, faults)
    while remaining:
        with STACKS[stack].start(document, _nodes(), lambda status: say(f"starting: {status.state}")) as app:
            send_load = partial(run_load, app.url, args["model"]["id"], rate=rate, apis=apis)
            say("undisturbed run to warm up")
            asyncio.run(send_load(seconds=min(seconds, 10.0), seed=1, salt="warm-up"))
            send_load = partial(send_load, seconds=seconds, seed=0, on_answer=on_answer)
            # A stack that counts nothing cannot show that a fault met a request, or that links are whole again.
            is_counting = bool(STACKS[stack].counters(app))
            undisturbed: dict[tuple[tuple[float, int], ...], list[Answer]] = {}
            is_whole = True
            while remaining and is_whole:
                fault = remaining.pop(0)
                try:
                    at_s = _FAULT_AT_FRAC * seconds
                    row = _row(app, stack, fault, break_part[fault], send_load, undisturbed, at_s=at_s, say=say)
                except DrillError as error:  # the other faults may still show something
                    say(f"{stack}, {fault}: {error}")
                    missed.append(fault)
                    break
                is_whole = row["recovered_s"] is not None and (is_counting or fault not in LINK_FAULTS)
                tries[fault] += 1
                if is_whole and is_counting and tries[fault] < _TRIES and (why := shows_nothing(row)):
                    say(f"{stack}, {fault}: {why[0]}: again")
                    remaining.insert(0, fault)
                    continue
                rows.append(row)
                on_row(row)
    if missed:
        raise DrillError(f"{stack}: {', '.join(missed)} showed nothing, for the reasons above; run these again")
    return rows


def _checked_document(config: Path) -> dict[str, Any]:
    from serve_app.checks.ray_schema import single_app_config

    document = load_serve_yaml(config)
    single_app_config(document)
    return on_two_parts(document)


def _nodes() -> list[NodeSpec]:
    """The nodes of a drill's cluster: one for the endpoint, the others for engines."""
    engine_nodes = (
        NodeSpec(cpus=_ENGINE_NODE_CPUS, labels={PART_LABEL: "engines", NODE_LABEL: str(number)})
        for number in range(_ENGINE_NODES)
    )
    return [NodeSpec(cpus=2, labels={PART_LABEL: "front"}), *engine_nodes]


def _row(
    app: App,
    stack: str,
    fault: str,
    break_part: Callable[..., str],
    send_load: Callable[..., Coroutine[Any, Any, list[Answer]]],
    undisturbed: dict[tuple[tuple[float, int], ...], list[Answer]],
    *,
    at_s: float,
    say: Say,
) -> dict[str, Any]:
    """The row of one fault: runs the load with it, and once for all faults with the same prompts without it.

    ``undisturbed``: answers so far to a load without a fault, by its further prompts; a missing one is added.
    """
    counters = STACKS[stack].counters
    burst = (*_BURST, *(_LONG_BURST if fault in PREFILL_FAULTS else ()))
    more = [(at_s - _BURST_BEFORE_S, input_tokens) for input_tokens in burst]
    if fault in ("expire-lease", *LINK_FAULTS):
        more += [(at_s + frac * GATHER_S, LONG_TOKENS) for frac in _LONG_PROMPTS_FRAC]
    send_load = partial(send_load, more=more)
    if tuple(more) not in undisturbed:
        say(f"{stack}, {fault}: undisturbed run")
        undisturbed[tuple(more)] = asyncio.run(send_load(salt=f"{fault}-before"))
    before = undisturbed[tuple(more)]
    if fault in SETTINGS_FAULTS:
        set_by_hand(app)
    by_hand = settings(app) if fault in SETTINGS_FAULTS else {}
    processes = app.processes()  # a busy machine takes seconds to list them, and the fault would come too late
    counted, replicas, whole = counters(app), replica_pids(processes), _running(app)
    broke_s: list[tuple[float, float]] = []

    def inject() -> None:
        began_s = time.monotonic()
        broken = break_part(processes)
        done_s = time.monotonic()
        # Faults of replicas first look for one that has work, and break it at the end; other faults break at once.
        broke_s.append((done_s if fault in (*DECODE_FAULTS, *PREFILL_FAULTS) else began_s, done_s))
        say(f"{stack}, {fault}: {broken}")

    after = asyncio.run(send_load(salt=f"{fault}-after", faults=[(at_s, inject)]))
    row = {"stack": stack, **compare(fault, before, after, broke_s[0])}
    row["recovered_s"] = _recovered(app, whole)
    is_whole = row["recovered_s"] is not None
    if fault in LINK_FAULTS and is_whole:
        again = partial(send_load, seconds=_LOOK_S, more=[(0.0, LONG_TOKENS)], salt=f"{fault}-again")
        _wait_for_links(app, stack, counted, again)
    for name, value in (since(counted, counters(app)) if is_whole else {}).items():  # else the endpoint may not answer
        row[name] = row.get(name, 0) + value
    if fault in SETTINGS_FAULTS:
        row["settings"], row["settings_after"] = by_hand, settings(app)
        unset(app)
    row["replicas_ended"] = len(replicas - replica_pids(app.processes()))
    row["held"] = STACKS[stack].held(app) if is_whole else {}
    return row


def _wait_for_links(
    app: App,
    stack: str,
    counted: Mapping[tuple[str, str], int],
    send_load: Callable[[], Coroutine[Any, Any, list[Answer]]],
) -> None:
    """Send requests until KV comes again over a link that failed: an idle link shows nothing."""
    until_s = time.monotonic() + _RECOVERY_S
    while time.monotonic() < until_s:
        done = since(counted, STACKS[stack].counters(app))
        if not done or done["link_repairs"]:  # empty: the stack counts nothing
            return
        asyncio.run(send_load())


def since(before: Mapping[tuple[str, str], int], after: Mapping[tuple[str, str], int]) -> Counter[str]:
    """Increase of each counter between two looks, over all replicas; replicas that have ended are left out."""
    counted: Counter[str] = Counter()
    for key, value in after.items():
        counted[key[0]] += value - before.get(key, 0)
    return counted


def compare(
    fault: str,
    before: Sequence[Answer],
    after: Sequence[Answer],
    broke_s: tuple[float, float],
    output_tokens: int = OUTPUT_TOKENS,
) -> dict[str, Any]:
    """The effect of a fault on the answers.

    Args:
        fault: its name.
        before: answers of an undisturbed run of the same requests.
        after: answers of the run with the fault.
        broke_s: when the fault began and when it was done, by the clock of the answers' spans.
        output_tokens: length of a right answer that has token ids.
    """
    row: dict[str, Any] = {"fault": fault, "requests": len(after)}
    row |= dict.fromkeys((*VERDICTS, "retried", "resumed", "failed_undisturbed"), 0)
    errors: Counter[str] = Counter()
    fault_s, front_ended_s = broke_s[0], [broke_s] if fault in FRONT_FAULTS else []
    for expected, answer in zip(before, after, strict=True):
        row["retried"] += answer.retries
        right = expected.output
        if not expected.is_ended or not right or (expected.text is None and len(right) != output_tokens):
            row["failed_undisturbed"] += 1  # the right answer is unknown
            errors[_UUID.sub("...", f"undisturbed: {expected.error or len(right)}")] += 1
        elif wrong := verdict(answer, right, front_ended_s):
            row[wrong] += 1
            why = answer.error or f"{len(answer.output)} {_unit(expected)} of {len(right)}"
            errors[_UUID.sub("...", why)] += 1
    row["in_flight_at_fault"] = sum(one.span_s[0] <= fault_s <= one.span_s[1] for one in after)
    row["broke_after_s"] = [round(one.span_s[1] - fault_s, 2) for one in after if one.is_cut]
    row["added_ttft_p99_s"] = _added_p99([one.ttft_s for one in before], [one.ttft_s for one in after])
    row["added_gap_p99_s"] = _added_p99([one.gap_s for one in before], [one.gap_s for one in after])
    row["errors"] = dict(errors)
    return row


def _unit(answer: Answer) -> str:
    return "tokens" if answer.text is None else "characters"


def failures(row: dict[str, Any]) -> list[str]:
    """What is wrong in a row of Tandem, a line for each fact."""
    must_be_zero = [name for name in _MUST_BE_ZERO if name != "lost" or row["fault"] not in SETTINGS_FAULTS]
    lines = [f"{name.replace('_', ' ')}: {row[name]} of {row['requests']}" for name in must_be_zero if row[name]]
    if "settings" in row and not (row["settings"] and row["settings"] == row["settings_after"]):
        lines.append(f"set by hand: {row['settings']}; afterwards: {row['settings_after']}")
    if row["held"]:
        lines.append(f"still held by replicas: {row['held']}")
    if row["recovered_s"] is None:  # nothing was counted
        return [*lines, f"not whole again {_RECOVERY_S:g} s after the load"]
    if row["fault"] in LINK_FAULTS and row.get("link_failures") and not row.get("link_repairs"):
        lines.append(f"KV comes over no link again {_RECOVERY_S:g} s after the load")
    return [*lines, *(f"{why}, so this shows nothing: run it again" for why in shows_nothing(row))]


def shows_nothing(row: dict[str, Any]) -> list[str]:
    """Why the fault of a row of Tandem met no request; empty: it met some."""
    fault = row["fault"]
    if not row["in_flight_at_fault"]:
        return ["no request was in flight at the fault"]
    if row.get("kv_late") == 0 and fault == "expire-lease":
        return ["no KV came late"]
    if fault in DECODE_FAULTS and not row["retried"] + row["resumed"]:
        return ["no stream was with the replica that broke"]
    if fault in PREFILL_FAULTS and not row.get("prefill_failures"):
        return ["no prompt was with the replica that broke"]
    if fault in FRONT_FAULTS and not row["cut_at_front"] + row["retried"]:
        return ["no request was with the part that broke"]
    if fault in LINK_FAULTS and not row.get("link_failures"):
        return ["no KV was to come over a link that broke"]
    return []


def _added_p99(before: Sequence[float | None], after: Sequence[float | None]) -> float | None:
    measured = [[value for value in values if value is not None] for values in (before, after)]
    if not all(measured):
        return None
    return float(np.quantile(measured[1], 0.99) - np.quantile(measured[0], 0.99))


def _running(app: App) -> Counter[str]:
    """Counts of what runs: replicas by deployment, engines and replicas by process, and each single process."""
    running = Counter({name: states.get("RUNNING", 0) for name, states in app.status().replicas.items()})
    processes = app.processes()
    kinds = count_kinds(processes)
    # Processes are counted as well, since Serve does not see at once that one hangs.
    return running + count_running(processes) + Counter({name: min(1, kinds[name]) for name in SINGLE_KINDS})


def _recovered(app: App, whole: Counter[str]) -> float | None:
    """Seconds until everything runs again; ``None``: it does not."""
    started_s = time.monotonic()
    while time.monotonic() - started_s < _RECOVERY_S:
        if app.is_answering() and app.status().state == "RUNNING" and _running(app) >= whole:
            return time.monotonic() - started_s
        time.sleep(_POLL_S)
    return None


def on_two_parts(document: dict[str, Any]) -> dict[str, Any]:
    """The Serve YAML with its endpoint on one node and its engines on others, so that a node can be lost."""
    document = without_keys(document)
    http = document["http_options"] = dict(document.get("http_options") or {})
    http |= {"host": "127.0.0.1", "port": free_ports(1)[0]}
    document["proxy_location"] = "HeadOnly"
    args = document["applications"][0]["args"]
    args["ingress"] = {**(args.get("ingress") or {}), "node_labels": {PART_LABEL: "front"}}
    for group in args["groups"]:
        for role in ("prefill", "decode"):
            pool = group[role] = dict(group.get(role) or {})
            pool["placement"] = {**(pool.get("placement") or {}), "node_labels": {PART_LABEL: "engines"}}
    return document
