"""statvfs: asks filesystems for their size, some of which never answer.

Used in the sidecar by the filesystem collector. Mounts come in, an answer for each goes out within a deadline.

A dead NFS server or FUSE daemon blocks `statvfs` for ever, in a thread that nothing can interrupt. (A SIGKILL of the
whole process can, unless a FUSE daemon has taken the question: then the process lets go of its ports and locks at
SIGTERM and stays until the daemon answers or dies, as any other process that asked would. Such mounts can be
excluded.) So the calls are made by threads of their own. One thread works through the mounts; when a call keeps it
longer than usual, another goes on behind it. A thread whose call has not returned at the deadline is left behind, its
mount gets no further call until it has returned, and nor does any other mount of the same filesystem. How many threads
may be left behind is bounded: once `max_hanging` calls are under way, network filesystems are not asked any more; local
ones, which answer, have as many again to themselves, so that dead servers never cost the local disks.

Threads end with the pass, or when their call returns. All are daemons.
"""

from __future__ import annotations

import enum
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from exporter.collectors.mounts import Mount

PATIENCE_SECONDS = 0.05
"""How long a call may keep its thread before another takes the rest: far above what an answer takes."""

REMOTE = frozenset(
    (
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "orangefs",
        "panfs",
        "smb3",
        "smbfs",
        "virtiofs",
        "wekafs",
    )
)
"""Filesystems that somebody else has to answer for; so has every kind of FUSE."""


class Silence(enum.Enum):
    """Why there is no answer."""

    HANGING = "statvfs has not returned"
    NOT_ASKED = "not asked: too many other mounts hang, or there was no thread for it"


Answer = os.statvfs_result | OSError | Silence


class _Pass:
    """The mounts of one pass: what is to be asked, by how many threads, and what came back."""

    __slots__ = ("answers", "over", "pending", "workers")

    def __init__(self, pending: list[Mount]) -> None:
        self.pending = pending
        self.answers: dict[str, Answer] = {}
        self.workers = 0
        self.over = False


class StatvfsPool:
    """Calls `statvfs` so that a call that hangs costs its own mount only.

    Args:
        statvfs: The call; takes the path.
        deadline_seconds: After so long a pass is over, whoever has not answered.
        max_hanging: Calls under way, beyond which no network filesystem is asked; twice as many in all.
        monotonic: Clock of the patience and the deadline, seconds.
    """

    def __init__(
        self,
        *,
        statvfs: Callable[[str], os.statvfs_result] = os.statvfs,
        deadline_seconds: float = 3.0,
        max_hanging: int = 8,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._statvfs = statvfs
        self._deadline = deadline_seconds
        self._max_hanging = max_hanging
        self._monotonic = monotonic
        self._lock = threading.Lock()  # everything below; never held while a filesystem is asked
        self._changed = threading.Condition(self._lock)
        # Filesystem (`major:minor`) → when its call began, and for which pass; late ones stay.
        self._calls: dict[str, tuple[float, _Pass]] = {}

    @property
    def hanging(self) -> int:
        """How many calls are under way, between passes: have not returned."""
        with self._lock:
            return len(self._calls)

    def ask(self, mounts: Sequence[Mount]) -> Mapping[str, Answer]:
        """Ask each mount once; to be called from one thread at a time.

        Returns:
            The answer by the mount's path.
        """
        # Local ones first: they are through before the first server hangs.
        order = sorted(mounts, key=_is_remote)
        with self._lock:
            current = _Pass([mount for mount in order if mount.device not in self._calls])
            end = self._monotonic() + self._deadline
            while current.pending or current.workers:
                now = self._monotonic()
                if now >= end or (self._next(current) is None and not current.workers):
                    break
                if self._is_stuck(current, now) and not self._add_worker(current):
                    break
                # A lost wake-up would cost the patience, not the pass.
                self._changed.wait(min(PATIENCE_SECONDS, end - now))
            current.over = True
            silent = {
                mount.path: Silence.HANGING if mount.device in self._calls else Silence.NOT_ASKED
                for mount in mounts
                if mount.path not in current.answers
            }
        return {**current.answers, **silent}

    def _next(self, current: _Pass) -> int | None:
        """Find the first mount that may be asked now."""
        for index, mount in enumerate(current.pending):
            limit = self._max_hanging if _is_remote(mount) else 2 * self._max_hanging
            if mount.device not in self._calls and len(self._calls) < limit:
                return index
        return None

    def _is_stuck(self, current: _Pass, now: float) -> bool:
        """Whether what could be asked waits for threads that have been in one call for long."""
        if self._next(current) is None:
            return False
        calls = [began for began, whose in self._calls.values() if whose is current]
        return len(calls) == current.workers and all(now - began >= PATIENCE_SECONDS for began in calls)

    def _add_worker(self, current: _Pass) -> bool:
        thread = threading.Thread(target=self._work, args=(current,), name="exporter-statvfs", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no thread for us: go on with those that there are
            return current.workers > 0
        current.workers += 1
        return True

    def _work(self, current: _Pass) -> None:
        while True:
            with self._lock:
                index = None if current.over else self._next(current)
                if index is None:
                    current.workers -= 1
                    self._changed.notify_all()
                    return
                mount = current.pending.pop(index)
                self._calls[mount.device] = (self._monotonic(), current)
            answer: Answer
            try:
                answer = self._statvfs(mount.path)
            except OSError as error:
                answer = error
            except ValueError as error:  # a path that cannot be one, from a damaged mountinfo
                answer = OSError(str(error))
            with self._lock:
                del self._calls[mount.device]
                if not current.over:  # not while the caller looks at them
                    current.answers[mount.path] = answer
                self._changed.notify_all()


def _is_remote(mount: Mount) -> bool:
    return mount.fstype in REMOTE or mount.fstype.startswith("fuse")
