"""The routes of the API: what each one asks of an engine, and the form of its errors (pure).

``docs/api.md`` is made from these tables.
"""

from dataclasses import dataclass
from enum import StrEnum


class Work(StrEnum):
    """What a request asks of an engine."""

    ANSWER = "answer"  # tokens: it waits for its turn, and its prompt may be computed on prefill
    PROMPT = "prompt"  # one pass over its texts: it waits for its turn
    NONE = "none"  # no step of the engine: it does not wait


class ErrorForm(StrEnum):
    """The API whose errors a route has."""

    OPENAI = "openai"
    RESPONSES = "responses"  # as OpenAI, but for the event that ends a stream
    ANTHROPIC = "anthropic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One route that decode replicas answer."""

    name: str  # label of metrics
    path: str  # pattern, as FastAPI has it
    method: str = "POST"
    work: Work = Work.ANSWER
    errors: ErrorForm = ErrorForm.OPENAI
    is_public: bool = False  # whether clients need no key for it
    what: str  # one sentence for the page

    @property
    def is_native(self) -> bool:
        """Whether vLLM's own HTTP application answers it; chat and completions have a shorter way."""
        return self.name not in ("chat", "completions")

    @property
    def has_body(self) -> bool:
        """Whether a request has a body."""
        return self.method == "POST" and "{" not in self.path


CHAT = Route(name="chat", path="/v1/chat/completions", what="OpenAI chat completions.")
COMPLETIONS = Route(name="completions", path="/v1/completions", what="OpenAI completions.")

OPENAPI = Route(
    name="openapi", path="/openapi.json", method="GET", work=Work.NONE, is_public=True, what="The schema of the API."
)

# Routes that decode replicas answer with vLLM's own application, unchanged.
NATIVE = (
    Route(
        name="responses",
        path="/v1/responses",
        errors=ErrorForm.RESPONSES,
        what="OpenAI responses: create, also streamed.",
    ),
    Route(
        name="response",
        path="/v1/responses/{response_id}",
        method="GET",
        work=Work.NONE,
        errors=ErrorForm.RESPONSES,
        what="A stored response, or its stream.",
    ),
    Route(
        name="response_cancel",
        path="/v1/responses/{response_id}/cancel",
        work=Work.NONE,
        errors=ErrorForm.RESPONSES,
        what="Cancels a response that is computed in the background.",
    ),
    Route(name="messages", path="/v1/messages", errors=ErrorForm.ANTHROPIC, what="Anthropic messages, also streamed."),
    Route(
        name="count_tokens",
        path="/v1/messages/count_tokens",
        work=Work.NONE,
        errors=ErrorForm.ANTHROPIC,
        what="Number of tokens of Anthropic messages.",
    ),
    Route(name="chat_batch", path="/v1/chat/completions/batch", what="Several conversations in one chat request."),
    Route(name="generate", path="/inference/v1/generate", what="Token ids in, token ids out."),
    Route(name="generative_scoring", path="/generative_scoring", what="Probabilities of given tokens after each item."),
    Route(name="tokenize", path="/tokenize", work=Work.NONE, what="Token ids of a text or a chat."),
    Route(name="detokenize", path="/detokenize", work=Work.NONE, what="Text of token ids."),
    Route(
        name="tokenizer_info",
        path="/tokenizer_info",
        method="GET",
        work=Work.NONE,
        what="The tokenizer's settings, if `enable_tokenizer_info_endpoint` is set in `engine_kwargs`.",
    ),
    Route(
        name="chat_render",
        path="/v1/chat/completions/render",
        work=Work.NONE,
        what="The request for `/inference/v1/generate` that a chat becomes.",
    ),
    Route(
        name="messages_render",
        path="/v1/messages/render",
        work=Work.NONE,
        errors=ErrorForm.ANTHROPIC,
        what="The request for `/inference/v1/generate` that Anthropic messages become.",
    ),
    Route(
        name="completions_render",
        path="/v1/completions/render",
        work=Work.NONE,
        what="The requests for `/inference/v1/generate` that a completion becomes.",
    ),
    Route(
        name="chat_derender",
        path="/v1/chat/completions/derender",
        work=Work.NONE,
        what="The chat answer that an answer of `/inference/v1/generate` becomes.",
    ),
    Route(
        name="completions_derender",
        path="/v1/completions/derender",
        work=Work.NONE,
        what="The completion that answers of `/inference/v1/generate` become.",
    ),
    Route(name="invocations", path="/invocations", what="For SageMaker: the body of any other route."),
    Route(name="embeddings", path="/v1/embeddings", work=Work.PROMPT, what="OpenAI embeddings."),
    Route(name="embed", path="/v2/embed", work=Work.PROMPT, what="Cohere embeddings."),
    Route(name="pooling", path="/pooling", work=Work.PROMPT, what="Raw outputs of a pooling model."),
    Route(name="classify", path="/classify", work=Work.PROMPT, what="Classes of texts."),
    Route(name="score", path="/score", work=Work.PROMPT, what="Similarity of pairs of texts."),
    Route(name="v1_score", path="/v1/score", work=Work.PROMPT, what="As `/score`."),
    Route(name="rerank", path="/rerank", work=Work.PROMPT, what="Documents in the order of their relevance."),
    Route(name="v1_rerank", path="/v1/rerank", work=Work.PROMPT, what="As `/rerank`."),
    Route(name="v2_rerank", path="/v2/rerank", work=Work.PROMPT, what="As `/rerank`."),
)

