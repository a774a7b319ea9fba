"""`training-exporter run [flags] COMMAND ARG...`: a training job with the exporter as a sidecar; exits like the job.

The job is started first, without waiting. Single thread: signals are blocked and handled in sequence.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from exporter.cli import child
from exporter.cli.command_line import parse_job_command
from exporter.cli.flags import (
    DEFAULT_ADDRESS,
    FEED_DIRECTORY_VARIABLE,
    FLAGS,
    PROGRAM,
    Parser,
    add_flags,
    mistake,
    parse_duration_flag,
    say,
    value_of,
)
from exporter.cli.sidecar_process import SidecarProcess, sidecar_command
from exporter.cli.signal_probe import SETTLE_SECONDS, SignalProbe
from exporter.errors import FeedError
from exporter.feed import runs
from exporter.feed.directory import default_directory, prepare_directory
from exporter.feed.overrides import has_overrides, write_overrides
from exporter.feed.runs import Job, Registration
from exporter.recording.identity import LAUNCH, LAUNCH_ID, launch_name

# Python ignores SIGPIPE and SIGXFSZ; blocked, they would queue up for the writes of `run` itself. Faults
# (SIGSEGV, …) terminate a process even when blocked; faults sent by `kill` are forwarded like all signals.
TAKEN = frozenset(signal.valid_signals()) - child.IGNORED_BY_PYTHON
STOPPING = frozenset({signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU})
ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
SI_KERNEL = 0x80

STOP_FOLLOWS_SECONDS = 5.0
"""Grace period of a job that handles Ctrl-Z and restores the terminal before the stop."""
KEEP_SECONDS = 2.0
"""Interval of checks that the registration still exists."""
ASKED_TO_END_SECONDS = 3.0
"""Limit for the exit after SIGTERM or Ctrl-C, whose sender may follow with SIGKILL."""
KILL_SECONDS = 1.5
"""Time between SIGTERM and SIGKILL of the sidecar, within the limit."""
DEATH_SECONDS = 0.5
"""Limit for the exit of the sidecar after SIGKILL."""
LONG_SECONDS, POLL_SECONDS, QUIET_SECONDS = 3600.0, 0.1, 2.0
AUTOLOAD = Path(__file__).resolve().parent.parent / "autoload"
"""First of the job's PYTHONPATH: the bridges of libraries that load no entry point."""

DESCRIPTION = f"""\
Runs COMMAND with the exporter beside it. Ends as COMMAND ends: with its exit status, or by its signal.

    {PROGRAM} run python train.py
    {PROGRAM} run --run.name=llama-7b torchrun --nproc-per-node 8 train.py
"""
NAME_HELP = """name of the run; a restart under the same name continues its totals (default $EXPORTER_RUN, the Slurm job
id, or a new name for each launch, such as train-20261122-1721-3f)"""
LINGER_HELP = f"""how long to wait for a final scrape after the job ends, if a scraper has come regularly (default 30s;
{ASKED_TO_END_SECONDS:g} s after SIGTERM or Ctrl-C)"""
NODES_SHARE_THE_NAME = """the nodes of this launch share the run name above, derived from the rendezvous; a later launch \
with the same rendezvous continues the run: set --run.name to separate them"""
NODES_NEED_A_NAME = """this launch has several nodes and no shared rendezvous address: every node records a run of its \
own; set the same --run.name on all nodes"""
USAGE = f"{PROGRAM} run [flags] [--] COMMAND ARG..."


