"""The latency of one pass over the critical path of the operators: Eq. 3 (pure)."""

from collections.abc import Sequence

from autoscale.operators.demand import PlanError


def critical_path(names: Sequence[str], edges: Sequence[tuple[str, str]], seconds: Sequence[float]) -> tuple[str, ...]:
    """The path through the graph with the largest sum of ``seconds``; without edges all operators, in their order.

    ``seconds``: by operator, its T_v + W_v + C_v. Operators that no edge names are on no path but their own.

    Raises:
        PlanError: an edge names an unknown operator, or the edges have a cycle.
    """
    if not edges:
        return tuple(names)
    index = {name: place for place, name in enumerate(names)}
    for a, b in edges:
        if a not in index or b not in index:
            raise PlanError(f"edge {a} to {b}: operators are {', '.join(names)}")
    before: dict[str, list[str]] = {name: [a for a, b in edges if b == name] for name in names}
    best: dict[str, tuple[float, tuple[str, ...]]] = {}
    waiting = list(names)
    while waiting:
        ready = [name for name in waiting if all(one in best for one in before[name])]
        if not ready:
            raise PlanError(f"the edges of {', '.join(waiting)} have a cycle")
        for name in ready:
            length, path = max((best[one] for one in before[name]), key=lambda one: one[0], default=(0.0, ()))
            best[name] = length + seconds[index[name]], (*path, name)
            waiting.remove(name)
    return max(best.values(), key=lambda one: one[0])[1]


def path_s(names: Sequence[str], edges: Sequence[tuple[str, str]], seconds: Sequence[float]) -> float:
    """T_total: the sum of ``seconds`` over the critical path."""
    if not edges:
        return float(sum(seconds))
    index = {name: place for place, name in enumerate(names)}
    return float(sum(seconds[index[name]] for name in critical_path(names, edges, seconds)))
