"""Emulated engines, which wait as long as a real one computes, and the profiler that measures real engines for them.

Enters: an EngineProfile and requests of Ray Serve LLM. Leaves: tokens at the profile's times; or a new EngineProfile.
"""
