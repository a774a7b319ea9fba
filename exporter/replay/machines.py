"""Machine descriptions by name, for replay without a GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exporter.collectors.gpu.child_process import command_of
from exporter.config.loader import load_file
from exporter.errors import ConfigurationError, Problem

if TYPE_CHECKING:
    from exporter.replay.description import MachineDescription

PACKAGE_DIRECTORY = Path(__file__).parent / "described"
"""Directory of the descriptions that ship with the package."""
DIRECTORY_VARIABLE = "EXPORTER_REPLAY_DIRECTORY"
"""Environment variable that names a second directory of descriptions, used by the demo, the tests and the dashboards' data sets."""


def machine_names() -> tuple[str, ...]:
    """Return the names of the described machines, sorted."""
    return tuple(sorted(_paths_by_name()))


def load_machine(name: str) -> MachineDescription:
    """Load the description of a machine.

    Raises ConfigurationError if no description has this name, or the description is invalid.
    """
    from exporter.replay.description import MachineDescription  # noqa: PLC0415 - 3 MiB that only a replay needs

    problem = unknown_machine_problem(name)
    if problem is not None:
        raise ConfigurationError([Problem("gpu.replay", line=None, column=None, message=problem)])
    return load_file(_paths_by_name()[name], MachineDescription)


def replay_arguments(name: str) -> dict[str, Any]:
    """Return the keyword arguments `replay` and `command` of a `GpuCollector` that replays a machine.

    Raises the same errors as `load_machine`.
    """
    return {"replay": load_machine(name).plain(), "command": command_of("exporter.replay.library")}


def _paths_by_name() -> dict[str, Path]:
    """Return the paths of the descriptions by machine name. A description in the second directory replaces one of the package."""
    directories = [PACKAGE_DIRECTORY, *map(Path, filter(None, [os.environ.get(DIRECTORY_VARIABLE)]))]
    return {path.stem: path for directory in directories for path in directory.glob("*.yaml")}


def unknown_machine_problem(name: str) -> str | None:
    """Return the error message for an unknown machine name, or None if a description has this name."""
    names = machine_names()
    return None if name in names else f'no machine "{name}" to replay; choose one of {", ".join(names)}'
