"""How near the simulator comes to real engines, papers and public traces.

In: the simulator, real engines, traces and ``papers``. Out: figures with their errors and tolerances.
"""
