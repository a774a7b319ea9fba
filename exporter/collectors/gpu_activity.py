"""What the SMs, tensor cores and memory of a GPU really do (GPM, Hopper and later): families.

Used in the sidecar. The readings come from the NVML child's `gpm`. Every ratio is the mean over the time between
two samples, at most a few seconds; nothing is missed in between.
"""

from __future__ import annotations

from exporter.collectors.family import FamilySpec
from exporter.collectors.gpu_counters import CounterRule
from exporter.collectors.gpu_rows import GPU_LABELS, Count, Gauge, Row

_ABSENT = "Absent before Hopper, on a divided GPU (MIG) and where GPM is switched off."
_CYCLES_ABSENT = (
    "Absent before Hopper, on older drivers, on a divided GPU (MIG) and where GPM is switched off."
)
# 1,000 SMs at 5 GHz; a counter of 53 exact bits loses single cycles after hours, which no rate can see.
_CYCLES = CounterRule(most_per_second=5e12)

GRAPHICS = FamilySpec(
    "gpu_graphics_activity_ratio",
    "gauge",
    f"Share of time in which any compute or graphics work was there. {_ABSENT}",
    GPU_LABELS,
    unit="ratio",
    source="GPM 1 / 100",
)
SM = FamilySpec(
    "gpu_sm_activity_ratio",
    "gauge",
    f"Share of SM cycles in which at least one warp was resident, over all SMs. {_ABSENT}",
    GPU_LABELS,
    unit="ratio",
    source="GPM 2 / 100",
)
OCCUPANCY = FamilySpec(
    "gpu_sm_occupancy_ratio",
    "gauge",
    f"Resident warps as a share of what the SMs could hold. {_ABSENT}",
    GPU_LABELS,
    unit="ratio",
    source="GPM 3 / 100",
)
TENSOR = FamilySpec(
    "gpu_tensor_activity_ratio",
    "gauge",
    f"Share of SM cycles in which tensor cores worked: any of them, or a kind (hmma for 16 and 8 bits, imma for integers; with details dmma, dfma). {_ABSENT}",
    (*GPU_LABELS, "pipe"),
    unit="ratio",
    source="GPM 5 any, 6 dfma, 7 hmma, 8 dmma, 9 imma / 100",
)
PIPE = FamilySpec(
    "gpu_pipe_activity_ratio",
    "gauge",
    f"Share of SM cycles in which a pipe outside the tensor cores worked: fp32, fp16; with details fp64, int. {_ABSENT}",
    (*GPU_LABELS, "pipe"),
    unit="ratio",
    source="GPM 11 fp64, 12 fp32, 13 fp16, 4 int / 100",
)
DRAM = FamilySpec(
    "gpu_dram_activity_ratio",
    "gauge",
    f"Memory bandwidth in use as a share of what is possible. {_ABSENT}",
    GPU_LABELS,
    unit="ratio",
    source="GPM 10 / 100",
)
VIDEO = FamilySpec(
    "gpu_video_engine_activity_ratio",
    "gauge",
    "Share of time in which a video engine worked. Absent unless video engines are asked for, and before Hopper.",
    (*GPU_LABELS, "engine"),
    unit="ratio",
    source="GPM 30 to 37, 40 to 47, 50, 51, 166 to 169 / 100",
)
SM_CYCLES = FamilySpec(
    "gpu_sm_cycles_total",
    "counter",
    f"Cycles of all SMs: elapsed, and active ones with a resident warp; what it is a share of moves with the clock. {_CYCLES_ABSENT}",
    (*GPU_LABELS, "state"),
    source="GPM 248, 249",
)
TENSOR_CYCLES = FamilySpec(
    "gpu_tensor_cycles_total",
    "counter",
    f"Cycles in which tensor cores worked: any of them; with details by kind. {_CYCLES_ABSENT}",
    (*GPU_LABELS, "pipe"),
    source="GPM 250 any, 251 dmma, 252 hmma, 253 imma, 254 dfma",
)
PIPE_CYCLES = FamilySpec(
    "gpu_pipe_cycles_total",
    "counter",
    "Cycles in which a pipe outside the tensor cores worked. Absent unless details are asked for, and before Hopper.",
    (*GPU_LABELS, "pipe"),
    source="GPM 257 int, 258 fp64, 259 fp32, 260 fp16",
)
STALL = FamilySpec(
    "gpu_mma_stall_ratio",
    "gauge",
    "Share of time in which tensor instructions were stalled. Absent before Hopper and on older drivers.",
    GPU_LABELS,
    unit="ratio",
    source="field 297 / 100",
)

ROWS: tuple[Row, ...] = (
    Gauge(GRAPHICS, "graphics_activity"),
    Gauge(SM, "sm_activity"),
    Gauge(OCCUPANCY, "sm_occupancy"),
    Gauge(TENSOR, "tensor_activity"),
    Gauge(PIPE, "pipe_activity"),
    Gauge(DRAM, "dram_activity"),
    Gauge(VIDEO, "video_activity"),
    Count(SM_CYCLES, "sm_cycles", _CYCLES),
    Count(TENSOR_CYCLES, "tensor_cycles", _CYCLES),
    Count(PIPE_CYCLES, "pipe_cycles", _CYCLES),
    Gauge(STALL, "mma_stall"),
)
SPECS = tuple(row.spec for row in ROWS)
