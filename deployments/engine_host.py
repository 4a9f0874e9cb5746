"""What a replica does before and around its engine: a port, cores, and its metrics."""

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import ray
from prometheus_client.metrics_core import Metric
from ray import serve
from ray.serve.llm import LLMConfig

from autoscale.types import PoolKey
from deployments.config import EMULATOR_KEY, STAGE_KEY
from deployments.cores import CoreClaim
from deployments.engine_watch import end_with_engine
from deployments.locks import CLAIMS
from deployments.metrics import process_metrics
from deployments.ports import PortClaim
from deployments.replica_log import restore_replica_log
from deployments.replica_port import listen_on_node_address
from deployments.staging import staged
from deployments.start_backoff import StartBackoff
from deployments.worker_extension import METHOD_GPU
from kvtransfer.topology import Role

# An engine that has just died never answers.
ANSWER_S = 5.0


class EngineHost:
    """Mixed into both servers, before Ray's own server class.

    Ray's NIXL backend derives the side-channel port from the replica's rank unless the variable is set; each replica
    is a process of its own, so setting it here is safe.
    """

    async def _prepare_host(self, llm_config: LLMConfig, cores_per_worker: int) -> None:
        listen_on_node_address()
        self._start = StartBackoff()
        await self._start.wait()
        if (into := llm_config.experimental_configs.get(STAGE_KEY)) is not None:
            loading = llm_config.model_loading_config
            loading.model_source = str(await asyncio.to_thread(staged, Path(str(loading.model_source)), Path(into)))
        context = serve.get_replica_context()
        self.pool = PoolKey.parse(context.deployment)
        self._has_gpus = llm_config.accelerator_type is not None or EMULATOR_KEY in llm_config.experimental_configs
        self.replica_id = context.replica_id.unique_id
        decode = self.pool.role is Role.DECODE
        host = ray.util.get_node_ip_address()
        self._port_claim = PortClaim(CLAIMS, host)
        os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(self._port_claim.port)
        if llm_config.accelerator_type is None and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
            workers = llm_config.get_engine_config().num_devices
            self._core_claim = CoreClaim(CLAIMS, count=cores_per_worker * workers, from_end=decode)
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = _spec(self._core_claim.cores, workers)

    def _watch_host(self, silence_s: float) -> None:
        """Once the engine is up: this process ends with it."""
        restore_replica_log()
        self._start.ready()
        self._watch = asyncio.create_task(end_with_engine(engine_client(self), silence_s))

    async def __del__(self) -> None:
        """Serve's last call: now the engine may end."""
        if (watch := getattr(self, "_watch", None)) is not None:
            watch.cancel()
        if (start := getattr(self, "_start", None)) is not None:
            start.leave()
        await super().__del__()  # type: ignore[misc]

    async def gpu_report(self) -> dict[str, float]:
        """Utilisation and SM activity since the last call, means over the engine's workers; empty on CPU."""
        if not self._has_gpus:
            return {}
        with suppress(Exception):  # an engine that has died, or whose step is long: no figures this time
            async with asyncio.timeout(ANSWER_S):
                return _means(await engine_client(self).collective_rpc(METHOD_GPU))
        return {}

    async def metrics(self) -> list[Metric]:
        """This process's Prometheus metrics, vLLM's included, labelled with pool and replica."""
        return process_metrics(role=str(self.pool.role), group=self.pool.group, replica=self.replica_id)


def _means(reports: list[dict[str, float]]) -> dict[str, float]:
    """Over the workers of an engine; of what all of them can read."""
    names = set.intersection(*map(set, reports)) if reports else set()
    return {name: fmean(report[name] for report in reports) for name in names}


def _spec(cores: list[int], workers: int) -> str:
    """vLLM's binding string: one comma list of cores per worker, joined by '|'."""
    share = max(1, len(cores) // workers)
    parts = [cores[(i * share) % len(cores) :][:share] for i in range(workers)]
    return "|".join(",".join(map(str, part)) for part in parts)


def lease_s(llm_config: LLMConfig) -> float:
    """How long prefill keeps KV that decode does not ask for."""
    return float(llm_config.engine_kwargs["kv_transfer_config"]["kv_connector_extra_config"]["kv_lease_duration"])


def engine_client(server: Any) -> Any:
    """The vLLM AsyncLLM behind a Ray Serve LLM server (private in Ray 2.60)."""
    return server.engine._engine_client
