"""Where gauges of replicas come from beside what these report themselves, and how answers are read (pure)."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

# What a replica reports that somebody else may know better, such as an exporter of GPU figures.
Gauge = Literal[
    "running_requests",
    "waiting_requests",
    "queued_prefill_tokens",
    "kv_usage_frac",
    "gpu_utilization_frac",
    "sm_activity_frac",
]
# By replica, what is known of it.
Gauges = Mapping[str, Mapping[str, float]]


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RayCollectorConfig(_Config):
    """Nothing but what replicas report to Serve."""

    kind: Literal["ray"] = "ray"


class PrometheusCollectorConfig(_Config):
    """A Prometheus server's answers take the place of what replicas report of the same name."""

    kind: Literal["prometheus"]
    url: str = Field(pattern=r"^https?://", description="Of the server, such as http://prometheus:9090.")
    queries: dict[Gauge, str] = Field(min_length=1, description="PromQL by gauge, a series for each replica.")
    replica_label: str = Field("replica", min_length=1, description="The label that holds a replica's id.")
    timeout_s: float = Field(2.0, gt=0.0, le=10.0, description="Of all queries together.")


class FileCollectorConfig(_Config):
    """A JSON file, written by whoever knows: {replica id: {gauge: value}}."""

    kind: Literal["file"]
    path: Path = Field(description="On the head node, read before every decision.")
    most_age_s: float = Field(30.0, gt=0.0, description="One that was written longer ago says nothing.")


CollectorConfig = Annotated[
    RayCollectorConfig | PrometheusCollectorConfig | FileCollectorConfig, Field(discriminator="kind")
]

_FILE = TypeAdapter(dict[str, dict[Gauge, float]])


def read_vector(body: bytes, label: str) -> dict[str, float]:
    """The values of an instant query's answer by replica; a series that names none, or has no number, is left out.

    Args:
        body: the HTTP API's JSON.
        label: the label that holds a replica's id.

    Raises:
        ValueError: it is no such answer.
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
    """What a file says.

    Raises:
        ValueError: it is no such file; names the place.
    """
    try:
        read = _FILE.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return {replica: {str(name): value for name, value in gauges.items()} for replica, gauges in read.items()}
