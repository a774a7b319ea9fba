"""Sessions: whose attempts belong together, one after another, and the state files that stand behind their goodput.

Runs in the sidecar, on the ledger's collecting thread, within the ledger's pass. The processes of rank 0 that the feed
shows come in; attempts are begun, counted, ended and saved; families go out.

A session is all processes of rank 0 with one session tag, or without one all of one run. It has one keeper at a time,
as ranks have: the state is kept under the tag, so that with a shared state directory the sidecar that sees the next
process, of another run and on another node perhaps, goes on where the last one was. Nothing is published before it is
saved, and the feed file of a dead process stays until what it says is safe.

A node without rank 0 counts its lowest rank in the same way, for itself: nothing of that is published, but the node's
energy is divided by what has become of the work.

A process is bound to its session when it tells its tag, or begins to train, or ends; what it tells is cumulative, so
that nothing is lost by waiting.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from prometheus_client.core import Metric

from exporter.errors import StateError
from exporter.feed.reader import FeedEntry
from exporter.feed.snapshot import Snapshot
from exporter.ledger import codec
from exporter.ledger.energy.attribution import Flows
from exporter.ledger.goodput.ends import SETTLE_SECONDS, Ends
from exporter.ledger.goodput.families import goodput_families
from exporter.ledger.goodput.task import Attempt, Goodput
from exporter.ledger.rank import Rank
from exporter.ledger.ranks import Ranks
from exporter.ledger.store import StateKey, StateStore, file_name
from exporter.ledger.totals import Moment, Process

TAG_SECONDS = 30.0
"""How long a process that does not train yet may take to tell its session tag."""
REFUSED_SECONDS = 60.0
"""How long the file of a dead process waits for another sidecar to let go of its session."""
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
        new_after_seconds: Without a session tag, a process that begins so long after the end of the last one of its
            run, at step 0 and without a checkpoint, begins another task.
    """

    validation_is_productive: bool = False
    new_after_seconds: float = 3600.0
    hang_seconds: float = 60.0  # no step for so long, and for `hang_steps` usual steps, is a hang
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

    @property
    def name(self) -> str:
        """Which, for people."""
        return f"{self.key[2]} {self.key[1]!r}"

    def see(
        self,
        process: Process,
        by_id: Mapping[str, Process],
        pid: int | None,
        ends: Ends,
        options: GoodputOptions,
        now: Moment,
    ) -> None:
        """Count what one of its processes has brought, which has a snapshot and, as seen from here, a pid."""
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
        attempt, identity = self.goodput.attempt, process.identity
        if attempt is None:
            return True
        # One that is left from before is none; one that lives has come later, whatever the clock was set to.
        if self.goodput.knows(identity.id) or (not process.living and identity.started < attempt.recorded):
            return False
        before = by_id.get(attempt.process)
        if before is None or not before.living:
            return True
        if identity.id not in self._told:
            self._told.add(identity.id)
            text = "%s is one session, and two processes of rank 0 live that belong to it (runs %r and %r): the first counts"
            _log.warning(text, self.name, attempt.run, identity.run)
        return False

    def _begin(self, process: Process, start: float, ends: Ends, options: GoodputOptions) -> Attempt:
        identity = process.identity
        attempt = Attempt(identity.id, identity.run, 1, start, identity.started, identity.pid)
        attempt.machine, attempt.tagged = ends.witnesses.machine, self.key[2] == "session"
        attempt.validates = options.validation_is_productive
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
        # One that exited normally within a step, while another rank was killed or crashed, did so for want of it.
        believed = attempt.open <= 0 or not evidence.silent
        goodput.end(ended, status=evidence.status, believed=believed)
        goodput.settle(evidence.reason)
        if not attempt.orderly:
            extra = {"reason": attempt.reason}
            _log.info("attempt %d of %s ended before its time", attempt.number, self.name, extra=extra)


