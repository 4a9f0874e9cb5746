"""Sources of replicas' gauges besides their own reports: configuration, and how answers are read (pure)."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from autoscale.documents import first_fault
from kvtransfer.strict_config import StrictConfig

# Gauges that another source may know better than the replica, such as an exporter of GPU figures.
Gauge = Literal[
    "running_requests",
    "waiting_requests",
    "queued_prefill_tokens",
    "kv_usage_frac",
    "gpu_utilization_frac",
    "sm_activity_frac",
]
# Gauges by replica id.
Gauges = Mapping[str, Mapping[str, float]]


class RayCollectorConfig(StrictConfig):
    """Only the replicas' own reports."""

    kind: Literal["ray"] = "ray"


class PrometheusCollectorConfig(StrictConfig):
    """Answers of a Prometheus server replace the replicas' own gauges of the same name."""

    kind: Literal["prometheus"]
    url: str = Field(pattern=r"^https?://", description="URL of the server, such as http://prometheus:9090.")
    queries: dict[Gauge, str] = Field(min_length=1, description="PromQL by gauge, a series for each replica.")
    replica_label: str = Field("replica", min_length=1, description="The label that holds a replica's id.")
    timeout_s: float = Field(2.0, gt=0.0, le=10.0, description="Timeout of all queries together.")


class FileCollectorConfig(StrictConfig):
    """A JSON file with gauges: {replica id: {gauge: value}}."""

    kind: Literal["file"]
    path: Path = Field(description="Path of the file on the head node; it is read before every decision.")
    most_age_s: float = Field(30.0, gt=0.0, description="A file that was written longer ago is ignored.")


CollectorConfig = Annotated[
    RayCollectorConfig | PrometheusCollectorConfig | FileCollectorConfig, Field(discriminator="kind")
]

_FILE = TypeAdapter(dict[str, dict[Gauge, float]])


def read_vector(body: bytes, label: str) -> dict[str, float]:
    """The values of an instant query's JSON by replica id; series without this label or a finite value are left out.

    Raises:
        ValueError: the body is not such an answer.
    """
    try:
        answer = json.loads(body)
        if answer["status"] != "success":
            raise ValueError(f"Prometheus says {answer.get('error', answer['status'])!r}")
        if answer["data"]["resultType"] != "vector":
            raise ValueError(f"the query yields a {answer['data']['resultType']}: it must be an instant vector")
        values = {
            series["metric"][label]: float(series["value"][1])
            for series in answer["data"]["result"]
            if label in series["metric"]
        }
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"that is no answer of Prometheus: {error!r} is missing or wrong") from None
    return {replica: value for replica, value in values.items() if math.isfinite(value)}


def read_gauges(text: str) -> Gauges:
    """The gauges of a file; a ValueError names the first fault."""
    try:
        read = _FILE.validate_json(text)
    except ValidationError as error:
        raise ValueError(first_fault(error)) from None
    return {replica: {str(name): value for name, value in gauges.items()} for replica, gauges in read.items()}
