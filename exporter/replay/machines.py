"""Lookup of machine descriptions: those of the package, and files of the user.

Used in the sidecar, when the configuration is read and when a replay starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from exporter.collectors.gpu.child_process import command_of
from exporter.config.loader import load_file
from exporter.errors import ConfigurationError, Problem

if TYPE_CHECKING:
    from exporter.replay.description import MachineDescription

MACHINES = Path(__file__).parent / "described"
"""Where the machines of the package are."""


def machine_names() -> tuple[str, ...]:
    """Return the names of the machines in the package."""
    return tuple(sorted(path.stem for path in MACHINES.glob("*.yaml")))


def load_machine(name_or_file: str) -> MachineDescription:
    """Load a machine by name or by file; a name with a slash or the suffix .yaml or .yml is a file.

    Raises:
        ConfigurationError: The machine does not exist, or the description has mistakes.
    """
    from exporter.replay.description import MachineDescription  # noqa: PLC0415 - 3 MiB that only a replay needs

    if is_machine_file(name_or_file):
        return load_file(name_or_file, MachineDescription)
    problem = unknown_machine(name_or_file)
    if problem:
        raise ConfigurationError([Problem("--gpu.replay", None, None, problem)])
    return load_file(MACHINES / f"{name_or_file}.yaml", MachineDescription)


def collector_arguments(name_or_file: str) -> dict[str, Any]:
    """Return the arguments with which a GPU collector replays a machine; raises as `load_machine`."""
    return {"replay": load_machine(name_or_file).plain(), "command": command_of("exporter.replay.library")}


def is_machine_file(name_or_file: str) -> bool:
    """Return True if the name is the path of a file."""
    return "/" in name_or_file or name_or_file.endswith((".yaml", ".yml"))


def unknown_machine(name: str) -> str:
    """Return the error message for the name of a machine; "" if the name is known."""
    names = machine_names()
    return (
        "" if name in names else f'no machine "{name}" to replay: give a file, or one of {", ".join(names)}'
    )
