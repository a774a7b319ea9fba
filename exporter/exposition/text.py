"""Text formats of a metric family, with validation.

The writer of prometheus_client calls a Python function for every character of a name. This writer is three times as fast on changed
blocks (benchmarks/bench_web.py), as the time budget of a scrape requires.

For valid families, the text equals that of prometheus_client byte for byte; a property test compares them. There are three exceptions:

- Names with characters other than ASCII letters, digits, `_` and `:` are refused.
- Timestamps, exemplars and `_created` are not written.
- In OpenMetrics, a histogram without `_sum` has no `_count`, as the format requires.

A line that a scraper cannot parse fails the whole scrape. A sample that cannot be written is therefore left out and counted.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

from prometheus_client.core import Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from exporter.exposition.negotiation import Format
from exporter.exposition.protobuf import encode

Reason = Literal["cap", "duplicate", "labels", "name", "value"]
"""Reasons to leave out a series; values of the label `reason`."""

# More than the exporter needs, and below usual values of Prometheus' `label_limit` and `label_value_length_limit`, beyond which
# the whole scrape fails.
MAX_SERIES_LABELS = 32
MAX_LABEL_VALUE_BYTES = 512

_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,255}")
_LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]{0,255}")
PART_LABELS = frozenset({"le", "quantile"})
"""Labels that distinguish the samples of a series of a histogram or summary."""
_SeriesKey = frozenset[tuple[str, str]]
"""Labels of a series of a histogram or summary, without `PART_LABELS`."""
_INFINITE = float("inf")
_go_number: Callable[[float], str] = floatToGoString


@dataclass(frozen=True, slots=True)
class TypeRules:
    """Rules of a family type for the names and the values of samples."""

    sample_suffixes: tuple[str, ...]  # suffixes of the names of samples
    plain_suffix: str  # suffix of the name of the family in plain text
    plain_type: str  # type of the family in plain text
    min_value: float = -_INFINITE
    max_value: float = _INFINITE


_TYPE_RULES: Mapping[str, TypeRules] = {
    "counter": TypeRules(("_total",), "_total", "counter", min_value=0.0),
    "gauge": TypeRules(("",), "", "gauge"),
    "histogram": TypeRules(("_bucket", "_count", "_sum"), "", "histogram", min_value=0.0),
    "info": TypeRules(("_info",), "_info", "gauge", min_value=1.0, max_value=1.0),
    "stateset": TypeRules(("",), "", "gauge", min_value=0.0, max_value=1.0),
    "summary": TypeRules(("", "_count", "_sum"), "", "summary", min_value=0.0),
    "unknown": TypeRules(("",), "", "untyped"),
}


class RefusedError(Exception):
    """Sample or family that cannot be written."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class FamilyText:
    """Texts of a family in the formats of the exposition, and the samples that they contain."""

    heads: Mapping[Format, str]  # lines of metadata in each text format
    texts: Mapping[Format, str]  # metadata and sample lines in each text format
    series_texts: Sequence[str]  # names and labels of the sample lines in the plain text format
    names: frozenset[str]  # names that other families of the page must not have
    dropped_counts: Counter[Reason]  # number of series left out, by reason
    metric: Metric
    samples: Sequence[Sample]  # samples in the text

    @property
    def series_count(self) -> int:
        """Number of sample lines in the plain text format."""
        return len(self.series_texts)

    def body(self, body_format: Format) -> bytes:
        """Return the body of the family in a format."""
        return self.protobuf if body_format is Format.PROTOBUF else self.texts[body_format].encode()

    @cached_property
    def protobuf(self) -> bytes:
        """Protobuf messages of the family, encoded on first use."""
        return encode(self.metric, self.samples)


