"""Which shapes the fields of a request model give."""

import json

from tests.lab.compat.answer import Answer
from tests.lab.compat.diff import unanswered
from tests.lab.compat.schema_shapes import Model, is_determined, schema_shapes
from tests.lab.compat.shape import bare
from tests.lab.compat.values import Fields

SCHEMA = {
    "properties": {
        "prompt": {"type": "string"},
        "flag": {"type": "boolean", "default": True},
        "count": {"anyOf": [{"type": "integer", "minimum": 3}, {"type": "null"}]},
        "choice": {"$ref": "#/$defs/Choice"},
    },
    "$defs": {"Choice": {"enum": ["a", "b"]}},
}
MODEL = Model(name="M", route="/r", schema=SCHEMA, base={"prompt": "{name}", "temperature": 0}, streams=True)


def bodies() -> dict[str, dict[str, object]]:
    return {shape.name: json.loads(shape.raw or b"") for shape in schema_shapes(MODEL)}


def test_every_field_has_right_and_wrong_values() -> None:
    found = bodies()
    for field in SCHEMA["properties"]:
        for kind in ("right", "right streamed", "wrong type", "null"):
            assert f"M {field} {kind}" in found
    assert found["M flag right"]["flag"] is False
    assert found["M count right"]["count"] == 3
    assert found["M count too low"]["count"] == 2
    assert found["M choice right"]["choice"] == "a"
    assert "prompt" not in found["M prompt missing"]


def test_no_two_prompts_begin_alike() -> None:
    prompts = [body["prompt"] for name, body in bodies().items() if "prompt" not in name]
    assert len(set(map(str, prompts))) == len(prompts)


def test_sampling_without_a_seed_is_left_to_chance() -> None:
    fields = ("temperature", "seed")
    assert is_determined({"temperature": 0}, fields)
    assert is_determined({"temperature": 0.8, "seed": 0}, fields)
    assert not is_determined({"temperature": 0.8, "seed": 0}, ("temperature",))  # as in Anthropic's API
    assert not is_determined({"temperature": 0.8}, fields)
    assert not is_determined({"temperature": None}, fields)
    assert is_determined({"sampling_params": {"temperature": 0}}, ("sampling_params",))


def test_a_value_may_bring_the_fields_that_it_needs() -> None:
    assert Fields({"a": 1}).fields == {"a": 1}


def test_what_an_earlier_run_has_sent_is_not_sent_again() -> None:
    one, first, second = (
        bare("one", "GET", "/1"),
        bare("first", "GET", "/2"),
        bare("then", "GET", "/3", after="first"),
    )
    answers = {each.name: Answer(digest=each.digest, status=200) for each in (one, first, second)}
    assert unanswered([one, first, second], answers) == []
    assert unanswered([one, first, second], answers | {"one": Answer(digest="other", status=200)}) == [one]
    for name in ("first", "then"):
        others = {key: answer for key, answer in answers.items() if key != name}
        assert unanswered([one, first, second], others) == [first, second]
