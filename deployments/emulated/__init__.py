"""Emulated engines, which wait as long as a real one computes.

Enters: an EngineProfile and requests of Ray Serve LLM. Leaves: tokens at the profile's times.
"""
