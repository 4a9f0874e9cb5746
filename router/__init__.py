"""Routing: which replica serves a request, where its prompt is prefilled, which requests wait or are refused.

Enter: numbers about replicas and requests, and the coordinator's membership. Leave: a choice, or a refusal.
Pure except `ray_*.py`; it does not know autoscaling, engines or HTTP.
"""
