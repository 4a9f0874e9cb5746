"""Asks other sources for figures, each in a daemon thread: a source that is slow or fails delays no decision."""

import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from autoscale.extension import Extension, error_text
from autoscale.observe.collected import Collected, checked
from autoscale.observe.collectors import (
    OWN_COLLECTORS,
    Collector,
    CollectorConfig,
    FileCollectorConfig,
    PrometheusCollectorConfig,
    RayCollectorConfig,
    SourceConfig,
    read_figures,
    read_single,
    read_vector,
)
from autoscale.observe.overrides import strangers
from autoscale.ray_daemon import in_daemon_thread

# Most by which the time of an answer may be ahead, seconds: clocks of two machines differ.
_MOST_AHEAD_S = 60.0


class Prometheus(Collector[PrometheusCollectorConfig]):
    """The answers of a Prometheus server, one query after the other."""

    def collect(self) -> Collected:
        """The present figures; an error of one query is the error of all."""
        deadline_s = time.monotonic() + self._config.timeout_s
        replicas: dict[str, dict[str, float]] = {}
        for figure, query in self._config.queries.items():
            for replica, value in read_vector(self._ask(query, deadline_s), self._config.replica_label).items():
                replicas.setdefault(replica, {})[figure] = value
        answers = {
            str(figure): read_single(self._ask(query, deadline_s))
            for figure, query in self._config.service_queries.items()
        }
        service = {figure: value for figure, value in answers.items() if value is not None}
        return Collected(replicas=replicas, service=service)

    def _ask(self, query: str, deadline_s: float) -> bytes:
        url = f"{self._config.url.rstrip('/')}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        timeout_s = max(0.1, deadline_s - time.monotonic())  # a timeout of 0 or less is an error
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:  # noqa: S310 (the url is http or https)
            body: bytes = answer.read()
        return body


class File(Collector[FileCollectorConfig]):
    """The content of a file that another program writes."""

    def collect(self) -> Collected:
        """The figures of the file, as old as the file."""
        return read_figures(self._config.path.read_text(), self._config.path.stat().st_mtime)


COLLECTORS: dict[str, type[Collector[Any]]] = {"prometheus": Prometheus, "file": File}


@dataclass(frozen=True, slots=True)
class _Answer:
    """Figures that can be true, the faults of the others by cause, and the monotonic time when they were true."""

    figures: Collected
    faults: Mapping[str, str]
    observed_s: float


class Source:
    """The collector of one service, which is asked again and again. Decisions read its last good answer.

    Its class is loaded in the thread of its first call, so that a slow or broken import is a slow or broken answer.
    """

    def __init__(self, config: SourceConfig | Extension) -> None:
        self.config = config
        self._limits = SourceConfig() if isinstance(config, Extension) else config  # until the class is loaded
        self._collector: Collector[Any] | None = None
        self._call: Future[_Answer] | None = None  # one at a time
        self._called_s = 0.0  # monotonic
        self._answer: _Answer | None = None  # the last good one
        self._error: str | None = None  # of the last call, if it failed

    def read(self) -> tuple[Collected, dict[str, str]]:
        """The figures of the last good answer, unless it is too old; and what is wrong, one text for each cause.

        It never waits. It begins the next call if none goes on.
        """
        now_s, answer, limits = time.monotonic(), self._take(), self._limits
        faults = {} if self._error is None else {self._error: self._error}
        if self._call is None:
            self._call, self._called_s = in_daemon_thread(self._collect, "tandem-collector"), now_s
        elif now_s - self._called_s > limits.timeout_s:
            slow = f"takes longer than {limits.timeout_s:g} s (timeout_s)"
            faults[slow] = slow
        figures = Collected()
        if answer is not None and now_s - answer.observed_s <= limits.most_age_s:
            figures, faults = answer.figures, {**answer.faults, **faults}
        elif answer is not None:
            old = f"its last answer is older than {limits.most_age_s:g} s (most_age_s): the replicas' own reports count"
            faults[old] = old
        return figures, {cause: f"collector {self._kind}: {text}" for cause, text in faults.items()}

    @property
    def _kind(self) -> str:
        return str(getattr(self.config, "kind", ""))

    def _take(self) -> _Answer | None:
        """The last good answer, after the result of a call that has ended was taken."""
        if self._call is not None and self._call.done():
            call, self._call = self._call, None
            error = call.exception()
            self._error = None if error is None else error_text(error)
            if error is None:
                self._answer = call.result()
        return self._answer

    def _collect(self) -> _Answer:
        """One call, in its thread."""
        began_s = time.monotonic()
        if self._collector is None:
            if isinstance(self.config, Extension):
                collector_class, self._limits = OWN_COLLECTORS.settings(self.config)
            else:
                collector_class = COLLECTORS[self._kind]
            self._collector = collector_class(self._limits)
        figures, faults = checked(self._collector.collect())
        if figures.observed_s is not None:
            age_s = time.time() - figures.observed_s
            if age_s < -_MOST_AHEAD_S:  # it would never be too old
                raise ValueError("observed_s is more than a minute in the future: give seconds since the epoch")
            began_s = time.monotonic() - max(0.0, age_s)
        return _Answer(figures, faults, began_s)


class Sources:
    """The sources of all services of an application."""

    def __init__(self) -> None:
        self._sources: dict[str, Source] = {}  # by service

    def read(self, service: str, config: CollectorConfig, running: frozenset[str]) -> tuple[Collected, dict[str, str]]:
        """As ``Source.read``; a changed configuration begins a new source. ``running``: ids of running replicas."""
        if isinstance(config, RayCollectorConfig):
            self._sources.pop(service, None)
            return Collected(), {}
        source = self._sources.get(service)
        if source is None or source.config != config:
            source = self._sources[service] = Source(config)
        figures, faults = source.read()
        if (stranger := strangers(figures, running)) is not None:
            faults["no figure is of a running replica"] = f"collector {config.kind}: {stranger}"
        return figures, faults
