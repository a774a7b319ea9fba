"""The rules of the two text formats: what a family's specification alone decides, and how values are written.

Used in the sidecar, whenever a block is rendered. Pure; a layout is made once for each specification.

The rules are prometheus_client's (names, order and escaping of labels, numbers as Go writes them), but not
its code: importing it costs 5 MiB and 73 modules (its package loads HTTP servers and TLS), an eighth of what
the sidecar may use, and it writes everything anew at each scrape, which takes fifty times as long as joining
what is written already (benchmarks/bench_exposition.py). A property test holds every byte against it.

What differs on purpose:
- Names that it would rewrite are refused: `a-b` would become `a_b` and may meet another `a_b`.
- A colon stays a colon in OpenMetrics, where it writes `a:b` above the samples and `a_b` in them.
- In plain text a histogram without `_sum` keeps its `_count`. In OpenMetrics it has neither, as the rules of
  that format demand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from exporter.collectors.family import FamilySpec
from exporter.exposition.drops import Reason
from exporter.exposition.negotiation import Format

# Longer or more than any of ours; below what operators set as Prometheus' `label_limit`,
# `label_name_length_limit` and `label_value_length_limit`, any of which fails the whole scrape.
NAME_CHARACTERS = 256
LABEL_NAMES = 32
LABEL_VALUE_BYTES = 512

_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")

_TYPES: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "counter": ("_total", "", ("", "_total", "_created")),
    "gauge": ("", "", ("",)),
    "histogram": ("", "le", ("", "_bucket", "_count", "_sum", "_created")),
    "info": ("_info", "", ("", "_info")),
    "stateset": ("", "", ("",)),
    "summary": ("", "quantile", ("", "_count", "_sum", "_created")),
}
"""By type: the suffix that its name must have, the label name that it may not have, and what must be added
to the name without its suffix to get all names that no other family may use."""


class Refused(Exception):  # noqa: N818  a verdict about one sample or family, caught where it is counted
    """A sample or a family that cannot be written."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class Layout:
    """What one specification decides.

    Attributes:
        spec: The specification.
        heads: Its metadata lines in each format.
        claims: Names that no other family of a page may use, in either format.
    """

    __slots__ = ("_order", "claims", "heads", "spec")

    def __init__(self, spec: FamilySpec) -> None:
        """Check a specification.

        Raises:
            Refused: It cannot be written.
        """
        if not _is_sound(spec):
            raise Refused(Reason.NAME)
        suffix, _, claimed = _TYPES[spec.type]
        base = spec.name[: len(spec.name) - len(suffix)]
        self.spec = spec
        self.claims = frozenset(base + each for each in claimed)
        self._order = sorted(range(len(spec.labels)), key=spec.labels.__getitem__)

        # A lone surrogate in a help text costs a character, not the family.
        text = spec.help.encode("utf-8", "replace").decode("utf-8").replace("\\", r"\\").replace("\n", r"\n")
        quoted = text.replace('"', r"\"")
        has_unit = spec.unit and spec.type not in ("info", "stateset") and base.endswith(f"_{spec.unit}")
        self.heads = {
            Format.TEXT: f"# HELP {spec.name} {text}\n"
            f"# TYPE {spec.name} {'gauge' if spec.type in ('info', 'stateset') else spec.type}\n",
            Format.OPENMETRICS: f"# HELP {base} {quoted}\n# TYPE {base} {spec.type}\n"
            + (f"# UNIT {base} {spec.unit}\n" if has_unit else ""),
        }

    def label_pairs(self, values: tuple[str, ...]) -> list[tuple[str, str]]:
        """Names and escaped values in the order of the names, without those that are absent.

        Args:
            values: In the order of the specification; an empty string is an absent label.

        Raises:
            Refused: Too few, too many, too long, not text or not UTF-8.
        """
        names = self.spec.labels
        if not isinstance(values, tuple) or len(values) != len(names):
            raise Refused(Reason.LABELS)
        return [(names[place], _escape(values[place])) for place in self._order if values[place] != ""]


def label_set(pairs: list[tuple[str, str]]) -> str:
    """Label pairs as they stand between a name and a value: braces, or nothing for no labels."""
    inner = ",".join([f'{name}="{value}"' for name, value in pairs])
    return f"{{{inner}}}" if inner else ""


def go_number(value: float) -> str:
    """Write a number as Go does: an exponent from a million on, `+Inf`, `-Inf`."""
    if 1e6 <= value < 1e16:
        whole, _, fraction = repr(value).partition(".")
        mantissa = f"{whole[0]}.{whole[1:]}{fraction}".rstrip("0.")
        return f"{mantissa}e+{len(whole) - 1:02d}"
    if value in _INFINITIES:
        return _INFINITIES[value]
    return repr(value)


_INFINITIES = {float("inf"): "+Inf", float("-inf"): "-Inf"}


def _escape(value: str) -> str:
    if not isinstance(value, str):
        raise Refused(Reason.LABELS)
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError:
        raise Refused(Reason.LABELS) from None
    # Not cut: two series whose values differ only at the end would become one.
    if size > LABEL_VALUE_BYTES:
        raise Refused(Reason.LABELS)
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def is_metric_name(name: object) -> bool:
    """Say whether a text is a metric name that both formats take unquoted."""
    return isinstance(name, str) and len(name) <= NAME_CHARACTERS and bool(_METRIC_NAME.fullmatch(name))


def _is_sound(spec: FamilySpec) -> bool:
    """Whether name, type, labels and texts of a specification can be written."""
    if spec.type not in _TYPES or not is_metric_name(spec.name):
        return False
    suffix, reserved, _ = _TYPES[spec.type]
    return (
        spec.name.endswith(suffix)
        and is_metric_name(spec.name[: len(spec.name) - len(suffix)])
        and isinstance(spec.labels, tuple)
        and len(set(spec.labels)) == len(spec.labels) <= LABEL_NAMES
        and reserved not in spec.labels
        and all(
            isinstance(each, str) and len(each) <= NAME_CHARACTERS and _LABEL_NAME.fullmatch(each)
            for each in spec.labels
        )
        and isinstance(spec.help, str)
        and isinstance(spec.unit, str)
    )
