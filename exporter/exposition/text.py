"""One metric family as text, checked so that no scraper stumbles over it.

Used in the sidecar, at the first scrape after a collector published. Pure functions of foreign data: whatever a family
holds, what comes out parses to its end. A line that a scraper cannot read would end the scrape there, and Prometheus
would draw everything before it as a flat line for five minutes; so what cannot be written is left out and counted.

The text is prometheus_client's to the byte (a property test compares them), but for what its writer would rewrite or
break: names that are not plain are refused, timestamps, exemplars and `_created` are not written, and in OpenMetrics a
histogram without `_sum` has no `_count`, as that format demands. The library's writer walks every name in Python, a
function call a character, and takes several times as long (benchmarks/bench_web.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from prometheus_client.core import Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from exporter.exposition.negotiation import Format

Reason = Literal["cap", "duplicate", "labels", "name", "value"]
"""Why a series was left out; the values of the label `reason`."""

# Longer or more than any of ours; below what operators set as Prometheus' `label_limit`, `label_name_length_limit` and
# `label_value_length_limit`, any of which fails the whole scrape.
MAX_NAME_CHARACTERS = 256
MAX_LABELS = 32
MAX_LABEL_VALUE_BYTES = 512

_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_INFINITE = float("inf")
_go_number: Callable[[float], str] = floatToGoString


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a type allows: suffixes of sample names, the suffix of the name in plain text, the range of values."""

    suffixes: tuple[str, ...]
    suffix: str = ""
    least: float = -_INFINITE
    most: float = _INFINITE
    text: str = "gauge"


_KINDS: Mapping[str, _Kind] = {
    "counter": _Kind(("_total",), "_total", least=0.0, text="counter"),
    "gauge": _Kind(("",)),
    "histogram": _Kind(("_bucket", "_count", "_sum"), least=0.0, text="histogram"),
    "info": _Kind(("_info",), "_info", least=1.0, most=1.0),
    "stateset": _Kind(("",), least=0.0, most=1.0),
    "summary": _Kind(("", "_count", "_sum"), least=0.0, text="summary"),
    "unknown": _Kind(("",), text="untyped"),
}
_DISTRIBUTIONS = ("histogram", "summary")


