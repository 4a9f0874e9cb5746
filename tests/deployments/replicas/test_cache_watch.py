"""What a replica knows of its engine's cache, whatever events are lost, repeated or of a new engine."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from router.batch_order import Turn
from router.engine_blocks import BlockEvent, BlocksCleared, BlocksRemoved, BlocksStored, EventBatch
from router.held_pieces import PieceChanges
from router.prompt_keys import PromptKeys

pytestmark = pytest.mark.ray

SIZE = 4
IDS = list(range(100, 124))


def batch(number: int, *events: BlockEvent, at_s: float | None = None) -> EventBatch:
    return EventBatch(number=number, at_s=float(number) if at_s is None else at_s, events=events)


def stored(first: int, count: int) -> BlocksStored:
    """Blocks of ``IDS``, which the engine names by their number."""
    return BlocksStored(
        hashes=tuple(range(first, first + count)),
        parent=first - 1 if first else None,
        token_ids=IDS[first * SIZE : (first + count) * SIZE],
        block_tokens=SIZE,
    )


class Engine:
    """An engine whose batches come as ``sent``, and which has kept some for a replay."""

    def __init__(self, *sent: EventBatch, kept: tuple[EventBatch, ...] = ()) -> None:
        self.sent, self.kept = sent, kept
        self.replays: list[int] = []

    async def batches(self) -> AsyncIterator[EventBatch]:
        for one in self.sent:
            yield one

    async def again(self, first: int) -> list[EventBatch]:
        self.replays.append(first)
        return [one for one in self.kept if one.number >= first]


def watch() -> Any:
    from deployments.replicas.cache_watch import CacheWatch

    return CacheWatch(block_tokens=SIZE, max_blocks=100, piece_tokens=16)


def lost(turn: Turn) -> float:
    from deployments.metrics import CACHE_EVENTS_LOST

    return float(CACHE_EVENTS_LOST.labels(turn)._value.get())


async def cached(engine: Engine, cache: Any = None) -> int:
    """Tokens of ``IDS`` that are known as cached after all batches; the last of its 24 tokens never counts."""
    cache = cache or watch()
    await cache.follow(engine)
    return int(cache.index.cached_tokens(cache.blocks(IDS)))


async def test_stored_and_removed_blocks_of_batches_in_order() -> None:
    assert await cached(Engine(batch(0, stored(0, 3)), batch(1, stored(3, 1)))) == 16
    assert await cached(Engine(batch(0, stored(0, 3)), batch(1, BlocksRemoved(hashes=(1,))))) == 4
    assert await cached(Engine(batch(0, stored(0, 3)), batch(1, BlocksCleared()))) == 0


async def test_missing_batches_are_had_from_the_replay() -> None:
    before = lost(Turn.GAP)
    first, second, third = batch(0, stored(0, 1)), batch(1, stored(1, 1)), batch(2, stored(2, 1))
    engine = Engine(first, third, kept=(first, second, third))
    assert await cached(engine) == 12
    assert engine.replays == [1]
    assert lost(Turn.GAP) == before + 1


async def test_a_subscriber_that_came_late_learns_the_beginning() -> None:
    first, second = batch(0, stored(0, 2)), batch(1, stored(2, 1))
    assert await cached(Engine(second, kept=(first,))) == 12


async def test_if_missing_batches_are_gone_the_cache_is_learnt_anew() -> None:
    engine = Engine(batch(0, stored(0, 2)), batch(5, stored(0, 1)), batch(6, stored(1, 1)), kept=(batch(4),))
    cache = watch()
    assert await cached(engine, cache) == 8
    cache = watch()
    assert await cached(Engine(batch(0, stored(0, 4)), batch(5, BlocksRemoved(hashes=(77,)))), cache) == 0


async def test_a_batch_that_comes_twice_counts_once() -> None:
    before = lost(Turn.LATE)
    first, removal = batch(0, stored(0, 1)), batch(1, BlocksRemoved(hashes=(0,)))
    assert await cached(Engine(first, first, removal)) == 0
    assert lost(Turn.LATE) == before + 1


async def test_a_new_engine_has_nothing_of_the_old_one() -> None:
    before = lost(Turn.RESTART)
    engine = Engine(batch(0, stored(0, 4)), batch(1), batch(0, stored(0, 1), at_s=9.0))
    assert await cached(engine) == 4
    assert lost(Turn.RESTART) == before + 1


async def test_an_error_of_the_events_leaves_what_the_replica_adds_itself() -> None:
    class Broken(Engine):
        async def batches(self) -> AsyncIterator[EventBatch]:
            yield batch(0, stored(0, 1))
            raise OSError("gone")

    cache = watch()
    assert await cached(Broken(), cache) == 4
    cache.computed(cache.blocks(IDS), None)
    assert cache.index.cached_tokens(cache.blocks(IDS)) == 20


async def test_events_move_the_pieces_that_are_reported() -> None:
    cache = watch()
    pieces = PromptKeys(keys=(1, 2), piece_tokens=8, tokens=len(IDS))
    cache.name(pieces, cache.blocks(IDS))
    await cache.follow(Engine(batch(0, stored(0, 3))))
    assert cache.pieces.take() == PieceChanges(stored=(1,), coming=(2,))
    await cache.follow(Engine(batch(1, BlocksRemoved(hashes=(1,)))))
    assert cache.pieces.take() == PieceChanges(removed=(1,))


def test_blocks_that_the_engine_did_not_find_are_reported_anew() -> None:
    cache = watch()
    blocks, pieces = cache.blocks(IDS), PromptKeys(keys=(1, 2), piece_tokens=8, tokens=len(IDS))
    cache.computed(blocks, None)
    cache.name(pieces, blocks)
    assert sorted(cache.pieces.take().stored) == [1, 2]
    cache.computed(blocks, 8)  # it had two blocks, so the end of the first piece
    assert cache.pieces.take() == PieceChanges(stored=(2,))


async def test_blocks_that_the_engine_reports_before_its_answer_stay() -> None:
    cache = watch()
    blocks, pieces = cache.blocks(IDS), PromptKeys(keys=(1, 2), piece_tokens=8, tokens=len(IDS))
    cache.name(pieces, blocks)
    await cache.follow(Engine(batch(0, stored(0, 6))))
    cache.computed(blocks, 0)
    changes = cache.pieces.take()
    assert (sorted(changes.stored), changes.removed) == ([1, 2], ())


@pytest.mark.parametrize("prompt_tokens", [3, 4, 10])
def test_an_answer_goes_on_from_the_blocks_of_its_prompt(prompt_tokens: int) -> None:
    cache = watch()
    cache.answered(cache.blocks(IDS[:prompt_tokens], salt="blue"), IDS, salt="blue")
    assert cache.index.cached_tokens(cache.blocks(IDS, salt="blue")) == 20
    assert len(cache.index) == 6


def test_an_engine_that_reuses_no_prefix_names_no_pieces() -> None:
    from deployments.replicas.cache_watch import CacheWatch

    one = CacheWatch(block_tokens=SIZE, max_blocks=0, piece_tokens=2 * SIZE)
    one.name(PromptKeys(keys=(1, 2), piece_tokens=2 * SIZE, tokens=24), one.blocks(IDS))
    assert one.pieces.take() == PieceChanges()
