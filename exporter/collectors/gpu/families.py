"""All families whose values are readings of the NVML child, and the rules of their counters.

The families of NVML itself, energy, Xids and MIG devices are in `publishing`.
"""

from __future__ import annotations

from exporter.collectors.gpu.device_families import DEVICE_FAMILIES
from exporter.collectors.gpu.health_families import HEALTH_FAMILIES
from exporter.collectors.gpu.link_families import LINK_FAMILIES

GPU_FAMILIES = (*DEVICE_FAMILIES, *LINK_FAMILIES, *HEALTH_FAMILIES)

COUNTER_RULES = {
    source.reading: source.rule
    for family in GPU_FAMILIES
    for source in family.sources
    if source.rule is not None
}
"""Rule of each reading that is a counter."""

ALTERNATIVE_LINK_READINGS = {
    source.reading: tuple(alternative.reading for alternative in family.sources)
    for family in GPU_FAMILIES
    if family.by_link
    for source in family.sources
}
"""All readings of the family, by each reading of a family that is a sum over the NVLinks."""
