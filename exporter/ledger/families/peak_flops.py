"""Peak FLOP/s of accelerators: what model FLOPs utilization is measured by.

Used in the sidecar by the ledger. A device's name, as its driver gives it, and a data type come in; dense FLOP/s come
out, or None. There is no fallback: a device that is not in the table has no peak, and one of a similar name is not it
(an L40S is no L4, an H100 NVL no H100). Numbers are those of the data sheets, without sparsity; what matrix
multiplications attain is 51 to 87 % of them.

Source: the vendors' data sheets, by way of stas00/ml-engineering and torchtitan.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_TERA = 1e12

_HOPPER = {"bf16": 989, "fp16": 989, "fp8": 1979, "tf32": 494.5}
_MODELS: tuple[tuple[str, str, Mapping[str, float]], ...] = (
    ("GB300", "", {"bf16": 2500, "fp16": 2500, "fp8": 5000, "tf32": 1250}),
    ("GB200", "", {"bf16": 2500, "fp16": 2500, "fp8": 5000, "tf32": 1250}),
    ("B300", "", {"bf16": 2250, "fp16": 2250, "fp8": 4500, "tf32": 1125}),
    ("B200", "", {"bf16": 2250, "fp16": 2250, "fp8": 4500, "tf32": 1125}),
    ("GH200", "", _HOPPER),
    ("H200", "NVL", _HOPPER),
    ("H100 HBM3", "NVL PCIE", _HOPPER),
    ("H100 SXM5", "NVL PCIE HBM3", _HOPPER),
    ("H100 NVL", "", {"bf16": 835, "fp16": 835}),
    ("H100 PCIE", "NVL", {"bf16": 756, "fp16": 756, "fp8": 1513, "tf32": 378}),
    ("H20", "", {"bf16": 148, "fp16": 148}),
    ("A100", "", {"bf16": 312, "fp16": 312, "tf32": 156}),
    ("L40S", "", {"bf16": 362, "fp16": 362, "fp8": 733, "tf32": 183}),
    ("L4", "", {"bf16": 121, "fp16": 121}),
    ("A10", "", {"bf16": 125, "fp16": 125}),
    ("A6000", "", {"bf16": 154.8, "fp16": 154.8}),
    ("V100 SXM2", "", {"fp16": 125}),
    ("V100 SXM3", "", {"fp16": 125}),
    ("V100 PCIE", "", {"fp16": 112}),
    ("T4", "", {"fp16": 65}),
    ("MI355X", "", {"bf16": 2500, "fp16": 2500}),
    ("MI325X", "", {"bf16": 1300, "fp16": 1300, "fp8": 2610}),
    ("MI300X", "", {"bf16": 1300, "fp16": 1300, "fp8": 2610}),
    ("MI250X", "", {"bf16": 191.5, "fp16": 191.5}),  # of one of its two dies, each of which is a device
)
"""Words that a device's name has, words that it has not, dense TFLOP/s by data type."""

_SLICE = re.compile(r"MIG|GRID|VGPU|\d+[ABCQ]")
"""A word in the name of a part of a device, which has not its peak (`GRID A100-10C`)."""

_TYPES: tuple[tuple[str, str], ...] = (
    (r"fp8|float8|e4m3|e5m2|transformer.engine", "fp8"),
    (r"bf16|bfloat16", "bf16"),
    (r"fp16|float16|^16|half", "fp16"),
    (r"tf32", "tf32"),
)


def data_type(precision: str) -> str:
    """Tell the data type in which a run multiplies matrices, from its framework's word (`16-mixed`, `torch.float16`, ...).

    Returns:
        `bf16`, `fp16`, `fp8` or `tf32`; "" where that is not clear, or is one without a row in the table.
    """
    return next((name for pattern, name in _TYPES if re.search(pattern, precision.lower())), "")


def peak_flops(device: str, dtype: str) -> float | None:
    """Look up the dense FLOP/s of a device, by the name that its driver gives it; None where they are not known."""
    words = set(re.findall(r"[A-Z0-9]+", device.upper()))
    if any(map(_SLICE.fullmatch, words)):
        return None
    for needs, never, tera_flops in _MODELS:
        if words.issuperset(needs.split()) and words.isdisjoint(never.split()):
            return tera_flops[dtype] * _TERA if dtype in tera_flops else None
    return None
