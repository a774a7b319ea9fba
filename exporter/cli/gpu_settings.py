"""The configuration of the GPUs.

Used in the sidecar, as a section of the configuration: the options of the GPU collector, and when it publishes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from exporter.collectors.gpu.options import GpuOptions
from exporter.config.options import Duration, Range
from exporter.replay.machines import is_machine_file, unknown_machine


@dataclass(frozen=True, slots=True)
class GpuSection(GpuOptions):
    """Which GPUs are watched, how closely, and when they are published."""

    enabled: bool = field(
        default=True,
        metadata={"help": "false: never start the process that loads NVIDIA's library."},
    )
    interval: Annotated[Duration, Range(0.1, 3600)] = field(
        default=2.0,
        metadata={
            "help": "Time from one publication to the next, up to 5 s while the next scrape is known to be far;"
            " a GPU that is lost or returns is published at once."
        },
    )
    deadline: Annotated[Duration, Range(0.1, 3600)] = field(
        default=5.0,
        metadata={"help": "A publication that takes longer has failed; nothing else waits for it."},
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Whether there is such a machine to replay; what is in a file is seen when it is read."""
        if self.replay is not None and not is_machine_file(self.replay):
            problem = unknown_machine(self.replay)
            if problem:
                yield "replay", problem

    def relative_to(self, directory: Path) -> GpuSection:
        """The same with a described machine's file found from a directory."""
        if self.replay is None or not is_machine_file(self.replay):
            return self
        return dataclasses.replace(self, replay=str(directory / self.replay))
