"""Replay of a captured process of a torchrun job through the compatibility modules of torchelastic."""

from __future__ import annotations

import json
from pathlib import Path

from exporter.elastic import events, metrics
from exporter.elastic.events import handlers


def replay_capture(path: str, process_id: str) -> None:
    """Replay the metrics and events of a captured process in order, and print the number of events that were not replayed."""
    processes = json.loads(Path(path).read_text(encoding="utf-8"))["processes"]
    process = next(process for process in processes if process["id"] == process_id)
    handlers._log_handlers["dynamic_rendezvous"] = handlers.PrometheusEventHandler()
    pending_events = list(process["events"])

    def record_until(metric_count: int) -> None:
        """Record the events that the captured process recorded before a metric. *metric_count* is the number of earlier metrics."""
        while pending_events and pending_events[0]["after_metrics"] <= metric_count:
            entry = pending_events.pop(0)
            fields = entry["event"]
            if entry["destination"] == "dynamic_rendezvous":
                fields["message"] = "x" * fields.pop("message_chars")
                events.record_rdzv_event(events.RdzvEvent.deserialize(json.dumps(fields)))
            else:
                events.record(events.Event.deserialize(json.dumps(fields)))

    for metric_count, (_, group, name, value) in enumerate(process["metrics"]):
        record_until(metric_count)
        metrics.put_metric(name, value, group)
    record_until(len(process["metrics"]))
    print(len(pending_events))
