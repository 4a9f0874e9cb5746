"""How far Tandem answers as plain vLLM does: the same requests to both, and vLLM's own tests against both.

In: vLLM's request classes, its source distribution, ``stand``. Out: answers as JSON and a table of differences.
"""
