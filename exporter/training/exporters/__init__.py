"""Exporters of spans: where a job's spans, events and errors go besides Prometheus.

Used in the training process. Each runs on a thread of its own (`exporter.training.delivery`) and may be the user's.
"""
