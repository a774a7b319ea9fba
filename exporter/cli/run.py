"""`python -m exporter run [flags] -- COMMAND ARG...`: the job, with the sidecar beside it.

One small process between the user's shell and the job, without threads: all signals are blocked and taken
one at a time. In come signals and the ends of its children; out go the signals that were meant for the job
and did not reach it, and the job's own exit status. The job shares the process group, the terminal and the
standard streams, as if `run` were not there.

The job depends on nothing here: a taken port, a dead sidecar, a feed directory that cannot be used cost a
line on standard error. When `run` is killed, the job goes on, and the sidecar ends when neither a run nor a
writer of the feed is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from exporter.cli import job, sidecar_process
from exporter.cli.flags import FEED_DIRECTORY_VARIABLE, Parser, add_flags, parse_duration_flag, resolve
from exporter.cli.sidecar_process import LINGER_FLAG, NAME_FLAG, SidecarProcess, sidecar_command
from exporter.cli.witness import SETTLE_SECONDS, Witness
from exporter.errors import ConfigurationError, FeedError, Problem
from exporter.feed import runs
from exporter.feed.directory import default_directory, is_trusted, own_uid, prepare_directory
from exporter.feed.runs import Registration

# Python ignores SIGPIPE and SIGXFSZ; blocked, they would queue up for the writes of `run` itself. Faults
# (SIGSEGV, …) end a process even when blocked, and from `kill` they are passed on like everything else.
TAKEN = frozenset(signal.valid_signals()) - job.IGNORED_BY_PYTHON
STOPPING = frozenset({signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU})
ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
SI_KERNEL = 0x80

# A job that handles Ctrl-Z itself may tidy up the terminal before it stops.
STOP_FOLLOWS_SECONDS = 5.0
LONG_SECONDS = 3600.0

# What the sidecar gets, beyond its lingering, to notice the end and to finish the answers under way (8 s);
# and after it was told to end.
FINISH_SECONDS = 10.0
DRAIN_SECONDS = 5.0
AT_ONCE_SECONDS = 2.0
POLL_SECONDS = 0.2
QUIET_SECONDS = 2.0

DESCRIPTION = """\
Runs COMMAND with the exporter beside it, and ends with COMMAND's own exit status.

    python -m exporter run -- torchrun --nproc-per-node 8 train.py
"""
USAGE = "exporter run [flags] -- COMMAND ARG..."
DEFAULT_LINGER = "30s"


@dataclass(frozen=True, slots=True)
class Plan:
    """What `run` was asked to do, all questions answered.

    Attributes:
        command: The job.
        environment: The job's whole environment.
        sidecar: The sidecar's command line.
        feed_directory: Absolute.
        linger_seconds: How long the sidecar may wait for the last scrape.
        watched: Whether there is to be a sidecar: not with `EXPORTER_DISABLED=1`.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    sidecar: tuple[str, ...]
    feed_directory: Path
    linger_seconds: float
    watched: bool = True


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run a command line.

    Args:
        arguments: What follows `run`.
        environ: The environment, for the job too.

    Returns:
        The job's exit status.

    Raises:
        ConfigurationError: The flags or the configuration file are wrong; nothing was started.
    """
    plan = make_plan(arguments, as_given(environ))
    if sys.platform != "linux":
        say("there is a sidecar on Linux only; the job runs without it")
        os.execvpe(plan.command[0], plan.command, plan.environment)  # noqa: S606  # no shell is wanted
    return supervise(plan)


def make_plan(arguments: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """Answer all questions that a command line leaves open.

    Raises:
        ConfigurationError: As for `main`.
    """
    separator = arguments.index("--") if "--" in arguments else len(arguments)
    flags, command = arguments[:separator], tuple(arguments[separator + 1 :])
    parser = Parser("exporter run", DESCRIPTION)
    parser.usage = USAGE
    add_flags(parser)
    own = parser.add_argument_group("run")
    own.add_argument(
        NAME_FLAG, metavar="NAME", help="the run's name (default $EXPORTER_RUN, else the launcher's)"
    )
    own.add_argument(
        LINGER_FLAG,
        metavar="DURATION",
        default=DEFAULT_LINGER,
        help=f"wait for the last scrape after the job, at most so long (default {DEFAULT_LINGER})",
    )
    missing = [Problem("command line", None, None, f"the job's command comes after two dashes: {USAGE}")]
    try:
        given = parser.parse_flags(flags)
    except ConfigurationError as error:
        # A command without the dashes: what would be said of each of its words leads astray.
        if not command and any(problem.source == "command line" for problem in error.problems):
            raise ConfigurationError(missing) from error
        raise
    if not command:
        raise ConfigurationError(missing)
    configuration = resolve(given, environ)
    linger_seconds = parse_duration_flag(LINGER_FLAG, vars(given)["run.linger"])
    feed_directory = (configuration.feed.dir or default_directory(own_uid())).absolute()
    environment = {"EXPORTER_AUTO": "1", **environ, FEED_DIRECTORY_VARIABLE: str(feed_directory)}
    if vars(given)["run.name"] is not None:
        environment["EXPORTER_RUN"] = vars(given)["run.name"]
    return Plan(
        command=command,
        environment=environment,
        sidecar=sidecar_command(flags, vars(given), linger_seconds=linger_seconds),
        feed_directory=feed_directory,
        linger_seconds=linger_seconds,
        watched=environ.get("EXPORTER_DISABLED") != "1",
    )


def as_given(environ: Mapping[str, str], proc: Path = Path("/proc")) -> Mapping[str, str]:
    """The environment that this process was started with, for the job to get the same."""
    # An entry `=value`, without a name, can be inherited but Python refuses to pass it on.
    environment = {name: value for name, value in environ.items() if name}
    # In the C locale CPython sets LC_CTYPE for itself and its children; /proc keeps what it was given.
    with contextlib.suppress(OSError):
        given = (proc / "self/environ").read_bytes().split(b"\0")
        if not any(entry.startswith(b"LC_CTYPE=") for entry in given):
            environment.pop("LC_CTYPE", None)
    return environment


def say(line: str) -> None:
    """One line on standard error; a closed or full one is not the job's business."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(f"exporter: {line}", file=sys.stderr, flush=True)


