"""Sessions: whose attempts belong together, one after another, and the state files that stand behind their goodput.

A session is all processes of rank 0 with one session tag, or without one all of one run. A process is bound to its session
when it tells its tag, begins to train, or ends: what it tells is cumulative, so that nothing is lost by waiting. A node
without rank 0 counts its lowest rank for itself: none of that is published, but the node's energy is divided by it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Annotated, Literal

from exporter.config.options import Duration, Range, option
from exporter.errors import StateError
from exporter.families import Collected
from exporter.feed.reader import FeedEntry
from exporter.feed.snapshot import Snapshot
from exporter.ledger.energy.attribution import Flows
from exporter.ledger.families.run_info import PeakFlops
from exporter.ledger.goodput.families import tell_goodput
from exporter.ledger.goodput.run_state import Witnesses
from exporter.ledger.goodput.task import Attempt, Goodput
from exporter.ledger.ranks import Ranks
from exporter.ledger.store import StateKey, StateStore, dumps, file_name, loads
from exporter.ledger.totals import Moment, Process

SETTLE_SECONDS = 3.0
"""How long after the end of a process others may still say what it died of."""
TAG_SECONDS = 30.0
"""How long a process that does not train yet may take to tell its session tag."""
REFUSED_SECONDS = 60.0
"""How long the file of a dead process waits for another sidecar to let go of its session."""
FINISHED_SECONDS = 5.0
"""How long a process lives on after its application before its work counts as done: its end says more."""
LAST_WORD_SECONDS = 0.5
"""How long after the end of a process that finished its exit status may come."""
EXITING_SECONDS = 10.0
"""How long a process may take to leave after it let go of its feed: torch tears down a device first."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GoodputOptions:
    """How the time of a training is counted."""

    validation: Literal["badput", "productive"] = option(
        "badput",
        "Whether validation and test count as lost time or as work. Takes effect at the next attempt.",
    )
    new_task_after: Annotated[Duration, Range(0, 365 * 86400)] = option(
        3600.0,
        "Without a session tag, a process begins a new task if it starts this long after the end of its run's last "
        "process, at step 0 and without loading a checkpoint. The time between belongs to no task.",
    )
    hang_after: Annotated[Duration, Range(1, 86400)] = option(
        60.0,
        "A run hangs if no step has ended for this long and for hang_steps usual steps. Its last values (loss, "
        "learning rate, ...) are then absent until the next step. Phases that take long by nature have five times "
        "as long.",
    )
    hang_steps: Annotated[float, Range(1, 1000)] = option(10.0, "See hang_after.", example=20.0)
    peak_flops: tuple[PeakFlops, ...] = option(
        (), "Peak performance of devices that the built-in table lacks."
    )


@dataclass(frozen=True, slots=True)
class _Pass:
    """What all sessions look at in one pass."""

    now: Moment
    witnesses: Witnesses
    options: GoodputOptions
    processes: Sequence[Process]  # of all ranks
    leading: Mapping[str, Process]  # those of rank 0 that have a snapshot, by id
    pids: Mapping[str, int | None]  # as seen from here, by id


