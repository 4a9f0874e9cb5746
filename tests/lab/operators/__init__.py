"""Times of single operators of transformer layers on a GPU, for the operator-level planner.

In: torch, numpy, the standard library and, where installed, pynvml; nothing else of the repository, since the machine
with the GPU has none of its dependencies. Out: at most seven small files under ``--out``: times of operators, slowdowns
of pairs, power, times by share of SMs, links, skipped points, and how it was measured. Settings of the GPU are read
and never changed.
"""
