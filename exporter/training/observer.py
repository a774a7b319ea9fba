"""Observers of blocks: one-logger's provider, tracing, and event handlers for spans.

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
    """Block with a span."""

    kind: BlockKind
    span: Span
    began: TracingTimestamp
    is_lexical: bool  # entered by a context manager; False for a callback
    call: str  # the API call of the job
    values: Mapping[str, object]  # arguments of the start, converted
    data: object = None  # for the observer's own use


class TrainingObserver(Protocol):
    """Consumer of blocks. Exceptions of its methods are logged and ignored, except OneLoggerError, which reaches the job."""

    def observes(self, kind: BlockKind) -> bool:
        """Return True to observe the blocks of a hot kind. Blocks of other kinds are always observed."""

    def allows(self, kind: BlockKind, call: str, values: Mapping[str, object]) -> bool:
        """Return False to skip a block, which metrics count nevertheless."""

    def begin_while_open(self, kind: BlockKind, call: str) -> bool:
        """Return True to refuse a block while a block of the same single kind is open, or False to discard the open block."""

    def block_began(self, block: ObservedBlock) -> None:
        """Handle the start of a block."""

    def block_ending(self, block: ObservedBlock) -> None:
        """Handle the end of an application or loop, before the inner blocks are ended."""

    def block_ended(
        self, block: ObservedBlock, timestamp: TracingTimestamp, error: BaseException | None
    ) -> None:
        """Handle the end of a block, after its span has stopped."""

    def block_discarded(self, block: ObservedBlock) -> None:
        """Handle a block that does not end, because the next block of the same kind has begun."""

    def end_without_begin(self, kind: BlockKind, call: str) -> None:
        """Handle an end without a start."""

    def save_succeeded(self, global_step: object, timestamp: TracingTimestamp, call: str) -> None:
        """Handle the success of a save, reported by a call."""

    def step_reported(
        self, step: int | None, seconds: float | None, mode: str, timestamp: TracingTimestamp
    ) -> None:
        """Handle a step that is reported after its end."""

    def iteration_ended(self, kind: BlockKind, start_time: float, end_time: float, is_failed: bool) -> None:
        """Handle the end of a training, validation or test iteration, before counting. The times are monotonic."""

    def event_added(self, span: Span, event: Event) -> None:
        """Handle an event that the job has added to a span."""
