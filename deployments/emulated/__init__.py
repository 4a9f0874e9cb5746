"""Engines that keep time instead of computing, and the profiler that measures real ones for them.

Enters: an EngineProfile and requests of Ray Serve LLM. Leaves: tokens at the profile's times; or a new EngineProfile.
"""
