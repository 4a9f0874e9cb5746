"""The OpenAI-compatible endpoint: from a client's HTTP request to a decode replica, and back.

A request passes gate (drain, key, limits), request_body and json_body (the body and its size), gate again (admission)
and relay (group, retries, one replica). It leaves as a ``DecodeRequest``, and its answer comes back as frames: a frame
is one event of a stream, or a whole JSON body. The room imports neither vllm nor ``deployments.replicas``.

A group is a decode pool with the prefill pool that computes prompts for it, if it has one; a pool is one Serve
deployment. A drain refuses new requests before the application is deleted.
"""
