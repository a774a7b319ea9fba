"""What the GPU collector knows, in the words of those who divide a machine among its runs.

Used in the sidecar by the composition root. Values only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from exporter.collectors.gpu_power import COUNTER_SOURCE
from exporter.collectors.gpu_values import GpuEnergy, GpuProcess
from exporter.collectors.job import EnergyReading, GpuProcessUse


def gpu_uses(processes: Iterable[GpuProcess]) -> Sequence[GpuProcessUse]:
    """Tell who uses which GPU."""
    uses = []
    for each in processes:
        ratios = {
            "sm": each.sm_ratio,
            "memory": each.memory_bandwidth_ratio,
            "encoder": each.encoder_ratio,
            "decoder": each.decoder_ratio,
        }
        known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
        uses.append(GpuProcessUse(each.pid, each.gpu, each.uuid, each.memory_bytes, known, each.sm_seconds))
    return uses


def gpu_readings(energies: Iterable[GpuEnergy]) -> Sequence[EnergyReading]:
    """Tell what each GPU has used; one that does not answer has no reading."""
    return [
        EnergyReading(
            component="gpu",
            device=each.uuid,
            source=each.source,
            measured=True,
            joules=sum(each.joules.values()) if each.up and each.joules else None,
            watts=each.watts,
            at=each.at,
            name=each.name,
            index=each.gpu,
            # Without a counter the integral is what counts already.
            power_joules=each.integral_joules if each.source == COUNTER_SOURCE else None,
            resets=each.resets,
        )
        for each in energies
        if each.uuid
    ]
