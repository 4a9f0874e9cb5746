"""How fast one engine is and how much it holds: profiles, the engine model, and formulas on both (pure).

Enters: an EngineProfile, lengths and rates. Leaves: seconds, batches, replicas that a load keeps busy, optimal ratios.
It knows no pool, no snapshot and no policy.
"""
