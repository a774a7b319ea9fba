"""The families of a GPU's links (PCIe, NVLink, fabric, Grace), of its errors, and of its instances (MIG).

Used in the sidecar. The readings come from the NVML child's `links`, `readings`, `gpm`, `events` and `mig`; Xids also
from the kernel's log (`kernel_log`).
"""

from __future__ import annotations

from exporter.collectors.gpu.counters import CounterRule
from exporter.collectors.gpu.families import OF_CHILD, Count, Gauge, Row, of_gpu

# Bytes a second that no link reaches: sixteen lanes of the sixth generation carry 128e9, NVLink 5 1.8e12 in all.
_PCIE = CounterRule(most_per_second=1e12)
_NVLINK = CounterRule(most_per_second=2e13)
_NVLINK_KIB = CounterRule(scale=1024, most_per_second=2e13)

_PCIE_GENERATION = of_gpu(
    "gpu_pcie_link_generation",
    "Generation of the PCIe link, now and at most; an idle GPU goes down to the first, so it tells something under load only.",
    "nvmlDeviceGetCurrPcieLinkGeneration, nvmlDeviceGetMaxPcieLinkGeneration",
    "kind",
)
_PCIE_WIDTH = of_gpu(
    "gpu_pcie_link_width",
    "Lanes of the PCIe link, now and at most.",
    "nvmlDeviceGetCurrPcieLinkWidth, nvmlDeviceGetMaxPcieLinkWidth",
    "kind",
)
_PCIE_ABSENT = "Absent before Hopper, unless sampling is asked for or the link is so slow that its 32-bit register cannot wrap unseen."
_PCIE_TRANSMIT = of_gpu(
    "gpu_pcie_transmit_bytes_total",
    f"Bytes that the GPU sent over PCIe, packet headers included. {_PCIE_ABSENT}",
    "GPM 20 integrated, else field 197, else nvmlDeviceGetPcieThroughput integrated",
)
_PCIE_RECEIVE = of_gpu(
    "gpu_pcie_receive_bytes_total",
    f"Bytes that the GPU received over PCIe, packet headers included. {_PCIE_ABSENT}",
    "GPM 21 integrated, else field 198, else nvmlDeviceGetPcieThroughput integrated",
)
_NVLINK_TRANSMIT = of_gpu(
    "gpu_nvlink_transmit_bytes_total",
    "Bytes that the GPU sent over NVLink, over all ports unless links are told apart. Absent without NVLink.",
    "field 138 * 1024, else field 202, else (or once the register has wrapped) GPM 61 integrated",
    "link",
)
_NVLINK_RECEIVE = of_gpu(
    "gpu_nvlink_receive_bytes_total",
    "Bytes that the GPU received over NVLink, over all ports unless links are told apart. Absent without NVLink.",
    "field 139 * 1024, else field 204, else (or once the register has wrapped) GPM 60 integrated",
    "link",
)

