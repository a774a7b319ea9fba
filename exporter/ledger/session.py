"""Session: the attempts that belong together, one after another, from what the feed shows of their processes.

Runs in the sidecar, on the ledger's collecting thread; no I/O. The records of its processes come in, pass by pass;
attempts are begun, counted and ended in its `Goodput`. Which processes are its own, and where it is kept, is `Sessions`'.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from exporter.feed.snapshot import Snapshot
from exporter.ledger.attempts import Attempt
from exporter.ledger.endings import SETTLE_SECONDS, Endings
from exporter.ledger.goodput import Goodput
from exporter.ledger.interruptions import reason_of
from exporter.ledger.seats import Moment, Record
from exporter.ledger.state import StateKey
from exporter.recording.values import TrainingReading

OOM_LOOK_SECONDS = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GoodputOptions:
    """What is to be counted as what.

    Attributes:
        validation_is_productive: Whether validation is part of the work and not time lost.
        new_after_seconds: Without a session tag, a process that begins so long after the end of the last one of its
            run, at step 0 and without a checkpoint, begins another task.
    """

    validation_is_productive: bool = False
    new_after_seconds: float = 3600.0


@dataclass(slots=True, eq=False)
class Session:
    """A session in memory.

    Attributes:
        key: Of its state file.
        goodput: What is counted.
        kept: Whether its state was loaded.
        safe: Whether what is counted may be shown.
        released: Whether another sidecar may keep it.
        refused: Whether another one does.
        gone: Monotonic time at which the end of the latest process was noticed.
        _down_since: Monotonic time of the end itself; None before that is known.
        _oom_kills: The kernel's count while the process lived.
        _oom_looked: Monotonic time of that look.
        _snapshot: The last one that was counted.
        _missing: Passes in which the latest process was not there.
        _told: What was logged, so that it is logged once.
    """

    key: StateKey
    goodput: Goodput = field(default_factory=Goodput)
    kept: bool = False
    safe: bool = False
    released: bool = False
    refused: bool = False
    gone: float | None = None
    _down_since: float | None = None
    _oom_kills: float | None = None
    _oom_looked: float = 0.0
    _snapshot: Snapshot | None = None
    _missing: int = 0
    _told: set[str] = field(default_factory=set)

    @property
    def rank(self) -> int:
        """Whose processes it follows: 0, or on a node without rank 0 its lowest."""
        return int(self.key[3]) if len(self.key) > 3 else 0

    def see(
        self,
        record: Record,
        by_id: Mapping[str, Record],
        pid: int | None,
        endings: Endings,
        options: GoodputOptions,
        now: Moment,
    ) -> None:
        """Count what one of its processes has brought.

        Args:
            record: Its record; with a snapshot.
            by_id: Those of all such processes.
            pid: It as seen from here.
            endings: How processes have ended.
            options: What counts as what.
            now: The time of the pass.
        """
        goodput, snapshot = self.goodput, record.snapshot
        assert snapshot is not None  # noqa: S101  # only such records are looked at
        attempt = goodput.attempt
        if attempt is None or attempt.process != record.process.id:
            if not self._may_begin(record, by_id):
                return
            start = endings.witnesses.started(pid, record.process.started)
            if attempt is not None and attempt.ended is None:
                self._end(by_id.get(attempt.process), endings, before=start)
            attempt = self._begin(record, start, endings, options)
        self._missing = 0
        if self._snapshot is not snapshot:
            self._snapshot = snapshot
            goodput.update(reading_of(record), written=snapshot.written, final=snapshot.recording.final)
        if record.living:
            self.gone = self._down_since = None
            if attempt.ended is not None:
                goodput.revive()
            if now.monotonic - self._oom_looked >= OOM_LOOK_SECONDS:
                self._oom_kills, self._oom_looked = endings.witnesses.oom_kills(), now.monotonic
        elif self.gone is None:
            self.gone = now.monotonic

    def follow_end(
        self, by_id: Mapping[str, Record], endings: Endings, now: Moment, *, linger_seconds: float
    ) -> None:
        """Notice the end of the latest process, settle it when its time has come, and wait for the next.

        Args:
            by_id: The records of all processes that lead a run.
            endings: How processes have ended.
            now: The time of the pass.
            linger_seconds: How long another process is waited for.
        """
        attempt = self.goodput.attempt
        if attempt is None:
            return
        record = by_id.get(attempt.process)
        if record is None and self.gone is None:
            self._missing += 1
            if attempt.ended is not None:  # in the life of another sidecar
                self.gone = now.monotonic - max(0.0, now.wall - attempt.ended)
            elif self._missing > 1:  # a listing made while a file is being replaced may miss it once
                self.gone = now.monotonic
        if self.gone is None:
            return
        if attempt.ended is None:
            waited = now.monotonic - self.gone >= SETTLE_SECONDS
            if not (waited or attempt.finished or endings.own_status(attempt, now.wall) is not None):
                return
            self._end(record, endings)
        if self._down_since is None:
            self._down_since = now.monotonic - max(0.0, now.wall - (attempt.ended or now.wall))
        if now.monotonic - self.gone <= linger_seconds:
            self.goodput.wait(now.monotonic - self._down_since)

    def _may_begin(self, record: Record, by_id: Mapping[str, Record]) -> bool:
        attempt = self.goodput.attempt
        if attempt is None:
            return True
        if self.goodput.knows(record.process.id):
            return False
        if not record.living and record.process.started < attempt.recorded:
            return False  # left from before; one that lives has come later, whatever the clock was set to
        before = by_id.get(attempt.process)
        if before is None or not before.living:
            return True
        if record.process.id not in self._told:
            self._told.add(record.process.id)
            _log.warning(
                "%s is one session, and two processes of rank 0 live that belong to it (runs %r and %r): the first is"
                " counted",
                shown(self.key),
                attempt.run,
                record.process.run,
            )
        return False

    def _begin(self, record: Record, start: float, endings: Endings, options: GoodputOptions) -> Attempt:
        process, reading = record.process, reading_of(record)
        facts = {} if reading is None else dict(reading.facts)
        attempt = Attempt(
            process.id,
            process.run,
            1,
            start=start,
            recorded=process.started,
            pid=process.pid,
            machine=endings.witnesses.machine,
            validates=options.validation_is_productive,
            tagged=self.key[1] == "session",
            perf_tag=facts.get("perf_tag", ""),
        )
        self.goodput.begin(attempt, new_after_seconds=options.new_after_seconds)
        self.gone = self._down_since = None
        self._oom_looked = -OOM_LOOK_SECONDS
        return attempt

    def _end(self, record: Record | None, endings: Endings, *, before: float = inf) -> None:
        """Take note of the end, and of the reason; it was noticed late where another process has begun `before`."""
        goodput, attempt = self.goodput, self.goodput.attempt
        assert attempt is not None  # noqa: S101  # what ends has begun
        ended = attempt.written
        if record is not None and record.departed is not None and not attempt.final:
            ended = max(ended, min(record.departed, before))
        evidence = endings.evidence(attempt, ended, self._oom_kills, seen=record is not None)
        goodput.end(ended, failed=bool(evidence.status))
        goodput.settle(reason_of(evidence))
        if not attempt.orderly:
            _log.info(
                "attempt %d of %s ended before its time",
                attempt.number,
                shown(self.key),
                extra={"reason": attempt.reason},
            )


def reading_of(record: Record) -> TrainingReading | None:
    """Give what a process tells of its training; None where it tells nothing."""
    return None if record.snapshot is None else record.snapshot.recording.training


def session_key(run: str, tag: str, rank: int, keeper: str) -> StateKey:
    """Name the state of a session.

    Args:
        run: The run of one of its processes.
        tag: The session's; "" for one that is all of a run.
        rank: Whose processes it follows.
        keeper: Of the state; the session of another rank than 0 is not the run's, it only tells this node what has
            become of its work.
    """
    key = ("goodput", *(("session", tag) if tag else ("run", run)))
    return (*key, str(rank), keeper, "") if rank else key


def is_session(key: StateKey) -> bool:
    """Whether a key is one that `session_key` makes."""
    return key[:1] == ("goodput",) and (len(key) == 3 or (len(key) == 6 and key[3].isdecimal()))


def shown(key: StateKey) -> str:
    """Name a session for people."""
    return f"{'session' if key[1] == 'session' else 'run'} {key[2]!r}"
