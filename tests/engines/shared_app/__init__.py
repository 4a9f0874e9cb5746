"""Tests that share one application on real engines: it starts before the first test and stops after the last.

What may enter: tests that send requests and read figures, or break what the application repairs without a restart.
"""
