"""``serve_app.app:build``: the import path that Serve's YAML names."""

from typing import Any

from ray.serve import Application

from serve_app.config import AppConfig
from serve_app.validate import parse_app_config


def build(args: dict[str, Any]) -> Application:
    """The application of one ``args`` mapping.

    Raises:
        ValueError: the configuration is wrong; says which field, its value and what to do.
    """
    return build_app(parse_app_config(args))


def build_app(config: AppConfig) -> Application:
    """The application of a checked configuration."""
    from deployments.graph import (
        Service,
        build_graph,
    )  # imports vllm: seconds, and only needed where the graph is built

    return build_graph(
        {
            service.model.id: Service(
                model=service.model,
                groups=service.groups,
                engine_kwargs=service.engine_kwargs,
                router=service.router,
                admission=service.admission,
                autoscale=service.autoscale,
                pools=service.pools(config.topology),
            )
            for service in config.services
        },
        kv_transfer=config.kv_transfer,
        ingress=config.ingress,
        topology=config.topology,
    )
