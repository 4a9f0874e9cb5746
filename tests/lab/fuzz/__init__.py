"""Bad requests to every route of an application, on emulated and on real engines.

In: hostile values and raw wires, bodies drawn by schemathesis, and ``stand``. Out: counts, memory and findings.
"""
