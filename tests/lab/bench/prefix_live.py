"""``python -m tests.lab.bench.prefix_live``: routing by prefixes on real engines, beside Ray Serve LLM's prefix router.

Each stack has four engines that compute prompts and answers, since Ray's prefix router knows no P/D. Prompts are those
of vLLM's prefix-repetition dataset (``vllm bench serve --dataset-name prefix_repetition``), in the same order for all.
The KV of all prefixes takes 73 % of the cluster's, so one engine cannot hold them. Hits are what engines say in the
usage of each answer. Every round measures every stack, in an order that rotates.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import yaml

from serve_app.local.cluster import LocalCluster, NodeSpec, driver_environment
from tests.lab.bench.peers import CONFIG, Stack

STACKS = {
    "tandem_prefix": "Tandem, router.policy: prefix",
    "tandem_least_tokens": "Tandem, router.policy: least_tokens",
    "ray_prefix": "Ray Serve LLM, PrefixCacheAffinityRouter",
}
ENGINES = 4
PREFIXES, PREFIX_TOKENS, SUFFIX_TOKENS, OUTPUT_TOKENS = 24, 1024, 64, 16
BLOCK_TOKENS = 32
# Share of the cluster's KV that all prefixes take: llm-d's published shape (needs of 73 %).
DEMAND_FRAC = 0.73
KV_BLOCKS = round(PREFIXES * PREFIX_TOKENS / DEMAND_FRAC / ENGINES / BLOCK_TOKENS)
_CPUS = 4 * ENGINES  # Ray's count of the node's CPUs, enough for all processes; the machine may have fewer cores
_PORT = 8100
_START_TIMEOUT_S = 400.0
_SETTLE_S = 15.0


class Answer(NamedTuple):
    """One answer: seconds to its first token, and cached and all tokens of its prompt."""

    ttft_s: float
    cached_tokens: int
    prompt_tokens: int


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=240, help="requests per stack and round")
    parser.add_argument("--concurrency", type=int, default=6)
    parser.add_argument("--stacks", nargs="+", choices=STACKS, default=list(STACKS))
    parser.add_argument("--out", type=Path, default=Path("reports/bench_prefix_live.json"))
    parser.add_argument("--host", choices=STACKS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.host:
        _host(args.host)
        return
    rounds = []
    for number in range(args.rounds):
        order = args.stacks[number % len(args.stacks) :] + args.stacks[: number % len(args.stacks)]
        prompts = _prompts(args.requests, seed=number)
        rounds.append({stack: _measure(stack, prompts, args.concurrency) for stack in order})
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"settings": _settings(args), "rounds": rounds}, indent=1) + "\n")
    print(table(rounds, args.stacks))


def table(rounds: Sequence[dict[str, dict[str, float]]], stacks: Sequence[str]) -> str:
    """A Markdown table with the median of the rounds of each figure."""
    names = list(rounds[0][stacks[0]])
    lines = ["| stack | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for stack in stacks:
        medians = [statistics.median(each[stack][name] for each in rounds) for name in names]
        lines.append(f"| {STACKS[stack]} | " + " | ".join(f"{value:.3g}" for value in medians) + " |")
    return "\n".join(lines)


def figures(answers_of: Sequence[Answer], elapsed_s: float) -> dict[str, float]:
    """The figures of one run, by name."""
    ttfts = [answer.ttft_s for answer in answers_of]
    return {
        "hit_frac": sum(a.cached_tokens for a in answers_of) / sum(a.prompt_tokens for a in answers_of),
        "ttft_p50_s": float(np.quantile(ttfts, 0.5)),
        "ttft_p90_s": float(np.quantile(ttfts, 0.9)),
        "requests_per_s": len(answers_of) / elapsed_s,
    }


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "engines": ENGINES,
        "prefixes": PREFIXES,
        "prefix_tokens": PREFIX_TOKENS,
        "suffix_tokens": SUFFIX_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "kv_blocks_per_engine": KV_BLOCKS,
        "requests": args.requests,
        "concurrency": args.concurrency,
    }


def _prompts(requests: int, seed: int) -> list[str]:
    from transformers import AutoTokenizer
    from vllm.benchmarks.datasets.datasets import PrefixRepetitionRandomDataset

    source = yaml.safe_load(CONFIG.read_text())["applications"][0]["args"]["model"]["source"]
    samples = PrefixRepetitionRandomDataset(random_seed=seed).sample(
        AutoTokenizer.from_pretrained(source),
        requests,
        prefix_len=PREFIX_TOKENS,
        suffix_len=SUFFIX_TOKENS,
        num_prefixes=PREFIXES,
        output_len=OUTPUT_TOKENS,
    )
    return [str(sample.prompt) for sample in samples]


def _measure(stack: str, prompts: Sequence[str], concurrency: int) -> dict[str, float]:
    print(f"measuring {stack}", file=sys.stderr, flush=True)
    with Stack(stack, "prefix_live", start_timeout_s=_START_TIMEOUT_S) as url:
        time.sleep(_SETTLE_S)
        answered, elapsed_s = asyncio.run(_load(url, prompts, concurrency))
    found = figures(answered, elapsed_s)
    print(found, file=sys.stderr, flush=True)
    return found


async def _load(url: str, prompts: Sequence[str], concurrency: int) -> tuple[list[Answer], float]:
    """Answers to all prompts, with ``concurrency`` requests at a time, and the seconds that they took."""
    unsent, answered = iter(prompts), list[Answer]()

    async def worker(session: aiohttp.ClientSession) -> None:
        for prompt in unsent:
            answered.append(await _ask(session, url, prompt))

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300.0)) as session:
        began_s = time.perf_counter()
        await asyncio.gather(*(worker(session) for _ in range(concurrency)))
        return answered, time.perf_counter() - began_s


async def _ask(session: aiohttp.ClientSession, url: str, prompt: str) -> Answer:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began_s, ttft_s, usage = time.perf_counter(), None, None
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data:") or line.strip().endswith(b"[DONE]"):
                continue
            if ttft_s is None:
                ttft_s = time.perf_counter() - began_s
            usage = json.loads(line[5:]).get("usage") or usage
    assert ttft_s is not None, "an answer without a token"
    assert usage is not None, "an answer without usage"
    details = usage.get("prompt_tokens_details") or {}
    return Answer(ttft_s, details.get("cached_tokens") or 0, usage["prompt_tokens"])


def _engine_kwargs(document: dict[str, Any]) -> dict[str, Any]:
    """Engine arguments of all stacks: a small KV, and cached tokens in the usage of each answer."""
    kwargs: dict[str, Any] = document["applications"][0]["args"]["engine_kwargs"]
    return {**kwargs, "num_gpu_blocks_override": KV_BLOCKS, "enable_prompt_tokens_details": True}


def _host(stack: str) -> None:
    document = yaml.safe_load(CONFIG.read_text())
    args, kwargs = document["applications"][0]["args"], _engine_kwargs(document)
    if stack == "ray_prefix":
        _host_ray(args["model"], kwargs)
        return
    from serve_app.sdk import deploy

    document["http_options"]["port"] = _PORT
    pool = {"replicas": ENGINES, "placement": {"cpus_per_worker": 0.5, "cpus_per_replica": 0.25}}
    args["engine_kwargs"] = kwargs
    args["groups"] = [{"name": "g0", "prefill": None, "decode": pool}]
    args["router"] = {"policy": stack.removeprefix("tandem_")}
    with LocalCluster([NodeSpec(cpus=_CPUS)]) as cluster, deploy(document, address=cluster.address):
        sys.stdin.read()


def _host_ray(model: dict[str, Any], engine_kwargs: dict[str, Any]) -> None:
    driver_environment()
    with LocalCluster([NodeSpec(cpus=_CPUS)]) as cluster:
        import ray
        from ray import serve
        from ray.serve.config import RequestRouterConfig
        from ray.serve.llm import build_openai_app
        from ray.serve.llm.request_router import PrefixCacheAffinityRouter

        ray.init(address=cluster.address, namespace="serve", log_to_driver=False)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": _PORT})
        config = {
            "model_loading_config": {"model_id": model["id"], "model_source": str(Path(model["source"]).resolve())},
            "engine_kwargs": engine_kwargs,
            "placement_group_config": {"bundles": [{"CPU": 1}]},
            "experimental_configs": {"stream_batching_interval_ms": 0},
            "log_engine_metrics": False,
            "deployment_config": {
                "autoscaling_config": None,
                "num_replicas": ENGINES,
                "request_router_config": RequestRouterConfig(request_router_class=PrefixCacheAffinityRouter),
            },
            # Engines share the two cores, as Tandem's do.
            "runtime_env": {"env_vars": {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}},
        }
        serve.run(build_openai_app({"llm_configs": [config]}), route_prefix="/")
        sys.stdin.read()
        ray.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    main()
