"""LoRA adapters of an application: which are wanted, and which replica has loaded what (pure).

A replica loads the adapters that are wanted for its model, and reports what it has. An adapter's *identity* is its name
with a digest of its files. Replicas with the same identity compute the same KV, so prefill and decode must agree on it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

# Time without a report, seconds, after which a replica is taken as gone. A replica reports at least every 5 s, but not
# while it reads the files of a large adapter.
SILENCE_S = 60.0


class FaultKind(StrEnum):
    """Why an adapter cannot be loaded or unloaded."""

    OUTSIDE = "outside"  # its path is outside of the allowed folder
    MISSING = "missing"  # it has no such files, or there is no such adapter
    UNFIT = "unfit"  # its files are broken, or made for another model or a higher rank
    FULL = "full"  # the engine may keep no further adapter
    TAKEN = "taken"  # its name is taken
    FIXED = "fixed"  # it is in the configuration
    FAILED = "failed"  # the engine or a replica failed; the adapter may be sound


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFault:
    """Why an adapter cannot be loaded or unloaded, for the client."""

    kind: FaultKind
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """An adapter that replicas of its model shall have."""

    name: str
    path: str
    revision: int = 0  # the same name is loaded again if it has another revision


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldAdapters:
    """The adapters of one replica, as it reports them."""

    model: str
    pool: str
    replica_id: str
    held: Mapping[str, str] = field(default_factory=dict)  # identities by name
    tried: Mapping[str, int] = field(default_factory=dict)  # the last revision that was tried, by name
    faults: Mapping[str, AdapterFault] = field(default_factory=dict)  # of the last try, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterNews:
    """What the board knows, for every process of the application."""

    version: int = -1
    wanted: Mapping[str, tuple[AdapterSpec, ...]] = field(default_factory=dict)  # adapters by model
    # Identities by pool, replica and name; a pool's replica without an adapter has an empty mapping.
    held: Mapping[str, Mapping[str, Mapping[str, str]]] = field(default_factory=dict)

    def holders(self, pool: str, name: str, identity: str | None = None) -> frozenset[str]:
        """Replicas of a pool that have an adapter; ``identity``: with these files, ``None`` means with any."""
        replicas = self.held.get(pool, {})
        return frozenset(
            replica for replica, held in replicas.items() if name in held and identity in (None, held[name])
        )

    def lacking(self, pool: str, name: str, identity: str | None = None) -> frozenset[str]:
        """Reporting replicas of a pool that do not have an adapter; ``identity``: as for ``holders``."""
        return frozenset(self.held.get(pool, {})) - self.holders(pool, name, identity)

    def identities(self, pool: str, name: str) -> frozenset[str]:
        """Identities under which the replicas of a pool have an adapter."""
        return frozenset(held[name] for held in self.held.get(pool, {}).values() if name in held)

    def find(self, name: str) -> tuple[str, AdapterSpec] | None:
        """The model of an adapter, and the adapter; ``None``: there is none of this name."""
        return next(
            ((model, spec) for model, specs in self.wanted.items() for spec in specs if spec.name == name), None
        )


def name_of(identity: str) -> str:
    """The name in an identity."""
    return identity.rpartition("@")[0]


def identity_of(name: str, digest: str) -> str:
    """The identity of an adapter whose files have this digest."""
    return f"{name}@{digest}"


class WantedAdapters:
    """The adapters that are wanted, and what the replicas have of them."""

    def __init__(self, configured: Mapping[str, tuple[AdapterSpec, ...]], version: int) -> None:
        """``configured``: adapters of the configuration, by model. ``version``: above that of any board before."""
        self._configured = {model: {spec.name: spec for spec in specs} for model, specs in configured.items()}
        self.loaded: dict[str, dict[str, AdapterSpec]] = {model: {} for model in configured}  # at run time, by model
        self.version = version
        self._replicas: dict[str, tuple[HeldAdapters, float]] = {}  # the last report and its time, by replica

    def news(self) -> AdapterNews:
        """What every process may know."""
        held: dict[str, dict[str, Mapping[str, str]]] = {}
        for report, _ in self._replicas.values():
            held.setdefault(report.pool, {})[report.replica_id] = report.held
        wanted = {model: (*specs.values(), *self.loaded[model].values()) for model, specs in self._configured.items()}
        return AdapterNews(version=self.version, wanted=wanted, held=held)

    def report(self, report: HeldAdapters, now_s: float) -> None:
        """Take a replica's report."""
        before = self._replicas.get(report.replica_id)
        self._replicas[report.replica_id] = (report, now_s)
        if before is None or before[0] != report:
            self.version += 1

    def drop_silent(self, now_s: float) -> None:
        """Forget replicas that have not reported for long."""
        kept = {name: entry for name, entry in self._replicas.items() if now_s - entry[1] <= SILENCE_S}
        if len(kept) < len(self._replicas):
            self._replicas = kept
            self.version += 1

    def drop(self, replica_id: str) -> None:
        """Forget a replica."""
        if self._replicas.pop(replica_id, None) is not None:
            self.version += 1

    def replicas(self) -> Iterator[HeldAdapters]:
        """The last report of each replica."""
        return (report for report, _ in self._replicas.values())

    def want(self, model: str, name: str, path: str, *, is_in_place: bool) -> AdapterSpec | AdapterFault:
        """Want an adapter from now on. With ``is_in_place``, one that is loaded already is loaded again."""
        before = self.loaded[model].get(name)
        if (found := self.news().find(name)) is not None and not (is_in_place and before is not None):
            where = "in the configuration" if found[1].name in self._configured[found[0]] else "loaded"
            remedy = "unload it first, or set load_inplace" if where == "loaded" else "give it another name"
            return AdapterFault(kind=FaultKind.TAKEN, message=f"the adapter {name!r} is already {where}: {remedy}")
        spec = AdapterSpec(name=name, path=path, revision=self.version)
        self.loaded[model][name] = spec
        self.version += 1
        return spec

    def restore(self, model: str, name: str, before: AdapterSpec | None) -> None:
        """Want what was wanted before a try."""
        if before is None:
            self.loaded[model].pop(name, None)
        else:
            self.loaded[model][name] = before
        self.version += 1

    def forget(self, name: str) -> AdapterFault | None:
        """Want an adapter no longer. Returns why it stays; ``None``: it goes."""
        if any(name in specs for specs in self._configured.values()):
            message = f"the adapter {name!r} is in the configuration: remove it from model.adapters, and deploy again"
            return AdapterFault(kind=FaultKind.FIXED, message=message)
        for specs in self.loaded.values():
            if specs.pop(name, None) is not None:
                self.version += 1
                return None
        return AdapterFault(kind=FaultKind.MISSING, message=f"the adapter {name!r} cannot be found")

    def is_tried(self, model: str, spec: AdapterSpec) -> bool:
        """Whether every replica of the model has tried to load an adapter."""
        reports = [report for report in self.replicas() if report.model == model]
        return all(report.tried.get(spec.name) == spec.revision for report in reports)

    def fault(self, model: str, spec: AdapterSpec) -> AdapterFault | None:
        """Why a replica of the model could not load an adapter; ``None``: none has reported a fault."""
        reports = [
            report
            for report in self.replicas()
            if report.model == model and report.tried.get(spec.name) == spec.revision
        ]
        for report in reports:
            if spec.name in report.faults:
                return report.faults[spec.name]
        identities = {report.held.get(spec.name) for report in reports}
        if len(identities) > 1:
            message = f"the files of {spec.name!r} in {spec.path} differ between nodes: copy the same ones to all"
            return AdapterFault(kind=FaultKind.UNFIT, message=message)
        return None
