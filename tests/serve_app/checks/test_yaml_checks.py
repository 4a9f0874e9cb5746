"""The message for a mistake in a configuration."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.checks.yaml_checks import ConfigError, load_serve_yaml, parse_app_config
from serve_app.config import AppConfig

TEXT = st.text(st.characters(), max_size=8)  # any character, line breaks and lone surrogates included
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


def put(tree: Any, path: tuple[str | int, ...], value: Any) -> None:
    """Set one place of a nested mapping, making the mappings on the way."""
    for part in path[:-1]:
        tree = tree.setdefault(part, {}) if isinstance(tree, dict) else tree[part]
    tree[path[-1]] = value


def places(tree: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every place of a nested mapping or list."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [found for key, value in items for found in ((*path, key), *places(value, (*path, key)))]


def complaint(args: Any) -> str:
    """The one line about a wrong configuration."""
    with pytest.raises(ConfigError) as caught:
        parse_app_config(args)
    line = str(caught.value)
    assert len(line.splitlines()) == 1, line
    return line


def test_valid_args_become_a_config(make_app_args: Callable[..., dict[str, Any]]) -> None:
    config = parse_app_config(make_app_args())
    assert isinstance(config, AppConfig)
    assert config.groups[0].prefill.replicas == 2
    assert config.groups[0].prefill.placement.node_labels == {"zone": "a"}


GROUP = ("groups", 0)


@pytest.mark.parametrize(
    ("path", "value", "field", "shown", "fix"),
    [
        (("model",), None, "model: ", "got None", "should be a valid dictionary"),
        (("model", "id"), "", "model.id: ", "got ''", "at least 1 character"),
        (("model", "id"), 7, "model.id: ", "got 7", "should be a valid string"),
        (("model", "sorce"), "x", "model.sorce: ", "", "no such field; remove it or check its spelling"),
        (("groups",), [], "groups: ", "got []", "at least 1 item"),
        (("groups",), "g0", "groups: ", "got 'g0'", "should be a valid tuple"),
        (("groups",), {"name": "g0"}, "groups: ", "got {'name': 'g0'}", "should be a valid tuple"),
        ((*GROUP, "name"), "G_0", "groups.0.name: ", "got 'G_0'", "should match pattern"),
        ((*GROUP, "prefil"), {}, "groups.0.prefil: ", "", "no such field"),
        ((*GROUP, "prefill", "replicas"), -1, "groups.0.prefill.replicas: ", "got -1", "greater than or equal to 0"),
        ((*GROUP, "prefill", "replicas"), 1.5, "groups.0.prefill.replicas: ", "got 1.5", "should be a valid integer"),
        (
            (*GROUP, "prefill", "pipeline_parallel_size"),
            2,
            "'g0': prefill.pipeline_",
            "is 2",
            "use tensor_parallel_size",
        ),
        ((*GROUP, "decode", "env"), {"A": 1}, "groups.0.decode.env.A: ", "got 1", "should be a valid string"),
        ((*GROUP, "decode", "placement", "strategy"), "ANY", "strategy: ", "got 'ANY'", "'PACK', 'STRICT_PACK'"),
        ((*GROUP, "decode", "placement", "cpus_per_worker"), float("nan"), "worker: ", "got nan", "a finite number"),
        ((*GROUP, "decode", "engine_kwargs"), {"model": "x"}, "kwargs: ", "'model'", "set model.source instead"),
        (("engine_kwargs",), {"kv_transfer_config": {}}, "engine_kwargs: ", "'kv_transfer_config'", "set kv_transfer"),
        (("engine_kwargs",), {"disable_log_stats": True}, "engine_kwargs: ", "'disable_log_stats'", "leave it out"),
        (("kv_transfer", "lease_s"), 5, "kv_transfer.lease_s: ", "got 5", "greater than or equal to 6"),
        (("kv_transfer", "backends"), [], "kv_transfer.backends: ", "got []", "at least 1 item"),
        (
            ("router", "policy"),
            "random",
            "router.policy: ",
            "got 'random'",
            "'round_robin' or 'prefix'",
        ),
        (("router", "length", "local_cap_tokens"), 1, "local_cap_tokens (1)", "(128)", "must be at least"),
        (("ingress", "request_timeout_s"), 0, "ingress.request_timeout_s: ", "got 0", "greater than 0"),
        (("ingress", "request_timeout_s"), 601, "ingress.request_timeout_s", "(601)", "raise the second"),
        (("kv_transfer", "lease_s"), 301, "prefill.graceful_shutdown_timeout_s", "(602)", "lower the second"),
        (("nonsense\nfield",), 1, "'nonsense\\nfield': ", "", "no such field"),
    ],
)
def test_one_mistake_is_one_line_with_field_value_and_fix(
    path: tuple[str | int, ...],
    value: Any,
    field: str,
    shown: str,
    fix: str,
    make_app_args: Callable[..., dict[str, Any]],
) -> None:
    args = make_app_args()
    put(args, path, value)
    line = complaint(args)
    assert field in line
    assert shown in line
    assert fix in line
    assert "Value error" not in line
    assert len(re.findall(r"(?:^|; )[\w.'\\]+: ", line)) == 1, "one mistake, several complaints"


def test_missing_fields_are_all_named() -> None:
    line = complaint({"model": {"id": "m"}})
    assert "model.source: is required; add it" in line
    assert "groups: is required; add it" in line


def test_a_name_that_is_used_twice_is_shown(make_app_args: Callable[..., dict[str, Any]]) -> None:
    line = complaint(make_app_args(groups=[{"name": "g0"}, {"name": "g1"}, {"name": "g1"}]))
    assert "the name 'g1' is used twice; each needs its own" in line


@pytest.mark.parametrize("args", [None, [], "model", 3])
def test_args_that_are_no_mapping_are_refused(args: Any) -> None:
    assert type(args).__name__ in complaint(args)


def test_long_value_is_cut(make_app_args: Callable[..., dict[str, Any]]) -> None:
    assert len(complaint(make_app_args(kv_transfer="x" * 100_000))) < 300


def test_integer_too_long_to_print_is_refused(make_app_args: Callable[..., dict[str, Any]]) -> None:
    assert complaint(make_app_args(ingress={"replicas": 16**4000})).endswith(
        "less than or equal to 256, got an unprintable int"
    )


def test_very_deep_nesting_is_refused(make_app_args: Callable[..., dict[str, Any]]) -> None:
    nested: list[Any] = []
    for _ in range(50_000):
        nested = [nested]
    assert "got an unprintable list" in complaint(make_app_args(groups=nested))
    while nested:  # freeing all of it at once would recurse as deeply
        nested = nested.pop()


@given(JSON)
def test_any_json_is_a_config_or_a_config_error(args: Any) -> None:
    complaint(args)


@settings(max_examples=4 * settings().max_examples)
@given(data=st.data())
def test_any_change_of_one_place_gives_a_config_or_one_line(
    data: st.DataObject, make_app_args: Callable[..., dict[str, Any]]
) -> None:
    args = make_app_args()
    path = data.draw(st.sampled_from(places(args)))
    if data.draw(st.booleans()):
        path = (*path[:-1], data.draw(TEXT)) if isinstance(path[-1], str) else path
    put(args, path, data.draw(JSON | st.sampled_from([copy.deepcopy(args), "1", 1, 1.0, True])))
    try:
        assert isinstance(parse_app_config(args), AppConfig)
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected a mapping with 'applications', got NoneType"),
        ("- 1\n- 2\n", "expected a mapping with 'applications', got list"),
        ("just words", "expected a mapping with 'applications', got str"),
        ("a: [1, 2", "not YAML: "),
        ("a: *nobody", "not YAML: "),
        ("a:\n\tb: 1", "not YAML: "),
        ("a: 1\n---\nb: 2", "not YAML: "),
        ("\x01", "not YAML: "),
        ("a: !!python/object:os.system {}", "not YAML: "),
        ("a: 2024-13-45", "month must be in 1..12"),
        ("a: !!bool x", "not YAML: "),
        ("a: !!timestamp x", "not YAML: "),
        ("applications: []\napplications: [{}]", "applications stands there twice"),
        ("a: " + "[" * 5000, "not YAML: "),
    ],
)
def test_wrong_yaml_is_one_line_with_its_path(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "app.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_serve_yaml(path)
    line = str(caught.value)
    assert line.startswith(f"{path}: ")
    assert words in line
    assert len(line.splitlines()) == 1


def test_file_that_cannot_be_read_is_one_line_with_its_path(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x9f")
    cases = [
        (tmp_path / "none.yaml", "cannot be read: No such file"),
        (tmp_path, "cannot be read: Is a directory"),
        (binary, "not a text file"),
    ]
    for path, words in cases:
        with pytest.raises(ConfigError) as caught:
            load_serve_yaml(path)
        assert str(caught.value).startswith(f"{path}: {words}")


def test_yaml_is_read_as_utf8_whatever_the_locale(tmp_path: Path) -> None:
    path = tmp_path / "app.yaml"
    path.write_bytes("a: größe\n".encode())
    assert load_serve_yaml(path) == {"a": "größe"}


def test_an_engine_may_not_stand_still_for_longer_than_prefill_keeps_its_kv(make_app_args: Any) -> None:
    from serve_app.config import AppConfig

    args = make_app_args(kv_transfer={"lease_s": 15})
    with pytest.raises(
        ValueError, match=r"decode.engine_silence_s \(15\) must be less than kv_transfer.lease_s \(15\)"
    ):
        AppConfig.model_validate(args)
    args["groups"][0]["decode"]["engine_silence_s"] = 14.0
    AppConfig.model_validate(args)


def test_a_value_that_looks_like_a_location_is_shown_as_it_is(make_app_args: Callable[..., dict[str, Any]]) -> None:
    args = make_app_args()
    args["router"]["policy"] = "services.0.policy"
    line = complaint(args)
    assert line.startswith("router.policy: ")
    assert "got 'services.0.policy'" in line
