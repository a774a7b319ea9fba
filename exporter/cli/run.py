"""`training-exporter run [flags] COMMAND ARG...`: runs a training job with the exporter as a sidecar, and exits like the job.

The job starts before the sidecar and does not wait for it. `run` has a single thread, which blocks the signals of
`HANDLED_SIGNALS` and handles them one after the other.
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
    flag_error,
    parse_duration_flag,
    print_notice,
    value_of,
)
from exporter.cli.sidecar_process import KILL_SECONDS, SidecarExit, SidecarProcess, sidecar_command
from exporter.cli.signal_probe import SENDER_GAP_SECONDS, SignalProbe
from exporter.errors import FeedError
from exporter.feed import runs
from exporter.feed.directory import default_directory, prepare_directory
from exporter.feed.overrides import has_overrides, write_overrides
from exporter.feed.runs import Job, Registration
from exporter.recording.identity import LAUNCH, LAUNCH_ID, launch_name

# Without SIGPIPE and SIGXFSZ, which Python ignores: if blocked, a write of `run` itself could make them pending. A fault of `run`
# (SIGSEGV, …) terminates it even if blocked. Such a signal sent by `kill` is forwarded.
HANDLED_SIGNALS = frozenset(signal.valid_signals()) - child.IGNORED_BY_PYTHON
STOP_SIGNALS = frozenset({signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU})
"""Signals that stop a process, for example because of Ctrl-Z."""
TERMINATION_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
"""Signals that request the end of a process."""
SI_KERNEL = 0x80
"""`si_code` of a signal that the kernel has sent, such as SIGINT for Ctrl-C in the terminal."""

STOP_GRACE_SECONDS = 5.0
"""Time after Ctrl-Z within which the job must stop, so that `run` stops too."""
REGISTRATION_CHECK_SECONDS = 2.0
"""Interval at which the registration is checked, and written again if it was deleted."""
TERMINATION_LINGER_SECONDS = 1.5
"""Maximum wait for the final scrape after a signal of `TERMINATION_SIGNALS`, because the sender may send SIGKILL next."""
IDLE_SECONDS = 3600.0
"""Timeout of a wait for signals if nothing else is due."""
CONNECT_SECONDS = 1.0
"""Timeout of the connection that shows whether another server uses the address of the status page."""
AUTOLOAD = Path(__file__).resolve().parent.parent / "autoload"
"""First directory of the job's PYTHONPATH. Its `sitecustomize` installs the bridges of libraries without entry points."""

DESCRIPTION = f"""\
Runs COMMAND with the exporter as a sidecar. Exits with COMMAND's exit status, or by the signal that terminated COMMAND.

    {PROGRAM} run python train.py
    {PROGRAM} run --run.name=llama-7b torchrun --nproc-per-node 8 train.py
"""
NAME_HELP = """name of the run; a restart under the same name continues its totals (default $EXPORTER_RUN, the Slurm job
id, torchrun's --rdzv-id, a name derived from the rendezvous of a launch on several nodes, or a new name for each launch,
such as train-20261122-1721-3f)"""
LINGER_HELP = f"""how long to wait for a final scrape after the job ends, if a scraper scrapes regularly (default 30s;
at most {TERMINATION_LINGER_SECONDS:g} s after SIGTERM or Ctrl-C)"""
NODES_SHARE_THE_NAME = """the nodes of this launch share the run name above, derived from the rendezvous; a later launch \
with the same rendezvous continues the run: set --run.name to separate them"""
NODES_NEED_A_NAME = """this launch has several nodes and no shared rendezvous address: every node records a separate run; \
set the same --run.name on all nodes"""
USAGE = f"{PROGRAM} run [flags] [--] COMMAND ARG..."


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of `run`, completed by defaults."""

    job_command: tuple[str, ...]
    environment: Mapping[str, str]  # complete environment of the job
    sidecar_command: tuple[str, ...]  # empty for no sidecar
    feed_directory: Path  # absolute, unless the current directory was removed
    linger_seconds: float  # maximum wait of the sidecar for the final scrape
    run: str = ""  # name of the run
    is_shared: bool = False  # True if the launch has further commands, such as torchrun on other nodes
    has_shared_name: bool = False  # True if the name of the launch is derived from the common rendezvous
    status_url: str = ""  # URL of the status page; "" if unknown
    rules: Sequence[Mapping[str, object]] = ()  # Stat rules


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfiguration:
    """Part of the configuration that applies to the job."""

    feed_directory: Path | None  # None for the default
    status_url: str  # URL of the status page on this machine; "" if the kernel chooses the port
    rules: Sequence[Mapping[str, object]]  # Stat rules


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run a job, and exit as the job exits. Raises ConfigurationError."""
    plan = make_plan(arguments, child.passable_environment(environ))
    if sys.platform != "linux":
        print_notice("the sidecar needs Linux; the job runs without it")
        os.execvpe(plan.job_command[0], plan.job_command, plan.environment)  # noqa: S606  # the command runs without a shell
    return supervise(plan)


