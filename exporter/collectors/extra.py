"""Collectors of other people, beside ours: by name in the configuration, or by an entry point of their package.

Used in the sidecar. A collector of prometheus_client's kind is any object whose `collect()` gives metric families; what
it lacks, a name, an interval and a deadline, it gets here. Each is imported and made on its own thread at its first
pass, so that one that cannot be imported, hangs or raises costs itself only.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any

from prometheus_client.core import Metric

from exporter.errors import CollectError
from exporter.families import FamilySpec

GROUP = "training_exporter.collectors"
"""The group of entry points under which a package offers collectors; the entry's name does not matter."""


class ExtraCollector:
    """Somebody else's collector.

    Args:
        name: `module:Class`, also the value of the label `collector`; the class needs no arguments.
    """

    specs: tuple[FamilySpec, ...] = ()

    def __init__(self, name: str) -> None:
        self.name = name
        self._collector: Any = None

    def collect(self) -> Iterable[Metric]:
        """Make one pass.

        Raises:
            CollectError: `import`: the class cannot be had or made.
            Exception: Whatever the collector raises.
        """
        if self._collector is None:
            module, _, attribute = self.name.partition(":")
            try:
                self._collector = getattr(importlib.import_module(module), attribute)()
            except Exception as error:  # whatever happens in an import of somebody else's
                message = f"{self.name} cannot be made: {type(error).__name__}: {error}"
                raise CollectError(message, reason="import") from error
        families: Iterable[Metric] = self._collector.collect()
        return list(families)


def extra_collectors(classes: Sequence[str]) -> list[ExtraCollector]:
    """Find the collectors that the configuration names, and those that installed packages offer.

    Args:
        classes: Names such as `my_package:QueueCollector`.
    """
    offered = sorted(entry.value for entry in metadata.entry_points(group=GROUP))
    return [ExtraCollector(name) for name in dict.fromkeys((*classes, *offered))]
