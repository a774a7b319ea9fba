"""Identity of a process: run, rank, role and node, from the launcher and from `configure`.

A run is a launch of the job. Its name comes from the user or the launcher; otherwise it is generated and passed to child processes
in `EXPORTER_LAUNCH`. A process without a rank has the role `helper`, or `agent` for torchrun's agent.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import PurePath
from typing import Any
from zlib import crc32

from exporter.recording.limits import MAX_IDENTITY_CHARACTERS
from exporter.recording.value_class import Value, value_class
from exporter.recording.values import ProcessIdentity

LAUNCH = "EXPORTER_LAUNCH"
"""Environment variable with the generated name of the run, which `run` sets, and a process sets for its children."""
LAUNCH_ID = "EXPORTER_LAUNCH_ID"
"""Environment variable with the random id of a launch by `run`."""
_RANK_OWNER = "EXPORTER_RANK_OWNER"
"""Environment variable with the pid and the rank variable of the process to which the launcher gave the rank. The children of this process
inherit both variables, but do not have the rank."""
_RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
_LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
_GENERATED_RUN_ID = re.compile(r"none|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""Run ids that torchrun generates if the user gives none."""
MAX_STEM_CHARACTERS = 60
"""Maximum length of the name of the script in a generated name of a run."""
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


@value_class
class _IdentitySettings(Value):
    """Parts of the identity that the environment of the process does not contain."""

    run: str | None = None  # from `configure`, as rank, labels and session
    rank: int | None = None
    labels: tuple[tuple[str, str], ...] = ()
    session: str = ""
    run_id: str = ""  # run id of torchelastic, as observed in the agent
    # True for torchrun's agent, which is recognized by calls of its libraries or by its command line
    is_agent: bool = False


class Process:
    """This process, whose identity comes from the launcher and from `configure`. May be read on any thread."""

    def __init__(self, renew: Callable[[], None] | None = None) -> None:
        self._renew = renew  # starts a new recording after a change of the identity
        self._settings = _IdentitySettings()
        self.after_fork()

    def after_fork(self) -> None:
        """Drop the claims of the parent in a forked child."""
        # Reentrant, because a signal handler that interrupts the holder may change settings too.
        self._settings_lock = threading.RLock()
        self._has_claimed_rank = self._trains = False
        self._settings = self._settings.replace(is_agent=False)
        self.begin_recording()

    def begin_recording(self) -> None:
        """Give the current identity to the recording that starts now."""
        self._recorded_settings = self._settings

    def identity(self) -> ProcessIdentity:
        """Return the current identity, without the fields of a feed file: `id`, `started` and `version`."""
        return self._identity_of(self._settings)

    def recorded_identity(self) -> ProcessIdentity:
        """Return the identity of the current recording. After a change, this is the earlier identity until the next recording starts."""
        return self._identity_of(self._recorded_settings)

    def _identity_of(self, settings: _IdentitySettings) -> ProcessIdentity:
        """Return the identity with these settings."""
        run, is_given = (settings.run, True) if settings.run is not None else _run_of(settings.run_id)
        rank, role = settings.rank, "agent"
        if not settings.is_agent:
            if rank is None and (self._has_claimed_rank or _is_rank_owner()):
                rank = _first_number(*_RANK_VARIABLES)
            if rank is None and self._has_claimed_rank:
                rank = 0
            role = "helper" if rank is None else "trainer"
        return ProcessIdentity(
            id="",
            pid=os.getpid(),
            started=0.0,
            run=run,
            rank=rank,
            local_rank=local_rank() if role == "trainer" else None,
            role=role,
            node=clean_text(_node()),
            labels=settings.labels,
            run_given=is_given,
            trains=self._trains and not settings.is_agent,
            launch=clean_text(os.environ.get(LAUNCH_ID, "")),
        )

    def export_environment(self) -> None:
        """Set the environment variables that pass a generated run name and the owner of the rank to child processes."""
        name, is_given = _run_of(self._settings.run_id)
        if not is_given:
            os.environ.setdefault(LAUNCH, name)
        if _is_rank_owner():
            os.environ[_RANK_OWNER] = f"{os.getpid()} {_rank_variable()}"

    def claim_rank(self, *, trains: bool = True) -> None:
        """Claim the rank for this process, which trains or records samples of the job."""
        self._has_claimed_rank = True
        self._trains = self._trains or trains

    @property
    def session(self) -> str:
        """Session tag from `configure` or `EXPORTER_SESSION`, or an empty text without a tag."""
        return _session_of(self._settings)

    @property
    def recorded_session(self) -> str:
        """Session tag of the current recording, see `recorded_identity`."""
        return _session_of(self._recorded_settings)

    def configure(
        self,
        run: str | None,
        rank: int | None,
        labels: tuple[tuple[str, str], ...] | None,
        session: str | None = None,
    ) -> None:
        """Set parts of the identity, which take precedence over the environment. None keeps the current value."""
        values = {"run": run, "rank": rank, "labels": labels, "session": session}
        self._change_settings(**{name: value for name, value in values.items() if value is not None})

    def observe_agent(self, run_id: str = "") -> None:
        """Record a call of a library that torchrun's agent uses. The call makes this process an agent, except in a torchelastic worker."""
        if self._settings.is_agent:
            is_changed = run_id not in {"", self._settings.run_id}
        else:
            is_changed = "TORCHELASTIC_RUN_ID" not in os.environ
        if is_changed:
            self.declare_agent(run_id)

    def declare_agent(self, run_id: str = "") -> None:
        """Make this process an agent, even in the environment of a torchelastic worker."""
        self._change_settings(is_agent=True, run_id=run_id or self._settings.run_id)

    def _change_settings(self, **changes: Any) -> None:
        """Change settings. If the identity changes, start a new recording; otherwise change the current recording."""
        with self._settings_lock:
            while True:
                previous_settings = self._settings
                settings = previous_settings.replace(**changes)
                if self._settings is previous_settings:  # otherwise a signal handler has changed the settings
                    self._settings = settings
                    break
        if self._renew is not None and self.identity() != self._identity_of(previous_settings):
            self._renew()
        elif self._recorded_settings is previous_settings:
            self.begin_recording()
        # Otherwise, a new recording with all changes is about to start.


