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
from dataclasses import dataclass

_TERA = 1e12


@dataclass(frozen=True, slots=True)
class _Model:
    """A model of accelerator.

    Attributes:
        needs: Words that its name has, all of them.
        never: Words that it has not.
        tera_flops: By data type.
    """

    needs: frozenset[str]
    never: frozenset[str]
    tera_flops: Mapping[str, float]


def _model(
    needs: str,
    half: float,
    *,
    fp8: float | None = None,
    tf32: float | None = None,
    never: str = "",
    fp16_only: bool = False,
) -> _Model:
    rates = {"fp16": half} if fp16_only else {"bf16": half, "fp16": half}
    rates |= {"fp8": fp8} if fp8 is not None else {}
    rates |= {"tf32": tf32} if tf32 is not None else {}
    return _Model(frozenset(needs.split()), frozenset(never.split()), rates)


_MODELS = (
    _model("GB300", 2500, fp8=5000, tf32=1250),
    _model("GB200", 2500, fp8=5000, tf32=1250),
    _model("B300", 2250, fp8=4500, tf32=1125),
    _model("B200", 2250, fp8=4500, tf32=1125),
    _model("GH200", 989, fp8=1979, tf32=494.5),
    _model("H200", 989, fp8=1979, tf32=494.5, never="NVL"),
    _model("H100 HBM3", 989, fp8=1979, tf32=494.5, never="NVL PCIE"),
    _model("H100 SXM5", 989, fp8=1979, tf32=494.5, never="NVL PCIE HBM3"),
    _model("H100 NVL", 835),
    _model("H100 PCIE", 756, fp8=1513, tf32=378, never="NVL"),
    _model("H20", 148),
    _model("A100", 312, tf32=156),
    _model("L40S", 362, fp8=733, tf32=183),
    _model("L4", 121),
    _model("A10", 125),
    _model("A6000", 154.8),
    _model("V100 SXM2", 125, fp16_only=True),
    _model("V100 SXM3", 125, fp16_only=True),
    _model("V100 PCIE", 112, fp16_only=True),
    _model("T4", 65, fp16_only=True),
    _model("MI355X", 2500),
    _model("MI325X", 1300, fp8=2610),
    _model("MI300X", 1300, fp8=2610),
    _model("MI250X", 191.5),  # of one of its two dies, each of which is a device
)

_SLICE = re.compile(r"MIG|GRID|VGPU|\d+[ABCQ]")
"""A word in the name of a part of a device, which has not its peak (`GRID A100-10C`)."""

_TYPES: tuple[tuple[str, str], ...] = (
    (r"fp8|float8|e4m3|e5m2|transformer.engine", "fp8"),
    (r"bf16|bfloat16", "bf16"),
    (r"fp16|float16|^16|half", "fp16"),
    (r"tf32", "tf32"),
)


def data_type(precision: str) -> str:
    """Tell the data type in which a run multiplies matrices.

    Args:
        precision: In the words of the run's framework: `bf16`, `bf16-mixed`, `16-mixed`, `torch.float16`, `fp8` …

    Returns:
        `bf16`, `fp16`, `fp8` or `tf32`; "" where that is not clear, or is one without a row in the table.
    """
    for pattern, name in _TYPES:
        if re.search(pattern, precision.lower()):
            return name
    return ""


def peak_flops(device: str, dtype: str) -> float | None:
    """Look a device up.

    Args:
        device: Its name, as the driver gives it.
        dtype: As `data_type` gives it.

    Returns:
        Dense FLOP/s; None where they are not known.
    """
    words = frozenset(re.findall(r"[A-Z0-9]+", device.upper()))
    if any(map(_SLICE.fullmatch, words)):
        return None
    for model in _MODELS:
        if model.needs <= words and not model.never & words:
            rate = model.tera_flops.get(dtype)
            return None if rate is None else rate * _TERA
    return None
