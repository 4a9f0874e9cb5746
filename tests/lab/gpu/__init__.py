"""Tandem on one real GPU: prefill and decode share it, each with its own engine and KV.

In: a machine with one GPU and the stack (nothing here runs in CI). Out: JSON with latencies and what NIXL moved, and an
``EngineProfile``. Weights are random (vLLM's ``load_format: dummy``): times are those of the model's shape, texts mean
nothing.
"""
