"""The bridge to torchelastic: metrics and events of torchrun's agent and of its workers.

Used in the training process and in the agent. Nothing happens before torchelastic's modules are imported, by whomever.
Then:

- every stream records a value, and gives it to the handlers of `exporter.elastic.metrics`, before it hands it to its
  own handler, whichever the job has configured in torch;
- every logger of events gets one more handler. A level that `LOGLEVEL` asks for is moved from the logger to the handlers
  that were there, so that they write what they would have written;
- events of the rendezvous are made when the job itself has nobody who wants them;
- whoever makes an agent is the agent: it has no rank, and its run is that of its rendezvous.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import PurePath
from types import ModuleType
from typing import Any

from exporter.bridges.patching import patch, when_imported
from exporter.elastic.events.handlers import PrometheusEventHandler
from exporter.elastic.metrics.api import MetricStream, PrometheusMetricHandler
from exporter.recording.identity import AGENT

_LAUNCHERS = frozenset({"torch.distributed.run", "torch.distributed.launch"})


def install() -> None:
    """Watch torchelastic from its import on."""
    if is_launcher(sys.orig_argv):
        AGENT.declare()
    when_imported(
        "torch.distributed.elastic.metrics.api", lambda api: patch(api.MetricStream, "add_value", _record)
    )
    when_imported("torch.distributed.elastic.events", _watch_events)
    when_imported(
        "torch.distributed.elastic.agent.server.api",
        lambda api: patch(api.SimpleElasticAgent, "__init__", _agent_made),
    )


def is_launcher(command: Sequence[str]) -> bool:
    """Tell whether a Python command line is torchrun's."""
    arguments = iter(command[1:])
    for argument in arguments:
        if argument == "-m":
            return next(arguments, "") in _LAUNCHERS
        if argument in {"-W", "-X", "--check-hash-based-pycs"}:
            next(arguments, None)
        elif not argument.startswith("-"):
            return PurePath(argument).name == "torchrun"
        elif argument == "-c":
            return False
    return False


def _record(stream: Any, metric_name: str, metric_value: Any) -> None:
    if not isinstance(getattr(stream, "handler", None), PrometheusMetricHandler):
        MetricStream(getattr(stream, "group_name", "")).add_value(metric_name, metric_value)


def _agent_made(_agent: Any, spec: Any, *_args: Any, **_kwargs: Any) -> None:
    try:
        AGENT.declare(str(spec.rdzv_handler.get_run_id() or ""))
    except Exception:  # noqa: BLE001  # the job's own rendezvous handler
        AGENT.declare()


def _watch_events(events: ModuleType) -> None:
    handlers = events.handlers._log_handlers  # noqa: SLF001  # torch has no other registry
    if isinstance(handlers.get("dynamic_rendezvous"), logging.NullHandler):
        handlers["dynamic_rendezvous"] = _HANDLER
    loggers = events._events_loggers  # noqa: SLF001  # nor another place to see loggers being made
    for logger in loggers.values():
        _listen(logger)
    events._events_loggers = _Loggers(loggers)  # type: ignore[attr-defined]  # noqa: SLF001


class _Loggers(dict[str, logging.Logger]):
    """torch's loggers of events by destination; each is listened to from when it is put in."""

    def __setitem__(self, destination: str, logger: logging.Logger) -> None:
        _listen(logger)
        super().__setitem__(destination, logger)


def _listen(logger: logging.Logger) -> None:
    level = logger.level
    if level > logging.INFO:
        for handler in logger.handlers:
            if handler is not _HANDLER and handler.level < level:
                handler.setLevel(level)
        logger.setLevel(logging.INFO)
    if not any(isinstance(handler, PrometheusEventHandler) for handler in logger.handlers):
        logger.addHandler(_HANDLER)


_HANDLER = PrometheusEventHandler()
