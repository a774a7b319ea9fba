"""Session: the attempts that belong together, one after another, from what the feed shows of their processes.

Runs in the sidecar, on the ledger's collecting thread; no I/O. Its processes come in, pass by pass;
attempts are begun, counted and ended in its `Goodput`. Which processes are its own, and where it is kept, is `Sessions`'.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from exporter.feed.snapshot import Snapshot
from exporter.ledger.goodput.ends import SETTLE_SECONDS, Ends
from exporter.ledger.goodput.task import Attempt, Goodput
from exporter.ledger.store import StateKey
from exporter.ledger.totals import Moment, Process

OOM_LOOK_SECONDS = 5.0
FINISHED_SECONDS = 5.0
"""How long a process lives on after its application before its work counts as done: its end says more."""
LAST_WORD_SECONDS = 0.5
"""How long after the end of a process that finished its exit status may come."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GoodputOptions:
    """What is to be counted as what.

    Attributes:
        validation_is_productive: Whether validation is part of the work and not time lost.
        new_after_seconds: Without a session tag, a process that begins so long after the end of the last one of its
            run, at step 0 and without a checkpoint, begins another task.
        hang_seconds: No step for so long, and for `hang_steps` usual steps, is a hang.
        hang_steps: Likewise.
    """

    validation_is_productive: bool = False
    new_after_seconds: float = 3600.0
    hang_seconds: float = 60.0
    hang_steps: float = 10.0


