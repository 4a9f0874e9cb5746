"""The LoRA adapters of one replica's engine: it loads those that are wanted, and reports what it has.

vLLM tells the KV of adapters apart by name alone. So the engine gets an adapter under its identity: its name with a
digest of its files. The KV of an adapter is then never used for another one that takes over its name. An engine ends if
it needs the files of an adapter again and they are gone. So it keeps all adapters in memory, and a further one is
refused.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest

from deployments.adapter_paths import OutsideFolderError, allowed_path
from deployments.replicas.adapter_files import AdapterError, load_checked
from router.adapters import AdapterFault, AdapterNews, AdapterSpec, FaultKind, HeldAdapters, identity_of, name_of
from router.ray_actors import find_actor, follow
from router.ray_adapters import INTERVAL_S, adapter_board_key

logger = logging.getLogger(__name__)

_FIRST_NEWS_S = 10.0  # longest wait of a replica that starts for the board's adapters, seconds


@dataclass(slots=True, eq=False)
class _Loaded:
    """An adapter in the engine."""

    spec: AdapterSpec
    request: LoRARequest  # as the engine has it; its name is the identity
    answers: int = 0  # answers that use it now
    is_unused: asyncio.Event = field(default_factory=asyncio.Event)  # set while no answer uses it

    def __post_init__(self) -> None:
        self.is_unused.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPlaces:
    """Where the adapters of a model are: the configured ones, and the folder of those that come at run time."""

    configured: Mapping[str, str]  # paths by name
    folder: str | None = None  # ``None``: none comes at run time

    def folder_of(self, spec: AdapterSpec) -> Path:
        """The folder with an adapter's files. Raises AdapterError: it is outside of the allowed one."""
        if self.configured.get(spec.name) == spec.path:
            return Path(spec.path)
        if self.folder is None:
            raise AdapterError(FaultKind.OUTSIDE, "the model has no adapters_folder")
        try:
            return allowed_path(Path(self.folder), spec.path)
        except OutsideFolderError as error:
            raise AdapterError(FaultKind.OUTSIDE, f"lora_path {error}") from None


