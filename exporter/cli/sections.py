"""Sections of the configuration: options, defaults and descriptions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from exporter.cli.flags import DEFAULT_ADDRESS
from exporter.cli.logs import LogFormat, LogLevel
from exporter.collectors.gpu.options import GpuOptions
from exporter.collectors.job import MAX_EXITED_RUNS
from exporter.config.options import Duration, Notation, Range, format_duration, option
from exporter.recording.stacks import StackDetail
from exporter.replay.machines import unknown_machine_problem
from exporter.web.listen import ADDRESS_PATTERN, parse_address

_ADDRESS_HELP = "an address such as :20909, 127.0.0.1:20909 or [::1]:20909 (port 0 for any free port)"
Address = Annotated[str, Notation(_ADDRESS_HELP, ADDRESS_PATTERN, lambda text: parse_address(text).text)]


@dataclass(frozen=True, slots=True)
class WebSection:
    """The HTTP server."""

    listen_address: tuple[Address, ...] = option(
        (DEFAULT_ADDRESS,),
        "Listen addresses. An address without a host means all interfaces.",
        restart=True,
    )
    config_file: Path | None = option(
        None,
        "File with TLS certificates and passwords, in the format of Prometheus' exporter-toolkit. "
        "Reloaded after each change.",
        restart=True,
    )
    enable_lifecycle: bool = option(
        False, "Allow POST /-/reload to reload this file, as SIGHUP does.", restart=True
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield a problem if there is no address, and for each address that is listed twice."""
        if not self.listen_address:
            yield "listen_address", "needs at least one address"
        fixed_addresses = [address for address in self.listen_address if not address.endswith(":0")]
        for address in sorted({address for address in fixed_addresses if fixed_addresses.count(address) > 1}):
            yield "listen_address", f'"{address}" is listed twice'


@dataclass(frozen=True, slots=True)
class FeedSection:
    """Data from the training processes."""

    dir: Path | None = option(
        None,
        "Directory in which the training processes write their feed files; the same as EXPORTER_FEED_DIR of the jobs. "
        "The default is /dev/shm/exporter-<uid>.",
        restart=True,
    )
    interval: Annotated[Duration, Range(0.1, 60)] = option(
        5.0, "Interval between two scans of the directory."
    )
    stale_after: Annotated[Duration, Range(1, 3600)] = option(
        10.0,
        "Age of a feed file after which the gauges of the running process are absent. Three flush intervals of the process apply "
        "instead if they are longer.",
        restart=True,
    )
    linger: Annotated[Duration, Range(0, 30 * 86400)] = option(
        900.0,
        "How long totals are still published after a process exits, unless its rank restarts. Of the ended runs, only the last "
        f"{MAX_EXITED_RUNS} are published.",
        restart=True,
    )


@dataclass(frozen=True, slots=True)
class StateSection:
    """State that outlives the exporter."""

    dir: Path | None = option(
        None,
        "Directory for totals that continue after restarts. Use shared storage if jobs move between nodes. The default "
        "is the feed directory.",
        restart=True,
    )


@dataclass(frozen=True, slots=True)
class LogSection:
    """Log lines on standard error."""

    level: LogLevel = option("info", "Minimum level of the logged lines.")
    format: LogFormat = option("logfmt", "Format of a line.")


@dataclass(frozen=True, slots=True)
class HangSection:
    """Explanation of hanging runs."""

    stacks: Literal["full", "location", "off"] = option(
        "full",
        "Request the stacks of the ranks of a hung or stalled run: full stacks (full), only the innermost frame of the "
        "job's own code and the frame it called (location), or no stacks (off). With full and location, the metrics contain "
        "names of files and functions.",
    )
    interval: Annotated[Duration, Range(0.5, 60)] = option(
        2.0, "Interval between two reads of the requested stacks."
    )

    @property
    def stack_detail(self) -> StackDetail | None:
        """Level of detail of the stacks, or None for off."""
        return None if self.stacks == "off" else StackDetail(self.stacks)


@dataclass(frozen=True, slots=True)
class ExpositionSection:
    """Limits of a scrape."""

    max_series: Annotated[int, Range(100, 1_000_000)] = option(
        15_000,
        "Maximum number of series in a scrape. Further series are dropped and counted in "
        "exporter_series_dropped_total, so that a label with too many values does not fail the whole scrape.",
        restart=True,
    )


GPU_DEADLINE_SECONDS = 5.0
"""Default of `gpu.deadline`."""


@dataclass(frozen=True, slots=True)
class GpuSection(GpuOptions):
    """GPU collector: monitored GPUs, sampling and publication."""

    enabled: bool = option(True, "Start the child process that loads NVML.")
    interval: Annotated[Duration, Range(0.1, 3600)] = option(
        10.0,
        "Publish at least this often, even if no pass over the GPUs has finished. Each finished pass is published immediately.",
    )
    deadline: Annotated[Duration, Range(0.1, 3600)] = option(
        GPU_DEADLINE_SECONDS,
        "Maximum duration of a publication; a longer publication fails. Other collectors do not wait.",
    )

    @property
    def effective_deadline(self) -> float:
        """Deadline in seconds, but at most the interval."""
        return min(self.deadline, self.interval)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield a problem for an unknown machine, and for a configured deadline above the interval. The default deadline is shortened instead."""
        is_default_deadline = self.deadline == GPU_DEADLINE_SECONDS
        if self.deadline > self.interval and not is_default_deadline:
            message = (
                f"{format_duration(self.deadline)} is above the interval {format_duration(self.interval)}"
            )
            yield "deadline", message
        if self.replay is not None:
            problem = unknown_machine_problem(self.replay)
            if problem is not None:
                yield "replay", problem
