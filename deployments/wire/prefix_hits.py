"""Tokens that a router expected in the cache of the replica that it chose, against those that the engine found."""

from deployments.metrics import PREFIX_EXPECTED, PREFIX_FALSE_HITS, PREFIX_FOUND
from kvtransfer.topology import Role
from router import known_pools
from router.held_pieces import found_tokens
from router.routing import Routing


def note_found(
    pool: str, role: Role, routing: Routing, *, input_tokens: int, cached_tokens: int, block_tokens: int
) -> None:
    """Count what an engine found, and correct this process's routers of the pool.

    Args:
        pool: name of the deployment.
        role: of its replicas.
        routing: of the call, with the choice that the router made.
        input_tokens: the prompt's tokens.
        cached_tokens: those of them that the engine had cached.
        block_tokens: the engine's block size.
    """
    chosen, prompt = routing.chosen(), routing.prompt
    if chosen is None or prompt is None:
        return
    expected = chosen.replica.overlap_tokens
    found = found_tokens(prompt, input_tokens=input_tokens, cached_tokens=cached_tokens, block_tokens=block_tokens)
    PREFIX_EXPECTED.labels(role).inc(expected)
    PREFIX_FOUND.labels(role).inc(min(expected, found))
    if found < expected:
        PREFIX_FALSE_HITS.labels(role).inc()
        known_pools.note_false_hit(pool, chosen.replica, prompt, found)
