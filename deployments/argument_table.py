"""Which of vLLM's arguments ``engine_kwargs`` takes, and what to write instead of each other one (pure; no vllm).

Every argument of the pinned vLLM is in one of these tables; a contract test names a new one. An argument is taken if it
acts on the engine, or on the part of vLLM's server that a replica runs. vLLM's process that listens to clients does not
run here: Serve's proxy and Tandem's endpoint are in its place.
"""

_OWN = "Tandem alone chooses its value; leave it out"
_ONE_ENGINE = "each replica is one engine: set the role's replicas instead"
_WORKERS = "Ray starts the workers: set tensor_parallel_size, pipeline_parallel_size and placement of the role instead"
_TLS = "put a proxy that ends TLS in front instead (docs/security.md)"
_SERVE_LOG = "set logging_config of Serve instead"
_SOCKET = "set http_options.host and http_options.port of Serve instead"

# Names of refused arguments, and what to do instead.
_REFUSED: tuple[tuple[str, str], ...] = (
    # Fields of the engine that have another place, or that Tandem owns.
    ("model model_weights model_tag", "set model.source instead"),
    ("served_model_name", "set model.id instead"),
    ("tensor_parallel_size", "set the role's tensor_parallel_size instead"),
    ("pipeline_parallel_size", "set the role's pipeline_parallel_size instead"),
    (
        "prefill_context_parallel_size",
        "a replica has no workers for it: set the role's tensor_parallel_size instead",
    ),
    ("kv_transfer_config", "set kv_transfer instead"),
    ("kv_events_config", "set router.policy instead"),
    ("enable_lora lora_modules", "set model.adapters or model.adapters_folder instead"),
    (
        "kv_offloading_size kv_offloading_backend",
        "vLLM would put another connector in the place of NIXL, and no KV could be handed over; leave it out",
    ),
    ("enable_sleep_mode", "set the role's engine_sleep instead"),
    ("shutdown_timeout", "set the role's graceful_shutdown_timeout_s instead"),
    (
        "worker_extension_cls distributed_executor_backend disable_log_stats _api_process_count _api_process_rank",
        _OWN,
    ),
    (
        "data_parallel_size data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address "
        "data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb "
        "data_parallel_backend data_parallel_supervisor_port dp_supervisor_probe_interval_s "
        "dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold disable_nccl_for_dp_synchronization "
        "aggregate_engine_logging enable_elastic_ep",
        _ONE_ENGINE,
    ),
    (
        "enable_fault_tolerance fault_tolerance_config",
        "vLLM repairs engines of data parallelism with it, and Tandem replaces a replica whose engine fails; leave it "
        "out",
    ),
    ("master_addr master_port nnodes node_rank device_ids", _WORKERS),
    (
        "numa_bind numa_bind_nodes numa_bind_cpus",
        "vLLM binds only processes that it starts itself, and Ray starts the workers; leave it out (on CPU, "
        "cores_per_worker of the role binds them)",
    ),
    (
        "ec_transfer_config mm_encoder_only",
        "no replica of Tandem runs an encoder without its language model; leave it out",
    ),
    ("tokens_only skip_tokenizer_init", "decode replicas turn text into tokens and back; leave it out"),
    ("weight_transfer_config", "no route here changes weights of a running engine: set model.source instead"),
    ("max_parallel_loading_workers", "vLLM itself ignores it; leave it out"),
    ("profiler_config", "no route here starts vLLM's profiler; leave it out"),
    # vLLM's own server, in whose place are Serve's proxy and Tandem's endpoint.
    ("api_key", "set ingress.api_keys_file instead, and make keys with `tandem key`"),
    ("allowed_origins", "set ingress.cors.allowed_origins instead"),
    ("allowed_methods", "set ingress.cors.allowed_methods instead"),
    ("allowed_headers", "set ingress.cors.allowed_headers instead"),
    ("allow_credentials", "set ingress.cors.allow_credentials instead"),
    ("host port uds", _SOCKET),
    ("root_path", "set route_prefix of the application instead"),
    ("ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs ssl_ciphers enable_ssl_refresh", _TLS),
    ("middleware", "the endpoint loads no middleware of others: put a proxy with it in front instead"),
    ("uvicorn_log_level disable_uvicorn_access_log disable_access_log_for_endpoints", _SERVE_LOG),
    ("log_config_file", "set VLLM_LOGGING_CONFIG_PATH in env of the role instead"),
    ("h11_max_incomplete_event_size", "set ingress.max_body_bytes instead"),
    ("h11_max_header_count", "HAProxy limits headers; leave it out"),
    ("enable_request_id_headers", "every answer has the header X-Request-Id; leave it out"),
    ("enable_server_load_tracking", "GET /load always answers; leave it out"),
    ("sse_keep_alive_interval", "the endpoint sends no comments in streams: let proxies wait longer instead"),
    ("disable_fastapi_docs enable_offline_docs", "vLLM's own pages of its routes are not served; leave it out"),
    ("cohere_is_reasoning_model", "there is no route /cohere/v2/chat here; leave it out"),
    # Options of vLLM's command line alone.
    ("api_server_count", "set ingress.replicas instead"),
    ("headless", "Serve starts engines where nodes have room; leave it out"),
    ("grpc", "the endpoint speaks HTTP; leave it out"),
    ("config", "write the arguments of that file here instead"),
)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# What to do instead of each refused argument, by its name.
INSTEAD: dict[str, str] = {name: remedy for names, remedy in _REFUSED for name in _names(names)}

