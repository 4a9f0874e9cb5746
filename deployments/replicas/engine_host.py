"""What prefill and decode replicas do around their engine: claim a port and cores, watch the engine, give metrics."""

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import ray
from prometheus_client.metrics_core import Metric
from ray import serve
from ray.serve.llm import LLMConfig

from autoscale.types import PoolKey
from deployments.adapters_config import ADAPTERS_KEY
from deployments.config import STAGE_KEY
from deployments.machine.claims import CLAIMS, CoreClaim, PortClaim
from deployments.metrics import process_metrics
from deployments.pool_config import EMULATOR_KEY, EngineSleepConfig
from deployments.replicas import start_host
from deployments.replicas.adapter_files import AdapterError
from deployments.replicas.adapter_host import AdapterHost, AdapterPlaces
from deployments.replicas.cache_watch import CacheWatch
from deployments.replicas.engine_sleep import EngineSleep
from deployments.replicas.staging import read_ahead, staged
from deployments.serve_seam.llm_server import engine_client, report_no_usage, served_adapters, start_no_download
from deployments.serve_seam.replica_process import listen_on_node_address, restore_replica_log
from deployments.serve_seam.start_backoff import StartBackoff
from deployments.vllm_seam.engine_stats import engine_stats
from deployments.vllm_seam.kv_events import KvEvents
from deployments.vllm_seam.parser_plugins import import_parser_plugins
from deployments.vllm_seam.worker_extension import METHOD_GPU
from kvtransfer.topology import Role
from router.config import RouterConfig

logger = logging.getLogger(__name__)

_TAIL_BYTES = 1 << 17  # length of the log's end that is searched for the error of an engine
# A line of vLLM's log with an exception, such as "(EngineCore pid=7) ValueError: no memory".
_RAISED = re.compile(r"^\((?:EngineCore|Worker)[^)]*\) ((?:\w+\.)*\w*(?:Error|Exception): .+)$", re.MULTILINE)
_POLL_S = 0.1  # seconds between two checks whether the engine has died
_PING_S = 1.0  # seconds between two pings of the engine
_STALL_S = 1.0  # time between two checks, seconds; if it is longer, this process itself stood still
_LAST_ERRORS_S = 0.3  # time for sending the errors of requests in flight before the process ends, seconds
ANSWER_S = 5.0  # time for an engine's answer, seconds: an engine that has just died never answers


@contextmanager
def named_cause() -> Iterator[None]:
    """Context of an engine's start. Raises RuntimeError: it did not start; the message has the cause from the log."""
    try:
        yield
    except RuntimeError:
        cause = engine_error(_own_log())
        if cause is None:
            raise
        raise RuntimeError(f"the engine did not start: {cause}") from None


def engine_error(log: str) -> str | None:
    """The last exception of an engine process in a log; vLLM prefixes such lines with the name of the process."""
    errors = _RAISED.findall(log)
    return errors[-1] if errors else None


def _own_log() -> str:
    """The end of this process's log; empty if its standard error is no file."""
    log = Path("/proc/self/fd/2").resolve()
    if not log.is_file():
        return ""
    with log.open("rb") as lines:
        lines.seek(max(0, os.fstat(lines.fileno()).st_size - _TAIL_BYTES))
        return lines.read().decode(errors="replace")


async def watch_engine(client: Any, silence_s: float, is_changing: Callable[[], bool] = bool) -> None:
    """Return once an engine has died, or has not answered a ping for ``silence_s``; it answers between two steps.

    ``is_changing``: whether the engine goes to sleep or wakes, in which it answers nothing.

    A replica with a dead engine fails each request within milliseconds. So it seems the least loaded, and attracts
    every request. A replica whose engine hangs passes Serve's health checks for ever.
    """
    ping: asyncio.Task[Any] | None = None
    answered_s = pinged_s = polled_s = time.monotonic()
    while True:
        await asyncio.sleep(_POLL_S)
        now_s = time.monotonic()
        if is_changing():
            answered_s = now_s
        if now_s - polled_s > _STALL_S:
            pinged_s = now_s  # this process stood still, and an answer may wait to be read
        polled_s = now_s
        if client.errored:
            logger.error("the engine has died: this replica ends")
            return
        if ping is None and now_s - pinged_s >= _PING_S:
            pinged_s, ping = now_s, asyncio.create_task(client.is_paused())
        if ping is not None and ping.done():
            ping.exception()  # read, since asyncio reports an error that no code has read
            answered_s, ping = now_s, None
        if ping is not None and now_s - max(answered_s, pinged_s) > silence_s:
            logger.error("the engine has not answered for %g s: this replica ends", silence_s)
            return


