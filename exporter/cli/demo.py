"""`training-exporter demo [flags]`: the sidecar and a small simulated job, to be scraped at once.

The parent of real processes: a sidecar, as `run` starts it, and two ranks (`simulated_job`) that write to a
private feed directory. When a rank dies it ends the others and starts all of them again, as torchrun would, and it
tells what is to be seen when.
No threads: signals are blocked and taken one at a time. Ctrl-C ends everything and removes the directory;
when the demo is killed, the ranks see their standard input close, and the sidecar sees that no run is left.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from exporter.cli import processes
from exporter.cli.flags import FEED_DIRECTORY_VARIABLE, PROGRAM, Parser, add_flags, parse_duration_flag
from exporter.cli.processes import say
from exporter.cli.resolve import resolve
from exporter.cli.scenario import DEFAULT, Scenario
from exporter.cli.sidecar_process import (
    DURATION_FLAG,
    JOINED,
    REFUSED,
    SEED_FLAG,
    SPEED_FLAG,
    SidecarProcess,
    sidecar_command,
    without,
)
from exporter.errors import ConfigurationError, FeedError, Problem
from exporter.feed import runs
from exporter.feed.directory import check_directory, own_uid
from exporter.web.listen import Address, bind, parse_addresses, url
from exporter.web.webconfig import load_web_config

DESCRIPTION = """\
Serves the metrics of a small simulated training job on a described machine with GPUs: no GPU, no torch, nothing
to install.

    training-exporter demo
    training-exporter demo --gpu.replay=h100-lost
"""
RUN_NAME = "demo"
REPLAY_FLAG, REPLAYED = "--gpu.replay", "h100"
ADDRESS_FLAG = "--web.listen-address"
FEED_FLAG = "--feed.dir"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # a private directory is made in it

ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
TAKEN = ENDING | {signal.SIGCHLD}

LOST = 1
# Faster, and the windows would be shorter than a Stat allows.
SLOWEST, FASTEST = 0.1, 20.0
RANKS_END_SECONDS = 5.0
SIDECAR_ENDS_SECONDS = 10.0
CONNECT_SECONDS = 0.5
POLL_SECONDS = 0.05
TICK_SECONDS = 0.5
FLUSH_SECONDS = 1.0
"""Of the ranks at speed 1."""


@dataclass(frozen=True, slots=True)
class Listening:
    """An address that the sidecar will listen on.

    Attributes:
        text: For its command line; with a port, also where the kernel was to choose one.
        url: How a client on this machine reaches it, without a path.
    """

    text: str
    url: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What `demo` was asked to do.

    Attributes:
        sidecar: The sidecar's command line, without the feed directory.
        listening: The first address.
        telemetry_path: Of the metrics.
        replay: The machine whose GPUs are shown; None for this one's.
        feed_directory: Absolute; None for a private temporary one.
        duration_seconds: 0 to go on until Ctrl-C.
        scenario: What happens.
    """

    sidecar: tuple[str, ...]
    listening: Listening
    telemetry_path: str
    replay: str | None
    feed_directory: Path | None
    duration_seconds: float
    scenario: Scenario


