"""Routing: which replica serves a request, where its prompt is prefilled, which requests wait or are refused.

Enter: numbers about replicas and requests, and the coordinator's membership. Leave: a choice, or a refusal.
Pure except `ray_*.py`; it does not know autoscaling, engines or HTTP.

A *group* is a set of prefill and decode replicas between which KV moves; its replicas of one role are a *pool*. The
*endpoint* is the deployment that clients talk to; each of its replicas does admission by itself. The *plan* of the
autoscaler says which replicas are *admitted*, which means that they get requests. An application's *coordinator* is the
actor that sends the plan to the routers. A *caller* is a process that sends requests to a pool: a replica of the
endpoint, or a decode replica that sends prompts to prefill.
"""
