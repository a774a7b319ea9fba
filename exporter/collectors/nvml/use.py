"""How much a GPU is used, and its memory.

Used in the NVML child. `read_fast` costs microseconds; what costs more is in `read_medium` and `read_slow`.
"""

from __future__ import annotations

from exporter.collectors.nvml.conversions import ratio, size, small

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from exporter.collectors.nvml.gpu import Gpu
    from exporter.collectors.nvml.options import Options

_MEMORY_V2 = 0x02000028

_ENGINES = {
    "encoder_utilization": "nvmlDeviceGetEncoderUtilization",
    "decoder_utilization": "nvmlDeviceGetDecoderUtilization",
    "jpeg_utilization": "nvmlDeviceGetJpgUtilization",
    "ofa_utilization": "nvmlDeviceGetOfaUtilization",
}


def read_fast(gpu: Gpu, out: dict[str, Any]) -> None:
    """Read utilisation and memory."""
    rates = gpu.ask("utilization", "nvmlDeviceGetUtilizationRates", convert=_rates)
    out["utilization"], out["bandwidth_utilization"] = rates or (None, None)
    memory = gpu.ask("memory", "nvmlDeviceGetMemoryInfo", _MEMORY_V2, convert=_memory)
    if memory is None and gpu.lacks("memory"):
        # Version 1 counts what the driver reserves as used.
        memory = gpu.ask("memory.v1", "nvmlDeviceGetMemoryInfo", convert=_memory)
    for part in ("total", "used", "free", "reserved"):
        out[f"memory_{part}"] = (memory or {}).get(part)


def read_medium(gpu: Gpu, options: Options, out: dict[str, Any]) -> None:
    """Read the video engines."""
    if options.video_engines:
        for name, call in _ENGINES.items():
            out[name] = gpu.ask(name, call, convert=_first_ratio)


def read_slow(gpu: Gpu, options: Options, out: dict[str, Any]) -> None:
    """Read the modes and the PCI window."""
    if not options.details:
        return
    bar1 = gpu.ask("bar1", "nvmlDeviceGetBAR1MemoryInfo", convert=_bar1)
    out["bar1_total"], out["bar1_used"] = bar1 or (None, None)
    out["compute_mode"] = gpu.ask("compute_mode", "nvmlDeviceGetComputeMode", convert=small)
    out["persistence_mode"] = gpu.ask("persistence_mode", "nvmlDeviceGetPersistenceMode", convert=small)
    out["accounting_mode"] = gpu.ask("accounting_mode", "nvmlDeviceGetAccountingMode", convert=small)


def _rates(rates: Any) -> tuple[float, float]:
    return ratio(rates.gpu), ratio(rates.memory)


def _first_ratio(pair: Any) -> float:
    return ratio(pair[0])


def _memory(info: Any) -> dict[str, int]:
    found = {part: size(getattr(info, part)) for part in ("total", "used", "free")}
    if hasattr(info, "reserved"):
        found["reserved"] = size(info.reserved)
    return found


def _bar1(info: Any) -> tuple[int, int]:
    return size(info.bar1Total), size(info.bar1Used)