@dataclass(frozen=True, slots=True)
class Plan:
    """Complete settings of `run`."""

    command: tuple[str, ...]
    environment: Mapping[str, str]  # complete environment of the job
    sidecar: tuple[str, ...]  # command line of the sidecar; empty for no sidecar
    feed_directory: Path  # absolute
    linger_seconds: float  # limit of the sidecar's wait for the last scrape
    run: str = ""  # name of the run in the job's environment
    shared: bool = False  # True if the launch has further commands, such as the agents of other nodes
    derived: bool = False  # True if the launch is named by the rendezvous of these commands
    page: str = ""  # URL of the status page; "" if unknown
    rules: Sequence[Mapping[str, object]] = ()  # overrides of the job's Stats


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfiguration:
    """Part of the configuration that concerns the job."""

    feed_directory: Path | None  # None for the default
    page: str  # URL of the status page on this machine; "" for a port of the kernel's choice
    rules: Sequence[Mapping[str, object]]  # overrides of the job's Stats


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run a command line and return the job's exit status, or terminate by the job's signal. Raises ConfigurationError."""
    plan = make_plan(arguments, child.passable_environment(environ))
    if sys.platform != "linux":
        say("the sidecar needs Linux; the job runs without it")
        os.execvpe(plan.command[0], plan.command, plan.environment)  # noqa: S606  # without a shell
    return supervise(plan)


def make_plan(arguments: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """Return the settings of a command line, completed by defaults; raises as `main`."""
    parser = Parser(f"{PROGRAM} run", DESCRIPTION)
    parser.usage = USAGE
    add_flags(parser)
    own = parser.add_argument_group("run")
    own.add_argument("--run.name", metavar="NAME", help=NAME_HELP)
    own.add_argument("--run.linger", metavar="DURATION", default="30s", help=LINGER_HELP)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND ARG...", help="the job")
    given = parser.parse_flags(arguments)
    command = tuple(given.command[1:] if given.command[:1] == ["--"] else given.command)
    if not command:
        raise mistake("command line", f"no command is given: {USAGE}")
    linger_seconds = parse_duration_flag("--run.linger", value_of(given, "--run.linger"))
    configured = _configured(given, environ)
    feed_directory = (configured.feed_directory or default_directory()).absolute()
    job, disabled = parse_job_command(command, environ), environ.get("EXPORTER_DISABLED") == "1"
    launch = job.shared_name or launch_name(job.script, time.time())
    own_places = {
        FEED_DIRECTORY_VARIABLE: str(feed_directory),
        LAUNCH: launch,
        LAUNCH_ID: secrets.token_hex(8),
    }
    environment = {"EXPORTER_AUTO": "1", **environ, **own_places}
    if environment["EXPORTER_AUTO"] == "1" and not disabled:
        paths = (str(AUTOLOAD), environ.get("PYTHONPATH"))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if (name := value_of(given, "--run.name")) is not None:
        environment["EXPORTER_RUN"] = name
    return Plan(
        command=command,
        environment=environment,
        sidecar=() if disabled else sidecar_command(given, linger_seconds),
        feed_directory=feed_directory,
        linger_seconds=linger_seconds,
        run=environment.get("EXPORTER_RUN") or environment.get("SLURM_JOB_ID") or job.run_id or launch,
        shared=job.is_shared,
        derived=launch == job.shared_name,
        page=configured.page,
        rules=configured.rules,
    )


def _configured(given: argparse.Namespace, environ: Mapping[str, str]) -> JobConfiguration:
    """Return the configuration of the job from the flags, the configuration file and the environment."""
    variable = environ.get(FEED_DIRECTORY_VARIABLE)
    directory, address, scheme = Path(variable) if variable else None, DEFAULT_ADDRESS, "http"
    rules: Sequence[Mapping[str, object]] = ()
    if any(value_of(given, flag) is not None for flag in FLAGS):
        # Imported only with flags: the import of all options would delay the job.
        from exporter.cli.configuration import resolve  # noqa: PLC0415

        configuration = resolve(given, environ)
        directory, web, rules = configuration.feed.dir, configuration.web, configuration.overrides()
        address, scheme = web.listen_address[0], "http" if web.config_file is None else "https"
    host, _, port = address.rpartition(":")
    name = host if host not in {"", "0.0.0.0", "[::]"} else "localhost"  # compared
    page = "" if port == "0" else f"{scheme}://{name}:{port}/"
    return JobConfiguration(feed_directory=directory, page=page, rules=rules)


def supervise(plan: Plan) -> int:
    """Run the job until the exit; returns as `main`."""
    return child.end_as(Supervision(plan).run())


class Supervision:
    """Supervisor of the job and the sidecar."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, TAKEN)  # signal mask of started programs
        # With an inherited SIG_IGN the kernel would discard the job's exit status.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._probe: SignalProbe | None = None
        with contextlib.suppress(
            OSError
        ):  # no further process is allowed: senders of signals are then inferred
            self._probe = SignalProbe()
        self._registration = _register(plan) if plan.sidecar else None
        self._sidecar: SidecarProcess | None = None
        self._ask_at = math.inf
        self._wait_status: int | None = None
        self._asked_to_end = False
        self._job_stopped = False
        self._stop_signal = 0
        self._stop_asked = -LONG_SECONDS

    def run(self) -> int:
        """Start the job, wait for the job and the sidecar, and return the job's wait status."""
        plan, registration, started = self._plan, self._registration, time.time()
        foreign = registration is not None and _is_anothers(plan)
        try:
            pid = child.start_job(plan.command, environment=plan.environment, mask=self._mask)
        except child.NotStartedError as error:
            say(str(error))
            self._end_probe()
            if registration is not None:
                registration.release()
            return error.status << 8
        self._job = Job(pid, plan.run, started, launch=plan.environment.get(LAUNCH_ID, ""))
        if registration is not None:
            registration.write_job(self._job)
            self._sidecar = SidecarProcess(plan.sidecar, plan.feed_directory, mask=self._mask)
            self._ask_at = time.monotonic() + runs.SILENT_SECONDS
            say(f"run {plan.run}" + (f", see {plan.page}" if plan.page and not foreign else ""))
            if plan.shared and plan.run == plan.environment[LAUNCH]:
                say(NODES_SHARE_THE_NAME if plan.derived else NODES_NEED_A_NAME)
        wait_status = self._wait_for_job()
        if registration is not None and self._sidecar is not None:
            registration.write_end(self._job, wait_status)
            registration.release()
            self._wait_for_sidecar(self._sidecar)
        return wait_status

    def _wait_for_job(self) -> int:
        """Forward signals until the job exits; returns the wait status."""
        while self._wait_status is None:
            if self._registration is not None:
                self._registration.keep()
            if self._sidecar is not None:
                self._sidecar.keep()
            self._ask_why_silent()
            info = signal.sigtimedwait(TAKEN, self._wait_seconds())
            if info is None:
                continue
            if info.si_signo == signal.SIGCHLD:
                self._reap()
            else:
                self._pass_on(info)
            self._stop_with_job()
        self._end_probe()
        return self._wait_status

    def _wait_for_sidecar(self, sidecar: SidecarProcess) -> None:
        """Wait for the sidecar unless a later run uses the sidecar; a second Ctrl-C or SIGTERM terminates at once."""
        sidecar.let_end()
        # A batch system signals processes in sequence: the job's signal may arrive here after the job's exit.
        time.sleep(SETTLE_SECONDS)
        while (info := signal.sigtimedwait(TAKEN - {signal.SIGCHLD}, 0)) is not None:
            self._asked_to_end = self._asked_to_end or info.si_signo in ENDING
        began = time.monotonic()
        most = max(self._plan.linger_seconds, KILL_SECONDS)
        kill = began + (min(most, ASKED_TO_END_SECONDS) if self._asked_to_end else most + KILL_SECONDS)
        asked = logged = killed = False
        joined = None if sidecar.pid is not None else runs.attached_owner(self._plan.feed_directory)
        while self._lives(sidecar, joined) and not runs.any_active(self._plan.feed_directory):
            now = time.monotonic()
            if now >= kill - KILL_SECONDS and joined is not None:
                return  # child of a different run, which lingers without `run`
            if killed and now >= kill + DEATH_SECONDS:
                # The sidecar hangs in the kernel, for example on a filesystem; the job's status must not wait.
                say("the sidecar cannot be ended: it is left behind")
                return
            if now >= kill and not killed:
                sidecar.send(signal.SIGKILL)
                asked, killed, kill = True, True, now
            elif now >= kill - KILL_SECONDS and not asked:
                sidecar.send(signal.SIGTERM)
                asked = True
            elif now >= began + QUIET_SECONDS and not logged and not asked:
                say(f"the job has ended; waiting up to {most:.0f} s for a final scrape (Ctrl-C to stop)")
                logged = True
            info = signal.sigtimedwait(TAKEN, POLL_SECONDS)
            if info is not None and info.si_signo in ENDING:
                kill = min(kill, now + KILL_SECONDS)
            elif info is not None and info.si_signo in STOPPING:
                _stop_self(info.si_signo)

    def _wait_seconds(self) -> float:
        waits = [LONG_SECONDS if self._registration is None else KEEP_SECONDS]
        if self._sidecar is not None:
            waits.append(self._sidecar.wait_seconds())
        return max(0.0, min(*waits, self._ask_at - time.monotonic()))

    def _ask_why_silent(self) -> None:
        """Start the diagnosis of a job without recorded values, once and after a delay."""
        if time.monotonic() < self._ask_at or self._registration is None:
            return
        self._ask_at = math.inf
        job = self._job
        asked = (job.pid, self._plan.feed_directory, job.run, job.started, self._registration.job_file)
        with contextlib.suppress(OSError, NotImplementedError):
            command = child.own_command("-m", "exporter.cli.silence", *map(str, asked))
            child.start_own(command, mask=self._mask)

    def _lives(self, sidecar: SidecarProcess, joined: int | None) -> bool:
        self._reap()
        if joined is not None:
            return runs.owner(self._plan.feed_directory) == joined
        return sidecar.pid is not None

    def _reap(self) -> None:
        """Reap all children: the job, the sidecar, the probe, and orphans if this is process 1."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED))[0]:
                pid, status = ended
                if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                    if pid == self._job.pid:
                        self._job_stopped = os.WIFSTOPPED(status)
                elif pid == self._job.pid:
                    self._wait_status = status
                elif self._sidecar is not None and pid == self._sidecar.pid:
                    self._sidecar.ended(status)
                elif self._probe is not None and pid == self._probe.pid:
                    self._probe.close()
                    self._probe = None

    def _pass_on(self, info: signal.struct_siginfo) -> None:
        """Send the job a signal that has not reached the job."""
        number = info.si_signo
        self._asked_to_end = self._asked_to_end or number in ENDING
        if number in STOPPING:
            self._stop_signal, self._stop_asked = number, time.monotonic()
        if not self._has_reached_job(info):
            # PermissionError: the job has changed the user.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._job.pid, number)

    def _has_reached_job(self, info: signal.struct_siginfo) -> bool:
        seen = None if self._probe is None else self._probe.has_seen(info.si_signo)
        if seen is None:
            self._end_probe()
            return info.si_code == SI_KERNEL
        # Signals of the terminal do not concern a job outside the process group; signals of `timeout` do.
        return seen and (info.si_code == SI_KERNEL or os.getpgid(self._job.pid) == os.getpgrp())

    def _end_probe(self) -> None:
        if self._probe is not None:
            self._probe.end()
            self._probe = None

    def _stop_with_job(self) -> None:
        """Stop after Ctrl-Z once the job has stopped, so the shell detects the stop."""
        recent = time.monotonic() - self._stop_asked < STOP_FOLLOWS_SECONDS
        if self._job_stopped and recent and self._wait_status is None:
            self._stop_asked = -LONG_SECONDS
            _stop_self(self._stop_signal)


def _stop_self(number: int) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)  # returns after SIGCONT
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})


def _is_anothers(plan: Plan) -> bool:
    """Return True if an unrelated server occupies the address of the status page."""
    found = urlsplit(plan.page)
    if runs.owner(plan.feed_directory) is not None or found.hostname is None:
        return False
    with (
        contextlib.suppress(OSError),
        socket.create_connection((found.hostname, found.port or 80), timeout=1),
    ):
        return True
    return False


def _register(plan: Plan) -> Registration | None:
    """Join the active runs; returns None and prints a line if the feed directory is unusable."""
    try:
        prepare_directory(plan.feed_directory)
        runs.forget_ends(plan.feed_directory)
        if runs.owner(plan.feed_directory) is None and (plan.rules or has_overrides(plan.feed_directory)):
            # Before the job's first value: whether a Stat has a histogram is settled there.
            write_overrides(plan.feed_directory, plan.rules)
        return runs.Registration(plan.feed_directory)
    except (OSError, FeedError) as error:
        say(f"the job runs without metrics: {error}")
        return None
