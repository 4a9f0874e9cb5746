"""The JSON schema accepts every example and refuses what the configuration's classes refuse."""

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from serve_app.cli.main import cli

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    printed = CliRunner().invoke(cli, ["schema"])
    assert printed.exit_code == 0, printed.output
    schema = json.loads(printed.stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.fixture
def document() -> dict[str, Any]:
    return copy.deepcopy(yaml.safe_load((CONFIGS[0].parent / "two_services.yaml").read_text()))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_example_is_valid(validator: jsonschema.Draft202012Validator, path: Path) -> None:
    validator.validate(yaml.safe_load(path.read_text()))


def test_a_wrong_field_is_refused_at_every_depth(
    validator: jsonschema.Draft202012Validator, document: dict[str, Any]
) -> None:
    service = document["applications"][0]["args"]["services"][0]
    places = (
        document,
        document["http_options"],
        document["applications"][0],
        document["applications"][0]["args"],
        service,
        service["groups"][0]["decode"],
        service["autoscale"]["policy"],
    )
    for place in places:
        place["tarrget"] = 600
        assert not validator.is_valid(document)
        del place["tarrget"]
    validator.validate(document)


def test_fields_of_one_service_and_services_exclude_each_other(
    validator: jsonschema.Draft202012Validator, document: dict[str, Any]
) -> None:
    args = document["applications"][0]["args"]
    args["model"] = args["services"][0]["model"]
    assert not validator.is_valid(document)


def test_a_value_outside_its_bounds_is_refused(
    validator: jsonschema.Draft202012Validator, document: dict[str, Any]
) -> None:
    document["applications"][0]["args"]["ingress"]["replicas"] = 0
    assert not validator.is_valid(document)


@pytest.mark.parametrize("ratio", ["1:2", 0.5])
def test_a_ratio_is_text_or_a_number(
    validator: jsonschema.Draft202012Validator, document: dict[str, Any], ratio: Any
) -> None:
    autoscale = document["applications"][0]["args"]["services"][0]["autoscale"]
    autoscale["pd_ratio"] = ratio
    validator.validate(document)
    autoscale["pd_ratio"] = "1 to 2"
    assert not validator.is_valid(document)


def test_an_inventory_may_be_a_file(validator: jsonschema.Draft202012Validator, document: dict[str, Any]) -> None:
    document["applications"][0]["args"]["topology"]["inventory"] = "/etc/tandem/nodes.yaml"
    validator.validate(document)
