"""What a person has set outlives all processes of an application, on emulated engines."""

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from autoscale.ratio import PdRatio
from serve_app.local.cluster import DeployError, LocalCluster, driver_environment
from tests.engines.endpoint import WAIT_S, forked_yaml
from tests.lab.stand.processes import title

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    made = forked_yaml("lasting")
    for role in ("prefill", "decode"):
        made["applications"][0]["args"]["groups"][0][role]["emulator"]["start_s"] = 0.0
    return made


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    driver_environment()
    with LocalCluster() as cluster:
        yield cluster


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            if holds():
                return
        except DeployError:  # the coordinator starts again
            pass
        assert time.monotonic() < deadline
        time.sleep(0.5)


def lose_everything(cluster: LocalCluster) -> None:
    """Kill Serve's controller, the coordinator and all replicas at once."""
    lost = [
        process
        for process in cluster.processes()
        if any(name in title(process) for name in ("ServeController", "Coordinator", "ServeReplica"))
    ]
    assert len(lost) >= 5  # controller, coordinator, endpoint, and at least one replica of each role
    for process in lost:
        process.kill()
    psutil.wait_procs(lost, timeout=60)


def test_what_a_person_has_set_outlives_all_processes_at_once_but_not_the_application(
    document: dict[str, Any], cluster: LocalCluster
) -> None:
    from serve_app.sdk import deploy

    with deploy(document, address=cluster.address) as app:
        outlives_all_processes(app, cluster)
        app.delete()
    with deploy(document, address=cluster.address) as app:
        assert app.control.status().tuned == {}
        assert not app.control.status().config.is_paused


def test_what_a_person_has_set_outlives_the_application_where_that_is_wanted(
    document: dict[str, Any], cluster: LocalCluster
) -> None:
    from serve_app.running.ray_control import status_of
    from serve_app.sdk import deploy

    made = copy.deepcopy(document)
    made["applications"][0]["args"]["keeps_settings"] = True
    with deploy(made, address=cluster.address) as app:
        app.control.scale(2, 2)
        app.control.tune({"guard": {"cooldown_in_s": 77.0}}, "by hand")
        app.control.cordon("switch-a")
        app.delete()
    with deploy(made, address=cluster.address) as app:
        until(lambda: (last := app.control.status().last) is not None and two_of_each(last))
        config = app.control.status().config
        assert config.guard.cooldown_in_s == 77.0
        assert (config.override.prefill, config.override.decode) == (2, 2)
        assert status_of(app.name).cordoned == ("switch-a",)
        app.delete()


def two_of_each(last: Any) -> bool:
    return {len(names) for names in last.running.values()} == {2}


def outlives_all_processes(app: Any, cluster: LocalCluster) -> None:
    from serve_app.running.ray_control import status_of

    control = app.control
    control.scale(2, 2)
    control.tune({"guard": {"cooldown_in_s": 77.0}, "pd_ratio": "1:1"}, "by hand")
    control.cordon("switch-a")
    until(lambda: two_of_each(control.status().last))
    control.pause()
    lose_everything(cluster)

    def is_back() -> bool:
        last = control.status().last
        return last is not None and two_of_each(last)

    until(is_back)
    config = control.status().config
    assert config.is_paused
    assert config.guard.cooldown_in_s == 77.0
    assert config.pd_ratio == PdRatio(1, 1)
    assert (config.override.prefill, config.override.decode) == (2, 2)
    assert status_of(app.name).cordoned == ("switch-a",)
