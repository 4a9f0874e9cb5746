"""API keys: the endpoint compares the keys of clients with a file of hashes (pure).

Each line has the name of a key and its SHA-256: ``team-a sha256:9f86...``. Empty lines and lines that begin with ``#``
are skipped. A plain hash is enough: a key is 256 random bits, so it cannot be guessed like a password.
"""

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path

logger = logging.getLogger("ray.serve")

_PREFIX = "tk-"  # beginning of every key
_LINE = re.compile(r"([A-Za-z0-9._-]{1,64}) sha256:([0-9a-f]{64})")
_CHECK_S = 1.0  # seconds between two checks whether the file has changed


def new_key() -> str:
    """A new key of 256 random bits."""
    return _PREFIX + secrets.token_urlsafe(32)


def key_line(name: str, key: str) -> str:
    """The line of a key in a key file. Raises ValueError: the name is too long or has other characters."""
    line = f"{name} sha256:{_hash(key)}"
    if not _LINE.fullmatch(line):
        raise ValueError(f"{name!r} is no name for a key: use 1 to 64 letters, digits, dots, dashes and underscores")
    return line


def parse_keys(text: str) -> dict[str, str]:
    """Names of keys by hash. Raises ValueError: a line is wrong; the error has its number, since its text is secret."""
    names: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise ValueError(f"line {number} is not 'NAME sha256:HEX': make it with `tandem key NAME`")
        name, digest = match.groups()
        if name in names.values() or digest in names:
            raise ValueError(f"line {number}: this name or key is in the file twice: remove one")
        names[digest] = name
    return names


class ApiKeys:
    """The keys of a file, which is read again within a second of a change.

    While the file is wrong, its previous keys stay valid. If a running endpoint finds no key in the file, it refuses
    every client.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic, *, limited: Iterable[str] = ()) -> None:
        """``limited``: names of keys with limits of their own. Raises ValueError: the file is wrong or has no key."""
        self._path = path
        self._clock = clock
        self._limited = frozenset(limited)
        self._names: dict[str, str] = {}  # names of keys by hash
        self._version: tuple[int, ...] | None = None  # of the file that was read last; it changes with the file
        self._checked_s = clock()
        self._load()
        if not self._names:
            raise ValueError(f"api_keys_file {path}: it has no key: make one with `tandem key NAME`")

    def name_of(self, authorization: str | None) -> str | None:
        """Name of the key in an ``Authorization`` header; ``None``: the file does not have this key.

        Every key of the file is compared in constant time, so the duration tells a client nothing about a key.
        """
        now_s = self._clock()
        if now_s - self._checked_s >= _CHECK_S:
            self._checked_s = now_s
            try:
                self._load()
            except ValueError as error:
                logger.error("%s; the keys that it had before stay valid", error)
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        key_hash = _hash(key.strip())
        names = [name for digest, name in self._names.items() if hmac.compare_digest(digest, key_hash)]
        return names[0] if names else None

    def _load(self) -> None:
        try:
            stat = self._path.stat()
            version = (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino)
            if version == self._version:
                return
            content = self._path.read_bytes()
            self._version = version  # so that an error in the content is logged once
            self._names = parse_keys(content.decode())
        except OSError as error:  # the version is not set, so every check reads the file again, and logs an error
            raise ValueError(f"api_keys_file {self._path}: {error.strerror}: give a file that can be read") from None
        except UnicodeDecodeError:
            raise ValueError(f"api_keys_file {self._path}: it is no text: give the file of `tandem key`") from None
        except ValueError as error:
            raise ValueError(f"api_keys_file {self._path}: {error}") from None
        if not self._names:
            logger.warning("api_keys_file %s has no key: every request is refused", self._path)
        for name in sorted(self._limited.difference(self._names.values())):
            logger.warning(
                "ingress.admission.keys has limits of %r, and api_keys_file %s has no such key: write the name as in "
                "the file, or remove the limits",
                *(name, self._path),
            )


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