def write(metric: Metric, previous: FamilyText | None = None) -> FamilyText:
    """Return the text of a family without invalid samples, and without series of a histogram or summary that have an invalid sample.

    Args:
        metric: Family to write.
        previous: Earlier text of the family. If the series are the same, only the values are written again.

    Raises:
        RefusedError: The name, type or help of the family is invalid, or no series of the histogram or summary is valid.
    """
    name, rules = metric.name, _TYPE_RULES.get(metric.type)
    if rules is not None and previous is not None:
        updated_text = _update(previous, metric, rules)
        if updated_text is not None:
            return updated_text
    if rules is None or not _METRIC_NAME.fullmatch(name) or not isinstance(metric.documentation, str):
        raise RefusedError("name")
    samples = _without_decreasing_sums(metric) if metric.type == "histogram" else metric.samples
    sample_names = frozenset(name + suffix for suffix in rules.sample_suffixes)
    lines: dict[str, str] = {}  # by series
    kept_samples: list[Sample] = []
    dropped_counts: Counter[Reason] = Counter()
    # Series of a histogram or summary, with the reason of the first invalid sample.
    refused_series: dict[_SeriesKey, Reason] = {}
    for sample in samples:
        try:
            if sample.name == f"{name}_created":
                continue
            series = _series_text(sample, sample_names)
            if series in lines:
                raise RefusedError("duplicate")  # noqa: TRY301  # the handler below also handles Python's own errors
            value = sample.value if type(sample.value) is float else _number(sample.value)
            if not rules.min_value <= value <= rules.max_value:
                raise RefusedError("value")  # noqa: TRY301  # the handler below also handles Python's own errors
            lines[series] = f"{series} {_format_value(value)}\n"
            kept_samples.append(sample)
        except (RefusedError, AttributeError, TypeError, ValueError) as error:
            # Python's own errors: the object is not a sample, or its labels are not text.
            refusal = error if isinstance(error, RefusedError) else RefusedError("labels")
            if metric.type in ("histogram", "summary"):
                key = _series_key(sample)
                if key is None:
                    raise refusal from None
                refused_series.setdefault(key, refusal.reason)
            else:
                dropped_counts[refusal.reason] += 1
    if refused_series:  # a histogram or summary that lacks a sample would be wrong
        dropped_counts.update(
            refused_series[key] for sample in samples if (key := _series_key(sample)) in refused_series
        )
        is_valid = [_series_key(sample) not in refused_series for sample in kept_samples]
        # A series is known to be refused only after the samples before the invalid sample were written.
        lines = dict(itertools.compress(lines.items(), is_valid))
        kept_samples = list(itertools.compress(kept_samples, is_valid))
        if not kept_samples:
            raise RefusedError(next(iter(refused_series.values())))
    names = frozenset({name, *sample_names, *([f"{name}_created"] if rules.min_value == 0.0 else [])})
    heads = _heads(metric, rules)
    texts = {
        Format.TEXT: heads[Format.TEXT] + "".join(lines.values()),
        Format.OPENMETRICS: heads[Format.OPENMETRICS] + _openmetrics_body(metric, lines, kept_samples),
    }
    return FamilyText(
        heads=heads,
        texts=texts,
        series_texts=tuple(lines),
        names=names,
        dropped_counts=dropped_counts,
        metric=metric,
        samples=kept_samples,
    )


def _series_text(sample: Sample, sample_names: frozenset[str]) -> str:
    """Return the name and the labels of a sample.

    Raises RefusedError for an invalid sample, and AttributeError, TypeError or ValueError for an object that is not a sample.
    """
    if sample.name not in sample_names:
        raise RefusedError("name")
    labels = sample.labels
    label_text = ",".join(
        [
            f'{name}="{_escape(labels[name])}"'
            for name in _sorted_label_names(tuple(labels))
            if labels[name] != ""  # Prometheus does not distinguish an empty label from an absent label
        ]
    )
    return f"{sample.name}{{{label_text}}}" if label_text else sample.name


def _update(previous: FamilyText, metric: Metric, rules: TypeRules) -> FamilyText | None:
    """Return the previous text of a counter or gauge with the values of *metric*.

    Returns None for other types, if the metadata or the series have changed, and if a sample is or was invalid.
    """
    old_metric = previous.metric
    if metric.type not in ("counter", "gauge") or previous.dropped_counts:
        return None
    if (metric.name, metric.type, metric.documentation, metric.unit) != (
        old_metric.name,
        old_metric.type,
        old_metric.documentation,
        old_metric.unit,
    ):
        return None
    if len(previous.samples) != len(metric.samples):
        return None
    lines = []
    try:
        for series, old_sample, sample in zip(
            previous.series_texts, previous.samples, metric.samples, strict=True
        ):
            value = sample.value if type(sample.value) is float else _number(sample.value)
            if (
                (sample.labels is not old_sample.labels and sample.labels != old_sample.labels)
                or sample.name != old_sample.name
                or not rules.min_value <= value <= rules.max_value
            ):
                return None
            lines.append(f"{series} {_format_value(value)}\n")
    except (AttributeError, TypeError, ValueError):
        return None  # labels of a third-party collector that cannot be compared
    body = "".join(lines)
    texts = {body_format: head + body for body_format, head in previous.heads.items()}
    return replace(previous, texts=texts, metric=metric, samples=metric.samples)


