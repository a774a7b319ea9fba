"""The current span of each thread and asyncio task."""

from __future__ import annotations

from contextvars import ContextVar
from threading import get_ident

from exporter.training.spans import Span

MAX_DEPTH = 64
"""Limit of nested spans, which bounds the memory of a job that does not end its spans."""


class CurrentSpan:
    """Innermost open span of the calling thread or task."""

    def __init__(self) -> None:
        self._current: ContextVar[Span | None] = ContextVar("exporter-training-span", default=None)
        self._setting_threads: set[int] = set()  # in a call of `_set`

    def get(self) -> Span | None:
        """Return the innermost open span, or None."""
        span = self._current.get()
        while span is not None and not span.active:
            span = span.parent_span
        return span

    def id(self) -> str | None:
        """Return the id of the innermost open span, or None."""
        span = self.get()
        return None if span is None else str(span.id)

    def parent(self) -> Span | None:
        """Return the parent of a new span: the innermost open span, or at `MAX_DEPTH` the parent of that span."""
        span = ancestor = self.get()
        if span is None:
            return None
        depth = 0
        while ancestor is not None and depth < MAX_DEPTH:
            ancestor, depth = ancestor.parent_span, depth + 1
        return span if depth < MAX_DEPTH else span.parent_span

    def enter(self, span: Span) -> None:
        """Make a span the current span."""
        self._set(span)

    def leave(self, span: Span) -> None:
        """Make the nearest open ancestor the current span again."""
        if self._current.get() is span:
            self._set(span.parent_span)
            self._set(self.get())

    def _set(self, span: Span | None) -> None:
        """Set the variable, unless a call on the same thread is interrupted.

        `ContextVar.set` of CPython is not reentrant: its allocations can start the garbage collection, which runs finalizers and signal
        handlers. If these set the variable, too, the interpreter can crash. Their spans do not become the current span.
        """
        thread = get_ident()
        if thread in self._setting_threads:
            return
        self._setting_threads.add(thread)
        try:
            self._current.set(span)
        finally:
            self._setting_threads.discard(thread)
