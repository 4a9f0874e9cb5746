"""The private parts of vLLM and NIXL are where our functions expect them; tests/engines/test_contracts.py uses some."""

import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.vllm_seam.fork_server import _STARTERS
from tests.installed_source import installed_source

NIXL = "vllm/distributed/kv_transfer/kv_connector/v1/nixl"


@pytest.fixture(name="nixl_worker", scope="module")
def _nixl_worker() -> str:
    """The source of vLLM's NIXL worker in pull mode, with its base class."""
    return installed_source(f"{NIXL}/base_worker.py") + installed_source(f"{NIXL}/pull_worker.py")


def test_contract_engine_arguments_check_known() -> None:
    assert re.search(r"@dataclass\nclass AsyncEngineArgs\(EngineArgs\)", installed_source("vllm/engine/arg_utils.py"))
    front_end = installed_source("vllm/entrypoints/launchers/cli_args.py")
    assert re.search(r"@config\nclass FrontendArgs\(|@dataclass\nclass FrontendArgs|class FrontendArgs\b", front_end)


def test_contract_engine_arguments_engine_complaint() -> None:
    variables = installed_source("vllm/envs.py")
    assert '"VLLM_PLUGINS"' in variables
    assert '"VLLM_LOGGING_STREAM"' in variables


def test_contract_engine_stats_engine_stats_logger() -> None:
    stats = installed_source("vllm/v1/metrics/stats.py")
    for field in (
        "num_running_reqs: int",
        "num_waiting_reqs: int",
        "num_skipped_waiting_reqs: int",
        "kv_cache_usage: float",
        "kv_connector_stats: dict[str, Any] | None",
        "computed: int",
        "local_cache_hit: int",
        "external_kv_transfer: int",
        "self.num_generation_tokens",
        "self.prompt_token_stats",
        "self.inter_token_latencies_iter",
    ):
        assert field in stats, field
    pulls = installed_source("vllm/distributed/kv_transfer/kv_connector/v1/nixl/stats.py")
    assert '"transfer_duration"' in pulls
    assert '"bytes_transferred"' in pulls
    assert "world_size: int" in installed_source("vllm/config/parallel.py")
    assert "vllm.stat_logger_plugins" in installed_source("vllm/plugins/__init__.py")
    assert "class StatLoggerBase" in installed_source("vllm/v1/metrics/loggers.py")


def test_contract_worker_extension_gpu_stats() -> None:
    nvml = installed_source("vllm/third_party/pynvml.py")
    for name in ("nvmlGpmMetricsGet", "nvmlGpmSampleAlloc", "nvmlGpmQueryDeviceSupport", "nvmlDeviceGetHandleByUUID"):
        assert f"def {name}(" in nvml
    assert "NVML_GPM_METRIC_SM_UTIL" in nvml


def test_contract_plugin_register() -> None:
    assert '"vllm.general_plugins"' in installed_source("vllm/plugins/__init__.py")
    for path in ("vllm/v1/engine/core.py", "vllm/v1/worker/worker_base.py", "vllm/engine/arg_utils.py"):
        assert "load_general_plugins()" in installed_source(path)


def test_contract_plugin_has_no_text() -> None:
    dump = installed_source("vllm/logging_utils/dump_input.py")
    assert "init_logger(__name__)" in dump
    records = re.findall(r'logger\.error\(\s*"([^"]+)"', dump)
    assert [record.split(" (")[0].split(": ")[0] for record in records] == [
        "Dumping input data for V1 LLM engine",
        "Dumping scheduler output for model execution",
        "Dumping scheduler stats",
    ]


def test_contract_plugin_end_with_side_channel() -> None:
    assert 'name="nixl_handshake_listener"' in installed_source(f"{NIXL}/base_scheduler.py")


def test_contract_plugin_keep_worker_in_engine_core() -> None:
    platform = installed_source("vllm/platforms/cpu.py")
    assert "def check_and_update_config(cls, vllm_config" in platform
    assert "class UniProcExecutor(" in installed_source("vllm/v1/executor/uniproc_executor.py")


def test_contract_plugin_bind_cores() -> None:
    assert "def discover_numa_topology(cls" in installed_source("vllm/platforms/cpu.py")
    assert "discover_numa_topology()" in installed_source(f"{NIXL}/base_worker.py")


