"""Sources of replicas' gauges besides the replicas' own reports: their configuration and their format (pure)."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from autoscale.documents import first_fault
from kvtransfer.strict_config import StrictConfig

# Gauges that another source, such as an exporter of GPU figures, may measure better than the replica itself.
Gauge = Literal[
    "running_requests",
    "waiting_requests",
    "queued_prefill_tokens",
    "kv_usage_frac",
    "gpu_utilization_frac",
    "sm_activity_frac",
]
# Values of gauges by replica id and by the gauge's name. Every value is finite.
Gauges = Mapping[str, Mapping[str, float]]


class RayCollectorConfig(StrictConfig):
    """No other source: only the replicas' own reports, which come through Ray Serve."""

    kind: Literal["ray"] = "ray"


class PrometheusCollectorConfig(StrictConfig):
    """A Prometheus server, whose answers replace the replicas' own gauges of the same name."""

    kind: Literal["prometheus"]
    url: str = Field(pattern=r"^https?://", description="URL of the server, such as http://prometheus:9090.")
    queries: dict[Gauge, str] = Field(
        min_length=1, description="PromQL by gauge; each query yields one series for each replica."
    )
    replica_label: str = Field("replica", min_length=1, description="The label that holds a replica's id.")
    timeout_s: float = Field(2.0, gt=0.0, le=10.0, description="Timeout of all queries together.")


class FileCollectorConfig(StrictConfig):
    """A JSON file, whose gauges replace the replicas' own of the same name: {replica id: {gauge: value}}."""

    kind: Literal["file"]
    path: Path = Field(description="Path of the file on the head node; it is read before every decision.")
    most_age_s: float = Field(
        30.0, gt=0.0, description="Seconds since the file was last written; an older file is ignored."
    )


CollectorConfig = Annotated[
    RayCollectorConfig | PrometheusCollectorConfig | FileCollectorConfig, Field(discriminator="kind")
]

# Format of the file of a FileCollectorConfig.
_GAUGES_FILE = TypeAdapter(dict[str, dict[Gauge, FiniteFloat]])


def read_vector(body: bytes, label: str) -> dict[str, float]:
    """Values by replica id from the JSON answer to an instant query; ``label``: the label that holds the replica id.

    A series without this label, or without a finite value, is left out. PromQL yields NaN or an infinity instead of an
    error, for instance after a division by zero: such a value counts as not observed.

    Raises:
        ValueError: the body is not such an answer.
    """
    try:
        answer = json.loads(body)
        if answer["status"] != "success":
            raise ValueError(f"Prometheus reports {answer.get('error', answer['status'])!r}: check the query")
        if answer["data"]["resultType"] != "vector":
            raise ValueError(f"the query yields a {answer['data']['resultType']}: it must be an instant vector")
        values = {
            series["metric"][label]: float(series["value"][1])
            for series in answer["data"]["result"]
            if label in series["metric"]
        }
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"the answer is not in Prometheus' format ({error!r}): check the collector's url") from None
    return {replica: value for replica, value in values.items() if math.isfinite(value)}


def read_gauges(text: str) -> Gauges:
    """The gauges in the text of a JSON file. Raises ValueError: the first fault, such as a value that is not finite."""
    try:
        document = _GAUGES_FILE.validate_json(text)
    except ValidationError as error:
        raise ValueError(first_fault(error)) from None
    return {replica: {str(name): value for name, value in gauges.items()} for replica, gauges in document.items()}
