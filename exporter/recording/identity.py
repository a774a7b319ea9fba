"""Identity of a process: run, rank, role and node, from the launcher and from `configure`.

A run is one launch. Its name is given by the user or the launcher, or generated and shared by `EXPORTER_LAUNCH`. A process
that does not train has the role `helper`.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import PurePath
from zlib import crc32

from exporter.recording.values import ProcessIdentity

MAX_TEXT_CHARACTERS = 256
LAUNCH = "EXPORTER_LAUNCH"
"""Environment variable with the generated name of this launch; set by `run`, and by processes for their children."""
LAUNCH_ID = "EXPORTER_LAUNCH_ID"
"""Environment variable with the random id of a launch of `run`, whatever the name of the run."""
_RANK_OWNER = "EXPORTER_RANK_OWNER"
"""Environment variable with the process that owns the launcher's rank: children inherit `RANK`, but not the rank."""
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
_MADE_BY_TORCHRUN = re.compile(r"none|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


class Process:
    """Identity of this process; safe to read from any thread.

    Attributes:
        is_agent: True for torchrun's agent, which is recognized by the calls of its libraries.
    """

    def __init__(self, renew: Callable[[], None] | None = None) -> None:
        self._renew = renew  # starts a new recording after a change of run or rank
        self._run: str | None = None
        self._rank: int | None = None
        self._labels: tuple[tuple[str, str], ...] = ()
        self._session = ""
        self.run_id = ""
        self.after_fork()

    def after_fork(self) -> None:
        """In a forked child: forget that the parent records."""
        self._records = self._trains = False
        self.is_agent = False

    def identity(self) -> ProcessIdentity:
        """Return the present identity, without the fields of a feed file (`id`, `started`, `version`)."""
        run, given = (self._run, True) if self._run is not None else _run_of(self.run_id)
        rank, role = self._rank, "agent"
        if not self.is_agent:
            if rank is None and (self._records or _is_rank_owner()):
                rank = _first_number(*_RANKS)
            if rank is None and self._records:
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
            labels=self._labels,
            run_given=given,
            trains=self._trains and not self.is_agent,
            launch=clean_text(os.environ.get(LAUNCH_ID, "")),
        )

    def begin(self) -> None:
        """Export a generated run name and the owner of the launcher's rank to child processes."""
        name, given = _run_of(self.run_id)
        if not given:
            os.environ.setdefault(LAUNCH, name)
        if _is_rank_owner():
            os.environ[_RANK_OWNER] = f"{os.getpid()} {_rank_variable()}"

    def claim_rank(self, *, trains: bool = True) -> None:
        """Claim the rank of a process that trains or records samples of the job; idempotent and cheap."""
        self._records = True
        self._trains = self._trains or trains

    @property
    def session(self) -> str:
        """The session tag from `configure` or `EXPORTER_SESSION`; empty if neither names one."""
        return self._session or clean_text(os.environ.get("EXPORTER_SESSION", "")).strip()

    def configure(
        self,
        run: str | None,
        rank: int | None,
        labels: tuple[tuple[str, str], ...] | None,
        session: str | None = None,
    ) -> None:
        """Set the identity; the arguments take precedence over the environment, and None changes nothing."""
        before = self._who()
        self._session = self._session if session is None else session
        self._run = self._run if run is None else run
        self._rank = self._rank if rank is None else rank
        self._labels = self._labels if labels is None else labels
        self._renew_unless(before)

    def seen(self, run_id: str = "") -> None:
        """Record that this process acts as an agent, unless its environment is that of a torchelastic worker."""
        is_new = run_id not in {"", self.run_id} if self.is_agent else "TORCHELASTIC_RUN_ID" not in os.environ
        if is_new:
            self.declare(run_id)

    def declare(self, run_id: str = "") -> None:
        """Record that this process is an agent, even in the environment of a worker of another agent."""
        before = self._who()
        self.is_agent = True
        self.run_id = run_id or self.run_id
        self._renew_unless(before)

    def _who(self) -> ProcessIdentity:
        # A claimed rank changes the identity in place; every other change starts a new recording.
        return self.identity().replace(trains=False)

    def _renew_unless(self, before: ProcessIdentity) -> None:
        if self._renew is not None and self._who() != before:
            self._renew()


