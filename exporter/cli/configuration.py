"""Configuration from flags, environment, file and defaults, read at the start and at each reload.

Flags override the file. The variable `EXPORTER_FEED_DIR` overrides `feed.dir` of the file, and `--feed.dir` overrides both. A relative
path in a file is relative to the file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args

from exporter.cli.flags import FEED_DIRECTORY_VARIABLE, FLAGS, value_of
from exporter.cli.sections import (
    ExpositionSection,
    FeedSection,
    GpuSection,
    HangSection,
    LogSection,
    StateSection,
    WebSection,
)
from exporter.collectors.catalogue import Collectors
from exporter.config.loader import load_file, parse
from exporter.config.options import REQUIRED, UNCHANGED, Duration, Notation, Range, option, options_of
from exporter.errors import ConfigurationError, DefinitionError, Problem
from exporter.feed.overrides import MAX_STAT_RULES
from exporter.ledger.energy.options import EnergyOptions
from exporter.ledger.goodput.options import GoodputOptions
from exporter.recording.definition import MIN_WINDOW_SECONDS, check_buckets
from exporter.recording.values import Aggregation
from exporter.replay.machines import unknown_machine_problem

StatPattern = Annotated[
    str,
    Notation(
        "a pattern of a Stat's name: letters, digits, _ and ., with * and ? for any", r"^[A-Za-z0-9_.*?]+$"
    ),
]
"""Pattern for `fnmatchcase`, as `exporter.recording.definition.apply_rules` uses it. Other characters, such as `[`, are refused."""


@dataclass(frozen=True, slots=True)
class StatRuleOptions:
    """Stat rule: changes for the Stats whose names match a pattern. A missing key leaves the definition in the code unchanged."""

    match: StatPattern = option(
        REQUIRED,
        "Pattern of the Stats' names, with * and ?. Later rules override earlier rules.",
        example="training.batch.*",
    )
    enabled: bool = option(UNCHANGED, "false: do not record or publish these Stats.", example=True)
    aggregations: frozenset[Aggregation] = option(
        UNCHANGED,
        "Aggregations to compute over each window.",
        example=frozenset({Aggregation.MEAN, Aggregation.P95, Aggregation.HISTOGRAM}),
    )
    window_seconds: Annotated[Duration, Range(MIN_WINDOW_SECONDS)] | None = option(
        UNCHANGED,
        "Length of a window. null: no limit by time. Without any limit, the limits of the definition apply.",
        example=30.0,
    )
    window_samples: Annotated[int, Range(1, 1_000_000_000)] | None = option(
        UNCHANGED,
        "Number of samples that ends a window. null: no limit by number. Without any limit, the limits of the definition apply.",
        example=None,
    )
    buckets: tuple[float, ...] = option(
        UNCHANGED,
        "Upper bounds of the histogram, ascending, without +Inf. Applied at the start of a process.",
        example=(0.05, 0.1, 0.5, 1.0),
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield a problem for a window without any limit, for invalid buckets, and for buckets without the aggregation `histogram`."""
        if self.window_seconds is None and self.window_samples is None:
            yield (
                "window_samples",
                "and window_seconds must not both be null: a window needs a length or a number of samples",
            )
        if self.buckets is not UNCHANGED:
            try:
                check_buckets(self.buckets)
            except DefinitionError as error:
                yield "buckets", f"must be {error.allowed}"
            if self.aggregations is not UNCHANGED and Aggregation.HISTOGRAM not in self.aggregations:
                yield "buckets", "require histogram among the aggregations"

    def as_override(self) -> dict[str, object]:
        """Return the set keys of the rule, ready for `json.dumps`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.aggregations is not UNCHANGED:
            values["aggregations"] = sorted(aggregation.value for aggregation in self.aggregations)
        return {name: value for name, value in values.items() if value is not UNCHANGED}


@dataclass(frozen=True, slots=True)
class Configuration:
    """All settings. The defaults work without a file."""

    web: WebSection = option(WebSection(), "The HTTP server.")
    feed: FeedSection = option(FeedSection(), "Data from the training processes.")
    state: StateSection = option(StateSection(), "State that outlives the exporter.")
    log: LogSection = option(LogSection(), "Log lines on standard error.")
    exposition: ExpositionSection = option(ExpositionSection(), "Limits of a scrape.")
    collectors: Collectors = option(Collectors(), "Collectors that run in the background.")
    gpu: GpuSection = option(GpuSection(), "Monitored GPUs and sampling intervals.")
    energy: EnergyOptions = option(
        EnergyOptions(), "Attribution of energy to runs, carbon intensity and prices."
    )
    hang: HangSection = option(HangSection(), "Explanation of hanging runs.")
    goodput: GoodputOptions = option(GoodputOptions(), "Accounting of training time.")
    recording: tuple[StatRuleOptions, ...] = option(
        (),
        "Aggregations, windows and buckets for the Stats of the training processes, which override the definitions in "
        "the code. A process reads these rules at the start and after each change.",
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield a problem if there are more rules than the training processes read."""
        if len(self.recording) > MAX_STAT_RULES:
            yield "recording", f"has {len(self.recording)} rules, at most {MAX_STAT_RULES} are allowed"

    def overrides(self) -> list[dict[str, object]]:
        """Return the set keys of each rule for the training processes, ready for `json.dumps`."""
        return [rule.as_override() for rule in self.recording]


