"""The private parts of vLLM and NIXL that Tandem uses or replaces.

Enters: vLLM and NIXL of exactly the pinned versions. Leaves: functions that name the parts they need, and what happens
without them (``docs/seams.md``). No other room uses ``vllm.v1``, ``vllm.distributed`` or ``nixl``.
"""