_PREFIX = "exporter-demo-"
ABANDONED_SECONDS = 86_400.0
"""A demo's directory that is older and has no run was left by a demo that was killed."""


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Show the demo.

    Args:
        arguments: What follows `demo`.
        environ: The environment.

    Returns:
        0 when it was ended or its time was over, 2 when it could not begin, 1 when the sidecar was lost.

    Raises:
        ConfigurationError: The flags or the configuration file are wrong.
        ListenError: The port is taken.
    """
    plan = make_plan(arguments, environ)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, TAKEN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        private = _make_private_directory()
    except OSError as error:
        say(f"no demo without a directory of its own: {error}; set TMPDIR to one that can be written")
        return REFUSED
    with _removed_at_the_end(private) as work:
        feed_directory = plan.feed_directory or work
        try:
            check_directory(feed_directory, trusted=True, uid=own_uid())
            registration = runs.register(feed_directory)
        except (OSError, FeedError) as error:
            say(f"no demo without a feed directory: {error}")
            return REFUSED
        demo = Demo(plan, feed_directory=feed_directory, work=work, environ=environ, mask=mask)
        try:
            return demo.show()
        finally:
            registration.release()
            demo.end()


def make_plan(arguments: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """Answer all questions that a command line leaves open.

    Raises:
        ConfigurationError: As for `main`.
        ListenError: As for `main`.
    """
    parser = Parser(f"{PROGRAM} demo", DESCRIPTION)
    add_flags(parser)
    own = parser.add_argument_group("demo")
    own.add_argument(
        DURATION_FLAG, metavar="DURATION", default="0s", help="end after so long (default 0s: until Ctrl-C)"
    )
    own.add_argument(SEED_FLAG, metavar="N", type=int, default=DEFAULT.seed, help="other numbers (default 1)")
    own.add_argument(
        SPEED_FLAG,
        metavar="X",
        type=float,
        default=DEFAULT.speed,
        help="how much faster than a minute a cycle is",
    )
    given = vars(parsed := parser.parse_flags(arguments))
    configuration = resolve(parsed, environ)
    duration_seconds = parse_duration_flag(DURATION_FLAG, given["demo.duration"])
    speed = given["demo.speed"]
    if not SLOWEST <= speed <= FASTEST:
        raise ConfigurationError(
            [Problem(SPEED_FLAG, None, None, f"{speed:g} is not in {SLOWEST:g} to {FASTEST:g}")]
        )
    file = configuration.web.config_file
    tls = file is not None and load_web_config(file).tls_server_config is not None
    addresses = [_try_out(address, tls=tls) for address in parse_addresses(configuration.web.listen_address)]
    flags = without(arguments, {ADDRESS_FLAG, FEED_FLAG})
    flags.extend(f"{ADDRESS_FLAG}={address.text}" for address in addresses)
    replay = configuration.gpu.replay
    if replay is None and given["gpu.replay"] is None and configuration.gpu.enabled:
        replay = REPLAYED
        flags.append(f"{REPLAY_FLAG}={replay}")
    return Plan(
        sidecar=sidecar_command(flags, given, linger_seconds=0.0),
        listening=addresses[0],
        telemetry_path=configuration.web.telemetry_path,
        replay=replay if configuration.gpu.enabled else None,
        # $EXPORTER_FEED_DIR is the user's own and stays free of made-up metrics.
        feed_directory=None if given["feed.dir"] is None else Path(given["feed.dir"]).absolute(),
        duration_seconds=duration_seconds,
        scenario=Scenario(seed=given["demo.seed"], speed=speed),
    )


def _try_out(address: Address, *, tls: bool) -> Listening:
    """See that an address is free before anything is started; a port of 0 becomes the kernel's choice."""
    with bind(address, backlog=1) as listener:
        host, _, _ = address.text.rpartition(":")
        return Listening(f"{host}:{listener.getsockname()[1]}", url(listener, tls=tls))


def _make_private_directory() -> Path:
    """Make a directory of this demo alone, in shared memory where there is some; clear those of demos that were killed."""
    within = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else tempfile.gettempdir()
    for old in Path(within).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            idle = time.time() - old.stat(follow_symlinks=False).st_mtime > ABANDONED_SECONDS
            if idle and old.stat().st_uid == os.getuid() and not runs.any_active(old):
                shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=within))


