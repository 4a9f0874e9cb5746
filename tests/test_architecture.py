"""The walls of the house: which way imports run, where Ray, vLLM and NIXL may be seen, and what no file may name."""

import ast
import re
import shutil
import subprocess
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("kvtransfer", "router", "autoscale", "deployments", "serve_app")  # from left to right
SOURCES = sorted(path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# Where a third party may be imported; `*` also matches `/`.
ALLOWED = {
    "ray": (
        "deployments/*.py",
        "serve_app/app.py",
        "serve_app/sdk.py",
        "serve_app/cli.py",
        "serve_app/bench*.py",
        "*/ray_*.py",
    ),
    "vllm": ("deployments/*.py",),
    "nixl": ("kvtransfer/probe.py", "deployments/vllm_plugin.py"),
}

# Modules that a laptop without ray and vllm can import.
PURE_DEPLOYMENTS = (
    "api_keys",
    "config",
    "cores",
    "environment",
    "explain",
    "frames",
    "handoff",
    "http_headers",
    "metrics",
    "openai_errors",
    "ports",
    "request_stats",
    "scaling_metrics",
    "waits",
)


def imported(source: str) -> set[str]:
    """Every module that a source text imports, at whatever depth of its code; a relative import as its dots."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
    return names


def violations(path: str, source: str) -> list[str]:
    """What a source file imports against the rules."""
    package = path.partition("/")[0]
    found = []
    for name in sorted(imported(source)):
        top = name.partition(".")[0]
        if name.startswith("."):
            found.append(f"{path} imports {name}: say the whole name")
        elif top in PACKAGES and top != package:
            if PACKAGES.index(top) > PACKAGES.index(package):
                found.append(f"{path} imports {name}: imports point left")
            elif package == "autoscale" and top == "router" and not _may_import_router(path, name):
                found.append(f"{path} imports {name}: only autoscale/sim imports router")
        elif top in ALLOWED and not any(fnmatch(path, pattern) for pattern in ALLOWED[top]):
            found.append(f"{path} imports {name}: {top} is imported only in {', '.join(ALLOWED[top])}")
    return found


def _may_import_router(path: str, name: str) -> bool:
    """A simulator calls the very same routing; the live policy finds the coordinator as the live router does."""
    is_at_the_edge = path.startswith("autoscale/ray_") and name.startswith("router.ray_")
    return path.startswith("autoscale/sim/") or is_at_the_edge


@pytest.mark.parametrize("path", SOURCES)
def test_source_keeps_to_its_side_of_the_walls(path: str) -> None:
    assert violations(path, (ROOT / path).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kvtransfer/cost.py", "import router"),
        ("kvtransfer/cost.py", "from autoscale.types import PoolKey"),
        ("router/length.py", "def f():\n    from deployments import config"),
        ("autoscale/guard.py", "if True:\n    import serve_app.config"),
        ("autoscale/guard.py", "from router.length import prefill_path"),
        ("autoscale/ray_policy.py", "from router.length import prefill_path"),
        ("deployments/graph.py", "from serve_app.config import AppConfig"),
        ("router/policy.py", "from .types import ReplicaView"),
        ("router/policy.py", "import ray.serve as anything"),
        ("autoscale/policies/x_ray_y.py", "import ray"),
        ("serve_app/config.py", "from ray import serve"),
        ("serve_app/guardian.py", "def f():\n    import ray"),
        ("serve_app/app.py", "import vllm"),
        ("router/ray_router.py", "from vllm import SamplingParams"),
        ("kvtransfer/connector.py", "from nixl import _api"),
        ("deployments/decode.py", "import nixl"),
    ],
)
def test_wall_holds(path: str, source: str) -> None:
    assert len(violations(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("router/length.py", "from kvtransfer.topology import Role\nfrom router.types import DecodeLoad"),
        ("autoscale/sim/engine.py", "from router.length import prefill_path"),
        ("autoscale/ray_policy.py", "import ray\nfrom router.ray_coordinator import find_coordinator"),
        ("deployments/graph.py", "import ray\nimport vllm\nfrom router.config import RouterConfig"),
        ("deployments/vllm_plugin.py", "import nixl"),
        ("kvtransfer/probe.py", "import nixl"),
        ("router/ray_router.py", "import ray"),
        ("autoscale/policies/ray_baseline.py", "import ray"),
        ("serve_app/app.py", "import ray\nfrom deployments.graph import build_graph"),
        ("serve_app/bench_peers.py", "import ray"),
        ("router/length.py", "import rayleigh"),
    ],
)
def test_wall_has_its_doors(path: str, source: str) -> None:
    assert violations(path, source) == []


def test_pure_modules_import_without_ray_vllm_and_nixl(run_python: Callable[..., Any]) -> None:
    names = [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in SOURCES]
    pure = [name for name in names if not is_edge(name)]
    assert "router.length" in pure
    script = """
import importlib, json, sys
class Closed:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"ray", "vllm", "nixl", "torch"}:
            raise ImportError(f"{name} is not for pure modules")
