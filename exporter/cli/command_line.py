"""Command line of a job: script, run id and rendezvous of a launch on several nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from zlib import crc32

_LAUNCHERS = frozenset({"accelerate", "deepspeed", "torchrun"})
_LAUNCHER_MODULES = ("accelerate", "deepspeed", "torch.distributed")
_WRAPPERS = frozenset({"env", "mpiexec", "mpirun", "nice", "nohup", "srun", "timeout"})
_PYTHON = re.compile(r"(python|pypy)[0-9.]*")
_PYTHON_OPTIONS_WITH_VALUE = frozenset({"-W", "-X"})
_SCRIPTS = (".py", ".sh")
# Spellings of torchrun and accelerate, without leading dashes and with dashes for underscores.
_NODES = ("nnodes", "num-machines")
_ENDPOINTS = ("rdzv-endpoint", "master-addr", "main-process-ip")
_PORTS = ("master-port", "main-process-port")


@dataclass(frozen=True, slots=True)
class JobCommand:
    """Parts of a job's command line that name the run."""

    script: str  # script, module or program
    run_id: str = ""  # torchrun's --rdzv-id; "" if none is chosen
    rendezvous: str = ""  # address that the agents of several nodes share; "" for a launch on a single node

    @property
    def shared_name(self) -> str:
        """Name that every agent of a launch on several nodes derives; "" for a launch on a single node."""
        if not self.rendezvous:
            return ""
        stem = re.sub(r"[^A-Za-z0-9_.]+", "-", PurePath(self.script).stem)[:60].strip("-") or "python"
        return f"{stem}-{crc32(f'{self.script} {self.rendezvous}'.encode()):08x}"


def parse_job_command(command: Sequence[str]) -> JobCommand:
    """Parse the words up to the script; later words belong to the script."""
    options: dict[str, str] = {}
    script = _script(command, options)
    nodes = next((options[name] for name in _NODES if name in options), "1")
    endpoint = next((options[name] for name in _ENDPOINTS if name in options), "")
    port = next((options[name] for name in _PORTS if name in options), "")
    several = nodes.rpartition(":")[2] not in {"", "1"}
    run_id = options.get("rdzv-id", "")
    return JobCommand(
        script=script,
        run_id="" if run_id == "none" else run_id,
        rendezvous=":".join(filter(None, (endpoint, port))) if several else "",
    )


def _script(command: Sequence[str], options: dict[str, str]) -> str:
    """Return the script, module or program; adds preceding launcher options to `options`."""
    words = iter(command)
    program = ""
    for word in words:
        name = PurePath(word).name
        if program and word in {"-m", "--module"}:
            module = next(words, "")
            if not module.startswith(_LAUNCHER_MODULES):
                return module.rpartition(".")[2]
            program = "torchrun"
        elif word == "-c" and _PYTHON.fullmatch(program):
            return program
        elif word.startswith("-"):
            _read_option(program, word, words, options)
        elif word.endswith(_SCRIPTS):
            return word
        elif name in _LAUNCHERS or _PYTHON.fullmatch(name):
            program = name
        elif _PYTHON.fullmatch(program):
            return word
    named = (word for word in command if not word.startswith("-"))
    return next((word for word in named if PurePath(word).name not in _LAUNCHERS | _WRAPPERS), "python")


def _read_option(program: str, word: str, words: Iterator[str], options: dict[str, str]) -> None:
    if _PYTHON.fullmatch(program):
        if word in _PYTHON_OPTIONS_WITH_VALUE:
            next(words, None)
        return
    option, has_value, value = word.lstrip("-").partition("=")
    name = option.replace("_", "-")
    if has_value:
        options[name] = value
    elif name in {"rdzv-id", *_NODES, *_ENDPOINTS, *_PORTS}:
        options[name] = next(words, "")