@contextlib.contextmanager
def _removed_at_the_end(directory: Path) -> Iterator[Path]:
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class Demo:
    """The processes of the demo.

    Args:
        plan: What to do.
        feed_directory: Exists.
        work: A private directory, for the ranks' checkpoints.
        environ: Of the user.
        mask: Signals that the children are started with.
        monotonic: Seconds.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        feed_directory: Path,
        work: Path,
        environ: Mapping[str, str],
        mask: Collection[int],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._work = work
        self._mask = mask
        self._monotonic = monotonic
        self._environment = {
            **{name: value for name, value in environ.items() if not name.startswith("EXPORTER_")},
            FEED_DIRECTORY_VARIABLE: str(feed_directory),
            "EXPORTER_RUN": RUN_NAME,
            "WORLD_SIZE": str(plan.scenario.ranks),
            "EXPORTER_FLUSH_SECONDS": str(FLUSH_SECONDS / plan.scenario.speed),
        }
        command = (*plan.sidecar, f"{FEED_FLAG}={feed_directory}")
        self._sidecar = SidecarProcess(
            start=lambda: processes.start_own(command, mask=mask),
            owned=lambda: False,
            say=say,
        )
        # Each rank has the reading end as its standard input and ends when the writing one is closed.
        self._life_line, self._hold = os.pipe()
        self._ranks: dict[int, int] = {}  # process id to rank
        self._attempt = 0
        self._due: float | None = monotonic()  # when all ranks are to be started
        self._ending = False
        self._status = 0

    def show(self) -> int:
        """Go on until a signal or the end of the time.

        Returns:
            The exit status.
        """
        until = self._monotonic() + (self._plan.duration_seconds or math.inf)
        announced = False
        while not self._ending and (now := self._monotonic()) < until:
            self._sidecar.keep()
            self._start_ranks(now)
            if not announced and self._sidecar.pid is not None and self._answers():
                self._announce()
                announced = True
            self._wait(min(TICK_SECONDS if announced else POLL_SECONDS, until - now))
            if self._sidecar.given_up and not self._ending:
                return self._status or (LOST if announced else REFUSED)
        return self._status

    def end(self) -> None:
        """End all processes; none is left when it returns."""
        self._ending = True
        self._sidecar.let_end()
        os.close(self._life_line)
        os.close(self._hold)
        self._finish(lambda: self._ranks, RANKS_END_SECONDS)
        for pid in self._sidecars():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        self._finish(self._sidecars, SIDECAR_ENDS_SECONDS)

    def _sidecars(self) -> Collection[int]:
        return () if self._sidecar.pid is None else (self._sidecar.pid,)

    def _finish(self, left: Callable[[], Collection[int]], seconds: float) -> None:
        """Wait for processes to end by themselves, and kill those that do not."""
        until = self._monotonic() + seconds
        while left() and self._monotonic() < until:
            self._wait(POLL_SECONDS)
        for pid in left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while left():
            self._wait(POLL_SECONDS)

    def _start_ranks(self, now: float) -> None:
        if self._due is not None and now >= self._due and not self._ranks:
            self._due = None
            for rank in range(self._plan.scenario.ranks):
                self._ranks[self._start_rank(rank)] = rank

    def _start_rank(self, rank: int) -> int:
        scenario = self._plan.scenario
        arguments = {
            "--rank": rank,
            "--attempt": self._attempt,
            "--seed": scenario.seed,
            "--speed": scenario.speed,
            "--checkpoint": self._work / f"checkpoint-{rank}",
        }
        options = [f"{name}={value}" for name, value in arguments.items()]
        return os.posix_spawn(
            sys.executable,
            processes.own_command("-m", "exporter.cli.simulated_job", *options),
            {**self._environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            file_actions=[(os.POSIX_SPAWN_DUP2, self._life_line, 0)],
            setsigmask=self._mask,
            setsigdef=processes.IGNORED_BY_PYTHON,
        )

    def _wait(self, seconds: float) -> None:
        info = signal.sigtimedwait(TAKEN, max(0.0, seconds))
        if info is not None and info.si_signo in ENDING:
            self._ending = True
        elif info is not None:
            self._reap()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._sidecar.pid:
                if os.WIFEXITED(status) and os.WEXITSTATUS(status) == JOINED:
                    say("another exporter serves this feed directory; choose another with --feed.dir")
                    self._status, self._ending = REFUSED, True
                self._sidecar.ended(status)
            elif pid in self._ranks:
                self._rank_ended(self._ranks.pop(pid), status)

    def _rank_ended(self, rank: int, status: int) -> None:
        if self._ending or self._due is not None:
            return
        delay = self._plan.scenario.restart_seconds / self._plan.scenario.speed
        self._attempt += 1
        self._due = self._monotonic() + delay
        for pid in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        say(
            f"rank {rank} ended with status {processes.exit_status(status)}; all ranks start again in {delay:g} s"
        )

    def _answers(self) -> bool:
        """Whether the sidecar accepts connections."""
        address = urlsplit(self._plan.listening.url)
        try:
            socket.create_connection((address.hostname, address.port or 0), timeout=CONNECT_SECONDS).close()
        except OSError:
            return False
        return True

    def _announce(self) -> None:
        scenario = self._plan.scenario
        step = 0.22 / scenario.speed
        pause = scenario.pause_seconds / scenario.speed
        url = self._plan.listening.url
        metrics = f"{url}{self._plan.telemetry_path}"
        curl = f"curl -s{'k' if metrics.startswith('https') else ''} {metrics}"
        replay = self._plan.replay
        gpus = f"\n  {curl} | grep '^gpu_'        # GPUs of the described machine {replay}" if replay else ""
        # A checkpoint each 25 steps: what was done since the last one is lost.
        lost = (scenario.crash_step - 1) % scenario.checkpoint_steps
        with contextlib.suppress(OSError):  # nobody reads it
            print(
                f"""
A simulated job of {scenario.ranks} ranks. What a person wants to see of it:

  {url}/

and its metrics, for Prometheus:

  {metrics}

  {curl} | grep '^training_'   # steps, phases, goodput
  {curl} | grep '^demo_'       # Stats of its own{gpus}

About {scenario.pause_step * step:.0f} s after the start all ranks wait {pause:.0f} s for data: window gauges vanish, totals stay.
About {scenario.nonfinite_step * step + pause:.0f} s after the start a loss is NaN: it is counted, and kept out of the loss.
About {scenario.crash_step * step + pause:.0f} s after the start rank {scenario.crash_rank} is killed; all ranks start again, and {lost} steps are lost.
Then it all begins again. Ctrl-C ends it.
""",
                flush=True,
            )
