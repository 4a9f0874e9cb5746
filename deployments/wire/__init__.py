"""Messages between processes, and the calls that carry them.

Typed messages (frames, handoff), OpenAI's errors, the record of a stream, and the call of a replica under a deadline.
Endpoint and replicas both import this room; it imports neither, and no vllm.
"""