def make_plan(arguments: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """Return the settings of a command line. Raises ConfigurationError."""
    parser = Parser(f"{PROGRAM} run", DESCRIPTION)
    parser.usage = USAGE
    add_flags(parser)
    group = parser.add_argument_group("run")
    group.add_argument("--run.name", metavar="NAME", help=NAME_HELP)
    group.add_argument("--run.linger", metavar="DURATION", default="30s", help=LINGER_HELP)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND ARG...", help="the job")
    flags = parser.parse_flags(arguments)
    command = tuple(flags.command[1:] if flags.command[:1] == ["--"] else flags.command)
    if not command:
        raise flag_error("command line", f"no command; usage: {USAGE}")
    linger_seconds = parse_duration_flag("--run.linger", value_of(flags, "--run.linger"))
    job_configuration = _job_configuration(flags, environ)
    feed_directory = job_configuration.feed_directory or default_directory()
    # If the current directory was removed, the path stays relative, and `_register` reports it.
    with contextlib.suppress(OSError):
        feed_directory = feed_directory.absolute()
    job, is_disabled = parse_job_command(command, environ), environ.get("EXPORTER_DISABLED") == "1"
    launch = job.shared_name or launch_name(job.script, time.time())
    variables = {
        FEED_DIRECTORY_VARIABLE: str(feed_directory),
        LAUNCH: launch,
        LAUNCH_ID: secrets.token_hex(8),
    }
    environment = {"EXPORTER_AUTO": "1", **environ, **variables}
    if environment["EXPORTER_AUTO"] == "1" and not is_disabled:
        paths = (str(AUTOLOAD), environ.get("PYTHONPATH"))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if (name := value_of(flags, "--run.name")) is not None:
        environment["EXPORTER_RUN"] = name
    return Plan(
        job_command=command,
        environment=environment,
        sidecar_command=() if is_disabled else sidecar_command(flags, linger_seconds),
        feed_directory=feed_directory,
        linger_seconds=linger_seconds,
        run=environment.get("EXPORTER_RUN") or environment.get("SLURM_JOB_ID") or job.run_id or launch,
        is_shared=job.is_shared,
        has_shared_name=launch == job.shared_name,
        status_url=job_configuration.status_url,
        rules=job_configuration.rules,
    )


def _job_configuration(flags: argparse.Namespace, environ: Mapping[str, str]) -> JobConfiguration:
    """Return the configuration of the job from the flags, the configuration file and the environment."""
    variable = environ.get(FEED_DIRECTORY_VARIABLE)
    directory, address, scheme = Path(variable) if variable else None, DEFAULT_ADDRESS, "http"
    rules: Sequence[Mapping[str, object]] = ()
    if any(value_of(flags, flag) is not None for flag in FLAGS):
        # Imported only if there are flags, because the import of all options would delay the job.
        from exporter.cli.configuration import resolve  # noqa: PLC0415

        configuration = resolve(flags, environ)
        directory, web, rules = configuration.feed.dir, configuration.web, configuration.overrides()
        address, scheme = web.listen_address[0], "http" if web.config_file is None else "https"
    host, _, port = address.rpartition(":")
    hostname = host if host not in {"", "0.0.0.0", "[::]"} else "localhost"
    status_url = "" if port == "0" else f"{scheme}://{hostname}:{port}/"
    return JobConfiguration(feed_directory=directory, status_url=status_url, rules=rules)


def supervise(plan: Plan) -> int:
    """Run the job and the sidecar. Return the job's exit status, or terminate by the signal that has terminated the job."""
    return child.end_as(JobSupervisor(plan).run())


class JobSupervisor:
    """Supervisor of the job and its sidecar: starts both, forwards signals to the job, and exits like the job."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        # The inherited mask, which the child processes receive.
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
        # With an inherited SIG_IGN, the kernel would discard the job's exit status.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._probe: SignalProbe | None = None
        # OSError: the limit of processes is reached. Without a probe, `_has_reached_job` looks at the sender only.
        with contextlib.suppress(OSError):
            self._probe = SignalProbe()
        self._registration = _register(plan) if plan.sidecar_command else None
        self._sidecar: SidecarProcess | None = None
        self._diagnosis_due = math.inf  # monotonic time; infinite without a diagnosis
        self._wait_status: int | None = None
        self._is_terminating = False
        self._is_job_stopped = False
        self._stop_signal = 0
        self._stop_requested_at = -math.inf  # monotonic time of the last signal of `STOP_SIGNALS`

    def run(self) -> int:
        """Start the job, wait for the job and the sidecar, and return the job's wait status."""
        plan, registration, started_at = self._plan, self._registration, time.time()
        try:
            pid = child.start_job(plan.job_command, environment=plan.environment, mask=self._mask)
        except child.NotStartedError as error:
            print_notice(str(error))
            self._end_probe()
            if registration is not None:
                registration.release()
            return error.status << 8  # as a wait status, whose second byte is the exit status
        self._job = Job(pid=pid, run=plan.run, started=started_at, launch=plan.environment.get(LAUNCH_ID, ""))
        if registration is not None:
            registration.write_job(self._job)
            self._sidecar = SidecarProcess(plan.sidecar_command, plan.feed_directory, mask=self._mask)
            self._diagnosis_due = time.monotonic() + runs.SILENT_SECONDS
            _print_start(plan)
        wait_status = self._wait_for_job()
        if registration is not None and self._sidecar is not None:
            registration.write_end(self._job, wait_status)
            registration.release()
            self._wait_for_sidecar(self._sidecar)
        return wait_status

    def _wait_for_job(self) -> int:
        """Forward signals, and maintain the registration and the sidecar, until the job exits. Return the job's wait status."""
        while self._wait_status is None:
            if self._registration is not None:
                self._registration.keep()
            if self._sidecar is not None:
                self._sidecar.check()
            self._diagnose_silence()
            info = signal.sigtimedwait(HANDLED_SIGNALS, self._wait_seconds())
            if info is None:
                continue
            if info.si_signo == signal.SIGCHLD:
                self._reap()
            else:
                self._forward(info)
            self._stop_with_job()
        self._end_probe()
        return self._wait_status

    def _wait_for_sidecar(self, sidecar: SidecarProcess) -> None:
        """Wait for the exit of the sidecar, unless another run uses it. A further termination signal ends the linger period."""
        sidecar.expect_exit()
        # A batch system signals processes one after the other, so the signal that ended the job may arrive here later.
        time.sleep(SENDER_GAP_SECONDS)
        while (info := signal.sigtimedwait(HANDLED_SIGNALS - {signal.SIGCHLD}, 0)) is not None:
            self._is_terminating = self._is_terminating or info.si_signo in TERMINATION_SIGNALS
        # Process id of a sidecar that another `run` has started and that this run has joined.
        joined_pid = None if sidecar.pid is not None else runs.attached_owner(self._plan.feed_directory)
        # Without a linger period, the sidecar still needs time to notice the end of the job and to exit.
        linger_seconds = max(self._plan.linger_seconds, KILL_SECONDS)
        if self._is_terminating:
            linger_seconds = min(self._plan.linger_seconds, TERMINATION_LINGER_SECONDS)
        sidecar_exit = SidecarExit(sidecar, linger_seconds=linger_seconds)
        # A sidecar whose feed directory was removed cannot notice the end of the launch. Without a recording, a sidecar that has not read
        # the directory yet has nothing to save: a job that ends at once does not wait until the sidecar has started.
        is_removed = not os.path.isdir(self._plan.feed_directory)  # noqa: PTH112 - Path.is_dir raises PermissionError
        if is_removed or self._has_nothing_to_save():
            sidecar_exit.end_linger_period()
        while self._is_alive(sidecar, joined_pid) and not runs.needs_sidecar(self._plan.feed_directory):
            if not sidecar_exit.advance():
                return
            info = signal.sigtimedwait(HANDLED_SIGNALS, sidecar_exit.wait_seconds())
            if info is not None and info.si_signo in TERMINATION_SIGNALS:
                sidecar_exit.end_linger_period()
            elif info is not None and info.si_signo in STOP_SIGNALS:
                _stop_self(info.si_signo)

    def _has_nothing_to_save(self) -> bool:
        """Return True if no sidecar owns the feed directory, and no process has recorded into it."""
        directory = self._plan.feed_directory
        return runs.owner(directory) is None and not runs.has_feed(directory)

    def _wait_seconds(self) -> float:
        """Return the time until the next check of the registration or the sidecar, or until the diagnosis."""
        timeouts = [IDLE_SECONDS if self._registration is None else REGISTRATION_CHECK_SECONDS]
        if self._sidecar is not None:
            timeouts.append(self._sidecar.wait_seconds())
        return max(0.0, min(*timeouts, self._diagnosis_due - time.monotonic()))

    def _diagnose_silence(self) -> None:
        """Start the diagnosis once, `SILENT_SECONDS` after the start of the job. The diagnosis checks whether the job is silent."""
        if time.monotonic() < self._diagnosis_due or self._registration is None:
            return
        self._diagnosis_due = math.inf
        job = self._job
        parameters = (job.pid, self._plan.feed_directory, job.run, job.started, self._registration.job_file)
        with contextlib.suppress(OSError, NotImplementedError):
            command = child.own_command("-m", "exporter.cli.silence", *map(str, parameters))
            child.start_own(command, mask=self._mask)

    def _is_alive(self, sidecar: SidecarProcess, joined_pid: int | None) -> bool:
        """Reap the children, and return True if the sidecar still runs: the own one, or the joined one with *joined_pid*."""
        self._reap()
        if joined_pid is not None:
            return runs.owner(self._plan.feed_directory) == joined_pid
        return sidecar.pid is not None

    def _reap(self) -> None:
        """Reap the exited children: job, sidecar, probe, diagnosis, and orphans if this is process 1. Record the stops of the job."""
        with contextlib.suppress(ChildProcessError):
            while (result := os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED))[0]:
                pid, status = result
                if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                    if pid == self._job.pid:
                        self._is_job_stopped = os.WIFSTOPPED(status)
                elif pid == self._job.pid:
                    self._wait_status = status
                elif self._sidecar is not None and pid == self._sidecar.pid:
                    self._sidecar.record_exit(status)
                elif self._probe is not None and pid == self._probe.pid:
                    self._probe.close()
                    self._probe = None

    def _forward(self, info: signal.struct_siginfo) -> None:
        """Forward a signal to the job unless its sender has already sent it to the job."""
        signal_number = info.si_signo
        self._is_terminating = self._is_terminating or signal_number in TERMINATION_SIGNALS
        if signal_number in STOP_SIGNALS:
            self._stop_signal, self._stop_requested_at = signal_number, time.monotonic()
        if not self._has_reached_job(info):
            # PermissionError: the job runs as another user now.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._job.pid, signal_number)

    def _has_reached_job(self, info: signal.struct_siginfo) -> bool:
        """Return True if the job has received a signal too, because the signal was sent to the process group of `run` and the job.

        Without a probe, the sender decides: a signal of the terminal (`SI_KERNEL`) counts as sent to the group, and a signal of a process
        counts as sent to `run` alone.
        """
        is_group_signal = None if self._probe is None else self._probe.has_received(info.si_signo)
        if is_group_signal is None:
            self._end_probe()
            return info.si_code == SI_KERNEL
        # A signal of the terminal goes to the process group only. A signal of `timeout` must reach a job in another group too.
        return is_group_signal and (info.si_code == SI_KERNEL or os.getpgid(self._job.pid) == os.getpgrp())

    def _end_probe(self) -> None:
        """Kill and reap the probe, if any."""
        if self._probe is not None:
            self._probe.end()
            self._probe = None

    def _stop_with_job(self) -> None:
        """Stop `run` once the job has stopped after Ctrl-Z, so that the shell sees a stopped job."""
        is_stop_requested = time.monotonic() - self._stop_requested_at < STOP_GRACE_SECONDS
        if self._is_job_stopped and is_stop_requested and self._wait_status is None:
            self._stop_requested_at = -math.inf
            _stop_self(self._stop_signal)


