"""Prefill and decode replicas: what a request meets between the endpoint and vLLM's engine.

A ``DecodeRequest`` enters at decode, which streams frames back. A prompt goes on to prefill as a ``PrefillRequest``,
and a ``PrefillResult`` with the place of its KV comes back. The room imports nothing of endpoint.
"""