_LINKS: tuple[Row, ...] = (
    Gauge(_PCIE_GENERATION, "pcie_generation"),
    Gauge(_PCIE_WIDTH, "pcie_width"),
    Count(_PCIE_TRANSMIT, "pcie_transmit_gpm", OF_CHILD),
    Count(_PCIE_TRANSMIT, "pcie_transmit_register", _PCIE),
    Count(_PCIE_TRANSMIT, "pcie_transmit_sampled", OF_CHILD),
    Count(_PCIE_RECEIVE, "pcie_receive_gpm", OF_CHILD),
    Count(_PCIE_RECEIVE, "pcie_receive_register", _PCIE),
    Count(_PCIE_RECEIVE, "pcie_receive_sampled", OF_CHILD),
    Count(
        of_gpu(
            "gpu_pcie_replays_total",
            "Packets that had to be sent again over PCIe.",
            "nvmlDeviceGetPcieReplayCounter",
        ),
        "pcie_replays",
    ),
    Count(
        of_gpu(
            "gpu_pcie_errors_total",
            "Errors of the PCIe link: correctable, non_fatal, fatal; with details finer kinds. Absent on older drivers.",
            "fields 173 to 183",
            "kind",
        ),
        "pcie_errors",
    ),
    Gauge(
        of_gpu(
            "gpu_nvlink_links",
            "NVLink ports, in use (active) or not. Absent without NVLink.",
            "nvmlDeviceGetNvLinkState",
            "state",
        ),
        "nvlink_links",
    ),
    Gauge(
        of_gpu(
            "gpu_nvlink_up",
            "Whether an NVLink port is in use. Absent unless links are told apart.",
            "nvmlDeviceGetNvLinkState",
            "link",
        ),
        "nvlink_up",
    ),
    Gauge(
        of_gpu(
            "gpu_nvlink_speed_bytes",
            "Bytes a second that one NVLink port can carry; of the first in use, unless links are told apart. Absent without NVLink.",
            "field 164, else field 90, * 1e6",
            "link",
        ),
        "nvlink_speed",
    ),
    Count(_NVLINK_TRANSMIT, "nvlink_transmit_kibibytes", _NVLINK_KIB, by_link=True),
    Count(_NVLINK_TRANSMIT, "nvlink_transmit_bytes", _NVLINK, by_link=True),
    Count(_NVLINK_TRANSMIT, "nvlink_transmit_gpm", OF_CHILD, by_link=True),
    Count(_NVLINK_RECEIVE, "nvlink_receive_kibibytes", _NVLINK_KIB, by_link=True),
    Count(_NVLINK_RECEIVE, "nvlink_receive_bytes", _NVLINK, by_link=True),
    Count(_NVLINK_RECEIVE, "nvlink_receive_gpm", OF_CHILD, by_link=True),
    Count(
        of_gpu(
            "gpu_nvlink_errors_total",
            "Errors of NVLink by kind, over all ports unless links are told apart. Absent without NVLink.",
            "fields 38, 45, 160 to 163, of the fifth generation 206 to 215, else nvmlDeviceGetNvLinkErrorCounter",
            *("link", "kind"),
        ),
        "nvlink_errors",
        by_link=True,
    ),
    Gauge(
        of_gpu(
            "gpu_fabric_state",
            "Whether the GPU has joined its NVLink fabric: 1 not begun, 2 under way, 3 done. Absent without a fabric.",
            "nvmlDeviceGetGpuFabricInfoV().state",
        ),
        "fabric_state",
    ),
    Gauge(
        of_gpu(
            "gpu_fabric_info",
            "The NVLink cluster and clique that the GPU has joined. Absent without a fabric.",
            "nvmlDeviceGetGpuFabricInfoV()",
            *("cluster_uuid", "clique"),
        ),
        "fabric",
    ),
    Count(
        of_gpu(
            "gpu_c2c_transmit_bytes_total",
            "Bytes that the GPU sent to a Grace CPU. Absent without one.",
            "GPM 102 integrated",
        ),
        "c2c_transmit_gpm",
        OF_CHILD,
    ),
    Count(
        of_gpu(
            "gpu_c2c_receive_bytes_total",
            "Bytes that the GPU received from a Grace CPU. Absent without one.",
            "GPM 103 integrated",
        ),
        "c2c_receive_gpm",
        OF_CHILD,
    ),
)

# Errors that the card's owner should know of.

EVENTS = of_gpu(
    "gpu_events_total",
    "Events that the driver reported since the exporter began to listen; they stay while the GPU is lost. Absent for a kind that the GPU does not report.",
    "nvmlEventSetWait_v2",
    "event",
)
XID_ERRORS = of_gpu(
    "gpu_xid_errors_total",
    "Xid errors since the exporter began to listen; they stay while the GPU is lost. Absent before the first one.",
    "nvmlEventSetWait_v2 and /dev/kmsg, whichever has seen more",
    "xid",
)
XID_TIME = of_gpu(
    "gpu_xid_last_timestamp_seconds",
    "When an Xid was last reported, Unix time. Absent before the first one.",
    "nvmlEventSetWait_v2 and /dev/kmsg",
    "xid",
)

