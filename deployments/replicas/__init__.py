"""Prefill and decode replicas: the path of a request between the endpoint and vLLM's engine.

Enters: a ``DecodeRequest`` at decode, which streams frames back. Decode sends a prompt to prefill as a
``PrefillRequest`` and gets a ``PrefillResult``, which names its KV. The room imports nothing of endpoint.
"""
