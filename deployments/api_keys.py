"""API keys: a file of their hashes, which clients' keys are held against (pure).

One key per line, its name and the SHA-256 of the key: ``team-a sha256:9f86...``; empty lines and lines that begin with
``#`` are skipped. A plain hash is enough since keys are 256 random bits and no passwords: nothing can be guessed.
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

_PREFIX = "tk-"
_LINE = re.compile(r"([A-Za-z0-9._-]{1,64}) sha256:([0-9a-f]{64})")
_LOOK_S = 1.0


def new_key() -> str:
    """A new key of 256 random bits."""
    return _PREFIX + secrets.token_urlsafe(32)


def key_line(name: str, key: str) -> str:
    """The line of a key in a key file.

    Raises:
        ValueError: the name is not of letters, digits, dots, dashes and underscores.
    """
    line = f"{name} sha256:{_hash(key)}"
    if not _LINE.fullmatch(line):
        raise ValueError(f"{name!r} is no name for a key: use 1 to 64 letters, digits, dots, dashes and underscores")
    return line


def parse_keys(text: str) -> dict[str, str]:
    """Names by the hash of their key; there may be none.

    Raises:
        ValueError: a line that is none of a key file, by its number; its text may be a key and is not repeated.
    """
    names: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise ValueError(f"line {number} is not 'NAME sha256:HEX': make it with `tandem key NAME`")
        name, digest = match.groups()
        if name in names.values() or digest in names:
            raise ValueError(f"line {number}: this name or key stands there twice: remove one")
        names[digest] = name
    return names


class ApiKeys:
    """The keys of a file, read again within a second of a change; while it is wrong, what it said last holds.

    One that has no key any more is not wrong: nobody is let in.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic, *, limited: Iterable[str] = ()) -> None:
        """Read the file; ``limited``: names that have limits of their own, and should be in it.

        Raises:
            ValueError: it cannot be read, is no key file or has no key.
        """
        self._path = path
        self._clock = clock
        self._limited = frozenset(limited)
        self._names: dict[str, str] = {}
        self._read: tuple[int, ...] | None = None
        self._looked_s = clock()
        self._load()
        if not self._names:
            raise ValueError(f"api_keys_file {path}: it has no key: make one with `tandem key NAME`")

    def name_of(self, authorization: str | None) -> str | None:
        """Whose key an ``Authorization`` header carries; ``None``: nobody's.

        Every key is compared, each in a time that does not depend on where they differ.
        """
        now_s = self._clock()
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            try:
                self._load()
            except ValueError as error:
                logger.error("%s; the keys that it had before hold", error)
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        presented, found = _hash(key.strip()), None
        for digest, name in self._names.items():
            if hmac.compare_digest(digest, presented):
                found = name
        return found

    def _load(self) -> None:
        try:
            stat = self._path.stat()
            version = (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino)
            if version == self._read:
                return
            text = self._path.read_text()
            self._read = version  # what is wrong is said once
            self._names = parse_keys(text)
        except OSError as error:
            # Not while it is being replaced, for instance: said whenever it is looked for.
            raise ValueError(f"api_keys_file {self._path}: {error.strerror}: give a file that can be read") from None
        except UnicodeDecodeError:
            raise ValueError(f"api_keys_file {self._path}: it is no text: give the file of `tandem key`") from None
        except ValueError as error:
            raise ValueError(f"api_keys_file {self._path}: {error}") from None
        if not self._names:
            logger.warning("api_keys_file %s has no key: nobody is let in", self._path)
        for name in sorted(self._limited.difference(self._names.values())):
            logger.warning(
                "ingress.admission.keys has limits of %r, and api_keys_file %s has no such key: write its name as it "
                "stands there, or remove the limits",
                *(name, self._path),
            )


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
