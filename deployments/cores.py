"""Which cores an engine gets on a machine without GPUs: the least claimed, one claim per engine."""

import os
from contextlib import suppress
from pathlib import Path
from typing import IO

from deployments.locks import own_folder, try_lock

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
        own_folder(folder)
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


def run_at_once(pid: int, *, is_on: bool = True) -> None:
    """Let all threads of a process run before others as soon as they have work (SCHED_RR), or as usual again.

    What they start inherits it.

    For what keeps time on a machine that is busy: threads of the usual class waited for up to ten seconds while eight
    replicas imported on two cores, whatever their niceness, and one of this class never did (DECISIONS 42).

    Raises:
        PermissionError: this user may not.
    """
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):
            policy, priority = (os.SCHED_RR, 1) if is_on else (os.SCHED_OTHER, 0)
            os.sched_setscheduler(int(thread.name), policy, os.sched_param(priority))