@dataclass(slots=True, eq=False)
class Session:
    """A session in memory; times are of the monotonic clock."""

    key: StateKey
    goodput: Goodput = field(default_factory=Goodput)
    kept: bool = False  # its state was loaded
    safe: bool = False  # what is counted may be shown
    released: bool = False  # another sidecar may keep it
    refused: bool = False  # another one does
    gone: float | None = None  # when the end of the latest process was noticed
    _down_since: float | None = None  # the end itself
    _oom_kills: float | None = None  # the kernel's count while the process lived
    _oom_looked: float = 0.0
    _snapshot: Snapshot | None = None  # the last one that was counted
    _missing: int = 0  # passes in which the latest process was not there
    _finished: float | None = None  # when its application was seen to have ended
    _told: set[str] = field(default_factory=set)  # processes that were logged

    @property
    def rank(self) -> int:
        """Whose processes it follows: 0, or on a node without rank 0 its lowest."""
        return int(self.key[3] or 0)

    def see(
        self,
        process: Process,
        by_id: Mapping[str, Process],
        pid: int | None,
        ends: Ends,
        options: GoodputOptions,
        now: Moment,
    ) -> None:
        """Count what one of its processes has brought.

        Args:
            process: It; with a snapshot.
            by_id: All such processes.
            pid: It as seen from here.
            ends: How processes have ended.
            options: What counts as what.
            now: The time of the pass.
        """
        goodput, snapshot = self.goodput, process.snapshot
        assert snapshot is not None  # noqa: S101  # only such processes are looked at
        attempt = goodput.attempt
        if attempt is None or attempt.process != process.identity.id:
            if not self._may_begin(process, by_id):
                return
            start = ends.witnesses.started(pid, process.identity.started)
            if attempt is not None and attempt.ended is None:
                self._end(by_id.get(attempt.process), ends, before=start)
            attempt = self._begin(process, start, ends, options)
        self._missing = 0
        if self._snapshot is not snapshot:
            self._snapshot = snapshot
            goodput.update(process.training, written=snapshot.written, final=process.final)
        if process.living:
            self.gone = self._down_since = None
            if attempt.ended is not None:
                goodput.revive()
            self._finished = (self._finished or now.monotonic) if attempt.finished else None
            if self._finished is not None and now.monotonic - self._finished >= FINISHED_SECONDS:
                goodput.complete()
            if now.monotonic - self._oom_looked >= OOM_LOOK_SECONDS:
                self._oom_kills, self._oom_looked = ends.witnesses.oom_kills(), now.monotonic
        elif self.gone is None:
            self.gone = now.monotonic

    def follow_end(
        self, by_id: Mapping[str, Process], ends: Ends, now: Moment, *, linger_seconds: float
    ) -> None:
        """Notice the end of the latest process, settle it when its time has come, and wait `linger_seconds` for the next."""
        attempt = self.goodput.attempt
        if attempt is None:
            return
        process = by_id.get(attempt.process)
        if process is None and self.gone is None:
            self._missing += 1
            if attempt.ended is not None:  # in the life of another sidecar
                self.gone = now.monotonic - max(0.0, now.wall - attempt.ended)
            elif self._missing > 1:  # a listing made while a file is being replaced may miss it once
                self.gone = now.monotonic
        if self.gone is None:
            return
        if attempt.ended is None:
            patience = LAST_WORD_SECONDS if attempt.finished else SETTLE_SECONDS
            waited = now.monotonic - self.gone >= patience
            if not waited and ends.own(attempt.pid, attempt.recorded, now.wall) is None:
                return
            self._end(process, ends)
        if self._down_since is None:
            self._down_since = now.monotonic - max(0.0, now.wall - (attempt.ended or now.wall))
        if now.monotonic - self.gone <= linger_seconds:
            self.goodput.wait(now.monotonic - self._down_since)

    def _may_begin(self, process: Process, by_id: Mapping[str, Process]) -> bool:
        attempt = self.goodput.attempt
        if attempt is None:
            return True
        if self.goodput.knows(process.identity.id):
            return False
        if not process.living and process.identity.started < attempt.recorded:
            return False  # left from before; one that lives has come later, whatever the clock was set to
        before = by_id.get(attempt.process)
        if before is None or not before.living:
            return True
        if process.identity.id not in self._told:
            self._told.add(process.identity.id)
            _log.warning(
                "%s is one session, and two processes of rank 0 live that belong to it (runs %r and %r): the first is"
                " counted",
                shown(self.key),
                attempt.run,
                process.identity.run,
            )
        return False

    def _begin(self, process: Process, start: float, ends: Ends, options: GoodputOptions) -> Attempt:
        identity = process.identity
        attempt = Attempt(
            identity.id,
            identity.run,
            1,
            start=start,
            recorded=identity.started,
            pid=identity.pid,
            machine=ends.witnesses.machine,
            validates=options.validation_is_productive,
            tagged=self.key[2] == "session",
        )
        self.goodput.begin(attempt, new_after_seconds=options.new_after_seconds)
        self.gone = self._down_since = self._finished = None
        self._oom_looked = -OOM_LOOK_SECONDS
        return attempt

    def _end(self, process: Process | None, ends: Ends, *, before: float = inf) -> None:
        """Take note of the end, and of the reason; it was noticed late where another process has begun `before`."""
        goodput, attempt = self.goodput, self.goodput.latest
        ended = attempt.written
        if process is not None and process.departed is not None and not attempt.final:
            ended = max(ended, min(process.departed, before))
        own = ends.own(attempt.pid, attempt.recorded, ended)
        if own is not None:  # whoever waited for it knows best
            ended = max(attempt.written, min(own.at, before))
        evidence = ends.look(attempt, ended, self._oom_kills, seen=process is not None)
        # One that exited normally within a step, while another rank died without a word, did so for want of it.
        believed = attempt.open <= 0 or not evidence.silent
        goodput.end(ended, status=evidence.status, believed=believed)
        goodput.settle(evidence.reason)
        if not attempt.orderly:
            extra = {"reason": attempt.reason}
            _log.info("attempt %d of %s ended before its time", attempt.number, shown(self.key), extra=extra)


def session_key(run: str, tag: str, rank: int, keeper: str) -> StateKey:
    """Name the state of a session: by its tag, or "" for one that is all of a run.

    That of another rank than 0 is not the run's and has a keeper: it only tells this node what has become of its work.
    """
    name, kind = (tag, "session") if tag else (run, "run")
    return ("goodput", name, kind, *((str(rank), keeper) if rank else ("", "")))


def shown(key: StateKey) -> str:
    """Name a session for people."""
    return f"{key[2]} {key[1]!r}"
