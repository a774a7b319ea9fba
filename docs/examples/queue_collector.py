"""Collector of prometheus_client: an object whose method collect() yields metric families."""

import os
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric


class QueueCollector:
    def collect(self) -> Iterator[Metric]:
        jobs = GaugeMetricFamily("queue_jobs", "Number of files in the queue.", labels=["queue"])
        directory = Path(os.environ.get("QUEUE_DIR", "/var/spool/jobs"))
        jobs.add_metric([directory.name], len(list(directory.iterdir())))
        yield jobs
