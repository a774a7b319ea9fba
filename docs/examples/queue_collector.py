"""Collector of prometheus_client that counts the jobs in a queue directory, one file for each job."""

import os
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric


class QueueCollector:
    def collect(self) -> Iterator[Metric]:
        queue_jobs = GaugeMetricFamily("queue_jobs", "Number of jobs in the queue.", labels=["queue"])
        directory = Path(os.environ.get("QUEUE_DIR", "/var/spool/jobs"))
        queue_jobs.add_metric([directory.name], len(list(directory.iterdir())))
        yield queue_jobs
