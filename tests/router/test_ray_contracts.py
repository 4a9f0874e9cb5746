"""The private parts of Ray that the router's files use are where they expect them."""

from tests.installed_source import installed_source


def test_contract_ray_coordinator_actor() -> None:
    common = installed_source("ray/serve/_private/common.py")
    assert "class DeploymentID" in common
    assert "def to_full_id_str(self)" in common
    assert "def get_num_ongoing_requests(self)" in installed_source("ray/serve/_private/replica.py")


def test_contract_ray_router_tandem_router() -> None:
    router = installed_source("ray/serve/_private/request_router/request_router.py")
    for name in ("self._deployment_id", "async def _choose_replica_for_request(", "should_backoff"):
        assert name in router, name
    assert "self._actor_handle" in installed_source("ray/serve/_private/request_router/replica_wrapper.py")
