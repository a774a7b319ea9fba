"""Collectors of this exporter in a registry of prometheus_client."""

import sys

from prometheus_client import CollectorRegistry, generate_latest

from exporter.collectors.host.memory import MemoryCollector
from exporter.collectors.host.rdma import RdmaCollector

registry = CollectorRegistry()
for collector in (MemoryCollector(), RdmaCollector()):
    registry.register(collector)
sys.stdout.buffer.write(generate_latest(registry))
