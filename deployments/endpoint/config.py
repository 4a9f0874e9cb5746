"""IngressConfig: the HTTP endpoint as a user configures it (pure)."""

from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from deployments.pool_config import Selector
from kvtransfer.strict_config import StrictConfig
from router.admission_config import AdmissionConfig, KeyLimits


class CorsConfig(StrictConfig):
    """Web pages of other sites whose scripts may call the API (CORS); the names are those of vLLM's arguments."""

    allowed_origins: tuple[str, ...] = Field(("*",), min_length=1)
    """Sites, such as https://chat.example.org; "*": all."""
    allowed_methods: tuple[str, ...] = Field(("*",), min_length=1)
    """HTTP methods that these pages may use; "*": all."""
    allowed_headers: tuple[str, ...] = Field(("*",), min_length=1)
    """Headers that these pages may send; "*": all."""
    allow_credentials: bool = False
    """Whether browsers may send cookies of the endpoint's site. API keys need no cookies."""

    def middleware_arguments(self) -> dict[str, Any]:
        """The arguments of Starlette's CORS middleware."""
        return {
            "allow_origins": self.allowed_origins,
            "allow_methods": self.allowed_methods,
            "allow_headers": self.allowed_headers,
            "allow_credentials": self.allow_credentials,
        }


class IngressConfig(StrictConfig):
    """The HTTP endpoint's replicas."""

    replicas: int = Field(2, ge=1, le=256)
    """Replicas of the endpoint. If there is only one, no request is answered while that one is replaced."""
    cpus_per_replica: float = Field(1.0, ge=0.0)
    """Ray CPUs of one replica of the endpoint."""
    node_labels: Selector = Field(default_factory=dict)
    """Ray label selector of the nodes that replicas of the endpoint run on."""
    request_timeout_s: float = Field(300.0, gt=0.0, le=86_400.0)
    """Time, seconds, after which a request ends with an error. It must not exceed graceful_shutdown_timeout_s of any
    decode role: a replica that stops has to finish its requests in that time."""
    retries: int = Field(2, ge=0, le=10)
    """Number of decode replicas that may be lost during one request. Another replica then answers the request, or
    continues its stream. So a request that crashes engines crashes at most retries + 1 of them."""
    max_body_bytes: int = Field(32 << 20, ge=1024)
    """Largest size of a request body; a larger one is refused (413)."""
    max_bodies_bytes: int = Field(512 << 20, ge=1024)
    """Memory of all request bodies at one replica of the endpoint. One API key gets at most half of it. A request whose
    body finds no room is refused (429)."""
    body_timeout_s: float = Field(30.0, gt=0.0, le=86_400.0)
    """Time, seconds, for the whole request body to arrive; after that the request is refused (408)."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Most tokens of a prompt; a longer one is refused (400) before it is computed. Left out, the model's context is
    the limit."""
    api_keys_file: Path | None = None
    """File with the hashes of API keys (`tandem key` makes them), on every node with a replica of the endpoint. It is
    read again when it changes. With this file clients must send a key. Left out, they need none."""
    admin_keys: tuple[str, ...] = ()
    """Names of the API keys that may load and unload adapters at run time. Without api_keys_file every client of the
    endpoint may."""
    session_header: str = Field("X-Session-ID", pattern=r"^[A-Za-z0-9-]{1,64}$")
    """Header by which a client names a session. Requests of one session go to one decode replica, unless it is
    overloaded. Any text is a session's name."""
    explains_routing: bool = False
    """Whether a request with the header X-Tandem-Explain: 1 is answered with the header x-tandem-routing: path and
    replicas of the request, and the two runners-up, with their queues and cached tokens in JSON. Clients then see names
    and load of replicas, and whether the beginning of a prompt is cached."""
    metrics_host: str = Field("127.0.0.1", min_length=1)
    """Address on which every node with a replica of the endpoint serves the application's metrics. It needs no key: let
    only the collector of metrics reach it."""
    metrics_port: int = Field(9464, ge=1, le=65_535)
    """Port of the metrics; each application of a cluster needs a different one."""
    metrics_on_public_port: bool = False
    """Also serve the metrics on the API's port, to clients that may use the API."""

    cors: CorsConfig | None = None
    """Web pages of other sites that may call the API. Left out, browsers let no page of another site call it."""
    docs: bool = False
    """Whether GET /docs and GET /openapi.json describe the API, to clients without a key too."""

    admission: AdmissionConfig = AdmissionConfig()

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        admission = self.admission
        if self.max_bodies_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_bodies_bytes ({self.max_bodies_bytes}) is less than max_body_bytes ({self.max_body_bytes})"
            )
        if self.api_keys_file is None and (admission.keys or admission.key != KeyLimits()):
            raise ValueError("admission.key and admission.keys are limits of API keys: give api_keys_file too")
        if self.api_keys_file is None and self.admin_keys:
            raise ValueError("admin_keys are names of API keys: give api_keys_file too")
        return self

    @field_validator("api_keys_file")
    @classmethod
    def _check_keys_path(cls, value: Path | None) -> Path | None:
        if value is None:
            return None
        try:
            path = value.expanduser()
        except RuntimeError:
            raise ValueError(
                f"api_keys_file {value} names a user that this machine does not know: give the whole path"
            ) from None
        if not path.is_absolute():
            raise ValueError(
                f"api_keys_file {value} is relative, and replicas start in another folder: give the whole path"
            )
        return path
