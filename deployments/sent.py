"""What of a stream its client has, so that another decode replica can go on with it."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

_CREATED = re.compile(r'"created":\d+')


class NotResumableError(Exception):
    """A stream whose rest another replica would not continue exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What of a stream its client has.

    Attributes:
        outputs: the output ids that came with it, as the engine's outputs had them.
        frames: how many frames.
        digest: of their texts, without the times in them.
        created: when the answer says that it was created, as its frames have it.
    """

    outputs: tuple[tuple[int, ...], ...]
    frames: int
    digest: bytes
    created: str


class SentFrames:
    """Counts what goes to a client, for the case that its replica is lost."""

    def __init__(self) -> None:
        self._outputs: list[tuple[int, ...]] = []
        self._frames = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._created = ""

    def add(self, text: str, outputs: Sequence[tuple[int, ...]]) -> None:
        """One more frame."""
        if not self._frames:
            found = _CREATED.search(text)
            self._created = found[0] if found else ""
        self._outputs += outputs
        self._frames += 1
        self._hash.update(text.encode())

    def sent(self) -> Sent | None:
        """So far; ``None`` when nothing has gone out."""
        if not self._frames:
            return None
        return Sent(
            outputs=tuple(self._outputs), frames=self._frames, digest=self._hash.digest(), created=self._created
        )


class SentAgain:
    """Drops the frames that a client has, and sees that they are the same."""

    def __init__(self, sent: Sent) -> None:
        self._sent = sent
        self._again = SentFrames()
        self._left = sent.frames

    def passes(self, text: str) -> str | None:
        """What the client gets of a frame: ``None`` for one that it has.

        Raises:
            NotResumableError: what was said again is not what was sent.
        """
        # The first to be written in a frame, before anything that a model may have said.
        text = _CREATED.sub(self._sent.created, text, count=1) if self._sent.created else text
        if not self._left:
            return text
        self._left -= 1
        self._again.add(text, ())
        if not self._left:
            again = self._again.sent()
            if again is None or again.digest != self._sent.digest:
                raise NotResumableError("the other replica's answer began otherwise")
        return None

    def check_end(self) -> None:
        """Raises NotResumableError: the answer ended within what the client has."""
        if self._left:
            raise NotResumableError("the other replica's answer is shorter")