def launch_name(script: str, start_seconds: float, pid: int | None = None) -> str:
    """Return a readable run name: script, start time in minutes, and two characters from the seconds and the pid."""
    path = PurePath(script)
    stem = path.parent.name if path.stem == "__main__" else path.stem
    stem = re.sub(r"[^A-Za-z0-9_.]+", "-", stem)[:MAX_STEM_CHARACTERS].strip("-") or "python"
    number = int(start_seconds % 60) * 21 + (os.getpid() if pid is None else pid) % 21
    letters = _DIGITS[number // 36] + _DIGITS[number % 36]
    return f"{stem}-{time.strftime('%Y%m%d-%H%M', time.localtime(start_seconds))}-{letters}"


def _session_of(settings: _IdentitySettings) -> str:
    """Return the session tag of the settings, otherwise of `EXPORTER_SESSION`."""
    return settings.session or clean_text(os.environ.get("EXPORTER_SESSION", "")).strip()


def local_rank() -> int | None:
    """Return the local rank of this process, as set by the launcher, or None if it is not set."""
    return _first_number(*_LOCAL_RANK_VARIABLES)


def clean_text(text: str) -> str:
    """Return the text as a label value: the first `MAX_IDENTITY_CHARACTERS`, with `?` for characters that are not printable."""
    characters = (
        character if character.isprintable() else "?" for character in text[:MAX_IDENTITY_CHARACTERS]
    )
    return "".join(characters)


def _run_of(agent_run_id: str) -> tuple[str, bool]:
    """Return the name of the run, and False if the name was generated.

    The first of these that is set is the name: `EXPORTER_RUN`, the Slurm job id, torchelastic's run id (unless torchrun generated the
    id), the name that `run` or a parent process has generated, and the result of `_generated_name`.
    """
    elastic_run_id = agent_run_id or os.environ.get("TORCHELASTIC_RUN_ID", "")
    if _GENERATED_RUN_ID.fullmatch(elastic_run_id):
        elastic_run_id = ""
    for name in (os.environ.get("EXPORTER_RUN", ""), os.environ.get("SLURM_JOB_ID", ""), elastic_run_id):
        if clean_text(name).strip():
            return clean_text(name), True
    return clean_text(os.environ.get(LAUNCH, "")) or _generated_name(), False


def _generated_name() -> str:
    """Return a run name that is the same in all processes of a launch, such as `train-20261122-1721-3f`.

    The name contains the start time of the process that has started the others: torchrun's agent, the parent in multiprocessing, or
    this process. The agents of a launch on several nodes start at different times. The name of such a launch contains a hash of the
    rendezvous instead.
    """
    environment, script = os.environ, sys.argv[0] if getattr(sys, "argv", None) else ""
    multiprocessing = sys.modules.get("multiprocessing.process")
    parent = multiprocessing.parent_process() if multiprocessing is not None else None
    if environment.get("TORCHELASTIC_RUN_ID"):
        if environment.get("WORLD_SIZE") != environment.get("LOCAL_WORLD_SIZE"):  # on several nodes
            names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
            rendezvous = " ".join(environment.get(name, "") for name in names)
            return f"{PurePath(script).stem or 'python'}-{crc32(rendezvous.encode()):08x}"
        pid = os.getppid()  # the agent, whose pid is the same for all restarts of the workers
    else:
        pid = os.getpid() if parent is None else parent.pid or os.getppid()
    return launch_name(script, _start_seconds(pid), pid)


def _start_seconds(pid: int) -> float:
    """Return the Unix time at which a process started. If this time is not readable, return the time at which this module was imported."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123  # without the import of pathlib
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        with open("/proc/stat", "rb") as file:  # noqa: PTH123  # without the import of pathlib
            boot_seconds = next(int(line.split()[1]) for line in file if line.startswith(b"btime "))
        return boot_seconds + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, StopIteration, AttributeError):
        return _IMPORT_SECONDS


_IMPORT_SECONDS = time.time()


def _is_rank_owner() -> bool:
    """Return True if the launcher set the rank for this process, and False if the process inherited the rank variable."""
    variable = _rank_variable()
    pid, _, inherited_variable = os.environ.get(_RANK_OWNER, "").partition(" ")
    return bool(variable) and (inherited_variable != variable or pid == str(os.getpid()))


def _rank_variable() -> str:
    """Return the rank variable that is set, with its value, such as `RANK=3`, or "" without one."""
    name = next((name for name in _RANK_VARIABLES if _first_number(name) is not None), "")
    return f"{name}={os.environ[name].strip()}" if name else ""


def _node() -> str:
    return os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "")


def _first_number(*names: str) -> int | None:
    """Return the first of these environment variables that is a whole number of at most nine digits, or None."""
    for name in names:
        text = os.environ.get(name, "").strip()
        if text.isascii() and text.isdigit() and len(text) <= 9:
            return int(text)
    return None


def number_within(
    environment: Mapping[str, str], name: str, default: float, minimum: float, maximum: float
) -> float:
    """Return a number from the environment, limited to the range, or the default if the variable is unset or invalid."""
    try:
        number = float(environment.get(name, default))
    except ValueError:
        return default
    return min(max(number, minimum), maximum) if isfinite(number) else default
