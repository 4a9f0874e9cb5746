"""The wheel, installed outside the checkout: its commands find the data that they need.

The environment holds the wheel alone; the packages that it depends on are those of this environment, by their path.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="no git checkout")

Tandem = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy, since a build leaves folders behind."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in listed:
        if name and os.path.lexists(root / name):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name, follow_symlinks=False)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(copy))
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    pip("--python", str(folder / "bin" / "python"), "install", "--no-deps", "--no-index", str(wheel))
    numpy = importlib.util.find_spec("numpy")
    assert numpy is not None
    assert numpy.origin is not None
    (packages,) = folder.glob("lib/python3*/site-packages")
    (packages / "dependencies.pth").write_text(str(Path(numpy.origin).parents[1]) + "\n")
    return folder


@pytest.fixture
def tandem(installed: Path, tmp_path: Path) -> Tandem:
    """Run the installed command in an empty folder."""

    def run(*arguments: str, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        command = [str(installed / "bin" / "tandem"), *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    return run


def pip(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def packages_of(installed: Path) -> Path:
    (folder,) = installed.glob("lib/python3*/site-packages/serve_app")
    return folder


def test_wheel_has_the_data_and_no_laboratory(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "serve_app/data/cpu_tiny.yaml",
        "serve_app/data/sim/h100_llama70b.yaml",
        "serve_app/data/traces/azure_conv_60s.csv",
        "serve_app/data/profiles/h100_llama70b_fp8_tp2.json",
        "serve_app/data/operators/models/llama-3.1-8b.json",
        "serve_app/data/operators/tables/H100/gemm.csv.gz",
        "serve_app/data/operators/tables/README.md",
        "serve_app/local/tiny_model_corpus.txt",
    } <= names
    tops = {name.partition("/")[0] for name in names if not name.startswith("tandem_serve-")}
    assert tops == {"kvtransfer", "router", "autoscale", "deployments", "serve_app"}


def test_the_installed_code_is_that_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    script = "import autoscale, serve_app; print(autoscale.__file__, serve_app.__file__)"
    python = str(installed / "bin" / "python")
    done = subprocess.run([python, "-P", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert all(path.startswith(str(installed)) for path in done.stdout.split())


def test_examples_are_copied_and_simulated(tandem: Tandem, tmp_path: Path) -> None:
    assert tandem("examples").returncode == 0
    files = ("--config", "configs/sim/h100_llama70b.yaml", "--trace")
    short = (*files, "configs/traces/azure_conv_600s.csv.gz", "--duration", "70")
    simulated = tandem("simulate", *short, "--policy", "static", "--jobs", "1")
    assert simulated.returncode == 0, simulated.stderr
    assert "static" in simulated.stdout
    # Without --config the shipped one is taken.
    tested = tandem("pressure-test", "--trace", "configs/traces/azure_conv_60s.csv", "--gpus", "4", "--duration", "10")
    assert tested.returncode == 0, tested.stderr
    assert "requests/s" in tested.stdout
    again = tandem("examples")
    assert again.returncode == 1
    assert again.stderr.strip() == "tandem: configs exists already: give another folder"


@pytest.mark.parametrize("content", [None, "no,trace\n1,2\n"])
@pytest.mark.parametrize("name", ["data/traces/azure_conv_60s.csv", "data/cpu_tiny.yaml"])
def test_damaged_data_is_named_in_one_line(tandem: Tandem, installed: Path, name: str, content: str | None) -> None:
    path = packages_of(installed) / name
    whole = path.read_text()
    try:
        if content is None:
            path.unlink()
        else:
            path.write_text(content)
        refused = tandem("quickstart")
    finally:
        path.write_text(whole)
    assert refused.returncode == 1
    (line,) = refused.stderr.strip().splitlines()
    assert line.startswith("tandem: ")
    assert path.name in line


def test_missing_corpus_is_named_before_anything_starts(tandem: Tandem, installed: Path, tmp_path: Path) -> None:
    corpus = packages_of(installed) / "local" / "tiny_model_corpus.txt"
    text = corpus.read_text()
    try:
        corpus.unlink()
        refused = tandem("quickstart")
    finally:
        corpus.write_text(text)
    assert refused.returncode == 1
    assert "tiny_model_corpus.txt: cannot be read" in refused.stderr
    assert not (tmp_path / "models").exists()


@pytest.mark.vllm
@pytest.mark.slow
def test_quickstart_runs_from_the_wheel(tandem: Tandem, tmp_path: Path) -> None:
    assert tandem("examples").returncode == 0
    valid = tandem("validate", "configs/cpu_tiny.yaml")
    assert valid.returncode == 0, valid.stderr
    shutil.rmtree(tmp_path / "configs")
    done = tandem("quickstart", "--requests", "30", timeout_s=900.0)
    assert done.returncode == 0, done.stderr
    assert "KV moved over NIXL" in done.stdout