class Sessions:
    """All sessions that this sidecar keeps.

    Args:
        linger_seconds: How long a session is shown after its end.
        shared: Whether other sidecars may go on with the state files, so that a session is let go of at its end.

    Attributes:
        options: May be replaced from any thread; those of validation hold from the next attempt on.
    """

    def __init__(
        self,
        state: StateStore,
        *,
        linger_seconds: float = 900.0,
        shared: bool = False,
    ) -> None:
        self.ends = Ends()
        self.options = GoodputOptions()
        self._state = state
        self._linger_seconds = linger_seconds
        self._shared = shared
        self._sessions: dict[StateKey, Session] = {}
        self._bound: dict[str, StateKey] = {}
        self._first_told: dict[str, float] = {}
        self._holds: frozenset[str] = frozenset()
        self._resumed = False
        self._owner = False

    def holds(self, process_id: str) -> bool:
        """Whether the feed file of a dead process is still needed."""
        return process_id in self._holds

    def flows(self) -> Mapping[str, Flows]:
        """Tell what has become of the work of each run, for who divides other things by it."""
        found = {}
        for session in self._latest(self._sessions.values()):
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

    def update(self, ranks: Ranks, entries: Mapping[str, FeedEntry], now: Moment) -> list[str]:
        """Count what the processes of rank 0 have brought, and save it; give why goodput is withheld."""
        if ranks.owner != self._owner or not ranks.owner:
            self._let_go_of_all()
            self._owner = ranks.owner
        if not ranks.owner:
            return []
        problems = [] if self._resumed else self._resume_recent(now)
        self.ends.note(ranks, now)
        processes = sorted(_leading(ranks), key=lambda each: (each.identity.started, each.identity.id))
        by_id = {each.identity.id: each for each in processes}
        self._let_go_of_followers({each.identity.run: each.identity.rank or 0 for each in processes})
        for process in processes:
            self._bind(process, now)
        self._first_told = {each: when for each, when in self._first_told.items() if each in by_id}
        self._bound = {each: key for each, key in self._bound.items() if each in by_id}
        for process_id, process in by_id.items():
            key = self._bound.get(process_id)
            if key is None:
                continue
            session = self._sessions.get(key)
            if session is not None and session.released and session.goodput.knows(process_id):
                continue
            if session is None or session.released:
                session = self._sessions[key] = Session(key)
            if not session.kept:
                problems += self._open(session)
            if session.kept:
                pid = entries[process_id].pid if process_id in entries else None
                session.see(process, by_id, pid, self.ends, self.options, now)
        for session in self._sessions.values():
            if session.kept and not session.released:
                session.follow_end(by_id, self.ends, now, linger_seconds=self._linger_seconds)
        problems += self._save()
        self._holds = frozenset(self._needed(by_id, now))
        self._forget(now)
        return problems

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
        since = self._first_told.setdefault(identity.id, now.monotonic)
        tag = dict(reading.facts).get("session_tag", "")
        waited = now.monotonic - since >= TAG_SECONDS
        if tag or reading.loop or reading.finished or waited or not process.living:
            name, kind = (tag, "session") if tag else (identity.run, "run")
            # That of another rank than 0 is not the run's: it only tells this node what has become of its work.
            node = (str(identity.rank), self._state.keeper) if identity.rank else ("", "")
            self._bound[identity.id] = ("goodput", name, kind, *node)

    # State ----------------------------------------------------------------------------------------------

    def _let_go_of_all(self) -> None:
        for key in self._sessions:
            self._state.release(key)
        self._sessions.clear()
        self._bound.clear()
        self._holds = frozenset()
        self._resumed = False

    def _let_go_of_followers(self, leading: Mapping[str, int]) -> None:
        """Forget what was counted from a rank that was seen before the one that leads its run."""
        for key, session in list(self._sessions.items()):
            attempt = session.goodput.attempt
            if attempt is not None and session.rank > leading.get(attempt.run, session.rank):
                self._state.release(key)
                del self._sessions[key]

    def _resume_recent(self, now: Moment) -> list[str]:
        """Load the sessions of this sidecar that ended a short while ago, or whose files are gone."""
        try:
            keys = self._state.recent("goodput", self._linger_seconds)
        except StateError as error:
            return [str(error)]
        self._resumed = True
        for key in keys:
            session = Session(key)
            if not self._open(session) and session.goodput.attempt is not None:
                ended = session.goodput.attempt.ended
                if ended is None or now.wall - ended <= self._linger_seconds:
                    self._sessions[key] = session
                    continue
            self._state.release(key)
        return []

    def _open(self, session: Session) -> list[str]:
        try:
            session.refused = not self._state.claim(session.key)
            if session.refused:
                return [f"another sidecar keeps the goodput of {session.name} in {self._state.directory}"]
            found = self._state.load(session.key, lambda content: codec.loads(Goodput, content))
        except StateError as error:
            return [str(error)]
        session.goodput, session.kept = found or Goodput(), True
        return []

    def _save(self) -> list[str]:
        problems = []
        for session in self._sessions.values():
            if session.kept and not session.released and (session.goodput.changed or not session.safe):
                try:
                    self._state.save(session.key, codec.dumps(session.goodput))
                    session.safe, session.goodput.changed = True, False
                except StateError as error:
                    problems.append(str(error))
                    session.safe = False
        return problems

    def _needed(self, by_id: Mapping[str, Process], now: Moment) -> Iterator[str]:
        """Processes whose feed files are not to be removed yet."""
        for process_id, key in self._bound.items():
            session, attempt = self._sessions[key], self._sessions[key].goodput.attempt
            gone = now.monotonic - by_id[process_id].departed_monotonic
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
                self._state.release(key)
                del self._sessions[key]

    # What goes out --------------------------------------------------------------------------------------

    @staticmethod
    def _latest(sessions: Iterable[Session]) -> Iterator[Session]:
        """Give what may be shown: of two for one run the later, or neither, since a run may change its session tag."""
        latest: dict[str, tuple[tuple[bool, float], Session]] = {}
        for session in sessions:
            attempt = session.goodput.attempt
            if attempt is None or not session.goodput.trains:
                continue
            # One that lives has come later, whatever the clock was set to.
            order = attempt.ended is None, attempt.recorded
            if attempt.run not in latest or latest[attempt.run][0] <= order:
                latest[attempt.run] = order, session
        return (session for _, session in latest.values() if session.safe)

    def families(self) -> list[Metric]:
        """Fill the families of every session that may be shown."""
        ours = (session for session in self._sessions.values() if session.rank == 0)
        return goodput_families(session.goodput for session in self._latest(ours))


def _leading(ranks: Ranks) -> Iterator[Process]:
    """The processes of rank 0; of a run that has none here, those of the lowest rank."""
    lowest: dict[str, Rank] = {}
    for rank in ranks:
        if rank.key.rank is not None and rank.slots:
            other = lowest.setdefault(rank.key.run, rank)
            if rank.key.rank < (other.key.rank or 0):
                lowest[rank.key.run] = rank
    for rank in lowest.values():
        for process in rank.slots[0].processes if 0 in rank.slots else ():
            if process.snapshot is not None:
                yield process
