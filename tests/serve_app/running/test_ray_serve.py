"""The private parts of Serve that the SDK uses are where it expects them; tests in tests/engines deploy with them."""

from tests.installed_source import installed_source


def test_contract_ray_serve_submit() -> None:
    assert "def _get_global_client(" in installed_source("ray/serve/context.py")
    client = installed_source("ray/serve/_private/client.py")
    assert "def http_config(self)" in client
    assert "def deploy_apps(" in client


def test_contract_ray_serve_endpoint_url() -> None:
    assert "def _get_global_client(" in installed_source("ray/serve/context.py")
    assert "raise RayServeException(" in installed_source("ray/serve/context.py")
    assert "def http_config(self)" in installed_source("ray/serve/_private/client.py")


def test_contract_ray_serve_leave() -> None:
    assert "_global_client: ServeControllerClient = None" in installed_source("ray/serve/context.py")
    assert "self.handle_cache: Dict[" in installed_source("ray/serve/_private/client.py")
    handle = installed_source("ray/serve/handle.py")
    assert "def is_initialized(self) -> bool" in handle
    assert "def _is_router_running_in_separate_loop(self) -> bool" in handle
    assert "def shutdown(self):" in handle