@dataclass(slots=True, eq=False)
class Session:
    """A session in memory; times are of the monotonic clock."""

    key: StateKey
    goodput: Goodput = field(default_factory=Goodput)
    kept: bool = False  # its state was loaded
    safe: bool = False  # what is counted may be shown
    saved: int = 0  # the hash of what was saved last
    released: bool = False  # another sidecar may keep it
    refused: bool = False  # another one does
    gone: float | None = None  # when the latest process ended
    # the kernel's count at the last two snapshots
    _oom_kills: tuple[float | None, float | None] = (None, None)
    _snapshot: Snapshot | None = None  # the last one that was counted
    _left: float = 0.0  # when a process that had finished was last seen to be there still
    _finished: float | None = None  # when its application was seen to have ended
    _told: set[str] = field(default_factory=set)  # processes that were logged

    @property
    def rank(self) -> int:
        """Whose processes it follows: 0, or on a node without rank 0 its lowest."""
        return int(self.key[3] or 0)

    @property
    def name(self) -> str:
        """Which, for people."""
        return f"{self.key[2]} {self.key[1]!r}"

    def see(self, process: Process, look: _Pass) -> None:
        """Count what one of its processes, which has a snapshot, has brought."""
        goodput, snapshot, now = self.goodput, process.snapshot, look.now.monotonic
        assert snapshot is not None  # noqa: S101  # only such processes are looked at
        attempt = goodput.attempt
        if attempt is None or attempt.process != process.identity.id:
            if not self._may_begin(process, look):
                return
            start = look.witnesses.started(look.pids.get(process.identity.id), process.identity.started)
            if attempt is not None and attempt.ended is None:
                self._end(look, before=start)
            attempt = self._begin(process, start, look)
        if self._snapshot is not snapshot:
            self._snapshot = snapshot
            goodput.update(process.training, written=snapshot.written, final=process.final)
            # Whoever wrote this snapshot was not killed before the last one was seen.
            last = self._oom_kills[1]
            self._oom_kills = last, look.witnesses.oom_kills() if process.living else last
        if process.living:
            self.gone = None
            if attempt.ended is not None:
                goodput.revive()
            self._finished = (self._finished or now) if attempt.reading.finished else None
            if self._finished is not None and now - self._finished >= FINISHED_SECONDS:
                goodput.complete()

    def follow_end(self, look: _Pass, *, linger_seconds: float) -> None:
        """Notice the end of the latest process, settle it when its time has come, and wait `linger_seconds` for the next."""
        attempt, now = self.goodput.attempt, look.now
        if attempt is None:
            return
        if self.gone is None:
            process = look.leading.get(attempt.process)
            if process is not None and process.living:
                return
            # One without a record ended in the life of another sidecar, or nobody saw when.
            ended = 0.0 if attempt.ended is None else max(0.0, now.wall - attempt.ended)
            self.gone = now.monotonic - ended if process is None else process.departed_monotonic
        if attempt.ended is None:
            since, patience = self.gone, SETTLE_SECONDS
            if attempt.reading.finished:
                # Its exit status is still to come where a process of its number and age is there.
                exiting = look.witnesses.started(attempt.pid, attempt.recorded) < attempt.recorded
                if exiting and now.monotonic - self.gone < EXITING_SECONDS:
                    self._left = now.monotonic
                since, patience = max(self.gone, self._left), LAST_WORD_SECONDS
            waited = now.monotonic - since >= patience
            if not waited and look.witnesses.own(attempt.pid, attempt.recorded, now.wall) is None:
                return
            self._end(look)
        if now.monotonic - self.gone <= linger_seconds:
            self.goodput.wait(now.monotonic - self.gone)

    def _may_begin(self, process: Process, look: _Pass) -> bool:
        attempt, identity = self.goodput.attempt, process.identity
        if attempt is None:
            return True
        # One that is left from before is none; one that lives has come later, whatever the clock was set to.
        if self.goodput.knows(identity.id) or (not process.living and identity.started < attempt.recorded):
            return False
        before = look.leading.get(attempt.process)
        if before is None or not before.living:
            return True
        if identity.id not in self._told:
            self._told.add(identity.id)
            text = "%s is one session, and two processes of rank 0 live that belong to it (runs %r and %r): the first counts"
            _log.warning(text, self.name, attempt.run, identity.run)
        return False

    def _begin(self, process: Process, start: float, look: _Pass) -> Attempt:
        identity = process.identity
        attempt = Attempt(identity.id, identity.run, 1, start, identity.started, identity.pid)
        attempt.machine, attempt.tagged = look.witnesses.machine, self.key[2] == "session"
        attempt.validates = look.options.validation == "productive"
        self.goodput.begin(attempt, new_after_seconds=look.options.new_task_after)
        self.gone, self._finished, self._oom_kills = None, None, (None, None)
        return attempt

    def _end(self, look: _Pass, *, before: float = inf) -> None:
        """Take note of the end, and of the reason; it was noticed late where another process has begun `before`."""
        goodput, attempt = self.goodput, self.goodput.latest
        process = look.leading.get(attempt.process)
        ended = attempt.written
        if process is not None and process.departed is not None and not attempt.final:
            ended = max(ended, min(process.departed, before))
        own = look.witnesses.own(attempt.pid, attempt.recorded, ended)
        if own is not None:  # whoever waited for it knows best
            ended = max(attempt.written, min(own.at, before))
        reason, status, silent = look.witnesses.explain(
            attempt, ended, look.processes, self._oom_kills[0], seen=process is not None
        )
        # One that exited normally within a step, while another rank was killed or crashed, did so for want of it.
        believed = attempt.reading.open_seconds <= 0 or not silent
        goodput.end(ended, reason, status=status, believed=believed)
        if not attempt.orderly:
            extra = {"reason": attempt.reason}
            _log.info("attempt %d of %s ended before its time", attempt.number, self.name, extra=extra)


