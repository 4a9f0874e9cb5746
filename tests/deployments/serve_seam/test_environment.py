"""Environment variables of a cluster's processes."""

from pathlib import Path

from deployments.serve_seam.environment import cluster_environment, serve_environment

PORTS = (8404, 9101, 8500)
FOLDER = Path("/somewhere/tandem-1")
CACHE = Path("/home/someone/cache")


def test_every_variable_is_text() -> None:
    for name, value in cluster_environment(FOLDER, cache=CACHE, ports=PORTS).items():
        assert isinstance(name, str)
        assert isinstance(value, str)


def test_the_cluster_has_all_variables_that_serve_needs() -> None:
    assert cluster_environment(FOLDER, cache=CACHE, ports=PORTS).items() >= serve_environment().items()


def test_no_process_sends_usage_data_or_joins_another_cluster() -> None:
    environment = cluster_environment(FOLDER, cache=CACHE, ports=PORTS)
    assert environment["RAY_USAGE_STATS_ENABLED"] == "0"
    assert environment["VLLM_NO_USAGE_STATS"] == "1"
    assert environment["RAY_ENABLE_AUTO_CONNECT"] == "0"


def test_every_path_but_the_cache_lies_in_the_folder_of_its_cluster() -> None:
    one, two = (
        cluster_environment(FOLDER, cache=CACHE, ports=PORTS),
        cluster_environment(FOLDER.with_name("tandem-2"), cache=CACHE, ports=PORTS),
    )
    assert Path(one["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(CACHE)
    paths = [value for name, value in one.items() if "/" in value and name != "TORCHINDUCTOR_CACHE_DIR"]
    assert len(paths) == 5
    assert all(Path(path).is_relative_to(FOLDER) for path in paths)
    assert not set(paths) & set(two.values())
