"""The options of the GPU collector, as they stand in the configuration and as the NVML child is given them.

Used in the sidecar and in the NVML child. Values only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from exporter.config.options import Duration, Glob, Range


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """Which GPUs are watched, and how closely."""

    mode: Literal["auto", "required"] = field(
        default="auto",
        metadata=_help(
            "auto: watch what there is. required: the exporter is not ready while NVML does not answer."
        ),
    )
    replay: str | None = field(
        default=None,
        metadata=_help("A described machine to play in place of NVIDIA's library: its name, or a file."),
    )
    include: tuple[Glob, ...] = field(
        default=(),
        metadata={
            "help": "Patterns of the GPUs to watch: NVML's index, UUID, PCI address or model. None means all. Where "
            "CUDA_VISIBLE_DEVICES names GPUs, they choose among those.",
            "example": ("GPU-8*", "0"),
        },
    )
    exclude: tuple[Glob, ...] = field(
        default=(), metadata={"help": "Patterns of the GPUs not to watch.", "example": ("*T400*",)}
    )
    gpm: bool = field(
        default=True,
        metadata=_help(
            "Whether to sample performance counters (SM, tensor and memory activity) from Hopper on."
        ),
    )
    details: bool = field(
        default=False,
        metadata=_help(
            "Also further limits and clocks, aggregate errors and finer kinds, about 20 more series a GPU; and NVML's cost by function."
        ),
    )
    per_link: bool = field(default=False, metadata=_help("Tell NVLinks apart instead of adding them up."))
    period: Annotated[Duration, Range(0.1, 60)] = field(
        default=1.0,
        metadata=_help(
            "Time between two passes over the GPUs; below a second the slower passes are sped up too."
        ),
    )
    retry: Annotated[Duration, Range(0.1, 3600)] = field(
        default=30.0, metadata=_help("How often a lost GPU is tried again.")
    )
    reprobe: Annotated[Duration, Range(1, 86400)] = field(
        default=600.0, metadata=_help("When what a GPU does not have is asked for again.")
    )


DEFAULT_OPTIONS = GpuOptions()
"""Watch what there is."""
