"""The sidecar, put together: this is where its stages meet, and the only place that knows them all.

Runs in the sidecar. The configuration comes in; metrics go out over HTTP, `overrides.json` and the ledger's
state into their directories. The main thread waits for signals; the scheduler's threads collect, the server's
answer. When the job dies, the sidecar goes on; when the sidecar dies, the job does not notice, and the next
sidecar continues the totals from the state.

The port is bound before anything else is touched, so that a second exporter on it changes nothing. A sidecar
that a `run` has started does it the other way round: it asks first whether another one serves the directory,
because then the port belongs to that one rightly.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import platform
import signal
import socket
import time
from collections.abc import Callable, Sequence

from prometheus_client.core import Metric

from exporter.cli.configuration import Configuration
from exporter.cli.job_wiring import PROCESS_MEMORY, PROCESSES, Wiring
from exporter.cli.lingering import Lingering
from exporter.cli.logs import Logs, stderr_descriptor
from exporter.cli.recording_rules import RecordingRules
from exporter.cli.reload import Reloader
from exporter.cli.schedule import FEED, Schedule
from exporter.cli.schema import render
from exporter.cli.signals import ENDING, Signals
from exporter.cli.silent_jobs import INTERVAL_SECONDS as SILENT_INTERVAL_SECONDS
from exporter.cli.silent_jobs import SilentJobs
from exporter.collectors.scheduler import Scheduler
from exporter.errors import StateError
from exporter.exposition.negotiation import Format
from exporter.exposition.page import Page
from exporter.feed import runs
from exporter.feed.directory import check_directory, default_directory, is_trusted, own_uid, prepare_directory
from exporter.feed.reader import FeedReader
from exporter.ledger.collector import JobCollector
from exporter.ledger.goodput.sessions import Sessions
from exporter.ledger.store import StateStore
from exporter.status.document import policy
from exporter.status.document import render as render_status
from exporter.status.history import History
from exporter.status.readings import Readings
from exporter.status.view import About, view
from exporter.version import __version__
from exporter.web.routes import Document
from exporter.web.server import Server

JOINED = 3
"""Exit status of a sidecar that a `run` has started where another one serves already."""

_log = logging.getLogger(__name__)

SCRAPE_AHEAD_SECONDS = 1.5
"""Until when before an expected scrape the feed may be read less often: a pass must fit, and some jitter."""


def serve(
    configuration: Configuration, *, read: Callable[[], Configuration], linger_seconds: float | None = None
) -> int:
    """Be the sidecar until a signal, or the last run, ends it.

    Args:
        configuration: What to begin with.
        read: Gives the configuration anew for a reload; raises ConfigurationError.
        linger_seconds: For a sidecar that belongs to `run`: how long it may wait for the last scrape. None for
            one that stands on its own.

    Returns:
        0 after an orderly end, `JOINED` where another sidecar serves the runs.

    Raises:
        ConfigurationError: web.config.yml is wrong.
        ListenError: An address cannot be listened on.
        FeedDirectoryError: The feed directory cannot be used.
        StateError: The state directory cannot be used.
    """
    _use_one_arena()
    signals = Signals()
    logs = Logs(level=configuration.log.level, form=configuration.log.format, descriptor=stderr_descriptor())
    logs.install()
    try:
        sidecar = Sidecar(configuration, read=read, logs=logs)
        if linger_seconds is not None and not sidecar.own_feed():
            _log.debug("another sidecar serves this feed directory")
            return JOINED
        lingering = None
        if linger_seconds is not None:
            active = lambda: runs.any_active(sidecar.feed_directory)  # noqa: E731  (it is a value, not a definition)
            lingering = Lingering(sidecar, active=active, linger_seconds=linger_seconds)
        try:
            sidecar.start()
            _settle_memory()
            _tell_what_started()
            _wait_for_the_end(sidecar, signals, lingering)
        finally:
            signals.ending = True
            sidecar.stop()
        _log.info("ended")
        return 0
    finally:
        logs.close()


def _use_one_arena() -> None:
    """Let all threads share one arena of glibc's malloc; does nothing where there is another malloc.

    By default each of the first threads gets its own, and what one has freed is of no use to the others: 4 of 48 MiB.
    Source: mallopt(3), M_ARENA_MAX.
    """
    with contextlib.suppress(AttributeError, OSError):  # musl
        ctypes.CDLL(None).mallopt(-8, 1)


def _settle_memory() -> None:
    """Keep what has been loaded out of the garbage collector's sight, and let it look less often.

    Each pass over a feed replaces thousands of objects, none of them part of a cycle; looking for cycles among
    them took a fifth of the sidecar's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def _tell_what_started() -> None:
    # After the addresses are bound, so that a start that could not be is one line and no more.
    python = f"{platform.python_implementation()} {platform.python_version()}"
    _log.info("started training-exporter", extra={"version": __version__})
    _log.info("build context", extra={"python": python, "platform": platform.platform(), "pid": os.getpid()})


