"""Environment variables of a cluster's processes."""

from pathlib import Path

from deployments.environment import cluster_environment, serve_environment

PORTS = (8404, 9101)
FOLDER = Path("/somewhere/tandem-1")


def test_every_variable_is_text() -> None:
    for name, value in cluster_environment(FOLDER, haproxy_ports=PORTS).items():
        assert isinstance(name, str)
        assert isinstance(value, str)


def test_cluster_has_all_that_serve_needs() -> None:
    assert cluster_environment(FOLDER, haproxy_ports=PORTS).items() >= serve_environment().items()


def test_nothing_phones_home_and_nothing_joins_a_strange_cluster() -> None:
    environment = cluster_environment(FOLDER, haproxy_ports=PORTS)
    assert environment["RAY_USAGE_STATS_ENABLED"] == "0"
    assert environment["VLLM_NO_USAGE_STATS"] == "1"
    assert environment["RAY_ENABLE_AUTO_CONNECT"] == "0"


def test_every_path_lies_in_the_folder_of_its_cluster() -> None:
    one, two = (
        cluster_environment(FOLDER, haproxy_ports=PORTS),
        cluster_environment(FOLDER.with_name("tandem-2"), haproxy_ports=PORTS),
    )
    paths = [value for value in one.values() if "/" in value]
    assert len(paths) == 5
    assert all(Path(path).is_relative_to(FOLDER) for path in paths)
    assert not set(paths) & set(two.values())