class Refused(Exception):  # noqa: N818  a verdict about one sample or family, caught where it is counted
    """A sample or a family that cannot be written."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Written:
    """A family as text.

    Attributes:
        text: Metadata and lines in each format.
        series: Lines, those of plain text.
        names: What no other family of a page may be called, and what the family is asked for by.
        dropped: Series that were left out.
    """

    text: Mapping[Format, str]
    series: int
    names: frozenset[str]
    dropped: Counter[Reason]


def write(metric: Metric) -> Written:
    """Write a family. A bad sample is left out alone; of a histogram or summary, with its whole family.

    Raises:
        Refused: Nothing of it can be written.
    """
    name, kind = metric.name, _KINDS.get(metric.type)
    if kind is None or not _is_name(name, _METRIC_NAME) or not isinstance(metric.documentation, str):
        raise Refused("name")
    samples: Sequence[Sample] = metric.samples
    buckets_alone = False
    if metric.type == "histogram":
        negative, buckets_alone = _check_histogram(name, samples)
        if negative:  # the sum may fall, so that it is no counter
            samples = [sample for sample in samples if sample.name != f"{name}_sum"]
    lines: dict[str, str] = {}
    dropped: Counter[Reason] = Counter()
    expected = {name + suffix for suffix in kind.suffixes}
    orders: dict[tuple[str, ...], list[str]] = {}
    least, most = kind.least, kind.most
    for sample in samples:
        try:
            called, labels, value = sample.name, sample.labels, sample.value
            if called not in expected:
                if called == f"{name}_created":
                    continue
                raise Refused("name")  # noqa: TRY301  told apart from what Python raises
            keys = tuple(labels)
            order = orders.get(keys)
            if order is None:
                order = orders[keys] = _sorted_labels(keys)
            inner = ",".join([f'{key}="{_escape(labels[key])}"' for key in order if labels[key] != ""])
            series = f"{called}{{{inner}}}" if inner else called
            if series in lines:
                raise Refused("duplicate")  # noqa: TRY301  likewise
            if value.__class__ is not float:
                value = _number(value)
            if not least <= value <= most:
                raise Refused("value")  # noqa: TRY301  likewise
            written = repr(value) if -_INFINITE < value < 1e6 else _go_number(value)
            lines[series] = f"{series} {written}\n"
        except Refused as refused:
            if metric.type in _DISTRIBUTIONS:
                raise
            dropped[refused.reason] += 1
        except (AttributeError, TypeError):  # no sample, or labels that are no text
            if metric.type in _DISTRIBUTIONS:
                raise Refused("labels") from None
            dropped["labels"] += 1
    names = frozenset({name, *expected, *([f"{name}_created"] if kind.least == 0.0 else [])})
    return Written(_texts(metric, kind, lines, buckets_alone=buckets_alone), len(lines), names, dropped)


def _texts(
    metric: Metric, kind: _Kind, lines: Mapping[str, str], *, buckets_alone: bool
) -> Mapping[Format, str]:
    name, shown = metric.name, f"{metric.name}{kind.suffix}"
    # A lone surrogate in a help text costs a character, not the family.
    help_text = (
        metric.documentation.encode("utf-8", "replace").decode().replace("\\", r"\\").replace("\n", r"\n")
    )
    quoted = help_text.replace('"', r"\"")
    type_ = metric.type
    if type_ == "stateset" and not all(name in sample.labels for sample in metric.samples):
        type_ = "gauge"  # OpenMetrics wants the states in a label that is called like the family
    has_unit = metric.unit and name.endswith(f"_{metric.unit}") and type_ not in ("info", "stateset")
    unit = f"# UNIT {name} {metric.unit}\n" if has_unit else ""
    body = "".join(lines.values())
    strict = body
    if buckets_alone:
        strict = "".join([line for line in lines.values() if line.startswith(f"{name}_bucket")])
    return {
        Format.TEXT: f"# HELP {shown} {help_text}\n# TYPE {shown} {kind.text}\n{body}",
        Format.OPENMETRICS: f"# HELP {name} {quoted}\n# TYPE {name} {type_}\n{unit}{strict}",
    }


def _check_histogram(name: str, samples: Sequence[Sample]) -> tuple[bool, bool]:
    """Whether a bound is below zero, and whether some count has no sum.

    Raises:
        Refused: Bounds that do not rise, or counts that fall.
    """
    bound, count = _INFINITE, 0.0
    sums, counts, lowest = 0, 0, _INFINITE
    for sample in samples:
        if sample.name == f"{name}_bucket":
            try:
                upper = float(sample.labels["le"])
                if bound == _INFINITE:  # the first of the next series
                    bound, count = -_INFINITE, 0.0
                if not (upper > bound and sample.value >= count):
                    raise Refused("value")
                bound, count = upper, sample.value
                lowest = min(lowest, upper)
            except (KeyError, TypeError, ValueError):
                raise Refused("labels") from None
        else:
            if bound != _INFINITE:  # no bucket +Inf
                raise Refused("value")
            sums += sample.name == f"{name}_sum"
            counts += sample.name == f"{name}_count"
    return lowest < 0.0, lowest < 0.0 or sums != counts


def _sorted_labels(keys: tuple[str, ...]) -> list[str]:
    if len(keys) > MAX_LABELS or not all(_is_name(key, _LABEL_NAME) for key in keys):
        raise Refused("labels")
    return sorted(keys)


def _is_name(name: object, pattern: re.Pattern[str]) -> bool:
    return isinstance(name, str) and len(name) <= MAX_NAME_CHARACTERS and bool(pattern.fullmatch(name))


@lru_cache(maxsize=2048)
def _escape(value: str) -> str:
    if not isinstance(value, str):
        raise Refused("labels")
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError:
        raise Refused("labels") from None
    # Not cut: two series whose values differ only at the end would become one.
    if size > MAX_LABEL_VALUE_BYTES:
        raise Refused("labels")
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: Any) -> float:
    if not isinstance(value, int | float):
        raise Refused("value")
    try:
        return float(value)
    except OverflowError:
        raise Refused("value") from None


def count_series(metrics: Iterable[Metric]) -> int:
    """How many series families have at most."""
    return sum(len(metric.samples) for metric in metrics)
