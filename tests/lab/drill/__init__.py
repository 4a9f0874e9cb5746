"""Drills and the soak: break one part of a running application under load, and check every token of every answer.

In: the product, processes of its local cluster, and ``stand``. Out: a row for each fault.
"""
