"""Observers of blocks: one-logger's provider, tracing and handlers of events that ask for spans.

Spans exist only for observers. An observer's methods run on the job's thread, after the accounting of the block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from exporter.training.attributes import TracingTimestamp
from exporter.training.kinds import BlockKind
from exporter.training.spans import Event, Span


@dataclass(slots=True, eq=False)
class ObservedBlock:
    """A block with a span."""

    kind: BlockKind
    span: Span
    began: TracingTimestamp
    entered: bool  # by a context manager; else by a callback
    call: str  # as the job wrote it
    values: Mapping[str, object]  # arguments of the begin, converted
    data: object = None  # for the observer's own use


class TrainingObserver(Protocol):
    """Consumer of blocks. What a method raises is ignored, except OneLoggerError, which leaves the job's call."""

    def wants(self, kind: BlockKind) -> bool:
        """Return True if blocks of a hot kind are observed; all other kinds always are."""

    def allows(self, kind: BlockKind, call: str, values: Mapping[str, object]) -> bool:
        """Return False if the block is not to be observed; metrics count all the same."""

    def begin_while_open(self, kind: BlockKind, call: str) -> bool:
        """Return True if a second begin of a single kind is refused; else the earlier block is discarded."""

    def block_began(self, block: ObservedBlock) -> None:
        """Take a block that has begun."""

    def block_ending(self, block: ObservedBlock) -> None:
        """Take an application or a loop that is about to end, before the blocks inside are ended."""

    def block_ended(self, block: ObservedBlock, at: TracingTimestamp, error: BaseException | None) -> None:
        """Take a block that has ended, whose span has stopped."""

    def block_discarded(self, block: ObservedBlock) -> None:
        """Take a block that will not end: another of its kind has begun."""

    def end_without_begin(self, kind: BlockKind, call: str) -> None:
        """Take an end without a begin."""

    def save_succeeded(self, global_step: object, at: TracingTimestamp, call: str) -> None:
        """Take the success of a save, reported by a call."""

    def step_reported(self, step: int | None, seconds: float | None, mode: str, at: TracingTimestamp) -> None:
        """Take a step that is reported after its end."""

    def iteration_ended(self, kind: BlockKind, began: float, ended: float, failed: bool) -> None:
        """Take an iteration of a training, validation or test, before it is counted; the times are monotonic."""

    def event_added(self, span: Span, event: Event) -> None:
        """Take an event that the job has added to a span."""
