"""How KV moves: roles, links and the connector that carries blocks from prefill to decode (pure; leftmost)."""