# Arguments of vLLM's server that act on the part of it that a replica runs.
OF_SERVER: tuple[str, ...] = _names(
    """
    chat_template chat_template_content_format trust_request_chat_template default_chat_template_kwargs
    response_role return_tokens_as_token_ids enable_auto_tool_choice exclude_tools_when_tool_choice_none
    tool_call_parser tool_parser_plugin tool_server max_log_len enable_prompt_tokens_details
    enable_per_request_metrics enable_force_include_usage enable_tokenizer_info_endpoint enable_log_outputs
    enable_log_deltas cohere_format log_error_stack fingerprint_mode fingerprint_value enable_flash_late_interaction
    """
)

# Arguments of the engine, which vLLM gets unchanged.
OF_ENGINE: tuple[str, ...] = _names(
    """
    enable_return_routed_experts return_sampling_mask tokenizer hf_config_path runner convert enable_prompt_embeds
    tokenizer_mode trust_remote_code allowed_local_media_path allowed_media_domains download_dir
    safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size load_format
    config_format dtype kv_cache_dtype seed max_model_len cudagraph_capture_sizes max_cudagraph_capture_size
    ir_op_priority distributed_timeout_seconds cpu_distributed_timeout_seconds decode_context_parallel_size
    dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size enable_expert_parallel
    enable_batch_sharded_sampling enable_ep_weight_filter moe_backend linear_backend all2all_backend enable_dbo
    ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold eplb_config enable_eplb
    expert_placement_strategy block_size enable_prefix_caching prefix_caching_hash_algo
    prefix_cache_retention_interval disable_sliding_window disable_cascade_attn offload_backend cpu_offload_gb
    cpu_offload_params offload_group_size offload_num_in_group offload_prefetch_step offload_params
    gpu_memory_utilization kv_cache_memory_bytes max_num_batched_tokens max_num_scheduled_tokens
    long_prefill_token_threshold max_num_seqs max_num_queued_reqs max_num_queued_tokens max_logprobs logprobs_mode
    use_fp64_gumbel enable_trace_replay revision code_revision hf_token hf_overrides model_class_overrides
    tokenizer_revision quantization quantization_config allow_deprecated_quantization enforce_eager
    disable_custom_all_reduce language_model_only limit_mm_per_prompt enable_mm_embeds interleave_mm_strings
    media_io_kwargs mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm
    mm_shm_cache_max_object_size_mb mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype
    mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin io_processor_plugin
    renderer_num_workers skip_mm_profiling video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device
    mm_ipc_gpu_memory_gb mm_device_do_normalize max_loras max_lora_rank default_mm_loras
    fully_sharded_loras max_cpu_loras lora_dtype lora_target_modules enable_tower_connector_lora
    specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras ray_workers_use_nsight
    num_gpu_blocks_override model_loader_extra_config ignore_patterns enable_chunked_prefill
    disable_chunked_mm_input scheduler_reserve_full_isl prefill_schedule_interval watermark
    disable_hybrid_kv_cache_manager structured_outputs_config reasoning_parser reasoning_parser_plugin
    speculative_config spec_method spec_model spec_tokens diffusion_config show_hidden_metrics_for_version
    otlp_traces_endpoint collect_detailed_traces per_request_spec_decode_metrics kv_cache_metrics
    kv_cache_metrics_sample cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics
    enable_logging_iteration_details jit_monitor_mode jit_monitor_verbose enable_mm_processor_stats
    scheduling_policy scheduler_cls pooler_config compilation_config attention_config mamba_config kernel_config
    enable_flashinfer_autotune enable_bf16x3_router_gemm worker_cls ec_manager_config reasoning_config
    generation_config enable_cumem_allocator override_generation_config model_impl attention_backend
    kv_cache_dtype_skip_layers mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size prefix_match_unit
    mamba_cache_mode replayssm_buffer_len use_replayssm mamba_backend mamba_ssu_algorithm
    enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds additional_config use_tqdm_on_load
    pt_load_map_location logits_processors async_scheduling stream_interval kv_sharing_fast_prefill
    optimization_level performance_mode fail_on_environ_validation gdn_prefill_backend kda_prefill_backend
    enable_log_requests
    """
)
