"""Bridge to torchelastic: metrics and events of torchrun's agent and workers, and recognition of the agent.

Runs in the job and in the agent; installed by `exporter.bridges` and by `configure` of `exporter.elastic`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from math import inf
from pathlib import PurePath
from time import time
from types import ModuleType
from typing import Any

from exporter.elastic import agent
from exporter.elastic.families import STATS
from exporter.elastic.python_command import parse_python_command
from exporter.patching import patch, when_imported
from exporter.recording.recorder import RECORDER
from exporter.recording.signal_safety import is_from_signal_handler

_LAUNCHER_MODULES = frozenset({"torch.distributed.run", "torch.distributed.launch"})
RECORDED_ATTRIBUTE = "exporter_recorded"
"""Attribute of log records whose event was recorded."""


class CompatibilityHandlers:
    """Functions that the bridge calls. The compatibility modules replace the defaults when they are imported."""

    # Records a group, a name and a value.
    record_metric: Callable[[Any, Any, Any], None] = staticmethod(STATS.record)
    # Returns the `Event` of a name, a source, metadata and a Unix time in milliseconds; None for an unknown source.
    create_event: Callable[[Any, Any, Any, float], object] = staticmethod(lambda *_fields: None)
    is_installed = False


def install() -> None:
    """Patch torchelastic when it is imported. A second call has no effect."""
    if CompatibilityHandlers.is_installed or os.environ.get("EXPORTER_DISABLED") == "1":
        return
    CompatibilityHandlers.is_installed = True
    if is_launcher(sys.orig_argv):
        RECORDER.process.declare_agent()
    when_imported(
        "torch.distributed.elastic.metrics.api",
        lambda api: patch(api.MetricStream, "add_value", _record_value),
    )
    when_imported("torch.distributed.elastic.events", _watch_events)
    when_imported(
        "torch.distributed.elastic.agent.server.api",
        lambda api: patch(api.SimpleElasticAgent, "__init__", _declare_agent),
    )


def checked_handlers(handler: Any, method: str) -> tuple[Any, ...]:
    """Return the handlers as a tuple, and install the bridge if there is one. Raises TypeError for an object without *method*."""
    if handler is None:
        return ()
    handlers = tuple(handler) if isinstance(handler, list | tuple) else (handler,)
    for candidate in handlers:
        if isinstance(candidate, type) or not callable(getattr(candidate, method, None)):
            raise TypeError(f"a handler must be an object with the method {method}, not {candidate!r}")
    if handlers:
        install()
    return handlers


def is_launcher(command: Sequence[str]) -> bool:
    """Return True if a command line of Python runs torchrun."""
    program = parse_python_command(command)
    return program.module in _LAUNCHER_MODULES or PurePath(program.script).name == "torchrun"


def _record_value(stream: Any, metric_name: str, metric_value: Any) -> None:
    """Record a value that torch adds to a stream."""
    CompatibilityHandlers.record_metric(getattr(stream, "group_name", ""), metric_name, metric_value)


def _declare_agent(_agent: Any, spec: Any, *_args: Any, **_kwargs: Any) -> None:
    """Declare this process an agent, with the run id of its rendezvous, or without a run id if the rendezvous raises."""
    try:
        RECORDER.process.declare_agent(str(spec.rdzv_handler.get_run_id() or ""))
    except Exception as error:  # the rendezvous handler may be a class of the job
        if is_from_signal_handler(error):
            raise
        RECORDER.process.declare_agent()


def _watch_events(events: ModuleType) -> None:
    """Record the events of all loggers of torch, and of the rendezvous unless the job has set a handler for these."""
    handlers = events.handlers._log_handlers  # noqa: SLF001  # torch has no other registry
    if isinstance(handlers.get("dynamic_rendezvous"), logging.NullHandler):
        handlers["dynamic_rendezvous"] = _HANDLER
    loggers = events._events_loggers  # noqa: SLF001  # torch has no hook for new loggers
    for logger in loggers.values():
        _listen(logger)
    events._events_loggers = _Loggers(loggers)  # type: ignore[attr-defined]  # noqa: SLF001


class _Loggers(dict[str, logging.Logger]):
    """Event loggers of torch by destination. Adds the handler to each new logger."""

    def __setitem__(self, destination: str, logger: logging.Logger) -> None:
        _listen(logger)
        super().__setitem__(destination, logger)


def _listen(logger: logging.Logger) -> None:
    """Record all events of a logger, whatever its level."""
    level = logger.level
    if level > logging.INFO:
        # The level moves to the handlers, so that their output is unchanged.
        for handler in logger.handlers:
            if handler is not _HANDLER and handler.level < level:
                handler.setLevel(level)
        logger.setLevel(logging.INFO)
    logger.addFilter(_HANDLER.handle)  # not a handler, because code of the job may count the handlers


class PrometheusEventHandler(logging.Handler):
    """Handler that records the events that torch logs as lines of JSON. Takes no lock and never raises.

    The bridge adds the handler to torch's event loggers, and to its registry of destinations.
    """

    def handle(self, record: logging.LogRecord) -> bool:
        """Handle a log record without the lock of logging.Handler."""
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """Record the event of a log record, unless a handler of this class has recorded it. Other log records are ignored."""
        if getattr(record, RECORDED_ATTRIBUTE, False):
            return
        try:
            fields = json.loads(record.msg)
        except (TypeError, ValueError, RecursionError):
            return
        if not isinstance(fields, dict):
            return
        setattr(record, RECORDED_ATTRIBUTE, True)
        if "node_state" in fields:
            agent.record_rendezvous(fields)
        elif fields.keys() >= {"name", "source", "metadata"}:
            name, source, metadata = fields["name"], fields["source"], fields["metadata"]
            timestamp_ms = fields.get("timestamp")
            if not isinstance(timestamp_ms, int | float) or not 0 < timestamp_ms < inf:
                timestamp_ms = time() * 1000
            event = CompatibilityHandlers.create_event(name, source, metadata, timestamp_ms)
            agent.record_event(name, source, metadata, timestamp_ms, event)


_HANDLER = PrometheusEventHandler()
