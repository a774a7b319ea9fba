"""Swap: how much there is, and how much goes in and out.

Used in the sidecar. /proc/meminfo and /proc/vmstat come in. No threads, no state.
"""

from __future__ import annotations

import os
from pathlib import Path

from exporter.collectors.draft import Draft
from exporter.collectors.family import Collected, FamilySpec
from exporter.collectors.kernel_files import (
    FILE_REASONS,
    named_values,
    parse_count,
    parse_kibibytes,
    read_file,
)

TOTAL = FamilySpec(
    "host_swap_total_bytes",
    "gauge",
    "Swap space; 0 without any.",
    unit="bytes",
    source="/proc/meminfo SwapTotal",
)
USED = FamilySpec(
    "host_swap_used_bytes",
    "gauge",
    "Swap space in use.",
    unit="bytes",
    source="/proc/meminfo SwapTotal - SwapFree",
)
FREE = FamilySpec(
    "host_swap_free_bytes", "gauge", "Swap space that is free.", unit="bytes", source="/proc/meminfo SwapFree"
)
IN = FamilySpec(
    "host_swap_in_bytes_total",
    "counter",
    "Memory read back from swap since boot. Absent on kernels without swap.",
    unit="bytes",
    source="/proc/vmstat pswpin * page size",
)
OUT = FamilySpec(
    "host_swap_out_bytes_total",
    "counter",
    "Memory written to swap since boot. Absent on kernels without swap.",
    unit="bytes",
    source="/proc/vmstat pswpout * page size",
)
SPECS = (TOTAL, USED, FREE, IN, OUT)

TRAFFIC = {IN: "pswpin", OUT: "pswpout"}


class SwapCollector:
    """Reads swap's part of /proc/meminfo and /proc/vmstat.

    Args:
        proc: Where procfs is mounted.
        page_size: Bytes; None asks the system.
    """

    name = "swap"
    specs = SPECS
    reasons = FILE_REASONS

    def __init__(self, *, proc: Path = Path("/proc"), page_size: int | None = None) -> None:
        self._meminfo = proc / "meminfo"
        self._vmstat = proc / "vmstat"
        self._page_size = page_size or os.sysconf("SC_PAGE_SIZE")

    def collect(self) -> Collected:
        """Read the sources once.

        Raises:
            CollectError: Nothing of them could be read.
        """
        draft = Draft()
        with draft.part():
            self._add_space(draft)
        with draft.part():
            self._add_traffic(draft)
        return draft.finish()

    def _add_space(self, draft: Draft) -> None:
        text = read_file(self._meminfo)
        if text is None:
            draft.unsupported(f"no {self._meminfo}")
            return
        values = named_values(text, ":")
        total = parse_kibibytes(values.get("SwapTotal", ""), self._meminfo, "SwapTotal")
        free = parse_kibibytes(values.get("SwapFree", ""), self._meminfo, "SwapFree")
        draft.add(TOTAL, total)
        draft.add(USED, max(0, total - free))
        draft.add(FREE, free)

    def _add_traffic(self, draft: Draft) -> None:
        text = read_file(self._vmstat)
        if text is None:
            draft.unsupported(f"no {self._vmstat}")
            return
        values = named_values(text, " ")
        for spec, name in TRAFFIC.items():
            if name not in values:
                draft.unsupported(f"{self._vmstat}: no {name}")
                continue
            with draft.part():
                draft.add(spec, parse_count(values[name], self._vmstat, name) * self._page_size)