sys.meta_path.insert(0, Closed())
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(len(sys.argv) - 1))
"""
    assert run_python(script, *pure) == len(pure)


def is_edge(name: str) -> bool:
    """Whether a module may need ray, vllm or nixl."""
    package, _, module = name.partition(".")
    if package == "deployments":
        return module not in ("", "vllm_plugin", *PURE_DEPLOYMENTS)
    if package == "serve_app" and (module in ("app", "sdk", "cli") or module.startswith("bench")):
        return True
    return module == "probe" or module.rpartition(".")[2].startswith("ray_")


# A letter in brackets, so that this file passes its own test.
MACHINE_PATHS = re.compile(r"(?<![\w.$}-])/(?:[w]ork|[r]oot)/|/tmp/[s]pike")
REGISTRIES = re.compile(
    r"[p]ypi\.org|pypi\.[p]ython\.org|[p]ythonhosted\.org|download\.[p]ytorch\.org|[a]naconda\.org"
    r"|registry\.[n]pmjs\.org|[w]heels\.vllm\.ai|proxy\.[g]olang\.org|index\.[c]rates\.io"
)
SETUP_SCRIPTS = ("Makefile", "setup", "setup.sh", "*/setup", "*/setup.sh")
SETUP_REGISTRY = re.compile(r"download\.[p]ytorch\.org")


def strays(path: str, text: str) -> list[str]:
    """Paths of one machine and hosts of package registries in a file's text."""
    found = MACHINE_PATHS.findall(text)
    hosts = REGISTRIES.findall(text)
    if any(fnmatch(path, pattern) for pattern in SETUP_SCRIPTS):
        hosts = [host for host in hosts if not SETUP_REGISTRY.fullmatch(host)]
    return [f"{path} names {stray}" for stray in (*found, *hosts)]


@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="no git checkout")
def test_no_file_names_this_machine_or_a_package_registry() -> None:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    files = [path for path in listed if path and (ROOT / path).is_file()]
    assert "pyproject.toml" in files
    found = [
        stray for path in files for stray in strays(path, (ROOT / path).read_bytes().decode("utf-8", errors="replace"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("path", "text", "count"),
    [
        ("README.md", "see /w~ork/main/x and /r~oot/.cache", 2),
        ("a.py", 'VENV = "/tmp/s~pike/venv"', 1),
        ("a.py", "docs/w~ork/x, ./r~oot/x, network/, /workers/, $HOME/w~ork/", 0),
        ("cpu.lock", "--index-url https://p~ypi.org/simple", 1),
        ("cpu.lock", "https://files.p~ythonhosted.org/x https://download.p~ytorch.org/whl/cpu", 2),
        ("requirements/setup.sh", "https://download.p~ytorch.org/whl/cpu", 0),
        ("requirements/setup.sh", "https://p~ypi.org/simple", 1),
    ],
)
def test_strays_are_found(path: str, text: str, count: int) -> None:
    assert len(strays(path, text.replace("~", ""))) == count
