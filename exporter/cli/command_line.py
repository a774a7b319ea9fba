"""Parser of the command line of a job: script, run id, and rendezvous of a launch on several nodes."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from zlib import crc32

from exporter.elastic.python_command import parse_python_command
from exporter.recording.identity import MAX_STEM_CHARACTERS

_LAUNCHERS = frozenset({"accelerate", "deepspeed", "torchrun"})
"""Programs that start the ranks of a job."""
_LAUNCHER_MODULES = ("accelerate", "deepspeed", "torch.distributed")
"""First parts of the names of the launchers' modules, for `python -m`."""
_WRAPPERS = frozenset({"env", "mpiexec", "mpirun", "nice", "nohup", "srun", "timeout"})
"""Programs before the command of the job, which do not name a run."""
_PYTHON = re.compile(r"(python|pypy)[0-9.]*")
"""Name of an interpreter."""
_SCRIPT_SUFFIXES = (".py", ".sh")
"""Suffixes of the argument that is the script of a job."""
# Options of torchrun and accelerate, without leading dashes and with dashes for underscores.
_NODE_OPTIONS = ("nnodes", "num-machines")
_ENDPOINT_OPTIONS = ("rdzv-endpoint", "master-addr", "main-process-ip")
_PORT_OPTIONS = ("master-port", "main-process-port")
_TORCHRUN_PREFIX = "PET_"
"""Prefix of torchrun's options as environment variables, which Kubernetes operators set."""
_WORLD_SIZE_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")
"""Environment variables with the number of ranks; the first that is set counts."""


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
        stem = readable_stem[:MAX_STEM_CHARACTERS].strip("-") or "python"
        return f"{stem}-{crc32(f'{self.script} {self.rendezvous}'.encode()):08x}"


def parse_job_command(command: Sequence[str], environ: Mapping[str, str]) -> JobCommand:
    """Parse the environment of the launcher, and the arguments before the script. Later arguments belong to the script."""
    options = {
        name.removeprefix(_TORCHRUN_PREFIX).lower().replace("_", "-"): value
        for name, value in environ.items()
        if name.startswith(_TORCHRUN_PREFIX)
    }
    program, script = _find_script(command, options)
    # Without a launcher, a command runs a single rank, so the world size takes the place of the number of nodes.
    default_count = "1" if program in _LAUNCHERS else _first_value(environ, _WORLD_SIZE_VARIABLES, "1")
    count = _first_value(options, _NODE_OPTIONS, default_count)
    address = _first_value(options, _ENDPOINT_OPTIONS, environ.get("MASTER_ADDR", ""))
    port = _first_value(options, _PORT_OPTIONS, environ.get("MASTER_PORT", ""))
    run_id = "" if _PYTHON.fullmatch(program) else options.get("rdzv-id", "")
    return JobCommand(
        script=script,
        run_id="" if run_id == "none" else run_id,
        is_shared=count.rpartition(":")[2] not in {"", "1"},  # the maximum of an elastic `1:4`
        rendezvous=":".join(filter(None, (address, port))),
    )


def _first_value(values: Mapping[str, str], names: Sequence[str], default: str) -> str:
    """Return the value of the first of the names that has a value, or the default."""
    return next((values[name] for name in names if name in values), default)


def _find_script(command: Sequence[str], options: dict[str, str]) -> tuple[str, str]:
    """Return the launcher or Python, and the script or module. Add the options of the launcher before the script to *options*.

    `torchrun --nnodes=2 train.py` gives `("torchrun", "train.py")`, and `python -m pkg.train` gives `("python", "train")`. For any other
    command, the first item is "". The second item is then a shell script, or the first argument that is no option and no wrapper.
    """
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
        elif argument.endswith(_SCRIPT_SUFFIXES):
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
    """Add an option to *options*. A known option without `=` takes its value from *pending*; other such options are ignored."""
    option, equals_sign, value = argument.lstrip("-").partition("=")
    name = option.replace("_", "-")
    if equals_sign:
        options[name] = value
    elif name in {"rdzv-id", *_NODE_OPTIONS, *_ENDPOINT_OPTIONS, *_PORT_OPTIONS}:
        options[name] = pending.popleft() if pending else ""
