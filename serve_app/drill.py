"""``tandem drill``: break a part under load, and hold every token of every answer against an undisturbed run."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from deployments.ports import free_ports
from kvtransfer.connector import ConnectorConfig
from serve_app.cluster import NodeSpec, driver_environment
from serve_app.drill_faults import (
    DECODE_FAULTS,
    FAULTS,
    FRONT_FAULTS,
    GATHER_S,
    LINK_FAULTS,
    NODE_LABEL,
    PART_LABEL,
    PREFILL_FAULTS,
    DrillError,
    expire_lease,
)
from serve_app.drill_load import INPUT_TOKENS, LONG_TOKENS, OUTPUT_TOKENS, Answer, run_load
from serve_app.drill_stacks import STACKS, faults_of
from serve_app.drill_verdict import VERDICTS, verdict
from serve_app.processes import SINGLE_KINDS, count_kinds, count_running, replica_pids
from serve_app.quickstart import without_keys
from serve_app.sdk import App
from serve_app.validate import load_serve_yaml

# Each has room for one engine's replica, so that a lost one takes no whole pool; one is spare.
_ENGINE_NODES, _ENGINE_NODE_CPUS = 5, 1
_FAULT_AT_FRAC = 0.4
_BEYOND_LEASE_S = 3.0
# When long prompts come, as shares of GATHER_S.
_LONG_PROMPTS_FRAC = (0.2, 0.3, 0.4, 0.5)
# What comes just before a part breaks, so that each of its kind has something to do, however fast the machine is.
_BURST, _BURST_BEFORE_S = 2 * INPUT_TOKENS, 0.3
# A prompt of the burst is computed before the part breaks; these are not, and wait in line.
_LONG_BURST = 4 * (LONG_TOKENS,)
_RECOVERY_S = 240.0
_POLL_S = 0.5
# For so long requests are sent again to see whether links carry KV.
_LOOK_S = 5.0
_MUST_BE_ZERO = ("lost", "duplicated", "truncated", "wrong_tokens", "failed_undisturbed")
# A request's id in an error would make each a kind of its own.
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
    on_answer: Callable[[], None] = lambda: None,
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """Run each fault on a local cluster, one after the other; a new one where the last fault left something broken.

    Args:
        config: a Serve YAML with one application.
        faults: names from ``FAULTS``; those that the stack cannot have are left out.
        stack: a name from ``STACKS``.
        rate: requests/s.
        seconds: of load, for the undisturbed run and for each fault; the fault comes after two fifths.
        say: told what happens.
        on_answer: called after each answer.
        on_row: told each row as soon as it is there.

    Returns:
        One row per fault.

    Raises:
        ConfigError: the config cannot be used.
        DrillError: faults that showed nothing; the others were drilled.
    """
    driver_environment()  # before anything imports ray
    from serve_app.ray_schema import single_app_config

    document = load_serve_yaml(config)
    single_app_config(document)
    document = on_two_parts(document)
    args = document["applications"][0]["args"]
    nodes = [
        NodeSpec(cpus=2, labels={PART_LABEL: "front"}),
        *(
            NodeSpec(cpus=_ENGINE_NODE_CPUS, labels={PART_LABEL: "engines", NODE_LABEL: str(number)})
            for number in range(_ENGINE_NODES)
        ),
    ]
    lease_s = ConnectorConfig.model_validate(args.get("kv_transfer") or {}).lease_s
    break_part: dict[str, Callable[..., str]] = {
        **FAULTS,
        "expire-lease": partial(expire_lease, seconds=lease_s + _BEYOND_LEASE_S),
    }
    rows: list[dict[str, Any]] = []
    missed: list[str] = []
    left = faults_of(stack, faults)
    while left:
        with STACKS[stack].start(document, nodes, lambda status: say(f"starting: {status.state}")) as app:
            ask = partial(run_load, app.url, args["model"]["id"], rate=rate)
            say("an undisturbed run to begin with, to warm up")
            asyncio.run(ask(seconds=min(seconds, 10.0), seed=1, salt="warm-up"))
            ask = partial(ask, seconds=seconds, seed=0, on_answer=on_answer)
            is_whole = True
            while left and is_whole:
                fault = left.pop(0)
                try:
                    row = _row(app, stack, fault, break_part[fault], ask, at_s=_FAULT_AT_FRAC * seconds, say=say)
                except DrillError as error:  # which says nothing of the others
                    say(f"{stack}, {fault}: {error}")
                    missed.append(fault)
                    break
                rows.append(row)
                on_row(row)
                # Of links nobody knows whether they are mended where that is not counted.
                has_links = fault not in LINK_FAULTS or bool(STACKS[stack].counters(app))
                is_whole = row["recovered_s"] is not None and has_links
    if missed:
        raise DrillError(f"{stack}: {', '.join(missed)} showed nothing, for the reasons above; run these again")
    return rows


def _row(
    app: App,
    stack: str,
    fault: str,
    break_part: Callable[..., str],
    ask: Callable[..., Coroutine[Any, Any, list[Answer]]],
    *,
    at_s: float,
    say: Say,
) -> dict[str, Any]:
    """The load without the fault and with it."""
    counters = STACKS[stack].counters
    burst = (*_BURST, *(_LONG_BURST if fault in PREFILL_FAULTS else ()))
    more = [(at_s - _BURST_BEFORE_S, input_tokens) for input_tokens in burst]
    if fault in ("expire-lease", *LINK_FAULTS):
        more += [(at_s + frac * GATHER_S, LONG_TOKENS) for frac in _LONG_PROMPTS_FRAC]
    ask = partial(ask, more=more)
    say(f"{stack}, {fault}: undisturbed run")
    before = asyncio.run(ask(salt=f"{fault}-before"))
    processes = app.processes()  # a busy machine takes seconds to list them, and the fault would come too late
    counted, replicas, whole = counters(app), replica_pids(processes), _running(app)
    broke_s: list[tuple[float, float]] = []

    def inject() -> None:
        began_s = time.monotonic()
        said = break_part(processes)
        done_s = time.monotonic()
        # A replica that has work is looked for, and then broken at once; other parts are broken first.
        broke_s.append((done_s if fault in (*DECODE_FAULTS, *PREFILL_FAULTS) else began_s, done_s))
        say(f"{stack}, {fault}: {said}")

    after = asyncio.run(ask(salt=f"{fault}-after", faults=[(at_s, inject)]))
    row = {"stack": stack, **compare(fault, before, after, broke_s[0])}
    row["recovered_s"] = _recovered(app, whole)
    is_whole = row["recovered_s"] is not None
    if fault in LINK_FAULTS and is_whole:
        again = partial(ask, seconds=_LOOK_S, more=[(0.0, LONG_TOKENS)], salt=f"{fault}-again")
        _wait_for_links(app, stack, counted, again)
    for name, value in (since(counted, counters(app)) if is_whole else {}).items():  # else nobody may answer
        row[name] = row.get(name, 0) + value
    row["replicas_ended"] = len(replicas - replica_pids(app.processes()))
    row["held"] = STACKS[stack].held(app) if is_whole else {}
    return row


def _wait_for_links(
    app: App, stack: str, counted: Mapping[tuple[str, str], int], ask: Callable[..., Coroutine[Any, Any, list[Answer]]]
) -> None:
    """Send requests until KV comes again over a link that failed: what has no work shows nothing."""
    until_s = time.monotonic() + _RECOVERY_S
    while time.monotonic() < until_s:
        done = since(counted, STACKS[stack].counters(app))
        if not done or done["link_repairs"]:  # nothing: nobody counts
            return
        asyncio.run(ask())


def since(before: Mapping[tuple[str, str], int], after: Mapping[tuple[str, str], int]) -> Counter[str]:
    """By name what was counted between two looks, over all replicas; one that has ended counts no more."""
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
    """What a fault did to the answers.

    Args:
        fault: its name.
        before: of an undisturbed run of the same requests.
        after: of the run with the fault.
        broke_s: when it began and when it was done, by the clock of the answers' spans.
        output_tokens: that each answer has if nothing is wrong.
    """
    row: dict[str, Any] = {"fault": fault, "requests": len(after)}
    row |= dict.fromkeys((*VERDICTS, "retried", "resumed", "failed_undisturbed"), 0)
    errors: Counter[str] = Counter()
    fault_s, front_ended_s = broke_s[0], [broke_s] if fault in FRONT_FAULTS else []
    for expected, answer in zip(before, after, strict=True):
        row["retried"] += answer.retries
        if not expected.is_ended or len(expected.token_ids) != output_tokens:
            row["failed_undisturbed"] += 1  # and nobody knows what would be right
            errors[_UUID.sub("...", f"undisturbed: {expected.error or len(expected.token_ids)}")] += 1
        elif one := verdict(answer, expected.token_ids, front_ended_s):
            row[one] += 1
            why = answer.error or f"{len(answer.token_ids)} tokens of {len(expected.token_ids)}"
            errors[_UUID.sub("...", why)] += 1
    row["in_flight_at_fault"] = sum(one.span_s[0] <= fault_s <= one.span_s[1] for one in after)
    row["broke_after_s"] = [round(one.span_s[1] - fault_s, 2) for one in after if one.is_cut]
    row["added_ttft_p99_s"] = _added_p99([one.ttft_s for one in before], [one.ttft_s for one in after])
    row["added_gap_p99_s"] = _added_p99([one.gap_s for one in before], [one.gap_s for one in after])
    row["errors"] = dict(errors)
    return row


def failures(row: dict[str, Any]) -> list[str]:
    """What a row says that must not be, in words; of a stack of ours."""
    said = [f"{name.replace('_', ' ')}: {row[name]} of {row['requests']}" for name in _MUST_BE_ZERO if row[name]]
    if row["held"]:
        said.append(f"still held by replicas: {row['held']}")
    if not row["in_flight_at_fault"]:
        said.append("no request was under way when it broke, so this shows nothing: raise --rate")
    if row["recovered_s"] is None:  # and nothing was counted
        return [*said, f"not whole again {_RECOVERY_S:g} s after the load"]
    if row.get("kv_late") == 0 and row["fault"] == "expire-lease":
        said.append("no KV came late, so this shows nothing: run it again")
    if row["fault"] in DECODE_FAULTS and not row["retried"] + row["resumed"]:
        said.append("no stream was with the replica that broke, so this shows nothing: run it again")
    if row["fault"] in PREFILL_FAULTS and not row.get("prefill_failures"):
        said.append("no prompt was with the replica that broke, so this shows nothing: run it again")
    if row["fault"] in FRONT_FAULTS and not row["cut_at_front"] + row["retried"]:
        said.append("no request was with the part that broke, so this shows nothing: run it again")
    if row["fault"] in LINK_FAULTS and not row.get("link_failures"):
        said.append("no KV was to come over a link that broke, so this shows nothing: run it again")
    elif row["fault"] in LINK_FAULTS and not row.get("link_repairs"):
        said.append(f"KV comes over no link again {_RECOVERY_S:g} s after the load")
    return said


def _added_p99(before: Sequence[float | None], after: Sequence[float | None]) -> float | None:
    known = [[value for value in values if value is not None] for values in (before, after)]
    if not all(known):
        return None
    return float(np.quantile(known[1], 0.99) - np.quantile(known[0], 0.99))


def _running(app: App) -> Counter[str]:
    """How many replicas of each deployment run, what of their processes does, and which parts that are there once."""
    running = Counter({name: states.get("RUNNING", 0) for name, states in app.status().replicas.items()})
    processes = app.processes()
    kinds = count_kinds(processes)
    # Serve does not see at once that one hangs.
    return running + count_running(processes) + Counter({name: min(1, kinds[name]) for name in SINGLE_KINDS})


def _recovered(app: App, whole: Counter[str]) -> float | None:
    """Seconds until everything runs again; ``None`` when it does not."""
    started_s = time.monotonic()
    while time.monotonic() - started_s < _RECOVERY_S:
        if app.is_answering() and app.status().state == "RUNNING" and _running(app) >= whole:
            return time.monotonic() - started_s
        time.sleep(_POLL_S)
    return None


def on_two_parts(document: dict[str, Any]) -> dict[str, Any]:
    """The endpoint on one node of the cluster, and engines on the others, so that a node with engines can be lost."""
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
