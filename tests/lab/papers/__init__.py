"""The experiments of papers, on our decision core and simulator: what one paper claims, and what we get (pure).

In: ``autoscale`` and the numbers of a paper. Out: a row (``Claim``) for each claim.
"""