_ERRORS: tuple[Row, ...] = (
    Count(
        of_gpu(
            "gpu_ecc_errors_total",
            "Memory errors: volatile ones since the driver was loaded, with details also aggregate ones over the card's life. Absent without ECC.",
            "nvmlDeviceGetMemoryErrorCounter",
            *("kind", "scope", "location"),
        ),
        "ecc_errors",
    ),
    Gauge(
        of_gpu(
            "gpu_ecc_mode",
            "Whether ECC is on; with details also whether it will be after the next reset. Absent without ECC.",
            "nvmlDeviceGetEccMode",
            "kind",
        ),
        "ecc_mode",
    ),
    Gauge(
        of_gpu(
            "gpu_sram_ecc_threshold_exceeded",
            "Whether the card has had so many SRAM errors that it should be replaced. Absent before Ampere and on older drivers.",
            "nvmlDeviceGetSramEccErrorStatus().bThresholdExceeded",
        ),
        "sram_threshold",
    ),
    Gauge(
        of_gpu(
            "gpu_remapped_rows",
            "Rows of memory that were replaced by spare ones. Absent before Ampere, on GeForce and on a divided GPU (MIG).",
            "nvmlDeviceGetRemappedRows",
            "kind",
        ),
        "remapped_rows",
    ),
    Gauge(
        of_gpu(
            "gpu_remapped_rows_pending",
            "Whether a row waits for the next reset to be replaced. Absent where rows are not remapped.",
            "nvmlDeviceGetRemappedRows",
        ),
        "remapped_rows_pending",
    ),
    Gauge(
        of_gpu(
            "gpu_remapped_rows_failed",
            "Whether a row could not be replaced; the card should be. Absent where rows are not remapped.",
            "nvmlDeviceGetRemappedRows",
        ),
        "remapped_rows_failed",
    ),
    Gauge(
        of_gpu(
            "gpu_retired_pages",
            "Pages of memory that are no longer used, because of several single bit errors (sbe) or a double bit error (dbe). Absent from Ampere on.",
            "nvmlDeviceGetRetiredPages",
            "kind",
        ),
        "retired_pages",
    ),
    Gauge(
        of_gpu(
            "gpu_recovery_action",
            "What the driver wants to be done: 0 nothing, 1 reset the GPU, 2 reboot, 3 drain peer to peer traffic, 4 drain and reset, 5 recover the IMEX domain, 6 reset the bus, 7 reboot the system. Absent on drivers before 565.",
            "field 230",
        ),
        "recovery_action",
    ),
)

# The instances of a divided GPU. An instance is known by the UUID that CUDA knows it by; what compute instances of one
# GPU instance share (its activity) is told for each.

_NOT_DIVIDED = "Absent on a GPU that is not divided."
_NO_GPM = "Absent before Hopper, and where GPM is switched off."

MIG_INFO = of_gpu(
    "gpu_mig_info",
    f"An instance: GPU instance, compute instance and profile. {_NOT_DIVIDED}",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    *("mig_uuid", "gi", "ci", "profile"),
)
MIG_READINGS = {
    "memory_total": of_gpu(
        "gpu_mig_memory_total_bytes",
        f"Device memory of an instance. {_NOT_DIVIDED}",
        "nvmlDeviceGetMemoryInfo_v2().total",
        "mig_uuid",
    ),
    "memory_used": of_gpu(
        "gpu_mig_memory_used_bytes",
        f"Device memory of an instance that is allocated. {_NOT_DIVIDED}",
        "nvmlDeviceGetMemoryInfo_v2().used",
        "mig_uuid",
    ),
    "sm": of_gpu(
        "gpu_mig_sm_activity_ratio",
        f"Share of SM cycles of an instance in which at least one warp was resident. {_NO_GPM}",
        "nvmlGpmMigSampleGet, GPM 2 / 100",
        "mig_uuid",
    ),
    "tensor": of_gpu(
        "gpu_mig_tensor_activity_ratio",
        f"Share of SM cycles of an instance in which tensor cores worked. {_NO_GPM}",
        "nvmlGpmMigSampleGet, GPM 5 / 100",
        "mig_uuid",
    ),
    "dram": of_gpu(
        "gpu_mig_dram_activity_ratio",
        f"Memory bandwidth of an instance in use as a share of what is possible. {_NO_GPM}",
        "nvmlGpmMigSampleGet, GPM 10 / 100",
        "mig_uuid",
    ),
}
"""Families of an instance by the child's name of the reading."""

_MIG_MODE = Gauge(
    of_gpu(
        "gpu_mig_mode",
        "Whether the GPU is divided; with details also whether it will be after the next reset. Absent where it cannot be.",
        "nvmlDeviceGetMigMode",
        "kind",
    ),
    "mig_mode",
)

ROWS: tuple[Row, ...] = (*_LINKS, *_ERRORS, _MIG_MODE)
SPECS = (EVENTS, XID_ERRORS, XID_TIME, MIG_INFO, *MIG_READINGS.values())
"""Those without a row."""
