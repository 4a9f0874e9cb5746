"""What experiments share: a stack to compare with, an application with fixed counts, processes and their memory.

In: the product, Ray, psutil. No experiment: those are in the other rooms, which import this one.
"""
