"""How KV moves from prefill to decode: roles, switches and link tiers, connector settings, cost and health of links.

Enter: settings, node labels, results of pulls. Leave: vLLM's connector settings, distances, links to avoid. Pure.
"""