def resolve(flags: argparse.Namespace, environ: Mapping[str, str]) -> Configuration:
    """Read the file and combine it with flags, environment and defaults. Raises ConfigurationError."""
    problems: list[Problem] = []
    configuration = Configuration()

    def parse_value(source: str, text: str, hint: Any) -> Any:
        """Return the value of a text, or record the problem and return None."""
        try:
            return parse(text, source, hint)
        except ConfigurationError as error:
            problems.extend(error.problems)
            return None

    file = value_of(flags, "--config.file")
    if file is not None and parse_value("--config.file", file, Path) is not None:
        try:
            configuration = _with_absolute_paths(Path(file).absolute().parent, load_file(file, Configuration))
        except ConfigurationError as error:
            problems.extend(error.problems)
    changes = _changes(flags, environ, configuration, parse_value)
    sections = {
        name: replace(getattr(configuration, name), **changed_keys) for name, changed_keys in changes.items()
    }
    if not problems:
        problems += [
            Problem("--web.listen-address", line=None, column=None, message=text)
            for _, text in sections["web"].problems()
        ]
    gpu = sections["gpu"]
    if gpu.replay is not None and gpu.replay != configuration.gpu.replay:
        message = unknown_machine_problem(gpu.replay)
        problems += (
            [] if message is None else [Problem("--gpu.replay", line=None, column=None, message=message)]
        )
    if problems:
        raise ConfigurationError(problems)
    return replace(configuration, **sections)


def _changes(
    flags: argparse.Namespace,
    environ: Mapping[str, str],
    configuration: Configuration,
    parse_value: Callable[[str, str, Any], Any],
) -> dict[str, dict[str, Any]]:
    """Return the values of the environment and of the flags, by section and key."""
    changes: dict[str, dict[str, Any]] = {section: {} for section in ("web", "feed", "state", "gpu", "log")}
    if environ.get(FEED_DIRECTORY_VARIABLE):
        variable = f"${FEED_DIRECTORY_VARIABLE}"
        changes["feed"]["dir"] = parse_value(variable, environ[FEED_DIRECTORY_VARIABLE], Path)
    for flag in FLAGS:
        if flag == "--config.file":
            continue
        section, _, name = flag.removeprefix("--").partition(".")
        key, value = name.replace("-", "_").replace(".", "_"), value_of(flags, flag)
        hints = {
            section_option.name: section_option.hint
            for section_option in options_of(type(getattr(configuration, section)))
        }
        if isinstance(value, list):
            item_hint = get_args(hints[key])[0]
            changes[section][key] = tuple(parse_value(flag, item, item_hint) for item in value)
        elif isinstance(value, str):
            # "" disables a replay that the file enables.
            is_disabled = flag == "--gpu.replay" and not value
            changes[section][key] = None if is_disabled else parse_value(flag, value, hints[key])
        elif value is not None:
            changes[section][key] = value
    return changes


def _with_absolute_paths(directory: Path, configuration: Configuration) -> Configuration:
    """Resolve the relative paths of a file against the file's directory."""
    changes: dict[str, Any] = {
        section.name: _resolved(directory, getattr(configuration, section.name))
        for section in fields(configuration)
    }
    return replace(configuration, **changes)


def _resolved(directory: Path, value: Any) -> Any:
    """Return a value with absolute paths, also inside dataclasses, mappings and tuples."""
    if isinstance(value, Path):
        return directory / value
    if isinstance(value, tuple):
        return tuple(_resolved(directory, item) for item in value)
    if isinstance(value, Mapping):
        return {key: _resolved(directory, item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{field.name: _resolved(directory, getattr(value, field.name)) for field in fields(value)}
        )
    return value
