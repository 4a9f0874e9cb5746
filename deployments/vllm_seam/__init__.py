"""The private parts of vLLM and NIXL that Tandem uses or replaces.

Enters: vLLM and NIXL of exactly the pinned versions. Leaves: functions that say what they need of them and what happens
without it (``docs/seams.md`` lists them). No other room reaches into ``vllm.v1``, ``vllm.distributed`` or ``nixl``.
"""
