"""What connects a GPU (PCIe, NVLink, fabric, Grace): families.

Used in the sidecar. The readings come from the NVML child's `links` and `gpm`. Bytes have several sources, of which
a GPU offers one or the other; all go into one family, each adding what it has counted. The first that is offered
counts, until its register wraps: at the speed of PCIe 32 bits are full in a second, between two looks more than once.
"""

from __future__ import annotations

from exporter.collectors.family import FamilySpec
from exporter.collectors.gpu_counters import CounterRule
from exporter.collectors.gpu_rows import GPU_LABELS, Count, Gauge, Row

# Bytes a second that no link reaches: sixteen lanes of the sixth generation carry 128e9, NVLink 5 1.8e12 in all.
_PCIE = CounterRule(most_per_second=1e12)
_NVLINK = CounterRule(most_per_second=2e13)
_NVLINK_KIB = CounterRule(scale=1024, most_per_second=2e13)
_ESTIMATE = CounterRule(of_process=True)

PCIE_GENERATION = FamilySpec(
    "gpu_pcie_link_generation",
    "gauge",
    "Generation of the PCIe link, now and at most; an idle GPU goes down to the first, so it tells something under load only.",
    (*GPU_LABELS, "kind"),
    source="nvmlDeviceGetCurrPcieLinkGeneration, nvmlDeviceGetMaxPcieLinkGeneration",
)
PCIE_WIDTH = FamilySpec(
    "gpu_pcie_link_width",
    "gauge",
    "Lanes of the PCIe link, now and at most.",
    (*GPU_LABELS, "kind"),
    source="nvmlDeviceGetCurrPcieLinkWidth, nvmlDeviceGetMaxPcieLinkWidth",
)
PCIE_TRANSMIT = FamilySpec(
    "gpu_pcie_transmit_bytes_total",
    "counter",
    "Bytes that the GPU sent over PCIe. Absent where the GPU has no counter for it, unless sampling is asked for.",
    GPU_LABELS,
    unit="bytes",
    source="field 197, else GPM 255, else GPM 20 integrated, else nvmlDeviceGetPcieThroughput integrated",
)
PCIE_RECEIVE = FamilySpec(
    "gpu_pcie_receive_bytes_total",
    "counter",
    "Bytes that the GPU received over PCIe. Absent where the GPU has no counter for it, unless sampling is asked for.",
    GPU_LABELS,
    unit="bytes",
    source="field 198, else GPM 256, else GPM 21 integrated, else nvmlDeviceGetPcieThroughput integrated",
)
PCIE_REPLAYS = FamilySpec(
    "gpu_pcie_replays_total",
    "counter",
    "Packets that had to be sent again over PCIe.",
    GPU_LABELS,
    source="nvmlDeviceGetPcieReplayCounter",
)
PCIE_ROLLOVERS = FamilySpec(
    "gpu_pcie_replay_rollovers_total",
    "counter",
    "How often the number of replays rolled over. Absent unless details are asked for.",
    GPU_LABELS,
    source="field 95",
)
PCIE_ERRORS = FamilySpec(
    "gpu_pcie_errors_total",
    "counter",
    "Errors of the PCIe link: correctable, non_fatal, fatal; with details by their kind. Absent on older drivers.",
    (*GPU_LABELS, "kind"),
    source="fields 173 to 183",
)
PCIE_RECOVERY = FamilySpec(
    "gpu_pcie_l0_to_recovery_total",
    "counter",
    "How often the PCIe link went from working to recovering. Absent unless details are asked for.",
    GPU_LABELS,
    source="field 169",
)
NVLINK_LINKS = FamilySpec(
    "gpu_nvlink_links",
    "gauge",
    "NVLink ports, in use (active) or not. Absent without NVLink.",
    (*GPU_LABELS, "state"),
    source="nvmlDeviceGetNvLinkState",
)
NVLINK_UP = FamilySpec(
    "gpu_nvlink_up",
    "gauge",
    "Whether an NVLink port is in use. Absent unless links are told apart.",
    (*GPU_LABELS, "link"),
    source="nvmlDeviceGetNvLinkState",
)
NVLINK_SPEED = FamilySpec(
    "gpu_nvlink_speed_bytes",
    "gauge",
    "Bytes a second that one NVLink port can carry; of the first in use, unless links are told apart. Absent without NVLink.",
    (*GPU_LABELS, "link"),
    unit="bytes",
    source="field 164, else field 90, * 1e6",
)
NVLINK_TRANSMIT = FamilySpec(
    "gpu_nvlink_transmit_bytes_total",
    "counter",
    "Bytes that the GPU sent over NVLink, over all ports unless links are told apart. Absent without NVLink.",
    (*GPU_LABELS, "link"),
    unit="bytes",
    source="field 138 * 1024, else field 202, else GPM 61 integrated",
)
NVLINK_RECEIVE = FamilySpec(
    "gpu_nvlink_receive_bytes_total",
    "counter",
    "Bytes that the GPU received over NVLink, over all ports unless links are told apart. Absent without NVLink.",
    (*GPU_LABELS, "link"),
    unit="bytes",
    source="field 139 * 1024, else field 204, else GPM 60 integrated",
)
NVLINK_ERRORS = FamilySpec(
    "gpu_nvlink_errors_total",
    "counter",
    "Errors of NVLink by type, over all ports unless links are told apart. Absent without NVLink.",
    (*GPU_LABELS, "link", "type"),
    source="fields 38, 45, 160 to 163, of the fifth generation 206 to 215, else nvmlDeviceGetNvLinkErrorCounter",
)
FABRIC_STATE = FamilySpec(
    "gpu_fabric_state",
    "gauge",
    "Whether the GPU has joined its NVLink fabric: 1 not begun, 2 under way, 3 done. Absent without a fabric.",
    GPU_LABELS,
    source="nvmlDeviceGetGpuFabricInfoV().state",
)
FABRIC_STATUS = FamilySpec(
    "gpu_fabric_status",
    "gauge",
    "How joining the fabric ended, as a return code of NVML; 0 is success. Absent without a fabric.",
    GPU_LABELS,
    source="nvmlDeviceGetGpuFabricInfoV().status",
)
FABRIC = FamilySpec(
    "gpu_fabric_info",
    "info",
    "The NVLink cluster and clique that the GPU has joined. Absent without a fabric.",
    (*GPU_LABELS, "cluster_uuid", "clique"),
    source="nvmlDeviceGetGpuFabricInfoV()",
)
C2C_LINKS = FamilySpec(
    "gpu_c2c_links",
    "gauge",
    "Links to a Grace CPU. Absent without one.",
    GPU_LABELS,
    source="field 170",
)
C2C_ERRORS = FamilySpec(
    "gpu_c2c_errors_total",
    "counter",
    "Errors of the links to a Grace CPU. Absent without one.",
    (*GPU_LABELS, "kind"),
    source="fields 231 to 233",
)
C2C_TRANSMIT = FamilySpec(
    "gpu_c2c_transmit_bytes_total",
    "counter",
    "Bytes that the GPU sent to a Grace CPU. Absent without one.",
    GPU_LABELS,
    unit="bytes",
    source="GPM 102 integrated",
)
C2C_RECEIVE = FamilySpec(
    "gpu_c2c_receive_bytes_total",
    "counter",
    "Bytes that the GPU received from a Grace CPU. Absent without one.",
    GPU_LABELS,
    unit="bytes",
    source="GPM 103 integrated",
)