def _format_value(value: float) -> str:
    """Return a value as Go formats it. Python's format is faster, and equal for finite values below a million."""
    return repr(value) if -_INFINITE < value < 1e6 else _go_number(value)


def _without_decreasing_sums(metric: Metric) -> Sequence[Sample]:
    """Return the samples of a histogram, without sums if a bound is negative: negative observations would lower a sum."""
    try:
        has_negative_bound = any(float(sample.labels.get("le", 0)) < 0.0 for sample in metric.samples)
    except ValueError:
        raise RefusedError("labels") from None
    if not has_negative_bound:
        return metric.samples
    return [sample for sample in metric.samples if sample.name != f"{metric.name}_sum"]


def _heads(metric: Metric, rules: TypeRules) -> Mapping[Format, str]:
    """Return the lines of metadata in each text format."""
    name, type_ = metric.name, metric.type
    # A lone surrogate in a help text is replaced, so that the family can be encoded.
    help_text = metric.documentation.encode("utf-8", "replace").decode()
    help_text = help_text.replace("\\", r"\\").replace("\n", r"\n")
    if type_ == "stateset" and not all(name in sample.labels for sample in metric.samples):
        type_ = "gauge"  # OpenMetrics requires the states in a label with the name of the family
    has_unit = metric.unit and name.endswith(f"_{metric.unit}") and type_ not in ("info", "stateset")
    unit = f"# UNIT {name} {metric.unit}\n" if has_unit else ""
    plain_name, quoted_help = name + rules.plain_suffix, help_text.replace('"', r"\"")
    return {
        Format.TEXT: f"# HELP {plain_name} {help_text}\n# TYPE {plain_name} {rules.plain_type}\n",
        Format.OPENMETRICS: f"# HELP {name} {quoted_help}\n# TYPE {name} {type_}\n{unit}",
    }


def _openmetrics_body(metric: Metric, lines: Mapping[str, str], samples: Sequence[Sample]) -> str:
    """Return the sample lines in OpenMetrics, where a histogram without `_sum` has no `_count`."""
    name = metric.name
    if metric.type == "histogram":
        keys = {
            part: [_series_key(sample) for sample in samples if sample.name == f"{name}_{part}"]
            for part in ("count", "sum")
        }
        if len(keys["count"]) != len(keys["sum"]):
            keys_with_sum = {*keys["count"]} & {*keys["sum"]}
            return "".join(
                line
                for line, sample in zip(lines.values(), samples, strict=True)
                if sample.name == f"{name}_bucket" or _series_key(sample) in keys_with_sum
            )
    return "".join(lines.values())


def _series_key(sample: Sample) -> _SeriesKey | None:
    """Return the labels that identify a series of a histogram or summary, or None if the labels cannot be compared."""
    try:
        return frozenset([(name, value) for name, value in sample.labels.items() if name not in PART_LABELS])
    except (AttributeError, TypeError):
        return None


@lru_cache(maxsize=2048)
def _sorted_label_names(names: tuple[str, ...]) -> list[str]:
    """Return sorted names of labels. Raises RefusedError for too many names and for an invalid name."""
    if len(names) > MAX_SERIES_LABELS or not all(map(_LABEL_NAME.fullmatch, names)):
        raise RefusedError("labels")
    return sorted(names)


@lru_cache(maxsize=2048)
def _escape(value: str) -> str:
    """Return the value of a label with escaped backslashes, line breaks and quotes.

    Raises RefusedError for a value that is too long or is not text.
    """
    try:
        # A long value is not truncated: two series could become equal.
        if len(value.encode("utf-8")) > MAX_LABEL_VALUE_BYTES:
            raise RefusedError("labels")
    except (AttributeError, UnicodeEncodeError):
        raise RefusedError("labels") from None
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: Any) -> float:
    """Return a number as a float, or NaN for other values and for an int outside the range of a float."""
    try:
        return float(value) if isinstance(value, int | float) else float("nan")
    except OverflowError:
        return float("nan")
