"""The configuration: what a user may set, with its defaults.

Used in the sidecar; made by `resolve` from a file and a command line, read by `serve`. `config.schema.json`,
`config.example.yaml` and the documentation are generated from it: an option's help is its comment in the example.
Durations are seconds here and `500ms 15s 1m30s 1h` in the file, sizes are bytes here and `64KiB 10MB` in the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from exporter.cli.flags import DEFAULT_ADDRESS
from exporter.cli.logs import Form, Level
from exporter.cli.sections import Energy, Goodput, GpuSection
from exporter.collectors.catalogue import CATALOGUE, EXTRA, CollectorEntry
from exporter.config.options import (
    REQUIRED,
    UNCHANGED,
    Duration,
    Glob,
    Keys,
    Notation,
    Range,
    Ratio,
    Size,
    option,
)
from exporter.errors import DefinitionError
from exporter.feed.overrides import MAX_RULES
from exporter.recording.definition import SHORTEST_WINDOW_SECONDS, check_buckets
from exporter.recording.values import Aggregation
from exporter.web.listen import parse_addresses


def _address(text: str) -> str:
    parse_addresses([text])
    return text


def _path(text: str) -> str:
    if f"{text}/".startswith(("/-/", "/config/")):
        raise ValueError(text)
    return text


Address = Annotated[
    str,
    Notation(
        "an address such as :20909, 127.0.0.1:20909 or [::1]:20909 (port 0 for a free one)",
        r"^(\[[0-9A-Fa-f:.]+(%[A-Za-z0-9_]+)?\]|[A-Za-z0-9_.-]*):[0-9]{1,5}$",
        _address,
    ),
]
UrlPath = Annotated[
    str,
    Notation("a path such as /metrics, other than the exporter's own", r"^(/|(/[A-Za-z0-9_.~-]+)+)$", _path),
]
Interval = Annotated[Duration, Range(0.1, 86400)]
_WORD = r"[A-Za-z_][A-Za-z0-9_]*"
ClassName = Annotated[
    str, Notation("a class such as my_package.queue:QueueCollector", rf"^{_WORD}(\.{_WORD})*:{_WORD}$")
]
StatPattern = Annotated[
    str,
    Notation(
        "a pattern of a Stat's name: letters, digits, _ and ., with * and ? for any", r"^[A-Za-z0-9_.*?]+$"
    ),
]
"""What `exporter.recording.definition.matches` understands; anything else could never match."""


@dataclass(frozen=True, slots=True)
class Web:
    """Where the exporter answers."""

    listen_address: tuple[Address, ...] = option(
        (DEFAULT_ADDRESS,), "Addresses to listen on; without a host, all of the machine's.", restart=True
    )
    config_file: Path | None = option(
        None,
        "File with TLS certificates and passwords, in the format of Prometheus' exporter-toolkit. "
        "Read again whenever it changes.",
        restart=True,
    )
    telemetry_path: UrlPath = option(
        "/metrics", "Path of the metrics; / takes the place of the status page.", restart=True
    )
    enable_lifecycle: bool = option(
        False, "Whether POST /-/reload reads this file again, as SIGHUP does.", restart=True
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Whether there is an address, and none twice."""
        if not self.listen_address:
            yield "listen_address", "needs at least one address"
        fixed = [address for address in self.listen_address if not address.endswith(":0")]
        for address in sorted({address for address in fixed if fixed.count(address) > 1}):
            yield "listen_address", f'"{address}" is listed twice'


@dataclass(frozen=True, slots=True)
class Feed:
    """What comes from the training processes."""

    dir: Path | None = option(
        None,
        "Directory through which training processes hand over what they record; the same as their "
        "EXPORTER_FEED_DIR. By default /dev/shm/exporter-<uid>.",
        restart=True,
    )
    interval: Annotated[Duration, Range(0.1, 60)] = option(
        1.0, "How often the directory is read; while the next scrape is known to be far, every 5 s at least."
    )
    stale_after: Annotated[Duration, Range(1, 3600)] = option(
        10.0,
        "A living process that has not refreshed its file for so long has no windowed values any more.",
        restart=True,
    )
    linger: Annotated[Duration, Range(0, 30 * 86400)] = option(
        900.0, "How long the totals of a process stay after its end, unless its rank restarts.", restart=True
    )
    max_file_size: Annotated[Size, Range(64 * 1024, 2**30)] = option(
        16 * 2**20, "A larger file is refused and counted, never read.", restart=True
    )