def _stop_self(signal_number: int) -> None:
    """Stop this process by a signal of `STOP_SIGNALS`, until SIGCONT."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal_number})
    os.kill(os.getpid(), signal_number)  # returns after SIGCONT
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal_number})


def _print_start(plan: Plan) -> None:
    """Print the name of the run and the address of its page.

    If the name of a launch on several nodes is generated, also print whether the nodes share the name, and what to do.
    """
    page = f", see {plan.status_url}" if plan.status_url and not _is_foreign_address(plan) else ""
    print_notice(f"run {plan.run}{page}")
    if plan.is_shared and plan.run == plan.environment[LAUNCH]:
        print_notice(NODES_SHARE_THE_NAME if plan.has_shared_name else NODES_NEED_A_NAME)


def _is_foreign_address(plan: Plan) -> bool:
    """Return True if a server other than a sidecar of this feed directory accepts connections at the status page's address.

    Returns False for a host name other than `localhost`, because the resolution of a name may take minutes.
    """
    address = urlsplit(plan.status_url)
    if runs.owner(plan.feed_directory) is not None or address.hostname is None:
        return False
    hosts = ("127.0.0.1", "::1") if address.hostname == "localhost" else (address.hostname,)
    return any(_accepts_connections(host, address.port or 80) for host in hosts)


def _accepts_connections(host: str, port: int) -> bool:
    """Return True if a server listens on the port of a numeric address. Returns False for a host name."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family) as client:
        socket.inet_pton(family, host)  # raises OSError for a host name, which `connect` would resolve
        client.settimeout(CONNECT_SECONDS)
        client.connect((host, port))
        return True
    return False


def _register(plan: Plan) -> Registration | None:
    """Register the run in the feed directory. Remove old exit statuses, and write the overrides unless a sidecar does that.

    If the directory is unusable, print the error and return None.
    """
    try:
        prepare_directory(plan.feed_directory)
        runs.remove_old_ends(plan.feed_directory)
        if runs.owner(plan.feed_directory) is None and (plan.rules or has_overrides(plan.feed_directory)):
            # Before the job creates a Stat, because the Stat rules determine whether the Stat has a histogram.
            write_overrides(plan.feed_directory, plan.rules)
        return runs.Registration(plan.feed_directory)
    except (OSError, FeedError) as error:
        print_notice(f"the job runs without metrics: {error}")
        return None
