"""How GPUs are watched: the options of the GPU collector, as they stand in the configuration.

Used in the sidecar. Values only; the NVML child gets those that concern it (`child_message`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from exporter.config.options import Duration, Glob, Range, format_duration

if TYPE_CHECKING:
    from exporter.collectors.nvml.description import Machine


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
            "Also limits, modes, aggregate errors and finer kinds, about 60 more series a GPU; and NVML's cost by function."
        ),
    )
    per_link: bool = field(default=False, metadata=_help("Tell NVLinks apart instead of adding them up."))
    video_engines: bool = field(
        default=False, metadata=_help("Also encoders, decoders, JPEG and optical flow.")
    )
    row_remap_histogram: bool = field(
        default=False,
        metadata=_help("Also spare rows by bank; fills the kernel's log in guests with a vGPU."),
    )
    pcie_sampling: bool = field(
        default=False,
        metadata=_help("Estimate PCIe traffic by calls that block for 40 ms a GPU, where it has no counter."),
    )
    period: Annotated[Duration, Range(0.1, 60)] = field(
        default=1.0, metadata=_help("Time between two passes over the GPUs; the slower tiers go with it.")
    )
    window: Annotated[Duration, Range(1, 600)] = field(
        default=15.0, metadata=_help("Over which minima and maxima are taken; at least the scrape interval.")
    )
    retry: Annotated[Duration, Range(0.1, 3600)] = field(
        default=30.0, metadata=_help("How often a lost GPU is tried again.")
    )
    reprobe: Annotated[Duration, Range(1, 86400)] = field(
        default=600.0, metadata=_help("When what a GPU does not have is asked for again.")
    )

    @property
    def window_label(self) -> str:
        """The value of the label `window`."""
        return format_duration(self.window)

    def child_message(
        self, machine: Machine | None, *, visible: str | None, skip: tuple[int, ...], origin: float
    ) -> dict[str, Any]:
        """The first message to an NVML child.

        Args:
            machine: What to replay; None for NVIDIA's library.
            visible: CUDA_VISIBLE_DEVICES; None where it is not set.
            skip: Indices of GPUs to leave out.
            origin: When the replay's timeline began, monotonic seconds.
        """
        return {
            "kind": "start",
            "parent": os.getpid(),
            "details": self.details,
            "gpm": self.gpm,
            "per_link": self.per_link,
            "row_remap_histogram": self.row_remap_histogram,
            "video_engines": self.video_engines,
            "pcie_sampling": self.pcie_sampling,
            "visible": visible,
            "pci_order": os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID",
            "include": list(self.include),
            "exclude": list(self.exclude),
            "skip": list(skip),
            "period_seconds": self.period,
            "window_seconds": self.window,
            "retry_seconds": self.retry,
            "reprobe_seconds": self.reprobe,
            "replay": None if machine is None else machine.plain(),
            "origin": origin,
        }


DEFAULT_OPTIONS = GpuOptions()
"""Watch what there is."""
