"""Resident memory of a cluster's processes while it is fuzzed, and which of them are there at all."""

from collections.abc import Callable, Sequence
from statistics import median

import psutil

from serve_app.drill_faults import replica_pids

# Of all requests: caches, pools and code that is loaded late fill up first.
_WARM_UP_FRAC = 0.15
# Of a process's title -> what it is; the first that fits.
_KINDS = (
    (":ingress", "ingress"),
    (":decode:", "decode replica"),
    (":prefill:", "prefill replica"),
    ("VLLM::EngineCore", "engine"),
    ("haproxy", "haproxy"),
    ("ServeController", "serve controller"),
    ("ProxyActor", "serve proxy"),
    ("HAProxyManager", "serve proxy"),
    ("gcs_server ", "ray gcs"),
    ("raylet/raylet ", "raylet"),
)


class Memory:
    """Resident memory of every process of a cluster, over time."""

    def __init__(self, processes: Callable[[], list[psutil.Process]]) -> None:
        self._processes = processes
        self._kinds: dict[int, str] = {}
        self._seen: dict[int, list[tuple[float, int]]] = {}

    def sample(self, done_frac: float) -> None:
        """Look at all of them now, when this share of the requests is done."""
        for process in self._processes():
            try:
                if process.pid not in self._kinds:
                    self._kinds[process.pid] = _kind(" ".join(process.cmdline()) or process.name())
                self._seen.setdefault(process.pid, []).append((done_frac, process.memory_info().rss))
            except psutil.Error:
                continue

    def totals(self) -> dict[str, dict[str, float]]:
        """As ``growth``, of all processes of a kind together: for where they end and others take their place."""
        sums: dict[str, dict[float, int]] = {}
        for pid, samples in self._seen.items():
            for done, rss in samples:
                of_kind = sums.setdefault(self._kinds[pid], {})
                of_kind[done] = of_kind.get(done, 0) + rss
        rows = {kind: _thirds(list(of_kind.items())) for kind, of_kind in sums.items() if kind != "other"}
        return {kind: row for kind, row in rows.items() if row is not None}

    def kind(self, pid: int) -> str:
        """What a process is."""
        return self._kinds.get(pid, "other")

    def growth(self) -> dict[str, dict[str, float]]:
        """Of each kind of process the one that grew most, by medians of the first and the last third after warm-up."""
        kinds: dict[str, dict[str, float]] = {}
        for pid, samples in self._seen.items():
            row = _thirds(samples)
            if row is None or self._kinds[pid] == "other":
                continue
            kinds[self._kinds[pid]] = max(kinds.get(self._kinds[pid], row), row, key=lambda one: one["growth_frac"])
        return kinds


def _thirds(samples: Sequence[tuple[float, int]]) -> dict[str, float] | None:
    third = (1.0 - _WARM_UP_FRAC) / 3
    first = [rss for done, rss in samples if _WARM_UP_FRAC <= done < _WARM_UP_FRAC + third]
    last = [rss for done, rss in samples if done >= 1.0 - third]
    if not first or not last:
        return None
    before, after = median(first) / 2**20, median(last) / 2**20
    return {"first_third_mib": before, "last_third_mib": after, "growth_frac": after / before - 1.0}


def _kind(title: str) -> str:
    return next((kind for word, kind in _KINDS if word in title), "other")


def servers(processes: Sequence[psutil.Process]) -> set[int]:
    """The processes of replicas, engines and HAProxy: none of them may end."""
    found = replica_pids(processes)
    for process in processes:
        try:
            if any(word in (" ".join(process.cmdline()) or process.name()) for word in ("VLLM::", "haproxy")):
                found.add(process.pid)
        except psutil.Error:
            continue
    return found
