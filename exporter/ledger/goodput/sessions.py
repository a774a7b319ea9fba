"""Sessions: whose attempts belong together, and the state files that stand behind their goodput.

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

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import Metric

from exporter.errors import StateError
from exporter.feed.reader import FeedEntry
from exporter.ledger import codec
from exporter.ledger.energy.work import Flows
from exporter.ledger.goodput.ends import Ends
from exporter.ledger.goodput.families import goodput_families
from exporter.ledger.goodput.session import GoodputOptions, Session, session_key, shown
from exporter.ledger.goodput.task import Goodput
from exporter.ledger.ranks import Rank, Ranks
from exporter.ledger.store import StateKey, StateStore, file_name
from exporter.ledger.totals import Moment, Process

TAG_SECONDS = 30.0
"""How long a process that does not train yet may take to tell its session tag."""
REFUSED_SECONDS = 60.0
"""How long the file of a dead process waits for another sidecar to let go of its session."""


class Sessions:
    """All sessions that this sidecar keeps.

    Args:
        state: Where they are kept.
        options: What counts as what.
        linger_seconds: How long a session is shown after its end.
        shared: Whether other sidecars may go on with the state files, so that a session is let go of at its end.

    Attributes:
        options: May be replaced from any thread; those of validation hold from the next attempt on.
    """

    def __init__(
        self,
        state: StateStore,
        *,
        options: GoodputOptions | None = None,
        linger_seconds: float = 900.0,
        shared: bool = False,
    ) -> None:
        self.ends = Ends()
        self.options = options or GoodputOptions()
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
        bound = {each.identity.id: self._bind(each, now) for each in processes}
        self._first_told = {each: when for each, when in self._first_told.items() if each in by_id}
        self._bound = {each: key for each, key in self._bound.items() if each in by_id}
        for process in processes:
            key = bound[process.identity.id]
            if key is None:
                continue
            session = self._sessions.get(key)
            if session is not None and session.released and session.goodput.knows(process.identity.id):
                continue
            if session is None or session.released:
                session = self._sessions[key] = Session(key)
            if not session.kept:
                problems += self._open(session)
            if session.kept:
                entry = entries.get(process.identity.id)
                pid = None if entry is None else entry.pid
                session.see(process, by_id, pid, self.ends, self.options, now)
        for session in self._sessions.values():
            if session.kept and not session.released:
                session.follow_end(by_id, self.ends, now, linger_seconds=self._linger_seconds)
        problems += self._save()
        self._holds = frozenset(self._needed(processes, bound, now))
        self._forget(now)
        return problems

    def _bind(self, process: Process, now: Moment) -> StateKey | None:
        """Tell to which session a process belongs; None as long as that is not known, or there is none."""
        identity = process.identity
        if (known := self._bound.get(identity.id)) is not None:
            return known
        reading = process.training
        if reading is None:
            if not process.living:
                self._bind_silent(process)
            return self._bound.get(identity.id)
        if not process.living and not reading.loop and not reading.failure and process.final:
            return None  # it came and went in order without training: no attempt at anything
        since = self._first_told.setdefault(identity.id, now.monotonic)
        tag = dict(reading.facts).get("session_tag", "")
        waited = now.monotonic - since >= TAG_SECONDS
        if tag or reading.loop or reading.finished or waited or not process.living:
            key = session_key(identity.run, tag, identity.rank or 0, self._state.keeper)
            self._bound[identity.id] = key
            return key
        return None

    def _bind_silent(self, process: Process) -> None:
        """A process that died before it told anything of training belongs to the session of its run, if there is one."""
        for key, session in self._sessions.items():
            attempt = session.goodput.attempt
            if attempt is not None and attempt.run == process.identity.run and session.goodput.trains:
                self._bound.setdefault(process.identity.id, key)

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
                return [
                    f"another sidecar keeps the goodput of {shown(session.key)} in {self._state.directory}"
                ]
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

    def _needed(
        self, processes: Sequence[Process], bound: Mapping[str, StateKey | None], now: Moment
    ) -> Iterator[str]:
        """Processes whose feed files are not to be removed yet."""
        for process in processes:
            key = bound[process.identity.id]
            session = None if key is None else self._sessions[key]
            gone = now.monotonic - process.departed_monotonic
            if session is None or (session.refused and gone > REFUSED_SECONDS):
                continue
            attempt = session.goodput.attempt
            latest = attempt is not None and attempt.process == process.identity.id
            if not session.safe or (latest and attempt is not None and attempt.ended is None):
                yield process.identity.id

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
        if rank.key.rank is not None and rank.totals.slots:
            other = lowest.setdefault(rank.key.run, rank)
            if rank.key.rank < (other.key.rank or 0):
                lowest[rank.key.run] = rank
    for rank in lowest.values():
        for process in rank.totals.slots[0].processes if 0 in rank.totals.slots else ():
            if process.snapshot is not None:
                yield process
