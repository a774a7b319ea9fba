"""Composition root of the sidecar: connects feed, collectors, ledger, exposition and web server.

The main thread waits for signals, the threads of the scheduler collect, and the threads of the web server respond.
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
from pathlib import Path

from prometheus_client.core import Metric

from exporter import diagnoses
from exporter.cli.configuration import Configuration
from exporter.cli.endpoints import StatusSources, sidecar_endpoints
from exporter.cli.flags import EXIT_JOINED
from exporter.cli.linger import LingerPeriod
from exporter.cli.logs import Logs
from exporter.cli.reload import Reloader
from exporter.cli.signals import ENDING_SIGNALS, Signals
from exporter.cli.silent_jobs import INTERVAL_SECONDS as SILENT_INTERVAL_SECONDS
from exporter.cli.silent_jobs import SilentJobs
from exporter.cli.wiring import FEED, Wiring
from exporter.collectors.catalogue import LOCAL_LANE
from exporter.collectors.processes.collector import ProcessCollector
from exporter.collectors.processes.memory import ProcessMemoryCollector
from exporter.collectors.scheduler import Scheduler
from exporter.errors import FeedDirectoryError, StateError
from exporter.exposition.page import Page
from exporter.feed import runs
from exporter.feed.directory import check_directory, default_directory, prepare_directory
from exporter.feed.overrides import write_overrides
from exporter.feed.reader import FeedReader
from exporter.ledger.collector import JobCollector
from exporter.ledger.state.store import StateStore
from exporter.recording.values import ProcessIdentity
from exporter.status.attention import FindingStarts
from exporter.status.history import History
from exporter.version import __version__
from exporter.web.server import Server

_log = logging.getLogger(__name__)


def serve(
    configuration: Configuration, *, read: Callable[[], Configuration], linger_seconds: float | None = None
) -> int:
    """Run the sidecar until SIGTERM or SIGINT. A sidecar that is attached to `run` also ends after the last run.

    Args:
        configuration: Initial configuration.
        read: Returns the new configuration at a reload.
        linger_seconds: Maximum wait of an attached sidecar for the final scrape; None if the sidecar is not attached.

    Returns:
        0, or `EXIT_JOINED` if the sidecar is attached and another sidecar serves the feed directory.

    Raises:
        ConfigurationError, ListenError, FeedDirectoryError, StateError: The sidecar cannot start.
    """
    # All threads share one arena of glibc's malloc (M_ARENA_MAX in mallopt(3)). With separate arenas, which do not share freed
    # memory, the sidecar took 4 MiB more of 48 MiB.
    with contextlib.suppress(AttributeError, OSError):  # musl
        ctypes.CDLL(None).mallopt(-8, 1)
    signals = Signals()
    logs = Logs(level=configuration.log.level, log_format=configuration.log.format)
    try:
        sidecar = SidecarService(configuration, read=read, logs=logs)
        linger_period = None
        if linger_seconds is not None:
            # Before the addresses are bound, because the other sidecar may use the port.
            if not sidecar.acquire_feed():
                _log.debug("another sidecar serves this feed directory")
                return EXIT_JOINED
            is_active = partial(runs.needs_sidecar, sidecar.feed_directory, launcher=os.getppid())
            linger_period = LingerPeriod(sidecar, is_active=is_active, linger_seconds=linger_seconds)
        try:
            sidecar.start()
            # Exclude the loaded modules from garbage collection.
            gc.collect()
            gc.freeze()
            # After the addresses are bound, so that a failed start logs a single line.
            python = f"{platform.python_implementation()} {platform.python_version()}"
            fields = {"version": __version__, "python": python, "platform": platform.platform()}
            _log.info("started training-exporter", extra=fields | {"pid": os.getpid()})
            _wait_for_end(sidecar, signals, linger_period)
        finally:
            signals.is_ending = True
            sidecar.stop()
        _log.info("ended")
        return 0
    finally:
        logs.finish()


def _wait_for_end(sidecar: SidecarService, signals: Signals, linger_period: LingerPeriod | None) -> None:
    """Handle signals until SIGTERM, SIGINT or the end of the linger period."""
    while True:
        number = signals.wait(None if linger_period is None else linger_period.wait_seconds())
        if number in ENDING_SIGNALS:
            _log.info("ending", extra={"signal": signal.Signals(number).name})
            return
        if number == signal.SIGHUP:
            sidecar.reload_soon()
        if number == signal.SIGUSR1:
            sidecar.toggle_gpus()
        if linger_period is not None and linger_period.poll():
            _log.info("ending: no run is left")
            return


class SidecarService:
    """Parts of the sidecar and their lifecycle.

    Attributes:
        feed_directory: Absolute path.
        feed_passes: Number of published passes over the feed.
    """

    def __init__(
        self, configuration: Configuration, *, read: Callable[[], Configuration], logs: Logs
    ) -> None:
        self._logs = logs
        self.feed_directory = (configuration.feed.dir or default_directory()).absolute()
        self.feed_passes = 0
        self._page = Page(max_series=configuration.exposition.max_series)
        self._reloader = Reloader(configuration, read=read, apply=self._apply)
        self._scheduler = Scheduler(publish=self._publish, withdraw=self._page.withdraw)
        self._reader = FeedReader(self.feed_directory)
        # Sidecars of a host may share a state directory, but not a feed directory.
        sidecar = f"{socket.gethostname()}:{self.feed_directory}"
        state = StateStore(configuration.state.dir or self.feed_directory, sidecar=sidecar)
        self._jobs = JobCollector(
            self._reader,
            state,
            stale_after_seconds=configuration.feed.stale_after,
            linger_seconds=configuration.feed.linger,
            directory=self.feed_directory,
            is_shared=configuration.state.dir is not None,
        )
        self._wiring = Wiring(
            configuration, self._scheduler, jobs=self._jobs, state=state, feed_directory=self.feed_directory
        )
        self._silent_jobs = SilentJobs(self.feed_directory, self._recording_processes)
        self._status = StatusSources(
            page=self._page,
            history=History(),
            finding_starts=FindingStarts(),
            silent_jobs=self._silent_jobs,
            hangs=self._wiring.hangs,
            collectors=self._scheduler.statuses,
            configuration=lambda: self._reloader.current,
            not_ready=self._not_ready,
            feed_directory=self.feed_directory,
            started_at=time.time(),
        )
        self._server = Server(
            sidecar_endpoints(
                self._status,
                reload=self._reloader.reload,
                enable_lifecycle=configuration.web.enable_lifecycle,
                missing_gpus=self._missing_gpus,
            ),
            listen=configuration.web.listen_address,
            web_config=configuration.web.config_file,
        )
        self._written_rules: Configuration | None = None  # configuration whose rules are in overrides.json
        self._has_logged_rules_error = False

    def acquire_feed(self) -> bool:
        """Try to become the owner of the feed directory. Return False if another sidecar owns it. Raises FeedDirectoryError.

        Returns True without ownership if no process can lock the directory. The sidecar then serves, but removes no file and saves
        no totals.
        """
        prepare_directory(self.feed_directory)
        return self._reader.ownership.acquire() or runs.owner(self.feed_directory) is None

    def start(self) -> None:
        """Prepare the directories, bind the addresses and start the collectors. Raises the errors of `serve`.

        The addresses are bound before a file is written, so that a second sidecar on the same port changes no file.
        """
        self._page.watch("exporter.collectors", self._scheduler.families)
        self._page.watch("exporter.configuration", self._reloader.families)
        self._page.watch("exporter.page", self._page.families)
        self._page.watch("exporter.web", self._server.families)
        self._check_directories()
        prepare_directory(self.feed_directory)
        self._server.start()
        self._reader.ownership.acquire()
        self._write_rules()
        self._wiring.apply(self._reloader.current)
        self._scheduler.add(
            self._silent_jobs,
            interval_seconds=SILENT_INTERVAL_SECONDS,
            deadline_seconds=SILENT_INTERVAL_SECONDS,
            lane=LOCAL_LANE,
        )
        self._scheduler.start()

    def stop(self) -> None:
        """Refuse new connections, finish the responses in progress, and release all resources.

        May be called after a failed start.
        """
        self._server.stop()
        self._scheduler.stop()
        self._wiring.close()
        self._reader.ownership.release()

    def _check_directories(self) -> None:
        """Check the feed directory if it exists, and create a missing state directory."""
        if os.path.lexists(self.feed_directory):
            check_directory(self.feed_directory)
        state = self._reloader.current.state.dir
        if state is not None:
            _prepare_state_directory(state)

    def _apply(self, previous: Configuration, current: Configuration) -> None:
        """Apply a reloaded configuration to the collectors and the log. After an exception, the previous configuration stays in force."""
        self._wiring.apply(current)
        if current.log != previous.log:
            self._logs.configure(level=current.log.level, log_format=current.log.format)
        self.collect_feed()  # the Stat rules are written after the pass

    def toggle_gpus(self) -> None:
        """Detach from NVML, so that the driver can be unloaded or a GPU can be reset. If detached, reattach."""
        gpus, fields = self._wiring.gpu, {"signal": "SIGUSR1"}
        if gpus is None:
            _log.warning("GPU collection is disabled; SIGUSR1 has no effect", extra=fields)
        elif gpus.toggle():
            _log.info("NVML is being detached; send the signal again to reattach it", extra=fields)
        else:
            _log.info("NVML is being reattached", extra=fields)

    def reload_soon(self) -> None:
        """Reload the configuration on a thread. Problems are logged."""
        self._reloader.reload_soon()

    def next_expected_scrape(self) -> float | None:
        """Return the monotonic time of the next scrape by a regular scraper, or None without a regular scraper."""
        return self._server.next_expected_scrape()

    def collect_feed(self) -> None:
        """Read the feed as soon as possible."""
        self._scheduler.run_soon(FEED)

    def _publish(self, name: str, families: Sequence[Metric]) -> None:
        """Publish the families of a collector's pass. The scheduler calls this function after each pass."""
        # The families of the feed are rendered at a scrape, because they are many and change more often than they are scraped.
        self._page.publish(name, families, early=name != FEED)
        if name == FEED:
            self.feed_passes += 1
            self._write_rules()
            self._status.record()
        elif name == ProcessCollector.name and self._wiring.has_new_job():
            self._scheduler.run_soon(ProcessMemoryCollector.name)  # which has a long interval

    def _write_rules(self) -> None:
        """Write `overrides.json` if this sidecar owns the directory. A failed write is retried after each pass."""
        configuration = self._reloader.current
        if not self._reader.ownership.is_held:
            self._written_rules = None
        elif self._written_rules is not configuration:
            try:
                write_overrides(self.feed_directory, configuration.overrides())
                self._written_rules, self._has_logged_rules_error = configuration, False
            except FeedDirectoryError as error:
                if not self._has_logged_rules_error:
                    statement = diagnoses.STAT_RULES_NOT_WRITTEN.describe(
                        problem=error.problem, directory=error.path, remedy=error.remedy
                    )
                    _log.warning(statement.sentence, extra={"remedy": statement.remedy})
                self._has_logged_rules_error = True

    def _not_ready(self) -> str | None:
        """Return why scrapes are refused, or None. Totals would decrease if they were published before the state is loaded."""
        return None if self._jobs.is_loaded else "the state of earlier processes is still being read"

    def _missing_gpus(self) -> str | None:
        """Return why required GPUs are missing, or None. The sidecar is then not ready, but answers scrapes."""
        gpus = self._wiring.gpu
        return None if gpus is None else gpus.not_ready()

    def _recording_processes(self) -> list[ProcessIdentity]:
        return [entry.identity for entry in self._jobs.processes or ()]


def _prepare_state_directory(path: Path) -> None:
    """Create the state directory (0700) if its parent exists. Raises StateError."""
    if path.is_dir():
        return
    try:
        path.mkdir(mode=0o700)
    except OSError as error:
        message = f"the state directory cannot be created ({error.strerror}); choose a different directory with --state.dir"
        raise StateError(message, path=str(path)) from error
