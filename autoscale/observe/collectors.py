"""Collectors, the sources of figures besides the replicas' own reports: their settings and their formats (pure)."""

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Annotated, ClassVar, Generic, Literal, Self, TypeVar

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from autoscale.documents import first_fault
from autoscale.extension import Extensible, Extension, ExtensionPoint
from autoscale.observe.collected import Collected, ReplicaFigure, ServiceFigure
from kvtransfer.strict_config import StrictConfig


class RayCollectorConfig(StrictConfig):
    """No other source: only the replicas' own reports, which come through Ray Serve."""

    kind: Literal["ray"] = "ray"


class SourceConfig(StrictConfig):
    """Fields of every other source. It is asked beside the decisions, which use its last answer."""

    timeout_s: float = Field(2.0, gt=0.0, le=10.0)
    """Time that one answer may take, seconds. A slower source is named; its answer still counts if it is not too
    old."""
    most_age_s: float = Field(30.0, gt=0.0)
    """Age above which an answer is ignored, seconds; then the replicas' own reports count."""


class PrometheusCollectorConfig(SourceConfig):
    """A Prometheus server, whose answers replace the figures of the same name that replicas report."""

    kind: Literal["prometheus"]
    url: str = Field(pattern=r"^https?://", description="URL of the server, such as http://prometheus:9090.")
    queries: dict[ReplicaFigure, str] = Field(
        default_factory=dict, description="PromQL by figure of a replica; each query yields one series per replica."
    )
    replica_label: str = Field("replica", min_length=1, description="The label that holds a replica's id.")
    service_queries: dict[ServiceFigure, str] = Field(
        default_factory=dict, description="PromQL by figure of the whole service; each query yields one series."
    )

    @model_validator(mode="after")
    def _check_queries(self) -> Self:
        if not self.queries and not self.service_queries:
            raise ValueError("give queries or service_queries: without both, the server is asked for nothing")
        return self


class FileCollectorConfig(SourceConfig):
    """A JSON file with figures that replace those that replicas report: {replica id: {figure: value}}.

    Figures of the whole service stand under ``service``. The age of its figures is the age of the file.
    """

    kind: Literal["file"]
    path: Path = Field(description="Path of the file on the head node; it is read before every decision.")


C = TypeVar("C", bound=SourceConfig)  # configuration class of a collector


class Collector(ABC, Generic[C]):
    """A source of figures.

    ``collect`` is called in a thread of its own, at each decision unless the last call still goes on.

    Attributes:
        config_class: class of the settings of a collector of one's own.
    """

    config_class: ClassVar[type[SourceConfig]]

    def __init__(self, config: C) -> None:
        self._config = config

    @abstractmethod
    def collect(self) -> Collected:
        """The present figures. Any error means that there are none."""


# Collectors of one's own, by import path or by the name of an entry point.
OWN_COLLECTORS = ExtensionPoint(noun="collector", group="tandem.collectors", base=Collector, config_base=SourceConfig)
CollectorConfig = Annotated[
    RayCollectorConfig | PrometheusCollectorConfig | FileCollectorConfig | Extension, Extensible(OWN_COLLECTORS)
]

# Format of the file of a FileCollectorConfig.
_FILE = TypeAdapter(dict[str, dict[str, float]])
# Key of the file under which the figures of the whole service stand; it is no id of a replica.
_SERVICE = "service"


def read_vector(body: bytes, label: str) -> dict[str, float]:
    """Values by replica id from the JSON answer to an instant query; ``label``: the label that holds the replica id.

    A series without this label is left out.

    Raises:
        ValueError: the body is not such an answer.
    """
    return {metric[label]: value for metric, value in _series(body) if label in metric}


def read_single(body: bytes) -> float | None:
    """The value of the only series in the JSON answer to an instant query; ``None``: there is no series.

    Raises:
        ValueError: the body is not such an answer, or has several series.
    """
    series = _series(body)
    if len(series) > 1:
        raise ValueError(f"the query yields {len(series)} series: add them up, so that it yields one for the service")
    return series[0][1] if series else None


def _series(body: bytes) -> list[tuple[dict[str, str], float]]:
    """Labels and value of each series of an answer. PromQL yields NaN or an infinity instead of some errors."""
    try:
        answer = json.loads(body)
        if answer["status"] != "success":
            raise ValueError(f"Prometheus reports {answer.get('error', answer['status'])!r}: check the query")
        kind, result = answer["data"]["resultType"], answer["data"]["result"]
        if kind == "scalar":
            return [({}, float(result[1]))]
        if kind != "vector":
            raise ValueError(f"the query yields a {kind}: it must be an instant vector")
        return [(series["metric"], float(series["value"][1])) for series in result]
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"the answer is not in Prometheus' format ({error!r}): check the collector's url") from None


def read_figures(text: str, observed_s: float) -> Collected:
    """The figures in the text of a JSON file, written at ``observed_s``. Raises ValueError: it has another form."""
    try:
        document = _FILE.validate_json(text)
    except ValidationError as error:
        raise ValueError(first_fault(error)) from None
    service = document.pop(_SERVICE, {})
    return Collected(replicas=document, service=service, observed_s=observed_s)
