"""The speed and the size of one engine: its profile, the engine model, and formulas on both (pure).

Enters: an EngineProfile, lengths and rates. Leaves: seconds, batches, replicas that a load keeps busy, optimal ratios.
This room knows no pool, no snapshot and no policy. A request's context is the tokens whose KV the engine holds: its
prompt and its output so far.
"""
