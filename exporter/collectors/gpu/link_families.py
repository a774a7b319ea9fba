"""Families of the connections of a GPU: PCIe and NVLink.

`nvml/queries.py`, `nvml/links.py` and `nvml/gpm.py` read the values; the rows here define the families.
"""

from __future__ import annotations

from exporter.collectors.gpu.family import (
    CHILD_COUNTER,
    DRIVER_COUNTER,
    GPU,
    NVLINK_BYTES,
    NVLINK_KIBIBYTES,
    GpuFamily,
    ReadingSource,
)
from exporter.families import FamilySpec

_NO_NVLINK_COUNTERS = (
    "without NVLink, if the driver does not report the counters, while no link has a reading, or after two"
    " impossible numbers of a link in a row"
)

PCIE_GENERATION = GpuFamily(
    spec=FamilySpec(
        name="gpu_pcie_link_generation",
        type="gauge",
        labels=(*GPU, "kind"),
        help=(
            "Generation of the PCIe link by kind: current and max. An idle GPU reduces the current generation to"
            " 1."
        ),
        absent="if the driver does not report the link",
        source="nvmlDeviceGetCurrPcieLinkGeneration, nvmlDeviceGetMaxPcieLinkGeneration",
    ),
    sources=(ReadingSource(reading="pcie_link_generation"),),
)
PCIE_WIDTH = GpuFamily(
    spec=FamilySpec(
        name="gpu_pcie_link_width",
        type="gauge",
        labels=(*GPU, "kind"),
        help="Lanes of the PCIe link by kind: current and max.",
        absent="if the driver does not report the link",
        source="nvmlDeviceGetCurrPcieLinkWidth, nvmlDeviceGetMaxPcieLinkWidth",
    ),
    sources=(ReadingSource(reading="pcie_link_width"),),
)
PCIE_TRANSMITTED = GpuFamily(
    spec=FamilySpec(
        name="gpu_pcie_transmit_bytes_total",
        type="counter",
        unit="bytes",
        labels=GPU,
        help="Bytes that the GPU sent over PCIe, packet headers included.",
        absent="before Hopper, while MIG is enabled, or where the option `gpu.gpm` is false",
        source="GPM 20 integrated",
    ),
    sources=(ReadingSource(reading="pcie_transmit_bytes", rule=CHILD_COUNTER),),
)
PCIE_RECEIVED = GpuFamily(
    spec=FamilySpec(
        name="gpu_pcie_receive_bytes_total",
        type="counter",
        unit="bytes",
        labels=GPU,
        help="Bytes that the GPU received over PCIe, packet headers included.",
        absent="before Hopper, while MIG is enabled, or where the option `gpu.gpm` is false",
        source="GPM 21 integrated",
    ),
    sources=(ReadingSource(reading="pcie_receive_bytes", rule=CHILD_COUNTER),),
)
PCIE_REPLAYS = GpuFamily(
    spec=FamilySpec(
        name="gpu_pcie_replays_total",
        type="counter",
        labels=GPU,
        help="PCIe packets that were retransmitted.",
        absent="if the driver does not count replays",
        source="nvmlDeviceGetPcieReplayCounter",
    ),
    sources=(ReadingSource(reading="pcie_replays", rule=DRIVER_COUNTER),),
)
PCIE_ERRORS = GpuFamily(
    spec=FamilySpec(
        name="gpu_pcie_errors_total",
        type="counter",
        labels=(*GPU, "kind"),
        help="Errors of the PCIe link by kind: correctable, non_fatal, fatal.",
        absent="on older drivers",
        source="fields 173, 179, 180",
    ),
    sources=(ReadingSource(reading="pcie_errors", rule=DRIVER_COUNTER),),
)
NVLINK_LINKS = GpuFamily(
    spec=FamilySpec(
        name="gpu_nvlink_links",
        type="gauge",
        labels=(*GPU, "state"),
        help="Number of NVLink ports by state: active or inactive.",
        absent="without NVLink",
        source="nvmlDeviceGetNvLinkState",
    ),
    sources=(ReadingSource(reading="nvlink_links"),),
)
NVLINK_TRANSMITTED = GpuFamily(
    spec=FamilySpec(
        name="gpu_nvlink_transmit_bytes_total",
        type="counter",
        unit="bytes",
        labels=GPU,
        help="Bytes that the GPU sent over NVLink, over all ports.",
        absent=_NO_NVLINK_COUNTERS,
        source="field 138 * 1024, else field 202, else GPM 61 integrated",
    ),
    sources=(
        ReadingSource(reading="nvlink_transmit_kibibytes", rule=NVLINK_KIBIBYTES),
        ReadingSource(reading="nvlink_transmit_bytes", rule=NVLINK_BYTES),
        ReadingSource(reading="nvlink_transmit_gpm", rule=CHILD_COUNTER),
    ),
    by_link=True,
)
NVLINK_RECEIVED = GpuFamily(
    spec=FamilySpec(
        name="gpu_nvlink_receive_bytes_total",
        type="counter",
        unit="bytes",
        labels=GPU,
        help="Bytes that the GPU received over NVLink, over all ports.",
        absent=_NO_NVLINK_COUNTERS,
        source="field 139 * 1024, else field 204, else GPM 60 integrated",
    ),
    sources=(
        ReadingSource(reading="nvlink_receive_kibibytes", rule=NVLINK_KIBIBYTES),
        ReadingSource(reading="nvlink_receive_bytes", rule=NVLINK_BYTES),
        ReadingSource(reading="nvlink_receive_gpm", rule=CHILD_COUNTER),
    ),
    by_link=True,
)
NVLINK_ERRORS = GpuFamily(
    spec=FamilySpec(
        name="gpu_nvlink_errors_total",
        type="counter",
        labels=(*GPU, "kind"),
        help="NVLink errors over all ports, by kind.",
        absent=_NO_NVLINK_COUNTERS,
        source="fields 38, 45, 52, 59 and 160 to 163; from the fifth generation on, 206 to 215",
        details=(
            (
                "Up to the fourth generation of NVLink: `crc`, `crc_flit`, `crc_data`, `ecc`, `replay`,"
                " `recovery`."
            ),
            (
                "From the fifth generation on: `malformed_packet`, `buffer_overrun`, `receive`,"
                " `receive_remote`, `receive_general`, `link_integrity`, `transmit_discard`, `recovery`,"
                " `recovery_successful`, `recovery_failed`."
            ),
        ),
    ),
    sources=(ReadingSource(reading="nvlink_errors", rule=DRIVER_COUNTER),),
    by_link=True,
)

LINK_FAMILIES = (
    *(PCIE_GENERATION, PCIE_WIDTH, PCIE_TRANSMITTED, PCIE_RECEIVED, PCIE_REPLAYS, PCIE_ERRORS),
    *(NVLINK_LINKS, NVLINK_TRANSMITTED, NVLINK_RECEIVED, NVLINK_ERRORS),
)
