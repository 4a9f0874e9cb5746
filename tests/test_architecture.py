"""Which folders and rooms may import which others, Ray, vLLM and NIXL, and which names no file may contain."""

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
PACKAGES = ("kvtransfer", "router", "autoscale", "deployments", "serve_app")  # none imports one to its right
SOURCES = sorted(path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# Where a third party may be imported; `*` also matches `/`.
ALLOWED = {
    "ray": (
        "deployments/*.py",
        "serve_app/app.py",
        "serve_app/sdk.py",
        "serve_app/cli/main.py",
        "*/ray_*.py",
    ),
    "vllm": ("deployments/*.py",),
    "nixl": ("deployments/vllm_seam/plugin.py",),
}

# Rooms and files that may reach into private parts: of Ray, and of vLLM and NIXL.
PRIVATE = {
    "ray": re.compile(r"^ray\.(?:.*\._(?:private|internal)\b|_private\b|experimental\.internal_kv)"),
    "vllm": re.compile(r"^(?:vllm\.(?:v1|distributed|third_party)\b|nixl\b)"),
}
MAY_BE_PRIVATE = {"ray": ("deployments/serve_seam/*", "*/ray_*.py"), "vllm": ("deployments/vllm_seam/*",)}

# Other rooms (subfolders) of its folder that a room may import. It may also import the folder's own modules but doors.
ROOMS: dict[str, set[str]] = {
    "autoscale/engines": set(),
    "autoscale/forecast": set(),
    "autoscale/operators": {"engines", "traces"},
    "autoscale/traces": set(),
    "autoscale/observe": set(),
    "autoscale/policies": {"engines"},
    "autoscale/policies/peers": {"engines", "forecast", "policies"},
    "autoscale/decide": {"forecast", "observe", "policies"},
    "autoscale/pressure": {"policies", "traces"},
    "autoscale/sim": {"engines", "forecast", "traces", "observe", "policies", "policies/peers", "decide", "pressure"},
    "deployments/machine": set(),
    "deployments/serve_seam": set(),
    "deployments/wire": {"serve_seam"},
    "deployments/vllm_seam": {"machine", "wire"},
    "deployments/actors": {"wire", "serve_seam"},
    "deployments/endpoint": {"machine", "wire", "serve_seam"},
    "deployments/replicas": {"machine", "wire", "serve_seam", "vllm_seam"},
    "deployments/emulated": {"machine", "wire", "serve_seam", "vllm_seam", "replicas"},
    "deployments/profiler": {"machine", "wire", "serve_seam", "vllm_seam", "replicas"},
    "deployments/operator_profiler": {"profiler", "vllm_seam"},
    "serve_app/checks": set(),
    "serve_app/load": set(),
    "serve_app/kube": {"checks"},
    "serve_app/local": {"checks", "load"},
    "serve_app/running": {"checks", "load", "local"},
    "serve_app/operators": {"checks", "local"},
    "serve_app/cli": {"checks", "load", "kube", "local", "running", "operators"},
}
# Doors: modules of a folder that use its rooms. No room may import them but the command line, which starts everything.
DOORS = (
    "autoscale/ray_policy",
    "autoscale/ray_link",
    "autoscale/ray_coordinator_client",
    "autoscale/ray_forecasts",
    "autoscale/ray_forecast_worker",
    "deployments/graph",
    "serve_app/app",
    "serve_app/sdk",
)

# Modules that a laptop without ray and vllm can import.
PURE_DEPLOYMENTS = (
    "vllm_seam.plugin",
    "actors.scaling_metrics",
    "endpoint.api_keys",
    "endpoint.config",
    "machine.claims",
    "serve_seam.environment",
    "serve_seam.http_headers",
    "wire.messages",
    "wire.openai_errors",
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
    """Imports of a source file that break the rules."""
    package = path.partition("/")[0]
    found = []
    for name in sorted(imported(source)):
        top = name.partition(".")[0]
        if top == "tests":
            found.append(f"{path} imports {name}: the product does not know its laboratory")
        elif name.startswith("."):
            found.append(f"{path} imports {name}: say the whole name")
        elif top in PACKAGES and top != package:
            if PACKAGES.index(top) > PACKAGES.index(package):
                found.append(f"{path} imports {name}: imports point left")
            elif package == "autoscale" and top == "router" and not _may_import_router(path, name):
                found.append(f"{path} imports {name}: only autoscale/sim imports router")
        elif top in ALLOWED and not any(fnmatch(path, pattern) for pattern in ALLOWED[top]):
            found.append(f"{path} imports {name}: {top} is imported only in {', '.join(ALLOWED[top])}")
    return found


def private_parts(path: str, source: str) -> list[str]:
    """Private parts of Ray, vLLM and NIXL that a source file reaches into, where only a seam may.

    These are imports of private modules, and private attributes whose names our sources do not define.
    """
    found = []
    tree = ast.parse(source)
    members = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    modules = imported(source)
    for name in sorted(modules | {name for name in members if name.endswith("internal_kv")}):
        for whose, pattern in PRIVATE.items():
            if pattern.match(name) and not any(fnmatch(path, one) for one in MAY_BE_PRIVATE[whose]):
                found.append(f"{path} imports {name}: only {', '.join(MAY_BE_PRIVATE[whose])} may")
    if not any(fnmatch(path, one) for patterns in MAY_BE_PRIVATE.values() for one in patterns):
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr) and node.attr not in OUR_NAMES:
                found.append(f"{path} uses {node.attr}, which is not ours: move it to a seam")
    return found


def names_defined(source: str) -> set[str]:
    """Names of functions and classes that a source defines, and of attributes and variables that it sets."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


# Private names of Python's own, and names that our sources define.
OUR_NAMES = {"_exit", "_replace", "_asdict", "_fields"}.union(
    *(names_defined((ROOT / path).read_text(encoding="utf-8")) for path in SOURCES)
)


@pytest.mark.parametrize("path", SOURCES)
def test_only_seams_use_private_parts_of_others(path: str) -> None:
    assert private_parts(path, (ROOT / path).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("deployments/replicas/decode.py", "from vllm.v1.engine import FinishReason"),
        ("deployments/replicas/decode.py", "import vllm.distributed.kv_transfer"),
        ("deployments/endpoint/ingress.py", "from ray.serve._private.common import DeploymentID"),
        ("deployments/actors/coordinator.py", "from ray.experimental import internal_kv"),
        ("deployments/emulated/engine.py", "from ray.llm._internal.serve.core import protocol"),
        ("deployments/replicas/prefill.py", "def f(x):\n    return x._reqs_to_send_of_vllm"),
        ("deployments/serve_seam/calls.py", "import vllm.v1.engine"),
        ("router/ray_router.py", "from nixl import _api"),
    ],
)
def test_use_of_a_private_part_outside_its_seam_is_found(path: str, source: str) -> None:
    assert len(private_parts(path, source)) == 1


@pytest.mark.parametrize("path", [path for path in SOURCES if path.startswith("deployments/endpoint/")])
def test_endpoint_imports_no_vllm(path: str) -> None:
    names = imported((ROOT / path).read_text(encoding="utf-8"))
    assert not [name for name in names if name.partition(".")[0] == "vllm"]


def room_of(path: str) -> str:
    """The room of a source file; its folder if it is in no room."""
    return path.rpartition("/")[0]


def room_violations(path: str, source: str) -> list[str]:
    """Imports of a source file from other rooms of its folder that break the rules."""
    room = room_of(path)
    if room not in ROOMS:
        return []
    folder = room.partition("/")[0]
    found = []
    for name in sorted(imported(source)):
        module = name.replace(".", "/")
        if module in DOORS and room != "serve_app/cli":
            found.append(f"{path} imports {name}: no room imports a door")
        if not name.startswith(f"{folder}."):
            continue
        other = next((one for one in sorted(ROOMS, reverse=True) if f"{module}/".startswith(f"{one}/")), None)
        if other is not None and other != room and other.removeprefix(f"{folder}/") not in ROOMS[room]:
            found.append(f"{path} imports {name}: {room} does not import {other}")
    return found


@pytest.mark.parametrize("path", SOURCES)
def test_room_imports_the_rooms_before_it(path: str) -> None:
    assert room_violations(path, (ROOT / path).read_text(encoding="utf-8")) == []


def test_rooms_do_not_import_each_other() -> None:
    """No two rooms of ``autoscale`` import each other; its own modules, but doors, count as one more room."""
    imports: dict[str, set[str]] = {}
    for path in SOURCES:
        module = path.removesuffix(".py")
        if module not in DOORS:
            names = {name.replace(".", "/") for name in imported((ROOT / path).read_text(encoding="utf-8"))}
            places = {name if name in ROOMS or name in PACKAGES else room_of(name) for name in names}
            imports.setdefault(room_of(path), set()).update(places)
    rooms = [room for room in imports if room.partition("/")[0] == "autoscale"]
    both = [(a, b) for a in rooms for b in rooms if a < b and b in imports[a] and a in imports[b]]
    assert both == []


def test_every_room_has_its_rule_and_a_contract() -> None:
    rooms = {room_of(path) for path in SOURCES} - set(PACKAGES)
    assert rooms == set(ROOMS)
    for room in (*rooms, *PACKAGES):
        contract = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text(encoding="utf-8")))
        assert contract, f"{room}/__init__.py says what the room is for"


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("deployments/endpoint/gate.py", "from deployments.replicas.decode import DecodeServer"),
        ("deployments/replicas/decode.py", "from deployments.endpoint import ingress"),
        ("deployments/endpoint/gate.py", "from deployments.vllm_seam import plugin"),
        ("deployments/serve_seam/environment.py", "import deployments.wire.messages"),
        ("autoscale/decide/guard.py", "from autoscale.sim.cluster import Cluster"),
        ("autoscale/policies/default.py", "from autoscale.policies.peers.hpa import Hpa"),
        ("autoscale/observe/signals.py", "from autoscale.ray_policy import JointPolicy"),
        ("serve_app/local/quickstart.py", "from serve_app.cli.main import cli"),
        ("serve_app/running/ray_drain.py", "from serve_app.sdk import deploy"),
    ],
)
def test_forbidden_import_between_rooms_is_found(path: str, source: str) -> None:
    assert len(room_violations(path, source)) == 1


def _may_import_router(path: str, name: str) -> bool:
    """The simulator runs the product's own routing; the live policy finds the coordinator as the live router does."""
    is_at_the_edge = path.startswith("autoscale/ray_") and name.startswith("router.ray_")
    return path.startswith("autoscale/sim/") or is_at_the_edge


@pytest.mark.parametrize("path", SOURCES)
def test_source_imports_only_what_its_folder_may_import(path: str) -> None:
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
        ("serve_app/cli/main.py", "from tests.lab.drill import cli"),
        ("router/policy.py", "import ray.serve as anything"),
        ("autoscale/policies/x_ray_y.py", "import ray"),
        ("autoscale/policies/peers/serve_baseline.py", "import ray"),
        ("serve_app/config.py", "from ray import serve"),
        ("serve_app/local/guardian.py", "def f():\n    import ray"),
        ("serve_app/app.py", "import vllm"),
        ("router/ray_router.py", "from vllm import SamplingParams"),
        ("kvtransfer/connector.py", "from nixl import _api"),
        ("deployments/replicas/decode.py", "import nixl"),
    ],
)
def test_forbidden_import_is_found(path: str, source: str) -> None:
    assert len(violations(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("router/length.py", "from kvtransfer.topology import Role\nfrom router.length import DecodeLoad"),
        ("autoscale/sim/engine.py", "from router.length import prefill_path"),
        ("autoscale/ray_policy.py", "import ray\nfrom router.ray_coordinator import find_coordinator"),
        ("deployments/graph.py", "import ray\nimport vllm\nfrom router.config import RouterConfig"),
        ("deployments/vllm_seam/plugin.py", "import nixl"),
        ("router/ray_router.py", "import ray"),
        ("serve_app/app.py", "import ray\nfrom deployments.graph import build_graph"),
        ("router/length.py", "import rayleigh"),
    ],
)
def test_allowed_import_is_not_reported(path: str, source: str) -> None:
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
        return module in ("graph", "options") or ("." in module and module not in PURE_DEPLOYMENTS)
    if package == "serve_app" and module in ("app", "sdk", "cli.main"):
        return True
    return module.rpartition(".")[2].startswith("ray_")


LONGEST_FUNCTION_LINES = 60


@pytest.mark.parametrize("path", SOURCES)
def test_functions_are_short(path: str) -> None:
    long = [
        f"{node.name} has {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= LONGEST_FUNCTION_LINES
    ]
    assert long == []


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
def test_paths_of_a_machine_and_package_registries_are_found(path: str, text: str, count: int) -> None:
    assert len(strays(path, text.replace("~", ""))) == count
