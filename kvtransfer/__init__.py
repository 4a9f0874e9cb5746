"""How KV moves from prefill to decode: roles, switches and link tiers, connector settings, cost and health of links.

Enter: settings, node labels, results of pulls. Leave: vLLM's connector settings, distances, links to avoid. Pure.

A *pull* is the transfer of one prompt's KV: the decode engine reads it from a prefill engine over NIXL. A *link* is the
connection of one decode replica to one prefill replica. The *levels* (or tiers) above a node are its S0 switch (rack),
S1 switch (minipod), S2 switch (bigpod), cluster and data centre.
"""
