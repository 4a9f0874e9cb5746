"""Prefill and decode replicas: the path of a request between the endpoint and vLLM's engine.

Enters: a ``DecodeRequest`` at decode, which streams frames back. Decode sends a prompt to prefill as a
``PrefillRequest`` and gets a ``PrefillResult``, which names its KV. The room imports nothing of endpoint.

A handoff: prefill computes a prompt and keeps its KV, and decode's engine pulls the KV. Prefill keeps KV for a lease,
which decode's heartbeats extend. A frame is a piece of an answer: an event of a stream, or a whole JSON body.
"""