class Sessions:
    """All sessions that this sidecar keeps; of `shared` state it lets go at a session's end, for another to go on."""

    def __init__(self, state: StateStore, *, shared: bool = False) -> None:
        self.options = GoodputOptions()  # may be replaced from any thread, as may the witnesses
        self.witnesses = Witnesses()
        self._state = state
        self._linger_seconds = 0.0
        self._shared = shared
        self._sessions: dict[StateKey, Session] = {}
        self._bound: dict[str, StateKey] = {}
        self._first_told: dict[str, float] = {}
        self._holds: frozenset[str] = frozenset()
        self._resumed = False

    def holds(self, process_id: str) -> bool:
        """Whether the feed file of a dead process is still needed."""
        return process_id in self._holds

    def flows(self) -> Mapping[str, Flows]:
        """Tell what has become of the work of each run, for who divides other things by it."""
        found = {}
        for session in self._latest():
            goodput = session.goodput
            found[goodput.latest.run] = Flows(
                session=file_name(session.key),
                productive=goodput.productive - goodput.validated,
                lost=goodput.badput["lost_progress"],
                hung=goodput.badput["hang"],
                uncommitted=goodput.uncommitted,
                validates=goodput.latest.validates,
            )
        return found

    # One pass -------------------------------------------------------------------------------------------

    def update(
        self, ranks: Ranks, entries: Mapping[str, FeedEntry], linger_seconds: float, now: Moment
    ) -> None:
        """Count what the processes of rank 0 have brought, and save it; an end is shown for `linger_seconds`."""
        self._linger_seconds = linger_seconds
        if not ranks.owner:
            self._let_go_of_all()
            return
        if not self._resumed:
            self._resume_recent(now)
        leading = {each.identity.id: each for each in _leading(ranks)}
        pids = {process_id: entry.pid for process_id, entry in entries.items()}
        look = _Pass(now, self.witnesses, self.options, list(ranks.processes()), leading, pids)
        # What was counted from a rank that was seen before the one that leads its run is forgotten.
        ranks_now = {each.identity.run: each.identity.rank or 0 for each in leading.values()}
        for key, session in list(self._sessions.items()):
            attempt = session.goodput.attempt
            if attempt is not None and session.rank > ranks_now.get(attempt.run, session.rank):
                self._let_go_of(key)
        for process in leading.values():
            self._bind(process, now)
        self._first_told = {each: when for each, when in self._first_told.items() if each in leading}
        self._bound = {each: self._bound[each] for each in leading if each in self._bound}
        for process_id, key in self._bound.items():
            found = self._sessions.get(key)
            if found is None or (found.released and not found.goodput.knows(process_id)):
                found = self._sessions[key] = Session(key)
            if not found.kept:
                self._open(found)
            if found.kept and not found.released:
                found.see(leading[process_id], look)
        for session in self._sessions.values():
            if session.kept and not session.released:
                session.follow_end(look, linger_seconds=linger_seconds)
                self._save(session)
        self._holds = frozenset(self._needed(leading, now))
        self._forget(now)

    def _bind(self, process: Process, now: Moment) -> None:
        """Find the session of a process, as soon as that is known."""
        identity, reading = process.identity, process.training
        if identity.id in self._bound:
            return
        if reading is None:
            # One that died before it told anything of training belongs to the session of its run, if there is one.
            for key, session in self._sessions.items() if not process.living else ():
                attempt = session.goodput.attempt
                if attempt is not None and attempt.run == identity.run and session.goodput.trains:
                    self._bound[identity.id] = key
            return
        if not process.living and not reading.loop and not reading.failure and process.final:
            return  # it came and went in order without training: no attempt at anything
        waited = now.monotonic - self._first_told.setdefault(identity.id, now.monotonic) >= TAG_SECONDS
        tag = dict(reading.facts).get("session_tag", "")
        if tag or reading.loop or reading.finished or waited or not process.living:
            name, kind = (tag, "session") if tag else (identity.run, "run")
            # That of another rank than 0 is not the run's: it only tells this node what has become of its work.
            node = (str(identity.rank), self._state.keeper) if identity.rank else ("", "")
            self._bound[identity.id] = ("goodput", name, kind, *node)

    # State ----------------------------------------------------------------------------------------------

    def _let_go_of(self, key: StateKey) -> None:
        self._state.release(key)
        del self._sessions[key]

    def _let_go_of_all(self) -> None:
        for key in list(self._sessions):
            self._let_go_of(key)
        self._bound.clear()
        self._holds = frozenset()
        self._resumed = False

    def _resume_recent(self, now: Moment) -> None:
        """Load the sessions of this sidecar that ended a short while ago, or whose files are gone."""
        try:
            keys = self._state.recent("goodput", self._linger_seconds)
        except StateError as error:
            self._state.problems.append(str(error))
            return
        self._resumed = True
        for key in keys:
            session = self._sessions[key] = Session(key)
            self._open(session)
            attempt = session.goodput.attempt
            ended = now.wall if attempt is None or attempt.ended is None else attempt.ended
            if attempt is None or now.wall - ended > self._linger_seconds:
                self._let_go_of(key)

    def _open(self, session: Session) -> None:
        try:
            session.refused = not self._state.claim(session.key)
            if session.refused:
                where = f"{session.name} in {self._state.directory}"
                self._state.problems.append(f"another sidecar keeps the goodput of {where}")
            else:
                session.goodput = self._state.load(session.key, lambda it: loads(Goodput, it)) or Goodput()
                session.kept = True
        except StateError as error:
            self._state.problems.append(str(error))

    def _save(self, session: Session) -> None:
        content = dumps(session.goodput)
        try:
            if not session.safe or session.saved != hash(content):
                self._state.save(session.key, content)
            session.safe, session.saved = True, hash(content)
        except StateError as error:
            session.safe = False
            self._state.problems.append(str(error))

    def _needed(self, leading: Mapping[str, Process], now: Moment) -> Iterator[str]:
        """Processes whose feed files are not to be removed yet."""
        for process_id, key in self._bound.items():
            session, attempt = self._sessions[key], self._sessions[key].goodput.attempt
            gone = now.monotonic - leading[process_id].departed_monotonic
            if session.refused and gone > REFUSED_SECONDS:
                continue
            open_ = attempt is not None and attempt.process == process_id and attempt.ended is None
            if open_ or not session.safe:
                yield process_id

    def _forget(self, now: Moment) -> None:
        for key, session in list(self._sessions.items()):
            attempt = session.goodput.attempt
            over = session.safe and attempt is not None and attempt.ended is not None
            if over and self._shared and not session.released:
                self._state.release(key)
                session.released = True
            lingers = session.gone is None or now.monotonic - session.gone <= self._linger_seconds
            if (over and not lingers) or (not session.kept and key not in self._bound.values()):
                self._let_go_of(key)

    # What goes out --------------------------------------------------------------------------------------

    def _latest(self) -> Iterator[Session]:
        """Give what may be shown: of two for one run the later, or neither, since a run may change its session tag."""
        begun = [each for each in self._sessions.values() if each.goodput.attempt and each.goodput.trains]
        # One that lives has come later, whatever the clock was set to.
        begun.sort(key=lambda each: (each.goodput.latest.ended is None, each.goodput.latest.recorded))
        latest = {each.goodput.latest.run: each for each in begun}
        return (session for session in latest.values() if session.safe)

    def tell(self, collected: Collected) -> None:
        """Fill the families of every session that may be shown."""
        for session in self._latest():
            if session.rank == 0:
                tell_goodput(collected, session.goodput)


def _leading(ranks: Ranks) -> list[Process]:
    """The processes of rank 0, in order; of a run that has none here, those of the lowest rank."""
    with_number = [rank for rank in ranks if rank.key.rank is not None and rank.slots]
    with_number.sort(key=lambda rank: -(rank.key.rank or 0))
    lowest = {rank.key.run: rank for rank in with_number}
    found = [
        process
        for rank in lowest.values()
        for slot, process in rank.processes()
        if slot.number == 0 and process.snapshot is not None
    ]
    # Who lives has come after the dead, whatever the clock was set to.
    return sorted(found, key=lambda each: (each.living, each.identity.started, each.identity.id))
