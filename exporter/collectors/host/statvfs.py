"""statvfs: asks filesystems for their size, some of which never answer.

Used in the sidecar by the collectors of filesystems and of checkpoint directories. Mounts come in, an answer for each
goes out within a deadline.

A dead NFS server or FUSE daemon blocks `statvfs` for ever, in a thread that nothing can interrupt. (A SIGKILL of the
whole process can, unless a FUSE daemon has taken the question: then the process lets go of its ports and locks at
SIGTERM and stays until the daemon answers or dies, as any other process that asked would. Such mounts can be
excluded.) So each call has a daemon thread of its own. One that has not returned at the deadline is left behind: its
filesystem gets no further call until it has, at whichever path it is mounted. Once `max_hanging` calls are under way,
network filesystems are not asked any more; local ones, which answer, have as many again to themselves, so that dead
servers never cost the local disks.
"""

from __future__ import annotations

import enum
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from exporter.collectors.host.mounts import Mount

PATIENCE_SECONDS = 0.05
"""How long a call may take before the next one begins beside it: far above what an answer takes."""

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


class StatvfsPool:
    """Calls `statvfs` so that a call that hangs costs its own mount only.

    Args:
        statvfs: The call; takes the path.
        deadline_seconds: After so long a pass is over, whoever has not answered.
        max_hanging: Calls under way, beyond which no network filesystem is asked; twice as many in all.
    """

    def __init__(
        self,
        *,
        statvfs: Callable[[str], os.statvfs_result] = os.statvfs,
        deadline_seconds: float = 3.0,
        max_hanging: int = 8,
    ) -> None:
        self._statvfs = statvfs
        self._deadline = deadline_seconds
        self._max_hanging = max_hanging
        self._returned = threading.Condition()  # guards what follows; never held while a filesystem is asked
        self._under_way: set[str] = set()  # filesystems (`major:minor`) with a call that has not returned

    @property
    def hanging(self) -> int:
        """How many calls are under way, between passes: have not returned."""
        with self._returned:
            return len(self._under_way)

    def ask(self, mounts: Sequence[Mount]) -> Mapping[str, Answer]:
        """Ask each mount once; to be called from one thread at a time.

        Returns:
            The answer by the mount's path.
        """
        end = time.monotonic() + self._deadline
        answers: dict[str, Answer] = {}
        with self._returned:
            stuck = set(self._under_way)
            # Local ones first: they are through before the first server hangs.
            waiting = sorted((mount for mount in mounts if mount.device not in stuck), key=_is_remote)
            while (waiting or self._under_way - stuck) and time.monotonic() < end:
                mount = next((each for each in waiting if self._may_ask(each)), None)
                if mount is None:
                    if not self._under_way - stuck:
                        break  # all that is left waits for what hung before
                    self._returned.wait(end - time.monotonic())
                    continue
                waiting.remove(mount)
                if not self._start(mount, answers):
                    break
                began = time.monotonic()
                self._returned.wait_for(
                    lambda mount=mount: mount.device not in self._under_way,  # type: ignore[misc]
                    min(PATIENCE_SECONDS, end - began),
                )
            silent = {
                mount.path: Silence.HANGING if mount.device in self._under_way else Silence.NOT_ASKED
                for mount in mounts
                if mount.path not in answers
            }
            return {**answers, **silent}

    def _may_ask(self, mount: Mount) -> bool:
        limit = self._max_hanging if _is_remote(mount) else 2 * self._max_hanging
        return mount.device not in self._under_way and len(self._under_way) < limit

    def _start(self, mount: Mount, answers: dict[str, Answer]) -> bool:
        self._under_way.add(mount.device)
        thread = threading.Thread(
            target=self._call, args=(mount, answers), name="exporter-statvfs", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the system has no thread for us
            self._under_way.discard(mount.device)
            return False
        return True

    def _call(self, mount: Mount, answers: dict[str, Answer]) -> None:
        try:
            answer: Answer = self._statvfs(mount.path)
        except OSError as error:
            answer = error
        except ValueError as error:  # a path that cannot be one, from a damaged mountinfo
            answer = OSError(str(error))
        with self._returned:
            self._under_way.discard(mount.device)
            answers[mount.path] = answer
            self._returned.notify_all()


def _is_remote(mount: Mount) -> bool:
    return mount.fstype in REMOTE or mount.fstype.startswith("fuse")
