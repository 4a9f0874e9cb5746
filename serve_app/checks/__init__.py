"""Checks of a configuration: ours, Ray's schema, vLLM's arguments.

Enter: a YAML or a mapping. Leave: an ``AppConfig``, a JSON schema, or one line that says what is wrong.
"""
