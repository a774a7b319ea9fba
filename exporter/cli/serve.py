"""The sidecar, put together: this is where its stages meet, and the only place that knows them all.

The main thread waits for signals; the scheduler's threads collect, the server's answer.
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
from functools import partial

from prometheus_client.core import Metric

from exporter.cli.configuration import Configuration
from exporter.cli.flags import JOINED
from exporter.cli.launches import Lingering
from exporter.cli.logs import Logs
from exporter.cli.reload import Reloader
from exporter.cli.signals import ENDING, Signals
from exporter.cli.silent_jobs import INTERVAL_SECONDS as SILENT_INTERVAL_SECONDS
from exporter.cli.silent_jobs import SilentJobs
from exporter.cli.wiring import FEED, Wiring
from exporter.collectors.catalogue import LOCAL_LANE
from exporter.collectors.processes.collector import ProcessCollector
from exporter.collectors.processes.memory import ProcessMemoryCollector
from exporter.collectors.scheduler import Scheduler
from exporter.config.loader import dump
from exporter.errors import FeedError, StateError
from exporter.exposition.page import Page
from exporter.feed import runs
from exporter.feed.directory import (
    check_directory,
    default_directory,
    is_trusted,
    prepare_directory,
    write_overrides,
)
from exporter.feed.reader import FeedReader
from exporter.ledger.collector import JobCollector
from exporter.ledger.store import StateStore
from exporter.status.document import policy
from exporter.status.document import render as render_status
from exporter.status.readings import History, Readings
from exporter.status.view import About, view
from exporter.version import __version__
from exporter.web.routes import Document
from exporter.web.server import Server

_log = logging.getLogger(__name__)

"""Until when before an expected scrape the feed may be read less often: a pass must fit, and some jitter."""


def serve(
    configuration: Configuration, *, read: Callable[[], Configuration], linger_seconds: float | None = None
) -> int:
    """Be the sidecar until a signal, or the last run, ends it; 0, or `JOINED` where another one serves the runs.

    `read` gives the configuration anew; `linger_seconds` is None for one that stands on its own. Raises ConfigurationError,
    ListenError, FeedDirectoryError or StateError where it cannot start.
    """
    # All threads share one arena of glibc's malloc: by default each of the first ones gets its own, and what one has
    # freed is of no use to the others: 4 of 48 MiB. Source: mallopt(3), M_ARENA_MAX.
    with contextlib.suppress(AttributeError, OSError):  # musl
        ctypes.CDLL(None).mallopt(-8, 1)
    signals = Signals()
    logs = Logs(level=configuration.log.level, form=configuration.log.format)
    try:
        sidecar = Sidecar(configuration, read=read, logs=logs)
        lingering = None
        if linger_seconds is not None:
            # Asked before the port is bound, which is the other sidecar's rightly.
            if not sidecar.own_feed():
                _log.debug("another sidecar serves this feed directory")
                return JOINED
            active = partial(runs.any_active, sidecar.feed_directory, launcher=os.getppid())
            lingering = Lingering(sidecar, active=active, linger_seconds=linger_seconds)
        try:
            sidecar.start()
            # What has been loaded is kept out of the garbage collector's sight. Each pass over a feed replaces
            # thousands of objects, none of them part of a cycle; looking for cycles took a fifth of all time.
            gc.collect()
            gc.freeze()
            gc.set_threshold(10_000, 20, 20)
            # After the addresses are bound, so that a start that could not be is one line and no more.
            python = f"{platform.python_implementation()} {platform.python_version()}"
            about = {"version": __version__, "python": python, "platform": platform.platform()}
            _log.info("started training-exporter", extra=about | {"pid": os.getpid()})
            _wait_for_the_end(sidecar, signals, lingering)
        finally:
            signals.ending = True
            sidecar.stop()
        _log.info("ended")
        return 0
    finally:
        logs.finish()


def _wait_for_the_end(sidecar: Sidecar, signals: Signals, lingering: Lingering | None) -> None:
    while True:
        number = signals.wait(None if lingering is None else lingering.wait_seconds())
        if number in ENDING:
            _log.info("ending", extra={"signal": signal.Signals(number).name})
            return
        if number == signal.SIGHUP:
            sidecar.reload_soon()
        if number == signal.SIGUSR1:
            sidecar.toggle_gpus()
        if lingering is not None and lingering.is_over():
            _log.info("ending: no run is left")
            return


class Sidecar:
    """All parts of the sidecar, and what the web server asks of them; `feed_passes` counts those that were published."""

    def __init__(
        self, configuration: Configuration, *, read: Callable[[], Configuration], logs: Logs
    ) -> None:
        self._logs = logs
        self._started = time.time()
        self.feed_directory = (configuration.feed.dir or default_directory()).absolute()
        self.feed_passes = 0
        self._page = Page(max_series=configuration.exposition.max_series)
        self._reloader = Reloader(configuration, read=read, apply=self._apply)
        self.metrics, self.reload = self._page.render, self._reloader.reload
        self.reload_soon = self._reloader.reload_soon
        self._history = History()
        self._scheduler = Scheduler(publish=self._publish, withdraw=self._page.withdraw)
        self._server = Server(
            self,
            lacks=self._gpus_lacking,
            listen=configuration.web.listen_address,
            web_config=configuration.web.config_file,
            enable_lifecycle=configuration.web.enable_lifecycle,
        )
        self.next_expected_scrape = self._server.next_expected_scrape
        self._reader = FeedReader(self.feed_directory)
        # Two sidecars of one host may share a state directory, each with a feed directory of its own.
        keeper = f"{socket.gethostname()}:{self.feed_directory}"
        state = StateStore(configuration.state.dir or self.feed_directory, keeper=keeper)
        self._jobs = JobCollector(
            self._reader,
            state,
            stale_after_seconds=configuration.feed.stale_after,
            linger_seconds=configuration.feed.linger,
            directory=self.feed_directory,
            shared=configuration.state.dir is not None,
        )
        self._wiring = Wiring(
            configuration, self._scheduler, jobs=self._jobs, state=state, feed_directory=self.feed_directory
        )
        recording = lambda: {each.process.run for each in self._jobs.processes or ()}  # noqa: E731  (as above)
        self._silent = SilentJobs(self.feed_directory, recording)
        self._handed_over: Configuration | None = None  # whose rules the training processes have
        self._rules_refused = False

    # Life ----------------------------------------------------------------------------------------------

    def own_feed(self) -> bool:
        """Become the owner of the feed directory unless another sidecar is; raises FeedDirectoryError."""
        prepare_directory(self.feed_directory)
        return self._reader.acquire_ownership() or runs.owner(self.feed_directory) is None

    def start(self) -> None:
        """Prepare the feed directory and bind the addresses, then begin to collect; raises as `serve`.

        The port is bound before anything else is touched, so that a second exporter on it changes nothing.
        """
        self._page.watch("exporter.collectors", self._scheduler.families)
        self._page.watch("exporter.configuration", self._reloader.families)
        self._page.watch("exporter.page", self._page.families)
        self._page.watch("exporter.web", self._server.families)
        self._check_directories()
        prepare_directory(self.feed_directory)
        self._server.start()
        self._reader.acquire_ownership()
        self._hand_rules_over()
        self._wiring.follow(self._reloader.current)
        every = SILENT_INTERVAL_SECONDS
        self._scheduler.add(self._silent, interval_seconds=every, deadline_seconds=every, lane=LOCAL_LANE)
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
        if is_trusted(self.feed_directory) or os.path.lexists(self.feed_directory):
            check_directory(self.feed_directory)
        state = self._reloader.current.state.dir
        if state is not None and not state.is_dir():
            message = "is no directory; create it, or choose another with --state.dir"
            raise StateError(message, path=str(state))

    # What changes while it runs -------------------------------------------------------------------------

    def _apply(self, old: Configuration, new: Configuration) -> None:
        if new.log != old.log:
            self._logs.configure(level=new.log.level, form=new.log.format)
        self._wiring.follow(new)
        self.collect_feed()  # after which the rules are handed over

    def toggle_gpus(self) -> None:
        """Let go of NVML for a signal, so that a driver can be unloaded or a GPU be reset; or take it again."""
        gpus, about = self._wiring.gpu, {"signal": "SIGUSR1"}
        if gpus is None:
            _log.warning("no GPUs are watched: there is nothing to release", extra=about)
        elif gpus.toggle():
            _log.info("NVML is being detached; send the signal again to reattach it", extra=about)
        else:
            _log.info("NVML is being opened again", extra=about)

    def collect_feed(self) -> None:
        """Read the feed as soon as possible."""
        self._scheduler.run_soon(FEED)

    def _publish(self, name: str, families: Sequence[Metric]) -> None:
        self._page.publish(name, families)
        if name == FEED:
            self.feed_passes += 1
            self._hand_rules_over()
            if self._history.is_due(now := time.monotonic()):
                self._history.note(now, Readings(self._page.offered()))
        elif name == ProcessCollector.name and self._wiring.job_came():
            self._scheduler.run_soon(ProcessMemoryCollector.name)  # which has a slow interval

    def _hand_rules_over(self) -> None:
        """Write `overrides.json` once this sidecar owns the directory; after every pass, since a full disk may recover."""
        wanted = self._reloader.current
        if not self._reader.owns:
            self._handed_over = None
        elif self._handed_over is not wanted:
            try:
                write_overrides(self.feed_directory, wanted.overrides())
                self._handed_over, self._rules_refused = wanted, False
            except FeedError as error:
                if not self._rules_refused:
                    about = {"error": error}
                    _log.warning("recording rules do not reach the training processes", extra=about)
                self._rules_refused = True

    # What the web server asks for -----------------------------------------------------------------------

    def not_ready(self) -> str | None:
        """Why a scrape would be wrong now: totals without their past would step back."""
        return None if self._jobs.loaded else "the state of earlier processes is still being read"

    def _gpus_lacking(self) -> str | None:
        """What is required and not there; a scrape is right all the same, and says so."""
        gpus = self._wiring.gpu
        return None if gpus is None else gpus.not_ready()

    def landing(self) -> Document:
        """The page for people."""
        goodput = self._reloader.current.goodput
        about = About(
            version=__version__,
            node=socket.gethostname(),
            started=self._started,
            now=time.time(),
            feed_directory=str(self.feed_directory),
            not_ready=self.not_ready(),
            silent_jobs=self._silent.jobs,
            hang_seconds=goodput.hang_after,
            hang_steps=goodput.hang_steps,
        )
        seen = view(about, Readings(self._page.snapshot()), self._history, self._scheduler.statuses())
        return Document(render_status(seen), policy())

    def configuration(self) -> str:
        """The configuration in force, as YAML."""
        return dump(self._reloader.current)
