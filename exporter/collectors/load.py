"""Load: how many threads ran or waited, averaged over 1, 5 and 15 minutes.

Used in the sidecar. /proc/loadavg comes in. No threads, no state.
"""

from __future__ import annotations

from pathlib import Path

from exporter.collectors.draft import Draft
from exporter.collectors.family import Collected, FamilySpec
from exporter.collectors.kernel_files import FILE_REASONS, parse_decimal, read_file, refuse

LOADS = tuple(
    FamilySpec(
        f"host_load{minutes}",
        "gauge",
        f"Threads that ran, could run or waited for a device, averaged over {minutes} min.",
        source="/proc/loadavg",
    )
    for minutes in (1, 5, 15)
)
SPECS = LOADS


class LoadCollector:
    """Reads /proc/loadavg.

    Args:
        proc: Where procfs is mounted.
    """

    name = "load"
    specs = SPECS
    reasons = FILE_REASONS

    def __init__(self, *, proc: Path = Path("/proc")) -> None:
        self._path = proc / "loadavg"

    def collect(self) -> Collected:
        """Read the source once.

        Raises:
            CollectError: Nothing of it could be read.
        """
        draft = Draft()
        text = read_file(self._path)
        if text is None:
            draft.unsupported(f"no {self._path}")
            return draft.finish()
        words = text.split()
        if len(words) < len(LOADS):
            refuse(text, (self._path,), "three averages")
        for spec, word in zip(LOADS, words, strict=False):
            with draft.part():
                draft.add(spec, parse_decimal(word, self._path))
        return draft.finish()
