"""The demonstration of autoscaling: compressed days of requests on emulated engines.

In: the product as a user runs it. Out: a table and a picture.
"""