@dataclass(frozen=True, slots=True)
class State:
    """What outlives the exporter."""

    dir: Path | None = option(
        None,
        "Directory of the totals that continue over restarts; shared storage where jobs move between "
        "nodes. By default the feed directory.",
        restart=True,
    )


@dataclass(frozen=True, slots=True)
class Log:
    """Lines on standard error."""

    level: Level = option("info", "The lowest level that is shown.")
    format: Form = option("logfmt", "How a line looks.")


@dataclass(frozen=True, slots=True)
class Exposition:
    """What a scrape may hold."""

    max_series: Annotated[int, Range(100, 1_000_000)] = option(
        15_000,
        "Series beyond this are left out and counted by exporter_series_dropped_total, so that a "
        "runaway label does not fail the whole scrape.",
        restart=True,
    )


@dataclass(frozen=True, slots=True)
class CollectorSettings:
    """One background collector; its own options come after these."""

    enabled: bool = option(REQUIRED, "Whether it runs.")
    interval: Interval = option(REQUIRED, "Time from the start of one collection to the next.")
    deadline: Interval = option(
        REQUIRED, "A collection that takes longer has failed; nothing else waits for it."
    )

    def own_options(self) -> dict[str, Any]:
        """What the collector's factory is given."""
        names = [each.name for each in fields(self)]
        return {
            name: getattr(self, name) for name in names if name not in {"enabled", "interval", "deadline"}
        }


_LISTS: Mapping[str, Any] = {
    "pattern": tuple[Glob, ...],
    "path": tuple[Path, ...],
    "class": tuple[ClassName, ...],
}


def _settings(entry: CollectorEntry) -> CollectorSettings:
    """A collector's defaults, of a class of its own where it has options of its own."""
    own: list[tuple[str, Any, Any]] = []
    for each in entry.settings:
        hint: Any = bool if each.default is False else _LISTS[each.kind]
        own.append((each.name, hint, option(each.default, each.help)))
    made: type[CollectorSettings] = make_dataclass(
        f"{entry.name}_settings", own, bases=(CollectorSettings,), frozen=True, slots=True
    )
    return made(True, entry.interval_seconds, entry.deadline_seconds)


# Made once: a class made twice would have values that are never equal.
DEFAULT_COLLECTORS: Mapping[str, CollectorSettings] = {
    entry.name: _settings(entry) for entry in (*CATALOGUE, EXTRA)
}
COLLECTORS_HELP: Mapping[str, str] = {entry.name: entry.help for entry in (*CATALOGUE, EXTRA)}


def _mentioned(rule: Any) -> dict[str, Any]:
    values = {each.name: getattr(rule, each.name) for each in fields(rule)}
    return {name: value for name, value in values.items() if value is not UNCHANGED}


