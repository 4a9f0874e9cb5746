"""The message for a mistake in Serve's part of a YAML."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.checks.yaml_checks import ConfigError

pytestmark = pytest.mark.ray


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"http_optins": {"port": 1}}, "http_optins: Serve has no such field; did you mean 'http_options'?"),
        ({"http_options": {"prot": 1}}, "http_options.prot: Serve has no such field; did you mean 'port'?"),
        ({"http_options": {"port": "x"}}, "not a Serve config: .*http_options.port.*integer"),
        ({"http_options": {"request_timeout_s": 5}}, "http_options.request_timeout_s: .*ingress.request_timeout_s"),
        ({"proxy_location": "Disabled"}, "proxy_location: Disabled leaves no endpoint; use HeadOnly or EveryNode"),
        ({"proxy_location": "Nowhere"}, "not a Serve config: .*proxy_location"),
        ({"applications": []}, "exactly one application"),
    ],
)
def test_a_wrong_field_of_serve_is_named(root: Path, change: dict[str, Any], said: str) -> None:
    from serve_app.checks.ray_schema import single_app_config

    document = {**yaml.safe_load((root / "configs" / "cpu_tiny.yaml").read_text()), **change}
    with pytest.raises(ConfigError, match=said) as caught:
        single_app_config(document)
    assert len(str(caught.value).splitlines()) == 1


def test_a_misspelt_field_of_the_application_is_named(root: Path) -> None:
    from serve_app.checks.ray_schema import single_app_config

    document = yaml.safe_load((root / "configs" / "cpu_tiny.yaml").read_text())
    document["applications"][0]["route_prefx"] = "/x"
    with pytest.raises(ConfigError, match=r"^applications.0.route_prefx: .* did you mean 'route_prefix'"):
        single_app_config(document)
