"""Draft: a block of families in the making, whose parts fail one by one.

Used by collectors in the sidecar, within one `collect`. Numbers come in, a `Collected` goes out. A part that
fails costs its own families and the verdict; the others are published. No threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from exporter.collectors.family import Collected, Family, FamilySpec, Sample
from exporter.errors import CollectError

ENOUGH_PROBLEMS = 5
"""How many of one reason are kept: the five hundred files of a large machine tend to fail in the same way."""


class Draft:
    """Collects families, and what went wrong while they were made."""

    def __init__(self) -> None:
        self._families: list[Family] = []
        self._problems: list[tuple[str, str]] = []
        self._unsupported: list[str] = []

    @contextmanager
    def part(self) -> Iterator[None]:
        """Let what is inside fail with `CollectError` alone.

        Families are added last in a part, when nothing can fail any more, so that none of it is half there.
        """
        try:
            yield
        except CollectError as error:
            self.fail(error)

    def fail(self, error: CollectError) -> None:
        """Note what went wrong; where it is caught anyway, a part is not needed."""
        if sum(reason == error.reason for reason, _ in self._problems) < ENOUGH_PROBLEMS:
            self._problems.append((error.reason, str(error)))

    def add(self, spec: FamilySpec, value: float, *labels: str) -> None:
        """Add a family of one sample."""
        self._families.append(Family(spec, (Sample(labels, value),)))

    def add_family(self, spec: FamilySpec, samples: dict[tuple[str, ...], float]) -> None:
        """Add a family by its samples; one without samples is left out."""
        if samples:
            self._families.append(
                Family(spec, tuple(Sample(labels, value) for labels, value in samples.items()))
            )

    @property
    def failed(self) -> bool:
        """Whether a part has failed so far, so that what is missing may be there after all."""
        return bool(self._problems)

    def unsupported(self, what: str) -> None:
        """Note a source that this machine does not offer: a normal state, told once."""
        self._unsupported.append(what)

    def finish(self) -> Collected:
        """Hand over the block.

        Raises:
            CollectError: All that was tried failed, so that there is nothing to publish.
        """
        if self._problems and not self._families:
            reason, message = self._problems[0]
            more = len(self._problems) - 1
            raise CollectError(f"{message} (and {more} more)" if more else message, reason=reason)
        return Collected(tuple(self._families), tuple(self._problems), tuple(self._unsupported))
