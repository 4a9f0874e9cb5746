"""The pressure test: how much load counts of replicas serve within the objectives, and what is best for that (pure).

Enters: results of steps, each of which was measured on a running application or simulated. Leaves: the rate of the next
step, the highest good rate of each pair of counts, and the values of the signals there.

Source: HeteroScale Algorithm 1, PRESSURETEST.
"""