def test_contract_plugin_quieten_nixl() -> None:
    api = installed_source("nixl/__init__.py") and _nixl_api()
    assert "nixlBind.nixlAgentConfig()" in api
    assert ".pthrDelay" in api


def _nixl_api() -> str:
    for package in ("nixl_cu13", "nixl_cu12", "nixl"):
        try:
            return installed_source(f"{package}/_api.py")
        except (FileNotFoundError, pytest.skip.Exception):
            continue
    raise AssertionError("no package has NIXL's _api.py")


def test_contract_worker_extension_worker_extension() -> None:
    worker = installed_source("vllm/v1/worker/worker_base.py") + installed_source("vllm/v1/worker/gpu_worker.py")
    assert "self.device" in worker
    assert "self.model_runner" in worker
    assert "worker_extension_cls" in worker


def test_contract_worker_extension_worker_extension_tandem_kv_bytes() -> None:
    assert "self.kv_caches" in installed_source("vllm/v1/worker/gpu_model_runner.py")


def test_contract_worker_extension_nixl_worker() -> None:
    group = installed_source("vllm/distributed/kv_transfer/kv_transfer_state.py")
    assert "def get_kv_transfer_group()" in group
    assert "def has_kv_transfer_group()" in group
    assert "self.connector_worker" in installed_source(f"{NIXL}/connector.py")


