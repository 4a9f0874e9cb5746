"""An application's actors beside its replicas: the coordinator with its metrics, and the health board.

Enter: configurations, cycles of plans, observations of callers. Leave: settings, status, admitted and ejected replicas.
Admitted replicas get requests by the autoscaler's plan. Ejected ones get none for a while, since they have failed.
"""