@dataclass(frozen=True, slots=True)
class Rule:
    """Other settings for the Stats of a pattern; what it does not mention stays as the code says."""

    match: StatPattern = option(
        REQUIRED,
        "Names of Stats; * and ? stand for any characters. A later rule wins over an earlier one.",
        example="training.batch.*",
    )
    enabled: bool = option(UNCHANGED, "false: the Stat is neither kept nor published.", example=True)
    aggregations: frozenset[Aggregation] = option(
        UNCHANGED,
        "What is computed over each window.",
        example=frozenset({Aggregation.MEAN, Aggregation.P95, Aggregation.HISTOGRAM}),
    )
    window_seconds: Annotated[Duration, Range(SHORTEST_WINDOW_SECONDS)] | None = option(
        UNCHANGED, "Length of a window; null for windows that only count.", example=30.0
    )
    window_samples: Annotated[int, Range(1, 1_000_000_000)] | None = option(
        UNCHANGED, "Samples that close a window; null for windows that only time.", example=None
    )
    buckets: tuple[float, ...] = option(
        UNCHANGED,
        "Upper bounds of the histogram, ascending, without +Inf. Take effect when a process starts.",
        example=(0.05, 0.1, 0.5, 1.0),
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Whether there is a window left, and the buckets make a histogram."""
        if self.window_seconds is None and self.window_samples is None:
            yield "window_samples", "a window needs a length, a number of samples or both, not null for both"
        if self.buckets is not UNCHANGED:
            try:
                check_buckets(self.buckets)
            except DefinitionError as error:
                yield "buckets", f"must be {error.allowed}"
            if self.aggregations is not UNCHANGED and Aggregation.HISTOGRAM not in self.aggregations:
                yield "buckets", "are given, but histogram is not among the aggregations"

    def as_override(self) -> dict[str, object]:
        """The rule as JSON for the training processes: only what it mentions."""
        override = _mentioned(self)
        if "aggregations" in override:
            override["aggregations"] = sorted(each.value for each in override["aggregations"])
        if "buckets" in override:
            override["buckets"] = list(override["buckets"])
        return override


@dataclass(frozen=True, slots=True)
class EventRule:
    """Which events of the training processes are recorded, and which of those their handlers are told."""

    match: Glob = option(
        REQUIRED,
        "Types of events; * and ? stand for any characters. A later rule wins over an earlier one.",
        example="checkpoint.*",
    )
    enabled: bool = option(UNCHANGED, "false: they are neither counted nor handed to anybody.", example=True)
    severity: Literal["debug", "info", "warning", "error", "critical"] = option(
        UNCHANGED, "The least severity that is recorded.", example="info"
    )
    sample: Ratio = option(UNCHANGED, "Share of them that handlers are told; all of them count.", example=1.0)
    per_second: Annotated[float, Range(0, 1_000_000)] | None = option(
        UNCHANGED,
        "How many of one type and severity handlers are told each second; all of them count. null "
        "for any number.",
        example=100.0,
    )

    def as_override(self) -> dict[str, object]:
        """The rule as JSON for the training processes: only what it mentions."""
        return {"events": True} | _mentioned(self)


@dataclass(frozen=True, slots=True)
class Configuration:
    """Everything that can be set; works as it is, without a file."""

    web: Web = option(Web(), "Where the exporter answers.")
    feed: Feed = option(Feed(), "What comes from the training processes.")
    state: State = option(State(), "What outlives the exporter.")
    log: Log = option(Log(), "Lines on standard error.")
    exposition: Exposition = option(Exposition(), "What a scrape may hold.")
    collectors: Annotated[Mapping[str, CollectorSettings], Keys(DEFAULT_COLLECTORS, COLLECTORS_HELP)] = field(
        default_factory=lambda: DEFAULT_COLLECTORS, metadata={"help": "What is collected in the background."}
    )
    gpu: GpuSection = option(GpuSection(), "Which GPUs are watched, and how closely.")
    energy: Energy = option(Energy(), "What energy is, and what it costs: carbon, water, money.")
    goodput: Goodput = option(Goodput(), "How the time of a training is counted.")
    events: tuple[EventRule, ...] = option(
        (),
        "Which events of the training processes are recorded and handed to their handlers; a process "
        "reads the rules at its start and whenever they change. What its code says goes first.",
    )
    recording: tuple[Rule, ...] = option(
        (),
        "Other aggregations, windows and buckets for the Stats of the training processes, without "
        "touching their code; a process reads them at its start and whenever they change.",
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Whether the rules are few enough for the training processes to read."""
        count = len(self.overrides())
        if len(self.recording) > MAX_RULES:
            yield "recording", f"has {len(self.recording)} rules, at most {MAX_RULES} are allowed"
        elif count > MAX_RULES:
            yield "events", f"and recording have {count} rules, at most {MAX_RULES} are allowed"

    def overrides(self) -> list[dict[str, object]]:
        """Every rule for the training processes, as JSON."""
        rules: tuple[EventRule | Rule, ...] = (*self.events, *self.recording)
        return [rule.as_override() for rule in rules]
