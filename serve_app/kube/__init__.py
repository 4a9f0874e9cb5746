"""Kubernetes: a RayService and its worker groups from a configuration.

Enter: a checked configuration. Leave: a manifest as YAML.
"""
