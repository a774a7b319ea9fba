"""The families of the job, each beside the code that fills it, and how tables of them are read.

A row of a table is `name{labels} [words]: help <- source`. Lines that are indented belong to the row before. Name and
words tell type and unit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from exporter.families import FamilySpec, family

IDENTITY_LABELS = ("run", "rank", "worker", "role")
"""The labels that the ledger puts on every series of a process, in the order of the samples."""

_ROW = re.compile(r"(\w+)(?:\{([\w,]+)\})?(?: \[([^]]*)\])?: (.*) <- (.*)")


def rows(written: str) -> Iterator[tuple[FamilySpec, str]]:
    """Read a table; each family with the words of its row."""
    for row in re.split(r"\n(?=\w)", written.strip()):
        ((name, labels, words, text, source),) = _ROW.findall(" ".join(row.split()))
        spec = family(name, text, source, *(labels.split(",") if labels else ()))
        if "histogram" in words:
            spec = replace(spec, type="histogram")
        if "summary" in words:
            spec = replace(spec, type="summary")
        yield spec, words


def table(written: str) -> Mapping[str, FamilySpec]:
    """Read a table of families by name."""
    return {spec.name: spec for spec, _ in rows(written)}