def supervise(plan: Plan) -> int:
    """Run the job to its end.

    Returns:
        The exit status that a shell would report for the job.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, TAKEN)
    # Ignored by inheritance, it would let the kernel throw away the job's exit status.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    witness = _call_witness()
    registration = _register(plan) if plan.watched else None
    started = job.start(plan.command, environment=plan.environment, mask=mask, defaults=job.IGNORED_BY_PYTHON)
    if isinstance(started, job.NotStarted):
        say(started.message)
        if witness is not None:
            witness.dismiss()
        if registration is not None:
            registration.release()
        return started.status
    sidecar = None
    if registration is not None:
        sidecar = SidecarProcess(
            start=lambda: sidecar_process.spawn(plan.sidecar, mask=mask, defaults=job.IGNORED_BY_PYTHON),
            owned=lambda: runs.owner(plan.feed_directory) is not None,
            say=say,
        )
    supervision = Supervision(started, witness=witness, sidecar=sidecar)
    status = supervision.wait_for_job()
    if registration is not None:
        if supervision.wait_status:  # nothing is to be told of one that succeeded
            registration.tell_end(started, supervision.wait_status)
        registration.release()
        supervision.wait_for_sidecar(plan)
    return status


class Supervision:
    """The job and the sidecar while they live.

    Args:
        pid: The job's process.
        witness: None where none could be made.
        sidecar: None where the feed directory cannot be used.
        monotonic: Seconds.

    Attributes:
        wait_status: The job's, as `os.waitpid` gave it; None while it lives.
    """

    def __init__(
        self,
        pid: int,
        *,
        witness: Witness | None,
        sidecar: SidecarProcess | None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pid = pid
        self._witness = witness
        self._sidecar = sidecar
        self._monotonic = monotonic
        self.wait_status: int | None = None
        self._job_stopped = False
        self._stop_signal = 0
        self._stop_asked = -LONG_SECONDS

    def wait_for_job(self) -> int:
        """Pass signals on until the job has ended; its exit status."""
        while self.wait_status is None:
            wait_seconds = None
            if self._sidecar is not None:
                self._sidecar.keep()
                wait_seconds = self._sidecar.wait_seconds()
            info = signal.sigtimedwait(TAKEN, LONG_SECONDS if wait_seconds is None else wait_seconds)
            if info is None:
                continue
            if info.si_signo == signal.SIGCHLD:
                self._reap()
            else:
                self._pass_on(info)
            self._stop_with_job()
        self._dismiss_witness()
        return job.exit_status(self.wait_status)

    def wait_for_sidecar(self, plan: Plan) -> None:
        """See the sidecar out, unless a later run needs it; a second Ctrl-C or SIGTERM ends it at once."""
        if self._sidecar is None:
            return
        self._sidecar.let_end()
        # A batch system signals its processes one after another: what ended the job may arrive here only now.
        time.sleep(SETTLE_SECONDS)
        while signal.sigtimedwait(TAKEN - {signal.SIGCHLD}, 0) is not None:
            pass
        began = self._monotonic()
        end = began + plan.linger_seconds + FINISH_SECONDS
        kill = end + DRAIN_SECONDS
        asked = told = False
        joined = None if self._sidecar.pid is not None else runs.attached_owner(plan.feed_directory)
        while self._sidecar_lives(joined, plan.feed_directory):
            if runs.any_active(plan.feed_directory):
                return
            now = self._monotonic()
            if now >= end and joined is not None:
                return  # another run's child, with a lingering of its own
            if now >= kill + AT_ONCE_SECONDS:
                # It waits in the kernel, for a filesystem that does not answer; the job's status must not.
                say("the sidecar cannot be ended: it is left behind")
                return
            if now >= kill:
                self._signal_sidecar(signal.SIGKILL)
            elif now >= end and not asked:
                self._signal_sidecar(signal.SIGTERM)
                asked = True
            elif now >= began + QUIET_SECONDS and not told:
                left = max(0.0, kill - now)
                say(
                    f"the job has ended; its exporter has at most {left:.0f} s for the last scrape, Ctrl-C ends it"
                )
                told = True
            info = signal.sigtimedwait(TAKEN, POLL_SECONDS)
            if info is not None and info.si_signo in ENDING:
                end = now
                kill = min(kill, now + AT_ONCE_SECONDS)
            elif info is not None and info.si_signo in STOPPING:
                _stop_self(info.si_signo)

    def _sidecar_lives(self, joined: int | None, feed_directory: Path) -> bool:
        self._reap()
        if joined is not None:
            return runs.owner(feed_directory) == joined
        return self._sidecar is not None and self._sidecar.pid is not None

    def _signal_sidecar(self, number: signal.Signals) -> None:
        # It is our child and not yet reaped: its process id cannot have been given to another.
        if self._sidecar is not None and self._sidecar.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._sidecar.pid, number)

    def _reap(self) -> None:
        """Take every ended child: the job, the sidecar, the witness, and as process 1 any orphan."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid and (os.WIFSTOPPED(status) or os.WIFCONTINUED(status)):
                self._job_stopped = os.WIFSTOPPED(status)
            elif os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                continue
            elif pid == self._pid:
                self.wait_status = status
            elif self._sidecar is not None and pid == self._sidecar.pid:
                self._sidecar.ended(status)
            elif self._witness is not None and pid == self._witness.pid:
                self._witness.forget()
                self._witness = None

    def _pass_on(self, info: signal.struct_siginfo) -> None:
        """Give the job a signal that did not reach it."""
        number = info.si_signo
        if number in STOPPING:
            self._stop_signal, self._stop_asked = number, self._monotonic()
        if not self._has_reached_job(info):
            # PermissionError: the job has become another user.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._pid, number)

    def _has_reached_job(self, info: signal.struct_siginfo) -> bool:
        seen = None if self._witness is None else self._witness.saw(info)
        if seen is None:
            self._dismiss_witness()
            return info.si_code == SI_KERNEL
        # A job that left the group on its own will is not meant by the terminal, but by `timeout` it is.
        return seen and (info.si_code == SI_KERNEL or os.getpgid(self._pid) == os.getpgrp())

    def _dismiss_witness(self) -> None:
        if self._witness is not None:
            self._witness.dismiss()
            self._witness = None

    def _stop_with_job(self) -> None:
        """Ctrl-Z: stop when the job has, so that the shell sees its child stop; and only then."""
        recent = self._monotonic() - self._stop_asked < STOP_FOLLOWS_SECONDS
        if self._job_stopped and recent and self.wait_status is None:
            self._stop_asked = -LONG_SECONDS
            _stop_self(self._stop_signal)


def _stop_self(number: int) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)  # returns when somebody continues us
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})


def _register(plan: Plan) -> Registration | None:
    """Join the active runs; None, and a line, where the feed directory cannot be used."""
    uid = own_uid()
    try:
        prepare_directory(plan.feed_directory, trusted=is_trusted(plan.feed_directory, uid), uid=uid)
        runs.forget_ends(plan.feed_directory)
        return runs.register(plan.feed_directory)
    except (OSError, FeedError) as error:
        say(f"the job runs without metrics: {error}")
        return None


def _call_witness() -> Witness | None:
    try:
        return Witness(job.IGNORED_BY_PYTHON)
    except OSError:  # no further process is allowed: signals are told apart less well
        return None
