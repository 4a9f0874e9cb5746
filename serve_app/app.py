"""``serve_app.app:build``: the import path that Serve's YAML names."""

import logging
from typing import Any

from ray.serve import Application

from serve_app.checks.yaml_checks import parse_app_config

logger = logging.getLogger(__name__)


def build(args: dict[str, Any]) -> Application:
    """The application of one ``args`` mapping; raises ConfigError with the field, its value and what to do."""
    from deployments.graph import build_graph  # not above: it imports vllm, which takes seconds

    config = parse_app_config(args)
    for sentence in (each for service in config.services for each in service.profile_differences()):
        logger.warning("%s", sentence)
    return build_graph(
        config.services,
        kv_transfer=config.kv_transfer,
        ingress=config.ingress,
        topology=config.topology,
        start_hosts=config.start_hosts,
        keeps_settings=config.keeps_settings,
    )