ROWS: tuple[Row, ...] = (
    Gauge(PCIE_GENERATION, "pcie_generation"),
    Gauge(PCIE_GENERATION, "pcie_generation_max"),
    Gauge(PCIE_WIDTH, "pcie_width"),
    Gauge(PCIE_WIDTH, "pcie_width_max"),
    Count(PCIE_TRANSMIT, "pcie_transmit", _PCIE),
    Count(PCIE_TRANSMIT, "pcie_transmit_gpm", _PCIE),
    Count(PCIE_TRANSMIT, "pcie_transmit_rate", _ESTIMATE),
    Count(PCIE_TRANSMIT, "pcie_transmit_sampled", _ESTIMATE),
    Count(PCIE_RECEIVE, "pcie_receive", _PCIE),
    Count(PCIE_RECEIVE, "pcie_receive_gpm", _PCIE),
    Count(PCIE_RECEIVE, "pcie_receive_rate", _ESTIMATE),
    Count(PCIE_RECEIVE, "pcie_receive_sampled", _ESTIMATE),
    Count(PCIE_REPLAYS, "pcie_replays"),
    Count(PCIE_ROLLOVERS, "pcie_replay_rollovers"),
    Count(PCIE_ERRORS, "pcie_errors"),
    Count(PCIE_RECOVERY, "pcie_l0_to_recovery"),
    Gauge(NVLINK_LINKS, "nvlink_links"),
    Gauge(NVLINK_UP, "nvlink_up"),
    Gauge(NVLINK_SPEED, "nvlink_speed"),
    Count(NVLINK_TRANSMIT, "nvlink_transmit_kibibytes", _NVLINK_KIB, by_link=True),
    Count(NVLINK_TRANSMIT, "nvlink_transmit_bytes", _NVLINK, by_link=True),
    Count(NVLINK_TRANSMIT, "nvlink_transmit_rate", _ESTIMATE, by_link=True),
    Count(NVLINK_RECEIVE, "nvlink_receive_kibibytes", _NVLINK_KIB, by_link=True),
    Count(NVLINK_RECEIVE, "nvlink_receive_bytes", _NVLINK, by_link=True),
    Count(NVLINK_RECEIVE, "nvlink_receive_rate", _ESTIMATE, by_link=True),
    Count(NVLINK_ERRORS, "nvlink_errors", by_link=True),
    Gauge(FABRIC_STATE, "fabric_state"),
    Gauge(FABRIC_STATUS, "fabric_status"),
    Gauge(FABRIC, "fabric"),
    Gauge(C2C_LINKS, "c2c_links"),
    Count(C2C_ERRORS, "c2c_errors"),
    Count(C2C_TRANSMIT, "c2c_transmit_rate", _ESTIMATE),
    Count(C2C_RECEIVE, "c2c_receive_rate", _ESTIMATE),
)
SPECS = tuple(dict.fromkeys(row.spec for row in ROWS))
