"""Actors of an application beside its replicas: the coordinator, the health board, and the coordinator's metrics.

Enter: configurations, cycles of plans, observations of callers. Leave: settings, status, admitted and ejected replicas.
"""