def launch_name(script: str, now: float, pid: int | None = None) -> str:
    """Return a readable name: the script's stem, the start to the minute, two letters of second and pid."""
    path = PurePath(script)
    stem = path.parent.name if path.stem == "__main__" else path.stem
    stem = re.sub(r"[^A-Za-z0-9_.]+", "-", stem)[:60].strip("-") or "python"
    number = int(now % 60) * 21 + (os.getpid() if pid is None else pid) % 21
    letters = _DIGITS[number // 36] + _DIGITS[number % 36]
    return f"{stem}-{time.strftime('%Y%m%d-%H%M', time.localtime(now))}-{letters}"


def local_rank() -> int | None:
    """Return the launcher's rank of this process on the node, or None."""
    return _first_number(*_LOCAL_RANKS)


def clean_text(text: str) -> str:
    """Return the text as a label value: without surrogates and control characters, of bounded length."""
    kept = (character if character.isprintable() else "?" for character in text[:MAX_TEXT_CHARACTERS])
    return "".join(kept)


def _run_of(agent_run_id: str) -> tuple[str, bool]:
    """Return the run's name, and True if the user or the launcher chose the name."""
    elastic = agent_run_id or os.environ.get("TORCHELASTIC_RUN_ID", "")
    if _MADE_BY_TORCHRUN.fullmatch(elastic):
        elastic = ""
    for name in (os.environ.get("EXPORTER_RUN", ""), os.environ.get("SLURM_JOB_ID", ""), elastic):
        if clean_text(name).strip():
            return clean_text(name), True
    return clean_text(os.environ.get(LAUNCH, "")) or _made_name(), False


def _made_name() -> str:
    environment, script = os.environ, sys.argv[0] if getattr(sys, "argv", None) else ""
    multiprocessing = sys.modules.get("multiprocessing.process")
    parent = multiprocessing.parent_process() if multiprocessing is not None else None
    if environment.get("TORCHELASTIC_RUN_ID"):
        if environment.get("WORLD_SIZE") != environment.get("LOCAL_WORLD_SIZE"):  # on several nodes
            names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
            shared = " ".join(environment.get(name, "") for name in names)
            return f"{PurePath(script).stem or 'python'}-{crc32(shared.encode()):08x}"
        pid = os.getppid()  # the agent, which lives through restarts of workers
    else:
        pid = os.getpid() if parent is None else parent.pid or os.getppid()
    return launch_name(script, _started(pid), pid)


def _started(pid: int) -> float:
    """Return the Unix time of a process's start; the time of this import on systems without /proc."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123  # without the import of pathlib
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        with open("/proc/stat", "rb") as file:  # noqa: PTH123  # likewise
            booted = next(int(line.split()[1]) for line in file if line.startswith(b"btime "))
        return booted + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, StopIteration, AttributeError):
        return _IMPORTED


_IMPORTED = time.time()


def _is_rank_owner() -> bool:
    """Return True if the launcher set the environment's rank for this process, False if the rank was inherited."""
    variable = _rank_variable()
    pid, _, owned = os.environ.get(_RANK_OWNER, "").partition(" ")
    return bool(variable) and (owned != variable or pid == str(os.getpid()))


def _rank_variable() -> str:
    name = next((name for name in _RANKS if _first_number(name) is not None), "")
    return f"{name}={os.environ[name].strip()}" if name else ""


def _node() -> str:
    return os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "")


def _first_number(*names: str) -> int | None:
    for name in names:
        text = os.environ.get(name, "").strip()
        if text.isascii() and text.isdigit() and len(text) <= 9:
            return int(text)
    return None


def number_within(
    environment: Mapping[str, str], name: str, usual: float, least: float, most: float
) -> float:
    """Return a number of the environment, clamped to the bounds; the usual number if the variable is unset or invalid."""
    try:
        found = float(environment.get(name, usual))
    except ValueError:
        return usual
    return min(max(found, least), most) if isfinite(found) else usual
