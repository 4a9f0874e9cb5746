"""Measures real engines of both roles, linked as in production, and makes their ``EngineProfile``.

Enters: a group of a configuration. Leaves: a profile, and a file with all measured points, so that a run goes on where
it was interrupted.
"""
