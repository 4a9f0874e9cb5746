"""The documents: links, commands and configurations exist, words are plain, and generated pages are current."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from autoscale.topology_config import TopologyConfig
from serve_app.checks.ray_schema import single_app_config
from serve_app.cli.main import cli
from serve_app.config import AppConfig, ServiceConfig
from tests.docs import api_reference, argument_reference, field_reference

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in (".", "docs", "docs/decisions", "deploy", "configs/traces", "tests/lab/demo/traces")
    for path in (ROOT / folder).glob("*.md")
)
PACKAGES = ("kvtransfer", "router", "autoscale", "deployments", "serve_app")
FOLDERS = (*PACKAGES, "configs", "deploy", "tests")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# A machine or a request is "it"; a quantity has a name.
UNPLAIN = re.compile(
    r"\b(?:[Ww]e|[Ww]ho|[Nn]obody|[Ss]omebody|[Ee]verybody|[Ss]o (?:many|much|long))\b|^Of [^.]*:", re.MULTILINE
)
COMMAND = re.compile(r"(?:^|[`$(] ?|; |&& )tandem ([a-z][a-z-]*)((?: [^\n`#|]*)?)", re.MULTILINE)
MAKE = re.compile(r"(?:^|`)make ([a-z][a-z-]*)", re.MULTILINE)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def prose(text: str) -> str:
    """A page as it is shown, without blocks of code and without the targets of links."""
    return re.sub(r"\]\([^)]*\)", "]", FENCE.sub("", text))


def anchors(page: str) -> set[str]:
    return {
        field_reference.slug(heading)
        for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(page)), re.MULTILINE)
    }


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_to_files_and_headings(page: str) -> None:
    broken = []
    for target in LINK.findall(re.sub(r"`[^`\n]*`", "", FENCE.sub("", text_of(page)))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        if not path.exists() or (anchor and anchor not in anchors(path.resolve().relative_to(ROOT).as_posix())):
            broken.append(target)
    assert broken == []


def test_readme_has_about_1000_words() -> None:
    words = [word for word in prose(text_of("README.md")).split() if any(letter.isalnum() for letter in word)]
    assert 900 <= len(words) <= 1100


# Descriptions of fields are held to the same words where they are written.
@pytest.mark.parametrize("page", [page for page in PAGES if page not in ("CONVENTIONS.md", "docs/configuration.md")])
def test_words_are_plain(page: str) -> None:
    assert [found.group() for found in UNPLAIN.finditer(prose(text_of(page)))] == []


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_their_options_exist(page: str) -> None:
    top: Any = typer.main.get_command(cli)
    wrong = []
    for name, arguments in COMMAND.findall(text_of(page)):
        command = top.commands.get(name)
        if command is not None and (words := arguments.split()):
            command = getattr(command, "commands", {}).get(words[0], command)
        if command is None:
            wrong.append(f"tandem {name}")
            continue
        options = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        wrong += [
            f"tandem {name} {option}" for option in re.findall(r"--[a-z][a-z-]*", arguments) if option not in options
        ]
    if page in ("CHANGELOG.md", "DECISIONS.md", "docs/decisions/packaging-and-tests.md"):
        wrong = [command for command in wrong if command != "tandem drill"]  # these pages name it as removed
    if page == "CONVENTIONS.md":
        wrong.remove("tandem profile --max-batch")  # an example of a message, not a command
    assert wrong == []


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    assert set(MAKE.findall(text_of(page))) - targets == set()


# Names of files in third-party packages, and of files that a reader makes.
FOREIGN = ("ray/", "vllm/", "nixl_", "my.yaml", "app.py")


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CONVENTIONS.md"])
def test_files_that_a_page_names_exist(page: str) -> None:
    named = set(re.findall(r"`([\w./-]+\.(?:py|yaml|sh|md))(?::\d+)?`", text_of(page)))
    files = [path.as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*")] + list(PAGES)
    missing = [
        name
        for name in named
        if not name.startswith(FOREIGN) and not any(f"/{file}".endswith(f"/{name}") for file in files)
    ]
    assert missing == []


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_metrics_that_a_page_names_exist(page: str) -> None:
    source = "\n".join(path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    names = set(re.findall(r"`(tandem_[a-z_]+)[`{]", text_of(page)))
    assert [name for name in names if name not in source and name.removesuffix("_total") not in source] == []


@pytest.mark.parametrize("page", PAGES)
def test_fields_that_a_page_names_exist(page: str) -> None:
    roots = AppConfig.model_fields | ServiceConfig.model_fields
    paths = [path.split(".") for path in re.findall(r"`(?:args\.)?((?:[a-z]\w*\.)+[a-z_]+)`", text_of(page))]
    wrong = [".".join(path) for path in paths if path[0] in roots and not leads_to_a_field(roots, path)]
    assert wrong == []


def leads_to_a_field(fields: dict[str, Any], path: list[str]) -> bool:
    """Whether a dotted path names a field; a field of any one of several policies counts."""
    if path[0] not in fields:
        return False
    sections = [section for section, _ in field_reference.sections_in(fields[path[0]].annotation)]
    return (
        len(path) == 1 or not sections or any(leads_to_a_field(section.model_fields, path[1:]) for section in sections)
    )


def yaml_blocks(page: str) -> Iterator[Any]:
    for language, block in FENCE.findall(text_of(page)):
        if language == "yaml":
            yield yaml.safe_load(block)


def combined(base: Any, added: Any) -> Any:
    """A configuration with another one laid over it; lists are combined by the names of their entries."""
    if isinstance(base, dict) and isinstance(added, dict):
        return {**base, **{key: combined(base.get(key), value) for key, value in added.items()}}
    if isinstance(base, list) and isinstance(added, list):
        by_name = {entry["name"]: entry for entry in base}
        return list(
            {**by_name, **{entry["name"]: combined(by_name.get(entry["name"]), entry) for entry in added}}.values()
        )
    return added


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """The application of the README."""
    document = next(yaml_blocks("README.md"))
    assert isinstance(document, dict)
    return document


def with_application(document: dict[str, Any], application: dict[str, Any]) -> dict[str, Any]:
    return {**document, "applications": [combined(document["applications"][0], application)]}


def test_the_readmes_configurations_are_valid(example: dict[str, Any]) -> None:
    first, sizing = yaml_blocks("README.md")
    single_app_config(first)
    sized = single_app_config(with_application(example, sizing))
    assert sized.is_autoscaled


def test_the_placement_pages_configuration_is_valid(example: dict[str, Any]) -> None:
    block, elastic, _, long = yaml_blocks("docs/placement.md")
    TopologyConfig.model_validate(elastic["topology"])
    chat = block["args"]["services"][0]
    assert [group.name for group in ServiceConfig.model_validate({**chat, **long}).all_groups][-1] == "long"
    application = {
        **example["applications"][0],
        "autoscaling_policy": {"policy_function": "autoscale.ray_policy:JointPolicy"},
        **block,
    }
    assert len(single_app_config({**example, "applications": [application]}).services) == 2


def test_the_placement_pages_variants_are_worth_what_it_says() -> None:
    _, _, services, _ = yaml_blocks("docs/placement.md")
    (service,) = services
    for group in service["groups"]:
        for role in ("prefill", "decode"):
            if group[role] is not None:
                kind = group[role]["profile"].removesuffix(".json")
                group[role]["profile"] = str(ROOT / "configs" / "profiles" / f"{kind}_llama2_70b_tp4.json")
                group[role]["tensor_parallel_size"] = 4
    policy = {"pd_ratio": "1:2", "policy": {"kind": "heteroscale", "target": 600}}
    limits = ServiceConfig.model_validate({**service, "autoscale": policy}).pool_limits().root
    worth = {str(key): round(pool.capacity, 2) for key, pool in limits.items()}
    assert (worth["prefill:a100"], worth["decode:a100"]) == (0.47, 0.32)


def test_the_overload_pages_configuration_is_valid(example: dict[str, Any]) -> None:
    (block,) = yaml_blocks("docs/overload.md")
    single_app_config(with_application(example, {"args": block}))


def test_the_pooling_pages_configurations_are_valid(example: dict[str, Any]) -> None:
    block, sizing = yaml_blocks("docs/pooling.md")
    application = {**example["applications"][0], **block}
    chat, embed = single_app_config({**example, "applications": [application]}).services
    assert (chat.is_pooling, embed.is_pooling) == (False, True)
    service = block["args"]["services"][1]
    service["groups"][0]["decode"]["max_replicas"] = 4
    assert ServiceConfig.model_validate({**service, **sizing}).is_pooling


def test_the_policies_of_the_autoscaling_page_are_valid(example: dict[str, Any]) -> None:
    _, sizing = yaml_blocks("README.md")
    blocks = [block for language, block in FENCE.findall(text_of("docs/autoscaling.md")) if language == "yaml"]
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("policy:")]
    assert len(lines) == 3
    for line in lines:
        sizing["args"]["autoscale"]["policy"] = yaml.safe_load(line)["policy"]
        single_app_config(with_application(example, sizing))


def test_the_floors_of_the_autoscaling_page_are_valid(example: dict[str, Any]) -> None:
    _, sizing = yaml_blocks("README.md")
    (floors,) = [block for block in yaml_blocks("docs/autoscaling.md") if "floors" in block]
    sizing["args"]["autoscale"] |= floors
    autoscale = single_app_config(with_application(example, sizing)).services[0].autoscale
    assert autoscale is not None
    assert len(autoscale.floors.periods) == 2


def test_the_configuration_reference_is_current() -> None:
    assert field_reference.PAGE.read_text(encoding="utf-8") == field_reference.page(), "run `make docs`"


def test_the_page_of_engine_arguments_is_current() -> None:
    assert argument_reference.PAGE.read_text(encoding="utf-8") == argument_reference.page(), "run `make docs`"


@pytest.mark.vllm
def test_the_page_of_the_api_is_current() -> None:
    assert api_reference.PAGE.read_text(encoding="utf-8") == api_reference.page(), "run `make docs`"


def test_every_decision_is_in_the_index_once() -> None:
    listed = [int(number) for number in re.findall(r"^- (\d+)\. ", text_of("DECISIONS.md"), re.MULTILINE)]
    written = [
        int(number)
        for page in PAGES
        if page.startswith("docs/decisions/")
        for number in re.findall(r"^### (\d+)\. ", text_of(page), re.MULTILINE)
    ]
    replaced = {80, 89, 98, 119}
    assert sorted(listed) == sorted(written)
    assert sorted(replaced.union(written)) == list(range(1, max(written) + 1))
