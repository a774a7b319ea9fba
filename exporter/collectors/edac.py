"""EDAC: errors that the memory controllers saw.

Used in the sidecar. /sys/devices/system/edac comes in. No threads, no state: an operator who resets a
controller's counts resets the counters.

Source: Documentation/admin-guide/RAS, "EDAC - Error Detection And Correction".
"""

from __future__ import annotations

from pathlib import Path

from exporter.collectors.draft import Draft
from exporter.collectors.family import Collected, FamilySpec
from exporter.collectors.kernel_files import FILE_REASONS, numbered_entries, parse_count, read_file

CORRECTABLE = FamilySpec(
    "host_memory_ecc_correctable_errors_total",
    "counter",
    "Memory errors that were corrected. Absent without ECC memory or its driver.",
    ("controller",),
    source="/sys/devices/system/edac/mc/mc*/ce_count",
)
UNCORRECTABLE = FamilySpec(
    "host_memory_ecc_uncorrectable_errors_total",
    "counter",
    "Memory errors that could not be corrected. Absent without ECC memory or its driver.",
    ("controller",),
    source="/sys/devices/system/edac/mc/mc*/ue_count",
)
SPECS = (CORRECTABLE, UNCORRECTABLE)

FILES = {CORRECTABLE: "ce_count", UNCORRECTABLE: "ue_count"}


class EdacCollector:
    """Reads the error counts of all memory controllers.

    Args:
        sys: Where sysfs is mounted.
    """

    name = "edac"
    specs = SPECS
    reasons = FILE_REASONS

    def __init__(self, *, sys: Path = Path("/sys")) -> None:
        self._directory = sys / "devices/system/edac/mc"

    def collect(self) -> Collected:
        """Read the sources once.

        Raises:
            CollectError: Nothing of them could be read.
        """
        draft = Draft()
        controllers = numbered_entries(self._directory, "mc")
        for spec, name in FILES.items():
            counts: dict[tuple[str, ...], float] = {}
            for number, controller in controllers:
                with draft.part():
                    text = read_file(controller / name)
                    if text is not None:
                        counts[str(number),] = parse_count(text.strip(), controller / name)
            draft.add_family(spec, counts)
        if not controllers:
            draft.unsupported(f"no memory controllers in {self._directory}")
        return draft.finish()