def _wait_for_the_end(sidecar: Sidecar, signals: Signals, lingering: Lingering | None) -> None:
    while True:
        timeout = None if lingering is None else lingering.wait_seconds()
        number = signals.wait(timeout)
        if number in ENDING:
            _log.info("ending", extra={"signal": signal.Signals(number).name})
            return
        if number == signal.SIGHUP:
            sidecar.reload_soon()
        if number == signal.SIGUSR1:
            sidecar.toggle_gpus()
        if lingering is not None and lingering.is_over():
            _log.info("ending, as no run is left")
            return


class Sidecar:
    """All parts of the sidecar, and what the web server asks of them.

    Args:
        configuration: What to begin with.
        read: Gives the configuration anew.
        logs: Installed already.
        clock: Unix time.

    Attributes:
        feed_directory: Where training processes hand over what they record.
    """

    def __init__(
        self,
        configuration: Configuration,
        *,
        read: Callable[[], Configuration],
        logs: Logs,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._logs = logs
        self._clock = clock
        self._started = clock()
        self.feed_directory = (configuration.feed.dir or default_directory(own_uid())).absolute()
        self._trusted = is_trusted(self.feed_directory, own_uid())
        self._page = Page(max_series=configuration.exposition.max_series)
        self._reloader = Reloader(
            configuration, read=read, apply=self._apply, changed=lambda: None, clock=clock
        )
        self._feed_passes = 0
        self._history = History()
        self._scheduler = Scheduler(
            publish=self._publish,
            withdraw=self._page.withdraw,
            unwatched=self._seconds_unwatched,
        )
        self._server = Server(
            self,
            lacks=self._gpus_lacking,
            listen=configuration.web.listen_address,
            web_config=configuration.web.config_file,
            enable_lifecycle=configuration.web.enable_lifecycle,
            telemetry_path=configuration.web.telemetry_path,
        )
        self._reader = FeedReader(self.feed_directory, max_bytes=configuration.feed.max_file_size)
        # Two sidecars of one host may share a state directory, each with a feed directory of its own.
        keeper = f"{socket.gethostname()}:{self.feed_directory}"
        self._state = StateStore(configuration.state.dir or self.feed_directory, keeper=keeper)
        self._jobs = JobCollector(
            self._reader,
            self._state,
            stale_after_seconds=configuration.feed.stale_after,
            linger_seconds=configuration.feed.linger,
            directory=self.feed_directory,
            sessions=Sessions(
                self._state,
                linger_seconds=configuration.feed.linger,
                shared=configuration.state.dir is not None,
            ),
        )
        self._wiring = Wiring(
            configuration, jobs=self._jobs, state=self._state, feed_directory=self.feed_directory
        )
        self._silent = SilentJobs(self.feed_directory, self._recording_runs)
        self._rules = RecordingRules(configuration.overrides(), self._reader, self.feed_directory)
        self._schedule = Schedule(self._scheduler, self._wiring, self._jobs)

    # Life ----------------------------------------------------------------------------------------------

    def own_feed(self) -> bool:
        """Become the owner of the feed directory unless another sidecar is.

        Raises:
            FeedDirectoryError: It cannot be used.
        """
        self._prepare_feed()
        return self._reader.acquire_ownership() or runs.owner(self.feed_directory) is None

    def start(self) -> None:
        """Prepare the feed directory and bind the addresses, then begin to collect.

        Raises:
            ConfigurationError: As `serve`.
            ListenError: As `serve`.
            FeedDirectoryError: As `serve`.
            StateError: As `serve`.
        """
        self._page.watch("exporter.collectors", self._scheduler.families)
        self._page.watch("exporter.configuration", self._reloader.families)
        self._page.watch("exporter.page", self._page.families)
        self._page.watch("exporter.web", self._server.families)
        self._check_directories()
        self._prepare_feed()
        self._server.start()
        self._reader.acquire_ownership()
        self._rules.hand_over()
        self._schedule.begin(self._reloader.current)
        self._scheduler.add(
            self._silent, interval_seconds=SILENT_INTERVAL_SECONDS, deadline_seconds=SILENT_INTERVAL_SECONDS
        )
        self._scheduler.start()
        self._reloader.start_listening()

    def stop(self) -> None:
        """Refuse new connections, finish running answers, then let go of everything; may be called after any start."""
        self._server.stop()
        self._scheduler.stop()
        self._wiring.close()
        self._reader.release_ownership()

    def _check_directories(self) -> None:
        """Find out what is wrong with them while nothing has been touched."""
        if self._trusted or self.feed_directory.is_symlink() or self.feed_directory.exists():
            check_directory(self.feed_directory, trusted=self._trusted, uid=own_uid())
        state = self._reloader.current.state.dir
        if state is not None and not state.is_dir():
            raise StateError(
                "is no directory; create it, or choose another with --state.dir", path=str(state)
            )

    def _prepare_feed(self) -> None:
        prepare_directory(self.feed_directory, trusted=self._trusted, uid=own_uid())

    # What changes with the configuration ---------------------------------------------------------------

    def reload_soon(self) -> None:
        """Reload for a signal, whose sender learns of problems from the log."""
        self._reloader.reload_soon()

    def _apply(self, old: Configuration, new: Configuration) -> None:
        if new.log != old.log:
            self._logs.configure(level=new.log.level, form=new.log.format)
        self._schedule.change(old, new)
        if new.goodput != old.goodput:
            self._wiring.configure_goodput(new.goodput)
        if new.overrides() != old.overrides():
            self._rules.replace(new.overrides())

    def toggle_gpus(self) -> None:
        """Let go of NVML for a signal, so that a driver can be unloaded or a GPU be reset; or take it again."""
        gpus = self._wiring.gpu
        if gpus is None:
            _log.warning("no GPUs are watched: nothing to let go of", extra={"signal": "SIGUSR1"})
        elif gpus.toggle():
            _log.info("NVML is let go of; send the signal again to take it back", extra={"signal": "SIGUSR1"})
        else:
            _log.info("NVML is taken again", extra={"signal": "SIGUSR1"})

    # What the last run needs to know --------------------------------------------------------------------

    @property
    def feed_passes(self) -> int:
        """Passes over the feed that were published."""
        return self._feed_passes

    def next_expected_scrape(self) -> float | None:
        """When a regular scraper is due, monotonic seconds; None without one."""
        return self._server.next_expected_scrape()

    def _seconds_unwatched(self) -> float:
        due = self._server.next_expected_scrape()
        return 0.0 if due is None else max(0.0, due - SCRAPE_AHEAD_SECONDS - time.monotonic())

    def collect_feed(self) -> None:
        """Read the feed as soon as possible."""
        self._scheduler.run_soon(FEED)

    def _publish(self, name: str, families: Sequence[Metric]) -> None:
        self._page.publish(name, families)
        if name == FEED:
            self._feed_passes += 1
            self._rules.hand_over()
            if self._history.is_due(now := time.monotonic()):
                self._history.note(now, Readings(self._page.offered()))
        elif name == PROCESSES and self._wiring.job_came():
            self._scheduler.run_soon(PROCESS_MEMORY)  # which has a slow interval

    # What the web server asks for -----------------------------------------------------------------------

    def metrics(self, form: Format, names: frozenset[str]) -> bytes:
        """The page."""
        return self._page.render(form, names)

    def _recording_runs(self) -> set[str]:
        return {each.process.run for each in self._jobs.processes or ()}

    def not_ready(self) -> str | None:
        """Why a scrape would be wrong now: totals without their past would step back."""
        return None if self._jobs.loaded else "the state of earlier processes is still being read"

    def _gpus_lacking(self) -> str | None:
        """What is required and not there; a scrape is right all the same, and says so."""
        gpus = self._wiring.gpu
        return None if gpus is None else gpus.not_ready()

    def landing(self) -> Document:
        """The page for people."""
        about = About(
            version=__version__,
            node=socket.gethostname(),
            started=self._started,
            now=self._clock(),
            feed_directory=str(self.feed_directory),
            telemetry_path=self._reloader.current.web.telemetry_path,
            not_ready=self.not_ready(),
            silent_jobs=self._silent.jobs,
        )
        seen = view(about, Readings(self._page.snapshot()), self._history, self._scheduler.statuses())
        return Document(render_status(seen), policy())

    def reload(self) -> None:
        """Read the configuration again and use it.

        Raises:
            ConfigurationError: It is wrong; the old one stays.
        """
        self._reloader.reload()

    def configuration(self) -> str:
        """The configuration in force, as YAML."""
        return render(self._reloader.current, comments=False)
