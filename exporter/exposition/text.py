"""Text formats of a metric family, with validation.

prometheus_client has a writer too. This writer exists because it is three times faster on changed blocks
(benchmarks/bench_web.py), which the budget of a scrape needs: the library's writer walks every name in Python, with a function
call per character.

The text equals prometheus_client's to the byte (a property test compares them), except for content that the library would
rewrite or break: names that are not plain are refused, timestamps, exemplars and `_created` are not written, and in OpenMetrics
a histogram without `_sum` has no `_count`, as that format requires.

A line that a scraper cannot parse would end the scrape there, and Prometheus would draw everything before it as a flat line for
five minutes. A sample that cannot be written is therefore left out and counted.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

from prometheus_client.core import Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from exporter.exposition.negotiation import Format
from exporter.exposition.protobuf import encode

Reason = Literal["cap", "duplicate", "labels", "name", "value"]
"""Reasons to leave a series out; values of the label `reason`."""

# Above the exporter's own labels; below usual values of Prometheus' `label_limit`, `label_name_length_limit` and
# `label_value_length_limit`, which fail the whole scrape.
MAX_LABELS = 32
MAX_LABEL_VALUE_BYTES = 512

_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,255}")
_LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]{0,255}")
_SeriesKey = frozenset[tuple[str, str]]
_INFINITE = float("inf")
_go_number: Callable[[float], str] = floatToGoString


@dataclass(frozen=True, slots=True)
class TypeRules:
    """Rules of an exposition type: suffixes of sample names, suffix and type in plain text, range of values."""

    suffixes: tuple[str, ...]
    suffix: str
    text: str
    least: float = -_INFINITE
    most: float = _INFINITE


_KINDS: Mapping[str, TypeRules] = {
    "counter": TypeRules(("_total",), "_total", "counter", least=0.0),
    "gauge": TypeRules(("",), "", "gauge"),
    "histogram": TypeRules(("_bucket", "_count", "_sum"), "", "histogram", least=0.0),
    "info": TypeRules(("_info",), "_info", "gauge", least=1.0, most=1.0),
    "stateset": TypeRules(("",), "", "gauge", least=0.0, most=1.0),
    "summary": TypeRules(("", "_count", "_sum"), "", "summary", least=0.0),
    "unknown": TypeRules(("",), "", "untyped"),
}


class RefusedError(Exception):
    """A sample or a family that cannot be written."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Written:
    """Text of a family."""

    text: Mapping[Format, str]  # metadata and lines in each text format
    series: int  # lines of plain text
    names: frozenset[str]  # names that no other family of a page may have
    dropped: Counter[Reason]  # series left out
    metric: Metric
    samples: Sequence[Sample]  # samples in the text

    def body(self, form: Format) -> bytes:
        """Return the family in a format."""
        return self.protobuf if form is Format.PROTOBUF else self.text[form].encode()

    @cached_property
    def protobuf(self) -> bytes:
        """The family in protobuf, encoded on first use."""
        return encode(self.metric, self.samples)


def write(metric: Metric, before: Written | None = None) -> Written:
    """Return the text of a family without bad samples, and without distributions that have a bad sample.

    Args:
        metric: The family.
        before: Text of an earlier state of the family; if the series are the same, only the values are written.

    Raises:
        RefusedError: No sample can be written.
    """
    name, kind = metric.name, _KINDS.get(metric.type)
    if kind is not None and before is not None and (same := _same_series(metric, kind, before)) is not None:
        return Written(
            _texts(metric, kind, same, metric.samples),
            len(same),
            before.names,
            Counter(),
            metric,
            metric.samples,
        )
    if kind is None or not _METRIC_NAME.fullmatch(name) or not isinstance(metric.documentation, str):
        raise RefusedError("name")
    samples = _without_falling_sums(metric) if metric.type == "histogram" else metric.samples
    expected = {name + suffix for suffix in kind.suffixes}
    lines: dict[str, str] = {}
    kept: list[Sample] = []
    dropped: Counter[Reason] = Counter()
    bad: dict[_SeriesKey, Reason] = {}
    orders: dict[tuple[str, ...], list[str]] = {}
    for sample in samples:
        try:
            if sample.name == f"{name}_created":
                continue
            if sample.name not in expected:
                raise RefusedError("name")  # noqa: TRY301  distinguished from Python's own errors
            labels, keys = sample.labels, tuple(sample.labels)
            order = orders.get(keys) or orders.setdefault(keys, _sorted_labels(keys))
            inner = ",".join([f'{key}="{_escape(labels[key])}"' for key in order if labels[key] != ""])
            series = f"{sample.name}{{{inner}}}" if inner else sample.name
            if series in lines:
                raise RefusedError("duplicate")  # noqa: TRY301  likewise
            value = sample.value if type(sample.value) is float else _number(sample.value)
            if not kind.least <= value <= kind.most:
                raise RefusedError("value")  # noqa: TRY301  likewise
            lines[series] = f"{series} {_text_of(value)}\n"
            kept.append(sample)
        except (
            RefusedError,
            AttributeError,
            TypeError,
        ) as error:  # not a sample, or labels that are not text
            refused = error if isinstance(error, RefusedError) else RefusedError("labels")
            if metric.type in ("histogram", "summary"):
                key = _series_key(sample)
                if key is None:
                    raise refused from None
                bad.setdefault(key, refused.reason)
            else:
                dropped[refused.reason] += 1
    if bad:  # a distribution without one of its samples would be wrong
        dropped.update(bad[key] for sample in samples if (key := _series_key(sample)) in bad)
        whole = [_series_key(sample) not in bad for sample in kept]
        lines = dict(itertools.compress(lines.items(), whole))
        kept = list(itertools.compress(kept, whole))
        if not kept:
            raise RefusedError(next(iter(bad.values())))
    names = frozenset({name, *expected, *([f"{name}_created"] if kind.least == 0.0 else [])})
    texts = _texts(metric, kind, lines, kept)
    return Written(texts, len(lines), names, dropped, metric, kept)


