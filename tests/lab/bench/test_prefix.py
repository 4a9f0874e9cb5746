"""The workloads and the goals of the benchmark of routing by prefixes."""

import gzip
import random
from dataclasses import replace
from pathlib import Path

import pytest

from kvtransfer.topology import Role
from tests.lab.bench.prefix import (
    _KEYS,
    _PIECE_TOKENS,
    LOAD,
    ORACLE,
    PREFIX,
    RANDOM,
    SENT,
    Figures,
    conversation,
    decision_s,
    faults,
    run,
    tenant_profile,
    tenants,
)


def figures(case: str, routers: int, **changes: float) -> Figures:
    made = Figures(
        case=case,
        routers=routers,
        requests=10,
        hit_frac=0.2,
        ttft_p50_s=0.1,
        ttft_p90_s=1.0,
        tpot_p90_s=0.02,
        imbalance=1.0,
        precision=0.9,
        found_frac=1.0,
    )
    return replace(made, **changes)


CONVERSATIONS = [figures(case.name, routers) for case in (PREFIX, ORACLE) for routers in (1, 8)]
SHAPE = [
    figures(case.name, routers, ttft_p90_s=ttft_s)
    for case, routers, ttft_s in ((PREFIX, 8, 1), (SENT, 8, 2), (LOAD, 1, 30), (RANDOM, 1, 40))
]


def test_users_of_a_tenant_share_its_context_and_each_repeats_its_question() -> None:
    sent = tenants(400.0, 30.0)
    assert len(sent) == pytest.approx(12_000, abs=330)  # three standard deviations
    contexts = {request.hash_ids[:60] for request in sent}
    questions = {request.hash_ids for request in sent}
    assert (len(contexts), len(questions)) == (150, 750)
    assert len({block for ids in questions for block in ids}) == 150 * 60 + 750 * 12
    assert all(len(request.hash_ids) * _PIECE_TOKENS == request.input_tokens == 7200 for request in sent)


def test_all_prompts_of_all_tenants_need_the_published_share_of_the_kv() -> None:
    assert 150 * (6000 + 5 * 1200) / (8 * tenant_profile().kv_tokens) == pytest.approx(0.73, abs=0.001)


def test_conversations_are_cut_and_spread_within_their_buckets(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    with gzip.open(path, "wt") as out:
        out.write("timestamp_s,input_tokens,output_tokens,hash_ids\n0,600,2,1\n0,600,2,1\n3,600,2,1\n6,600,2,1\n")
    times = [request.at_s for request in conversation(path, 6.0)]
    assert len(times) == 3 and times == sorted(times)
    assert 0.0 < times[0] < times[1] < 3.0 < times[2] < 6.0


def test_prefixes_save_prompt_tokens_and_the_precise_way_saves_the_most() -> None:
    decode = _KEYS[Role.DECODE]
    sent = tenants(10.0, 60.0)
    rows = {
        case.name: run(case, sent, {decode: tenant_profile()}, {decode: 8}, _PIECE_TOKENS)
        for case in (RANDOM, LOAD, PREFIX, PREFIX.with_routers(8), SENT.with_routers(8))
    }
    hits = {name: row.hit_frac for name, row in rows.items()}
    assert hits["prefix"] > hits["prefix, no reports"] > hits["random"]
    assert rows["prefix"].precision > 0.95 > rows["random"].precision
    assert rows["prefix"].found_frac == pytest.approx(1.0, abs=0.02)
    assert rows["random"].found_frac is None


def test_each_missed_goal_is_named() -> None:
    assert faults(CONVERSATIONS, {"10": SHAPE}, 1e-4) == []
    few = [figures(PREFIX.name, 1, hit_frac=0.18), figures(PREFIX.name, 8, precision=0.5)]
    worse = [replace(SHAPE[0], ttft_p90_s=3.0), *SHAPE[1:]]
    missed = faults([*CONVERSATIONS, *few], {"10": SHAPE, "20": worse}, 3e-4)
    assert [fault.split(" ")[0] for fault in missed] == ["prefix,", "precision", "tenants", "a"]


def test_a_decision_has_its_quantiles_in_order() -> None:
    taken = decision_s(random.Random(1), timed=20)
    assert 0.0 < taken["p50_s"] <= taken["p90_s"] <= taken["p99_s"]
