"""Parser of the command line of a job: script, run id, and rendezvous of a launch on several nodes."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from zlib import crc32

from exporter.elastic.python_command import parse_python_command

_LAUNCHERS = frozenset({"accelerate", "deepspeed", "torchrun"})
_LAUNCHER_MODULES = ("accelerate", "deepspeed", "torch.distributed")
_WRAPPERS = frozenset({"env", "mpiexec", "mpirun", "nice", "nohup", "srun", "timeout"})
_PYTHON = re.compile(r"(python|pypy)[0-9.]*")
_SCRIPTS = (".py", ".sh")
# Options of torchrun and accelerate, without leading dashes and with dashes for underscores.
_NODES = ("nnodes", "num-machines")
_ENDPOINTS = ("rdzv-endpoint", "master-addr", "main-process-ip")
_PORTS = ("master-port", "main-process-port")
_TORCHRUN_VARIABLE = "PET_"
"""Prefix of torchrun's options as environment variables, which Kubernetes operators set."""
_WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")
_MAX_STEM_CHARACTERS = 60  # of the script's name, in the name of a launch


@dataclass(frozen=True, slots=True)
class JobCommand:
    """Parts of the command line of a job that determine the name of the run."""

    script: str  # script, module or program
    run_id: str = ""  # torchrun's --rdzv-id; "" if the user has chosen none
    is_shared: bool = False  # True if the launch has further commands, such as torchrun on other nodes
    rendezvous: str = ""  # address that is equal in all commands of a shared launch; "" if unknown

    @property
    def shared_name(self) -> str:
        """Name of the launch, which is equal for all its commands; "" for a single command or without a rendezvous."""
        if not (self.is_shared and self.rendezvous):
            return ""
        readable_stem = re.sub(r"[^A-Za-z0-9_.]+", "-", PurePath(self.script).stem)
        stem = readable_stem[:_MAX_STEM_CHARACTERS].strip("-") or "python"
        return f"{stem}-{crc32(f'{self.script} {self.rendezvous}'.encode()):08x}"


def parse_job_command(command: Sequence[str], environ: Mapping[str, str]) -> JobCommand:
    """Parse the environment of the launcher, and the arguments before the script. Later arguments belong to the script."""
    options = {
        name.removeprefix(_TORCHRUN_VARIABLE).lower().replace("_", "-"): value
        for name, value in environ.items()
        if name.startswith(_TORCHRUN_VARIABLE)
    }
    program, script = _script(command, options)
    nodes = _first(options, _NODES, "1" if program in _LAUNCHERS else _first(environ, _WORLD_SIZES, "1"))
    address = _first(options, _ENDPOINTS, environ.get("MASTER_ADDR", ""))
    port = _first(options, _PORTS, environ.get("MASTER_PORT", ""))
    run_id = "" if _PYTHON.fullmatch(program) else options.get("rdzv-id", "")
    return JobCommand(
        script=script,
        run_id="" if run_id == "none" else run_id,
        is_shared=nodes.rpartition(":")[2] not in {"", "1"},
        rendezvous=":".join(filter(None, (address, port))),
    )


def _first(values: Mapping[str, str], names: Sequence[str], default: str = "") -> str:
    return next((values[name] for name in names if name in values), default)


def _script(command: Sequence[str], options: dict[str, str]) -> tuple[str, str]:
    """Return the program and its script or module. Add the options of the launcher before the script to *options*."""
    pending = deque(command)
    program = ""
    while pending:
        argument = pending.popleft()
        name = PurePath(argument).name
        if _PYTHON.fullmatch(name):
            python_program = parse_python_command([argument, *pending])
            if python_program.module.startswith(_LAUNCHER_MODULES):
                program = "torchrun"
            elif PurePath(python_program.script).name in _LAUNCHERS:
                program = PurePath(python_program.script).name
            else:
                module_name = python_program.module.rpartition(".")[2]
                return name, python_program.script or module_name or name
            pending = deque(python_program.arguments)
        elif program and argument in {"-m", "--module"}:
            module = pending.popleft() if pending else ""
            return program, module.rpartition(".")[2]
        elif argument.startswith("-"):
            _read_option(argument, pending, options)
        elif argument.endswith(_SCRIPTS):
            return program, argument
        elif name in _LAUNCHERS:
            program = name
    positional_arguments = (argument for argument in command if not argument.startswith("-"))
    return program, next(
        (
            argument
            for argument in positional_arguments
            if PurePath(argument).name not in _LAUNCHERS | _WRAPPERS
        ),
        "python",
    )


def _read_option(argument: str, pending: deque[str], options: dict[str, str]) -> None:
    option, has_value, value = argument.lstrip("-").partition("=")
    name = option.replace("_", "-")
    if has_value:
        options[name] = value
    elif name in {"rdzv-id", *_NODES, *_ENDPOINTS, *_PORTS}:
        options[name] = pending.popleft() if pending else ""
