"""Benchmarks: how fast and how cheap Tandem is, beside other stacks or an earlier checkout.

In: the product as a user runs it, and ``stand``. Out: ratios over alternating rounds, with medians.
"""