class AdapterHost:
    """Loads and unloads the adapters of one engine."""

    def __init__(
        self, client: Any, places: AdapterPlaces, *, base: Path | None, registry: dict[str, LoRARequest]
    ) -> None:
        """An engine without adapters.

        Args:
            client: the engine's ``AsyncLLM``.
            places: where adapters are.
            base: folder of the model's weights; ``None``: it is not known.
            registry: the adapters that vLLM's OpenAI layer takes for models, by public name.
        """
        lora = client.vllm_config.lora_config
        self._most_rank, self._most_adapters = int(lora.max_lora_rank), int(lora.max_cpu_loras)
        self._client, self._places, self._base = client, places, base
        self._registry = registry
        self._loaded: dict[str, _Loaded] = {}  # by public name
        self._leaving: set[asyncio.Task[None]] = set()  # removals that wait for answers
        self._tried: dict[str, int] = {}
        self._faults: dict[str, AdapterFault] = {}
        self._last_id = 0
        self.news = AdapterNews()

    def identity(self, name: str) -> str | None:
        """The identity of an adapter; ``None``: this replica does not have it."""
        loaded = self._loaded.get(name)
        return None if loaded is None else loaded.request.lora_name

    def held(self) -> dict[str, str]:
        """Identities of this replica's adapters by name."""
        return {name: loaded.request.lora_name for name, loaded in self._loaded.items()}

    @contextmanager
    def use(self, name: str) -> Iterator[LoRARequest | None]:
        """Context of an answer: the adapter as the engine has it; ``None``: this replica does not have it."""
        loaded = self._loaded.get(name)
        if loaded is None:
            yield None
            return
        loaded.answers += 1
        loaded.is_unused.clear()
        try:
            yield loaded.request
        finally:
            loaded.answers -= 1
            if not loaded.answers:
                loaded.is_unused.set()

    def use_identity(self, identity: str) -> AbstractContextManager[LoRARequest | None]:
        """As ``use``, but only for an adapter with the same files."""
        name = name_of(identity)
        return self.use(name) if self.identity(name) == identity else nullcontext()

    def refusal(self, identity: str, *, is_resumed: bool) -> str | None:
        """Why this replica cannot answer with an adapter; ``None``: it can. A resumed answer needs the same files."""
        own = self.identity(name_of(identity))
        if own is None:
            return f"the adapter {name_of(identity)!r} is not loaded on this replica; the request may be sent again"
        if is_resumed and own != identity:
            return f"the adapter {name_of(identity)!r} was loaded again with other files, so the stream cannot continue"
        return None

    def lacking(self, pool: str, identity: str) -> frozenset[str] | None:
        """Replicas of a pool without an adapter; ``None``: none is known to have it."""
        name = name_of(identity)
        has_any = bool(self.news.holders(pool, name, identity))
        return self.news.lacking(pool, name, identity) if has_any else None

    def generating(self, generate: Any, note: Callable[[AsyncGenerator[Any, None]], None]) -> Any:
        """``generate`` of an engine, for callers that know an adapter by its public name.

        ``note``: called with each answer, so that it ends with its client.
        """

        def outputs(*arguments: Any, lora_request: LoRARequest | None = None, **kwargs: Any) -> Any:
            if lora_request is None:
                return generate(*arguments, **kwargs)
            answer = self._with_adapter(generate, lora_request, arguments, kwargs)
            note(answer)
            return answer

        return outputs

    async def _with_adapter(
        self, generate: Any, public: LoRARequest, arguments: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        with self.use(public.lora_name) as own:
            # Without its own, the adapter has just been unloaded, and vLLM's layer had it before.
            if own is None:
                raise ValueError(f"the adapter {public.lora_name!r} has just been unloaded")
            async with aclosing(generate(*arguments, lora_request=own, **kwargs)) as outputs:
                async for output in outputs:
                    yield output

    async def load(self, spec: AdapterSpec) -> None:
        """Load an adapter, in the place of an earlier one of its name. Raises AdapterError: it cannot be loaded."""
        before = self._loaded.get(spec.name)
        folder = self._places.folder_of(spec)
        digest = await asyncio.to_thread(load_checked, spec.name, folder, most_rank=self._most_rank, base=self._base)
        identity = identity_of(spec.name, digest)
        if before is not None and before.request.lora_name == identity:
            before.spec = spec
            return
        if len(self._loaded) + len(self._leaving) >= self._most_adapters:
            raise AdapterError(
                FaultKind.FULL,
                f"the engines have {self._most_adapters} adapters, and keep no more: unload one, or set a higher "
                "max_cpu_loras in engine_kwargs",
            )
        self._last_id += 1
        request = LoRARequest(lora_name=identity, lora_int_id=self._last_id, lora_path=str(folder))
        try:
            await self._client.add_lora(request)
        except Exception as error:
            kind = FaultKind.FAILED if self._client.errored else FaultKind.UNFIT
            raise AdapterError(kind, f"the engine refuses the adapter {spec.name!r}: {_cause(error)}") from error
        self._loaded[spec.name] = _Loaded(spec, request)
        # For vLLM's own layer: its answers have the public name.
        self._registry[spec.name] = LoRARequest(
            lora_name=spec.name, lora_int_id=request.lora_int_id, lora_path=str(folder)
        )
        if before is not None:
            self._remove(before)

    def unload(self, name: str) -> None:
        """Take an adapter from new requests; the engine removes it once no answer uses it."""
        self._registry.pop(name, None)
        if (loaded := self._loaded.pop(name, None)) is not None:
            self._remove(loaded)

    def _remove(self, loaded: _Loaded) -> None:
        task = asyncio.create_task(self._removed(loaded))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _removed(self, loaded: _Loaded) -> None:
        await loaded.is_unused.wait()
        with suppress(Exception):  # the engine has died
            await self._client.remove_lora(loaded.request.lora_int_id)

    async def load_configured(self) -> None:
        """Load the adapters of the configuration. Raises AdapterError: one of them cannot be loaded."""
        for name, path in self._places.configured.items():
            await self.load(AdapterSpec(name=name, path=path))
            self._tried[name] = 0

    async def load_wanted(self, app: str, model: str, pool: str, replica_id: str) -> None:
        """Load what the board wants now; without a board, nothing."""

        async def once() -> None:
            board = await asyncio.to_thread(find_actor, adapter_board_key(app))
            if board is not None:
                await self._take(await board.watch.remote(-1), model)
                await board.sync.remote(self._report(model, pool, replica_id), -1)

        try:
            await asyncio.wait_for(once(), _FIRST_NEWS_S)
        except Exception as error:  # it has them a little later
            logger.warning("the adapters that are loaded at run time are not known yet: %r", error)

    async def run(self, app: str, model: str, pool: str, replica_id: str) -> None:
        """Load what the board wants, and report it, until this process leaves Ray."""

        async def ask(board: Any, version: int) -> int:
            news = await board.sync.remote(self._report(model, pool, replica_id), version)
            await self._take(news, model)
            await asyncio.sleep(INTERVAL_S)
            return int(news.version)

        await follow(adapter_board_key(app), ask, lambda: None)

    def _report(self, model: str, pool: str, replica_id: str) -> HeldAdapters:
        return HeldAdapters(
            model=model,
            pool=pool,
            replica_id=replica_id,
            held=self.held(),
            tried=dict(self._tried),
            faults=dict(self._faults),
        )

    async def _take(self, news: AdapterNews, model: str) -> None:
        self.news = news
        wanted = {spec.name: spec for spec in news.wanted.get(model, ())}
        for name in [name for name in self._loaded if name not in wanted]:
            self.unload(name)
        for name in [name for name in self._tried if name not in wanted]:
            del self._tried[name]
            self._faults.pop(name, None)
        for spec in wanted.values():
            if self._tried.get(spec.name) != spec.revision:
                await self._try(spec)

    async def _try(self, spec: AdapterSpec) -> None:
        """Load an adapter, and note the outcome."""
        self._faults.pop(spec.name, None)
        try:
            await self.load(spec)
        except AdapterError as error:
            logger.warning("%s", error)
            self._faults[spec.name] = error.fault
        except Exception as error:
            logger.exception("the adapter %r cannot be loaded", spec.name)
            message = f"the adapter {spec.name!r} cannot be loaded: {type(error).__name__}: {error}"
            self._faults[spec.name] = AdapterFault(kind=FaultKind.FAILED, message=message)
        self._tried[spec.name] = spec.revision


def _cause(error: Exception) -> str:
    """The reason in an error of ``add_lora``, without the frames of the engine's processes around it."""
    text = str(error)
    for before, after in (("Call to add_lora method failed: ", ""), ("Worker failed with error '", "', please check")):
        if before in text:
            text = text.partition(before)[2]
            text = text.rpartition(after)[0] if after and after in text else text
    return text
