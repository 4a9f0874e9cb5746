"""The OpenAI-compatible endpoint: from a client's HTTP request to a decode replica, and back.

A request passes gate (drain, key, limits), request_body and json_body (the body and its size), gate again (admission)
and relay (group, retries, one replica). It leaves as a ``DecodeRequest``, and its answer comes back as frames. The room
imports neither vllm nor ``deployments.replicas``.
"""
