"""What the NVML child is told when it starts.

Used in the NVML child; made by the sidecar. A dictionary from the pipe comes in. No third-party imports.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Options:
    """How to sample, and what.

    Attributes:
        parent: Process id of the sidecar.
        details: Whether to ask for what most dashboards do without.
        gpm: Whether to sample performance counters on Hopper and later.
        per_link: Whether to tell NVLinks apart.
        row_remap_histogram: Whether to ask for it; spams the kernel's log in guests with a vGPU.
        video_engines: Whether to ask for encoders, decoders, JPEG and optical flow.
        pcie_sampling: Whether to estimate PCIe traffic by calls that block for 20 ms, where there is no counter.
        visible: CUDA_VISIBLE_DEVICES of the job; None where it has none.
        pci_order: Whether CUDA numbers the job's GPUs as NVML does, whatever they are.
        include: Patterns of the GPUs to sample; empty for all.
        exclude: Patterns of those not to.
        skip: Indices of GPUs that are left out because a call on them hangs.
        period_seconds: Time between two passes.
        window_seconds: Over which minima and maxima are taken.
        retry_seconds: When to try a lost GPU again.
        reprobe_seconds: When to ask again for what was not there.
        slow_call_seconds: A call under way for longer is told to the sidecar.
        memory_limit_bytes: Resident size at which the child asks to be replaced; a guard against leaks.
        replay: A machine to play in place of the library; None for the real one.
        origin: Monotonic time at which the replay's timeline began.
        virtual_seconds: For tests: how long a replay runs, as fast as it can, on a clock of its own; None for the
            real clock.
    """

    __slots__ = (
        "parent",
        "details",
        "gpm",
        "per_link",
        "row_remap_histogram",
        "video_engines",
        "pcie_sampling",
        "visible",
        "pci_order",
        "include",
        "exclude",
        "skip",
        "period_seconds",
        "window_seconds",
        "retry_seconds",
        "reprobe_seconds",
        "slow_call_seconds",
        "memory_limit_bytes",
        "replay",
        "origin",
        "virtual_seconds",
    )

    def __init__(self, message: dict[str, Any]) -> None:
        get = message.get
        self.parent: int = get("parent", 0)
        self.details: bool = get("details", False)
        self.gpm: bool = get("gpm", True)
        self.per_link: bool = get("per_link", False)
        self.row_remap_histogram: bool = get("row_remap_histogram", False)
        self.video_engines: bool = get("video_engines", False)
        self.pcie_sampling: bool = get("pcie_sampling", False)
        self.visible: str | None = get("visible")
        self.pci_order: bool = get("pci_order", False)
        self.include: list[str] = get("include", [])
        self.exclude: list[str] = get("exclude", [])
        self.skip: list[int] = get("skip", [])
        self.period_seconds: float = get("period_seconds", 1.0)
        self.window_seconds: float = get("window_seconds", 15.0)
        self.retry_seconds: float = get("retry_seconds", 30.0)
        self.reprobe_seconds: float = get("reprobe_seconds", 600.0)
        self.slow_call_seconds: float = get("slow_call_seconds", 2.0)
        self.memory_limit_bytes: int = get("memory_limit_bytes", 128 << 20)
        self.replay: dict[str, Any] | None = get("replay")
        self.origin: float | None = get("origin")
        self.virtual_seconds: float | None = get("virtual_seconds")
