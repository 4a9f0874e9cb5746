"""Which cores an engine gets on a machine without GPUs: the least claimed, one claim per engine."""

import os
from contextlib import suppress
from pathlib import Path
from typing import IO

from deployments.locks import try_lock

_SLOTS_PER_CORE = 64


class CoreClaim:
    """Cores held by this process until it ends: an exclusive lock on one slot file per core, so no death leaks one."""

    def __init__(self, folder: Path, *, count: int, from_end: bool) -> None:
        """Claim ``count`` of this process's allowed cores.

        Args:
            folder: where the slot files of this machine's engines live, shared by all replicas of a cluster.
            count: cores wanted; all of them where there are fewer.
            from_end: prefer high core numbers (decode) rather than low ones (prefill) among equally claimed cores.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._slots: list[IO[str]] = []
        cores = sorted(os.sched_getaffinity(0), reverse=from_end)
        count = min(count, len(cores))
        chosen: list[int] = []
        for slot in range(_SLOTS_PER_CORE):
            for core in cores:
                if len(chosen) == count:
                    break
                lock = None if core in chosen else try_lock(folder / f"core-{core}.{slot}")
                if lock is not None:
                    self._slots.append(lock)
                    chosen.append(core)
        self.cores = sorted(chosen)


def set_priority(pid: int, niceness: int) -> None:
    """Give all threads of a process a niceness.

    Raises:
        PermissionError: it is a higher priority than this user may give.
    """
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(thread.name), niceness)
