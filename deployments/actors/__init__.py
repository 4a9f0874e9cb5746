"""An application's actors beside its replicas: the coordinator with its metrics, the health board, the prefill queues.

Enter: configurations, cycles of plans, observations of callers, prompts that ask for a place. Leave: settings, status,
admitted and ejected replicas, places on prefill replicas. Admitted replicas get requests by the autoscaler's plan.
Ejected ones get none for a while, since they have failed.
"""