def test_contract_worker_extension_worker_extension_tandem_unread_kv_requests(
    nixl_worker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "self._reqs_to_send: dict[ReqId, float]" in nixl_worker
    from deployments.vllm_seam import worker_extension

    extension = worker_extension.WorkerExtension()
    worker: Any = SimpleNamespace(_reqs_to_send={"a": 1.0, "b": 2.0})
    monkeypatch.setattr(worker_extension, "_nixl_worker", lambda: worker)
    assert extension.tandem_unread_kv_requests() == 2
    # Moved: the count is unknown, and not 0, which would let a prefill replica end before its KV is read.
    del worker._reqs_to_send
    with pytest.raises(AttributeError, match="_reqs_to_send"):
        extension.tandem_unread_kv_requests()


def test_contract_worker_extension_worker_extension_tandem_pulls(nixl_worker: str) -> None:
    for name in ("self._recving_transfers", "self._recving_metadata", "self.nixl_wrapper", "check_xfer_state("):
        assert name in nixl_worker, name
    assert "def _handle_failed_transfer(self, req_id: str, handle: int | None)" in nixl_worker


def test_contract_worker_extension_worker_extension_tandem_forget_peer(nixl_worker: str) -> None:
    for name in (
        "self._handshake_lock",
        "self._remote_agents",
        "self._ready_requests",
        "release_xfer_handle(",
        "def _cleanup_remote_engine(",
    ):
        assert name in nixl_worker, name


def test_contract_engine_types() -> None:
    assert "class FinishReason(" in installed_source("vllm/v1/engine/__init__.py")
    assert "class EngineDeadError(" in installed_source("vllm/v1/engine/exceptions.py")
    assert "class RequestStateStats" in installed_source("vllm/v1/metrics/stats.py")


def test_contract_engine_types_computed_s() -> None:
    stats = installed_source("vllm/v1/metrics/stats.py")
    fields = stats[stats.index("class RequestStateStats") :]
    assert "scheduled_ts: float" in fields
    assert "first_token_ts: float" in fields


def test_contract_engine_types_times_of() -> None:
    stats = installed_source("vllm/v1/metrics/stats.py")
    fields = stats[stats.index("class RequestStateStats") :]
    for name in ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts"):
        assert f"{name}: float" in fields
    assert "timestamp = time.monotonic() if timestamp is None" in installed_source("vllm/v1/engine/__init__.py")


def test_contract_engine_types_with_times() -> None:
    serving = installed_source("vllm/entrypoints/generate/base/serving.py")
    body = serving[serving.index("def build_per_request_timing_metrics(") : serving.index("def build_spec_decoding_")]
    assert set(re.findall(r"metrics\.(\w+)", body)) == {"queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts"}
    assert "metrics=self.stats" in installed_source("vllm/v1/engine/output_processor.py")


def test_contract_engine_types_with_arrival() -> None:
    assert 'prompt.get("arrival_time"' in installed_source("vllm/v1/engine/input_processor.py")
    assert "arrival_time: NotRequired[float]" in installed_source("vllm/inputs/engine.py")


def test_contract_output_side_output_side() -> None:
    processor = installed_source("vllm/v1/engine/output_processor.py")
    for name in ("class OutputProcessor", "class RequestOutputCollector", "def process_outputs(", "def get_nowait("):
        assert name in processor, name
    assert "class EngineCoreOutput(" in installed_source("vllm/v1/engine/__init__.py")
    assert "def check_sequence_repetition(" in installed_source("vllm/v1/core/sched/utils.py")
    inputs = installed_source("vllm/v1/engine/input_processor.py")
    assert "def process_inputs(" in inputs
    assert "def assign_request_id(" in inputs
    client = installed_source("vllm/v1/engine/async_llm.py")
    for name in ("self.input_processor", "self.output_processor", "def get_supported_tasks("):
        assert name in client, name


def test_contract_output_side_first_tokens() -> None:
    processor = installed_source("vllm/v1/engine/output_processor.py")
    for name in ("self.external_req_ids", "self.request_states", "self.is_prefilling"):
        assert name in processor, name


def test_contract_fork_server_use_fork_server() -> None:
    for name in _STARTERS:
        assert "get_mp_context()" in installed_source(name.replace(".", "/") + ".py")


def test_contract_cpu_sleep_install() -> None:
    worker = installed_source("vllm/v1/worker/cpu_worker.py")
    assert "def sleep(self, level: int = 1)" in worker and "def wake_up(self" in worker
    assert "sleep mode is not supported on CPU" in worker  # if vLLM has one of its own, ours goes
    assert "self.kv_caches" in installed_source("vllm/v1/worker/gpu_model_runner.py")
    assert "layer.cpu_linear = " in installed_source("vllm/model_executor/layers/utils.py")


def test_contract_engine_imports_compile_sampler() -> None:
    """A fork server has compiled the sampler for one row and for several, so its forks compile nothing."""
    script = """
import deployments.vllm_seam.engine_imports
import torch
from torch._dynamo.utils import counters
from vllm.v1.sample.ops.topk_topp_sampler import compiled_random_sample
compiled = counters["stats"]["unique_graphs"]
torch.set_num_threads(1)
with torch.inference_mode():
    for rows in (1, 5):
        compiled_random_sample(torch.randn(rows, 300))
print(compiled, counters["stats"]["unique_graphs"])
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.split()[-2:] == ["2", "2"]


def test_contract_kv_events_kv_events() -> None:
    events = installed_source("vllm/distributed/kv_events.py")
    for part in (
        "class AllBlocksCleared(KVCacheEvent)",
        "block_hashes: list[ExternalBlockHash]",
        "parent_block_hash: ExternalBlockHash | None",
        "extra_keys: list[tuple[Any, ...] | None] | None = None",
        "lora_name: str | None",
        'MEDIUM_GPU = "GPU"',
        "self._pub.send_multipart((self._topic_bytes, seq_bytes, payload))",
        'END_SEQ = (-1).to_bytes(8, "big", signed=True)',
        'or self._endpoint.startswith("ipc://")',
    ):
        assert part in events, part
    assert "kv_events_config: KVEventsConfig | None" in installed_source("vllm/engine/arg_utils.py")
    # The order of the extra keys of a block: adapter, images, salt, embeddings; the salt only at the beginning.
    keys = installed_source("vllm/v1/core/kv_cache_utils.py")
    assert "lora_extra_keys + mm_extra_keys + cache_salt_keys + prompt_embeds_keys" in keys
    assert "[request.cache_salt] if (start_token_idx == 0 and request.cache_salt) else []" in keys
    # One event for each copy of a block, stored and removed, unless a request asks for more.
    assert '"kv_cache_report_mode", "incremental"' in installed_source("vllm/v1/request.py")


def test_contract_media_keep_media() -> None:
    renderer = installed_source("vllm/renderers/base.py")
    for part in (
        "self.mm_processor = mm_registry.create_processor(",
        "mm_processor_cache = mm_registry.processor_cache_from_config(config)",
        "return self.mm_processor.cache",
    ):
        assert part in renderer, part
    assert "self.cache = cache" in installed_source("vllm/multimodal/processing/processor.py")
    assert "def processor_only_cache_from_config(" in installed_source("vllm/multimodal/registry.py")
    # Both kinds of engines' caches take tensors of an image that they have.
    caches = installed_source("vllm/multimodal/cache.py")
    of_engine, of_worker = caches.split("class MultiModalReceiverCache(")[1].split("class ShmObjectStoreReceiverCache(")
    assert "if (cached_item := self._cache.get(mm_hash)) is not None:\n            return cached_item" in of_engine
    assert 'if "address" in mm_item:' in of_worker and "return mm_item" in of_worker


def test_contract_media_has_media() -> None:
    inputs = installed_source("vllm/inputs/engine.py")
    assert 'type: Literal["multimodal"]' in inputs and 'mm_kwargs: "MultiModalKwargsOptionalItems"' in inputs
    # Embeddings of a client in a chat have a modality of their own.
    assert '"prompt_embeds"' in installed_source("vllm/entrypoints/chat_utils.py")


def test_contract_media_media_hashes() -> None:
    inputs = installed_source("vllm/inputs/engine.py")
    assert "mm_hashes: MultiModalHashes" in inputs and "MultiModalHashes: TypeAlias = Mapping[str, list[str]]" in inputs
    hasher = installed_source("vllm/multimodal/hasher.py")
    assert "def hash_kwargs(" in hasher and "random" not in hasher and "hash(" not in hasher.replace("_hash(", "")


def test_contract_media_packed_media() -> None:
    """Decode's engine gets the media in the same way."""
    processor = installed_source("vllm/v1/engine/input_processor.py")
    for part in ('["mm_kwargs"]', '["mm_hashes"]', '["mm_placeholders"]', "base_mm_hash = decoder_mm_hashes[modality]"):
        assert part in processor, part
    assert "mm_features: list[MultiModalFeatureSpec] | None" in installed_source("vllm/v1/engine/__init__.py")
    keys = installed_source("vllm/v1/core/kv_cache_utils.py")
    assert "extra_keys.append((mm_feature.identifier, offset - start_token_idx))" in keys


def test_contract_media_prompt_with_media() -> None:
    """vLLM's own route for rendered prompts does the same."""
    serving = installed_source("vllm/entrypoints/scale_out/token_in_token_out/serving.py")
    assert "engine_input = mm_input(" in serving
    assert "mm_kwargs=MultiModalKwargsItems(mm_kwargs)" in serving


@pytest.mark.vllm
def test_contract_answer_ids_install_seeded_ids() -> None:
    import vllm.entrypoints.anthropic.serving as anthropic
    import vllm.entrypoints.openai.responses.streaming_events as responses
    from vllm.entrypoints.chat_utils import make_tool_call_id
    from vllm.v1.engine import input_processor

    from deployments.vllm_seam.answer_ids import install_seeded_ids, seed_ids

    install_seeded_ids()

    def ids(seed: str) -> list[str]:
        seed_ids(seed)
        return [make_tool_call_id(), responses.random_uuid(), anthropic.uuid.uuid4().hex]

    assert ids("a") == ids("a") != ids("b")
    tool_call, item, signature = ids("a")
    assert re.fullmatch(r"chatcmpl-tool-[0-9a-f]{16}", tool_call)
    assert re.fullmatch(r"[0-9a-f]{16}", item)
    assert re.fullmatch(r"[0-9a-f]{32}", signature)
    seed_ids("a")
    engine_id = input_processor.random_uuid()
    seed_ids("a")
    assert input_processor.random_uuid() != engine_id  # requests of the engine must not share an id


def test_contract_stored_responses_has_response() -> None:
    serving = installed_source("vllm/entrypoints/openai/responses/serving.py")
    assert "self.response_store: dict[str, ResponsesResponse] = {}" in serving
    assert "self.response_store.get(response_id)" in serving
    assert "state.openai_serving_responses = (" in installed_source("vllm/entrypoints/generate/api_router.py")


def test_contract_stored_responses_background_work() -> None:
    serving = installed_source("vllm/entrypoints/openai/responses/serving.py")
    assert "self.background_tasks: dict[str, asyncio.Task] = {}" in serving
    assert "self.background_tasks[response_id] = task" in serving
    assert "lambda _: self.background_tasks.pop(response_id, None)" in serving


def test_contract_load_report_load_headers() -> None:
    source = installed_source("vllm/entrypoints/serve/utils/orca_metrics.py")
    assert "def metrics_header(metrics_format: str) -> Mapping[str, str] | None:" in source
    for route in ("chat_completion", "completion"):
        router = installed_source(f"vllm/entrypoints/openai/{route}/api_router.py")
        assert 'LABEL = "endpoint-load-metrics-format"' in router
        assert "headers=metrics_header(metrics_header_format)" in router