def _same_series(metric: Metric, kind: TypeRules, before: Written) -> Mapping[str, str] | None:
    """Return the lines of a family whose samples share their labels with an earlier state; None for any other family."""
    known = before.metric
    if metric.type not in ("counter", "gauge") or (known.type, known.name) != (metric.type, metric.name):
        return None
    if before.dropped or len(before.samples) != len(metric.samples):
        return None
    lines = {}
    known_lines = before.text[Format.TEXT].split("\n")[2:-1]  # after the two lines of metadata
    for line, old, new in zip(known_lines, before.samples, metric.samples, strict=True):
        value = new.value if type(new.value) is float else _number(new.value)
        if new.labels is not old.labels or new.name != old.name or not kind.least <= value <= kind.most:
            return None
        series = line.rpartition(" ")[0]
        lines[series] = f"{series} {_text_of(value)}\n"
    return lines


def _text_of(value: float) -> str:
    return repr(value) if -_INFINITE < value < 1e6 else _go_number(value)


def _without_falling_sums(metric: Metric) -> Sequence[Sample]:
    """Return the samples of a histogram without sums that may fall, because observations below zero are possible."""
    try:
        negative = any(float(sample.labels.get("le", 0)) < 0.0 for sample in metric.samples)
    except ValueError:
        raise RefusedError("labels") from None
    if not negative:
        return metric.samples
    return [sample for sample in metric.samples if sample.name != f"{metric.name}_sum"]


def _texts(
    metric: Metric, kind: TypeRules, lines: Mapping[str, str], samples: Sequence[Sample]
) -> Mapping[Format, str]:
    name, type_, body = metric.name, metric.type, "".join(lines.values())
    # A lone surrogate in a help text costs a character, not the family.
    text = metric.documentation.encode("utf-8", "replace").decode().replace("\\", r"\\").replace("\n", r"\n")
    if type_ == "stateset" and not all(name in sample.labels for sample in metric.samples):
        type_ = "gauge"  # OpenMetrics requires the states in a label with the name of the family
    has_unit = metric.unit and name.endswith(f"_{metric.unit}") and type_ not in ("info", "stateset")
    unit = f"# UNIT {name} {metric.unit}\n" if has_unit else ""
    strict = body
    if type_ == "histogram":
        keys = {
            part: [_series_key(sample) for sample in samples if sample.name == f"{name}_{part}"]
            for part in ("count", "sum")
        }
        if len(keys["count"]) != len(keys["sum"]):
            complete = {*keys["count"]} & {*keys["sum"]}
            strict = "".join(
                line
                for line, sample in zip(lines.values(), samples, strict=True)
                if sample.name == f"{name}_bucket" or _series_key(sample) in complete
            )
    shown, quoted = name + kind.suffix, text.replace('"', r"\"")
    return {
        Format.TEXT: f"# HELP {shown} {text}\n# TYPE {shown} {kind.text}\n{body}",
        Format.OPENMETRICS: f"# HELP {name} {quoted}\n# TYPE {name} {type_}\n{unit}{strict}",
    }


def _series_key(sample: Sample) -> _SeriesKey | None:
    """Return the labels of a distribution; None if the labels cannot be compared."""
    try:
        return frozenset([each for each in sample.labels.items() if each[0] not in {"le", "quantile"}])
    except (AttributeError, TypeError):
        return None


def _sorted_labels(keys: tuple[str, ...]) -> list[str]:
    if len(keys) > MAX_LABELS or not all(map(_LABEL_NAME.fullmatch, keys)):
        raise RefusedError("labels")
    return sorted(keys)


@lru_cache(maxsize=2048)
def _escape(value: str) -> str:
    try:
        # Not cut: two series whose values differ only at the end would become one.
        if len(value.encode("utf-8")) > MAX_LABEL_VALUE_BYTES:
            raise RefusedError("labels")
    except (AttributeError, UnicodeEncodeError):
        raise RefusedError("labels") from None
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else float("nan")
    except OverflowError:
        return float("nan")