async def _end_with_engine(client: Any, silence_s: float, is_changing: Callable[[], bool]) -> None:
    await watch_engine(client, silence_s, is_changing)
    await asyncio.sleep(_LAST_ERRORS_S)
    os._exit(1)


class EngineHost:
    """Mixed into the prefill and the decode server before Ray's own server class."""

    _sleep: EngineSleep | None = None
    _events: KvEvents | None = None
    _adapters: AdapterHost | None = None

    async def _prepare_host(self, llm_config: LLMConfig, cores_per_worker: int, router: RouterConfig) -> None:
        """Claim what the engine needs on this machine, before it starts."""
        context = serve.get_replica_context()
        start_host.take(context.app_name)
        listen_on_node_address()
        self._start = StartBackoff()
        await self._start.wait()
        if (stage_folder := llm_config.experimental_configs.get(STAGE_KEY)) is not None:
            loading = llm_config.model_loading_config
            source = Path(str(loading.model_source))
            folder = await asyncio.to_thread(staged, source, Path(stage_folder))
            await asyncio.to_thread(read_ahead, folder)
            loading.model_source = str(folder)
        start_no_download(llm_config)
        report_no_usage()
        import_parser_plugins(llm_config.engine_kwargs)
        self._request_events(llm_config, router)
        self.pool = PoolKey.parse(context.deployment)
        # An emulated engine reports figures of a GPU too.
        self._has_gpus = llm_config.accelerator_type is not None or EMULATOR_KEY in llm_config.experimental_configs
        self.replica_id = context.replica_id.unique_id
        host = ray.util.get_node_ip_address()
        self._port_claim = PortClaim(CLAIMS, host)
        # Without the port, Ray's NIXL backend would derive one from the replica's rank, which Serve may use again while
        # the port is still bound. The environment is this replica's alone: each replica is a process of its own.
        os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(self._port_claim.port)
        if llm_config.accelerator_type is None and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
            workers = llm_config.get_engine_config().num_devices
            from_end = self.pool.role is Role.DECODE  # prefill takes cores from the other end
            self._core_claim = CoreClaim(CLAIMS, count=cores_per_worker * workers, from_end=from_end)
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = core_binding(self._core_claim.cores, workers)

    def _request_events(self, llm_config: LLMConfig, router: RouterConfig) -> None:
        """Let the engine tell which blocks it has cached, where routing depends on them."""
        is_emulated = EMULATOR_KEY in llm_config.experimental_configs
        if router.follows_prefixes and not is_emulated:
            self._events = KvEvents()
            llm_config.engine_kwargs.update(self._events.engine_arguments())

    def _watch_cache(self, router: RouterConfig) -> CacheWatch:
        """Watch what the engine has cached; it has started."""
        stats = engine_stats()
        cache = CacheWatch(
            block_tokens=stats.block_tokens,
            max_blocks=stats.prefix_cache_blocks,
            piece_tokens=router.prefix.piece_tokens,
        )
        if router.follows_prefixes:
            context = serve.get_replica_context()
            if (follow := getattr(engine_client(self), "follow_cache", None)) is not None:
                follow(cache.change)  # an emulated engine
            cache.start(self._events, app=context.app_name, pool=context.deployment, replica_id=self.replica_id)
        return cache

    async def _start_adapters(self, llm_config: LLMConfig) -> None:
        """Load the model's LoRA adapters, and follow those that come at run time.

        Raises RuntimeError: an adapter of the configuration cannot be loaded.
        """
        if (places := llm_config.experimental_configs.get(ADAPTERS_KEY)) is None:
            return
        loading, context = llm_config.model_loading_config, serve.get_replica_context()
        source = Path(str(loading.model_source))
        adapters = AdapterHost(
            engine_client(self),
            AdapterPlaces(**places),
            base=source if source.is_dir() else None,
            registry=served_adapters(self),
        )
        with self._start.failure_is_crash():
            try:
                await adapters.load_configured()
            except AdapterError as error:
                raise RuntimeError(str(error)) from error
        where = (context.app_name, str(loading.model_id), context.deployment, self.replica_id)
        await adapters.load_wanted(*where)
        self._adapters, self._following = adapters, asyncio.create_task(adapters.run(*where))

    def _adapter(self, identity: str) -> AbstractContextManager[Any]:
        """Context of an answer with an adapter: the adapter, or ``None`` if there is none."""
        return nullcontext() if self._adapters is None or not identity else self._adapters.use_identity(identity)

    def _watch_host(self, silence_s: float, sleep: EngineSleepConfig | None) -> None:
        """Watch an engine that has started: this process ends with it. It may sleep while it is idle."""
        is_changing: Callable[[], bool] = bool
        if sleep is not None:
            self._sleep = EngineSleep(engine_client(self), sleep, self._has_nothing_left, partial(os._exit, 1))
            self._sleeping = asyncio.create_task(self._sleep.run())
            is_changing = self._sleep.is_changing
        restore_replica_log()
        self._start.ready()
        self._watch = asyncio.create_task(_end_with_engine(engine_client(self), silence_s, is_changing))

    def _awake(self) -> AbstractAsyncContextManager[None]:
        """Context of a request: the engine is awake in it."""
        return nullcontext() if self._sleep is None else self._sleep.awake()

    async def _has_nothing_left(self) -> bool:
        """Whether an engine without requests may sleep."""
        return True

    async def __del__(self) -> None:
        """Called by Serve when it ends the replica."""
        if (watch := getattr(self, "_watch", None)) is not None:
            watch.cancel()
        if (start := getattr(self, "_start", None)) is not None:
            start.leave()
        if self._events is not None:
            self._events.close()
        await super().__del__()  # type: ignore[misc]

    async def worker_answers(self, method: str) -> list[Any]:
        """The answers of the engine's workers to a method; empty: the engine has died, or is in a long step."""
        with suppress(Exception):
            async with asyncio.timeout(ANSWER_S):
                return await engine_client(self).collective_rpc(method)
        return []

    async def gpu_report(self) -> dict[str, Any]:
        """GPU utilisation and SM activity since the last call, means over the engine's workers; empty on CPU."""
        return _means(await self.worker_answers(METHOD_GPU)) if self._has_gpus else {}

    async def metrics(self) -> list[Metric]:
        """This process's Prometheus metrics, including vLLM's, labelled with pool and replica."""
        return process_metrics(role=str(self.pool.role), group=self.pool.group, replica=self.replica_id)


def _means(reports: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each figure that all reports have."""
    names = set.intersection(*map(set, reports)) if reports else set()
    return {name: fmean(report[name] for report in reports) for name in names}


def core_binding(cores: list[int], workers: int) -> str:
    """vLLM's ``VLLM_CPU_OMP_THREADS_BIND``: the cores of each worker, joined by commas, and '|' between workers."""
    share = max(1, len(cores) // workers)
    # With fewer cores than workers, some workers get the same core.
    parts = [cores[(i * share) % len(cores) :][:share] for i in range(workers)]
    return "|".join(",".join(map(str, part)) for part in parts)


def lease_s(llm_config: LLMConfig) -> float:
    """The lease: seconds for which prefill keeps KV that decode does not ask for."""
    return float(llm_config.engine_kwargs["kv_transfer_config"]["kv_connector_extra_config"]["kv_lease_duration"])
