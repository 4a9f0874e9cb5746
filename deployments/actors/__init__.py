"""An application's actors beside its replicas: the coordinator with its metrics, and the health board.

Enter: configurations, cycles of plans, observations of callers. Leave: settings, status, admitted and ejected replicas.
"""
