"""LoRA adapters at the endpoint: their names beside those of the models, and the replicas that can answer with one."""

import asyncio
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from deployments.config import ModelConfig
from deployments.endpoint.model_card import model_card
from deployments.wire.openai_errors import OpenAIError
from router.adapters import AdapterNews, AdapterSpec
from router.ray_adapters import AdapterFeed

_FIRST_NEWS_S = 5.0  # longest wait of an endpoint that starts for the board's adapters, seconds
_POLL_S = 0.05  # seconds between two checks whether a replica has reported its adapters
_REPORT_S = 5.0  # time, seconds, that replicas which have just started have for their first report
_RETRY_S = 5.0  # Retry-After, seconds, of a request whose adapter is not loaded in both roles


class _Group(Protocol):
    name: str
    pool: str
    prefill_pool: str | None


class _Model(Protocol):
    @property
    def model_id(self) -> str: ...

    @property
    def groups(self) -> Sequence[_Group]: ...

    def serving(self) -> Sequence[_Group]: ...


class _Feed(Protocol):
    @property
    def news(self) -> AdapterNews: ...


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter that a request names."""

    name: str
    feed: _Feed

    def identity(self, model: _Model) -> str:
        """The name with a digest of the adapter's files; while it is loaded again, one of both."""
        identities = [one for group in _groups(model) for one in self.feed.news.identities(group.pool, self.name)]
        return max(identities, default=f"{self.name}@")

    def lacking(self, pool: str) -> frozenset[str]:
        """Replicas of a decode pool without the adapter."""
        return self.feed.news.lacking(pool, self.name)

    def lacking_groups(self, model: _Model) -> frozenset[str]:
        """Names of a model's groups in which not both roles have the adapter."""
        return frozenset(self._faults(model))

    async def check(self, model: _Model) -> None:
        """Raises OpenAIError: 503, no group has the adapter in both roles."""
        until_s = time.monotonic() + _REPORT_S
        while len(faults := self._faults(model)) == len(_groups(model)):
            if self._have_reported(model) or time.monotonic() > until_s:
                why = "; ".join(f"group {name}: {fault}" for name, fault in faults.items())
                raise OpenAIError(
                    503,
                    f"the adapter {self.name!r} cannot answer now ({why}): load it, or send the request again",
                    param="model",
                    code="adapter_not_loaded",
                    retry_after_s=_RETRY_S,
                )
            await asyncio.sleep(_POLL_S)

    def _faults(self, model: _Model) -> dict[str, str]:
        """Why groups cannot answer with the adapter, by name; groups that can are left out."""
        return {group.name: fault for group in _groups(model) if (fault := self._fault(group)) is not None}

    def _have_reported(self, model: _Model) -> bool:
        """Whether some replica of each pool has reported its adapters."""
        held = self.feed.news.held
        return all(
            held.get(pool) for group in _groups(model) for pool in (group.pool, group.prefill_pool) if pool is not None
        )

    def _fault(self, group: _Group) -> str | None:
        """Why a group cannot answer with the adapter; ``None``: it can."""
        news = self.feed.news
        decode = news.identities(group.pool, self.name)
        if group.prefill_pool is None:
            return None if decode else "its replicas do not have it"
        prefill = news.identities(group.prefill_pool, self.name)
        if decode & prefill:
            return None
        if decode and prefill:
            return "its prefill and decode replicas have other files of it"
        if not decode and not prefill:
            return "its replicas do not have it"
        return f"its {'prefill' if decode else 'decode'} replicas do not have it"


def _groups(model: _Model) -> Sequence[_Group]:
    """The groups that may answer."""
    return model.serving() or model.groups


class AdapterNames:
    """The adapters of all models, as this replica of the endpoint knows them."""

    def __init__(self, feed: _Feed, models: Collection[ModelConfig]) -> None:
        """``feed``: the board's news. Without news the adapters are those of the configuration."""
        self._feed = feed
        self._configured = {
            model.id: tuple(AdapterSpec(name=one.id, path=str(one.path)) for one in model.adapters) for model in models
        }

    @classmethod
    def none(cls) -> "AdapterNames":
        """No adapters: the models have none."""
        return cls(_NoFeed(), ())

    @classmethod
    async def follow(cls, app: str, models: Collection[ModelConfig]) -> "AdapterNames":
        """The adapters of an application's models, which follow its board."""
        with_adapters = [model for model in models if model.has_adapters]
        if not with_adapters:
            return cls.none()
        feed = AdapterFeed(app)
        names = cls(feed, with_adapters)
        names.following = asyncio.create_task(feed.run())
        with suppress(TimeoutError):
            await asyncio.wait_for(feed.has_news.wait(), _FIRST_NEWS_S)
        return names

    following: asyncio.Task[None] | None = None  # kept, since the loop itself has only weak references to its tasks

    def named(self, name: str) -> NamedAdapter | None:
        """The adapter of a name; ``None``: there is none."""
        return None if self._find(name) is None else NamedAdapter(name, self._feed)

    def base_of(self, name: str) -> str:
        """The model of an adapter; of another name: the name itself."""
        found = self._find(name)
        return name if found is None else found[0]

    def names(self) -> list[str]:
        """Names of all adapters."""
        return [spec.name for specs in self._wanted.values() for spec in specs]

    def card(self, name: str, created_s: int) -> dict[str, Any] | None:
        """The model card of an adapter; ``None``: there is none of this name."""
        found = self._find(name)
        return None if found is None else _card(*found, created_s)

    def cards(self, created_s: int) -> list[dict[str, Any]]:
        """The model cards of all adapters."""
        return [_card(model, spec, created_s) for model, spec in self._specs()]

    @property
    def _wanted(self) -> Mapping[str, tuple[AdapterSpec, ...]]:
        return self._feed.news.wanted or self._configured

    def _specs(self) -> Iterator[tuple[str, AdapterSpec]]:
        return ((model, spec) for model, specs in self._wanted.items() for spec in specs)

    def _find(self, name: str) -> tuple[str, AdapterSpec] | None:
        return next(((model, spec) for model, spec in self._specs() if spec.name == name), None)


class _NoFeed:
    """The feed of an application without adapters."""

    news = AdapterNews()


def _card(model: str, spec: AdapterSpec, created_s: int) -> dict[str, Any]:
    return model_card(spec.name, root=spec.path, max_model_len=None, created_s=created_s, parent=model)