_FORMS = {route.path: route.errors for route in NATIVE}


def error_form(path: str) -> ErrorForm:
    """The form of errors at a path, whatever the method; the Responses API's differs in streams only."""
    return _FORMS.get(path, ErrorForm.OPENAI)


# Routes that the endpoint answers itself, as method and path.
OWN = {
    "GET /v1/models": "All models and their adapters.",
    "GET /v1/models/{model}": "One model.",
    "POST /v1/load_lora_adapter": "Loads a LoRA adapter in all replicas of its model ([adapters.md](adapters.md)).",
    "POST /v1/unload_lora_adapter": "Unloads an adapter that was loaded at run time.",
    "GET /health": "200 if every model has a healthy decode pool, or sleeps; also `HEAD`.",
    "GET /ping": "As `/health`, for SageMaker; also `POST`.",
    "GET /load": "Number of requests that wait or are being answered.",
    "GET /version": "Version of vLLM.",
    "GET /metrics": "Prometheus metrics, if `ingress.metrics_on_public_port` is set.",
    "GET /docs": "A page to read and try the API, if `ingress.docs` is set.",
    "GET /redoc": "The description as one long page, if `ingress.docs` is set.",
    "GET /openapi.json": "The API's schema, if `ingress.docs` is set.",
}

# Routes of vLLM that are not here, with the reason.
ABSENT = {
    "/start_profile": "it would slow the engine for all clients: profile one engine by itself",
    "/stop_profile": "it belongs to /start_profile",
    "/scale_elastic_ep": "the autoscaler sizes the pools: set autoscale, or counts by `tandem scale`",
    "/is_scaling_elastic_ep": "it belongs to /scale_elastic_ep",
    "/fault_tolerance/apply": "replicas that fail are replaced by Serve",
    "/fault_tolerance/status": "see `tandem status`",
    "/sleep": "the configuration decides when engines sleep (engine_sleep)",
    "/wake_up": "an engine wakes with its first request",
    "/is_sleeping": "see `tandem status`",
    "/pause": "it would stop one engine of many: `tandem delete` stops an application",
    "/resume": "it belongs to /pause",
    "/is_paused": "it belongs to /pause",
    "/abort_requests": "a client ends its own request by closing its connection",
    "/collective_rpc": "it runs any method in an engine's workers",
    "/server_info": "it shows the engine's whole configuration: see `tandem status`",
    "/reset_prefix_cache": "the engines of one pool have caches of their own, and their routers would not learn it",
    "/reset_mm_cache": "as /reset_prefix_cache",
    "/reset_encoder_cache": "as /reset_prefix_cache",
    "/init_weight_transfer_engine": "weights change with the configuration, in all replicas of both roles",
    "/start_weight_update": "as /init_weight_transfer_engine",
    "/start_draft_weight_update": "as /init_weight_transfer_engine",
    "/update_weights": "as /init_weight_transfer_engine",
    "/finish_weight_update": "as /init_weight_transfer_engine",
    "/update_weight_version": "as /init_weight_transfer_engine",
    "/weight_info": "as /init_weight_transfer_engine",
    "/get_world_size": "see `tandem status`",
    "/v1/audio/transcriptions": "audio is not handed over between prefill and decode, and has no tests here",
    "/v1/audio/translations": "as /v1/audio/transcriptions",
    "/v1/realtime": "the endpoint takes no websockets",
    "/cohere/v2/chat": "its Python package is no part of Tandem: use /v1/chat/completions",
    "/cohere/v2/chat/render": "as /cohere/v2/chat",
}
