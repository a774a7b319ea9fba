"""Observers of blocks: one-logger's provider, tracing, and event handlers for spans.

An observer's methods run on the job's thread, after the accounting of the block.
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
    """Block with a span, as passed to observers."""

    kind: BlockKind
    span: Span
    began: TracingTimestamp
    is_lexical: bool  # True if a context manager entered the block, False for a callback
    call: str  # API call of the job
    values: Mapping[str, object]  # converted arguments of the start
    data: object = None  # state that an observer attaches


class TrainingObserver(Protocol):
    """Consumer of blocks.

    An exception of a method is logged and ignored. Only a OneLoggerError can reach the job, and only if `Observers.notify` was called
    with `propagates=True`. A block that ends with an exception of the job is not such a call, because the job's exception must not be
    replaced.
    """

    def observes(self, kind: BlockKind) -> bool:
        """Return True to observe the blocks of a hot kind, which are entered in each step. All other blocks are observed anyway."""

    def allows(self, kind: BlockKind, call: str, values: Mapping[str, object]) -> bool:
        """Return False to ignore a block. The metrics count the block in any case."""

    def begin_while_open(self, kind: BlockKind, call: str) -> bool:
        """Decide about a start while a block of the same kind is open, if the kind allows only one.

        Return True to refuse the new block, or False to discard the open block.
        """

    def block_began(self, block: ObservedBlock) -> None:
        """Handle the start of a block."""

    def block_ending(self, block: ObservedBlock) -> None:
        """Handle the end of an application or a training loop, before the open inner blocks are ended."""

    def block_ended(
        self, block: ObservedBlock, timestamp: TracingTimestamp, error: BaseException | None
    ) -> None:
        """Handle the end of a block, after its span has stopped."""

    def block_discarded(self, block: ObservedBlock) -> None:
        """Handle a block that is discarded without an end, for example at the start of the next block of its kind."""

    def end_without_begin(self, kind: BlockKind, call: str) -> None:
        """Handle a call that ends a block although no block of the kind is open."""

    def save_succeeded(self, global_step: object, timestamp: TracingTimestamp, call: str) -> None:
        """Handle the success of a save that the job reports by a call."""

    def step_reported(
        self, step: int | None, seconds: float | None, mode: str, timestamp: TracingTimestamp
    ) -> None:
        """Handle a step that the job reports after the end of the step."""

    def iteration_ended(self, kind: BlockKind, start_time: float, end_time: float, is_failed: bool) -> None:
        """Handle the end of a training, validation or test iteration, before it is counted. The times are monotonic."""

    def event_added(self, span: Span, event: Event) -> None:
        """Handle an event that the job has added to a span."""
