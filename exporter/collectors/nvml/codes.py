"""NVML's return codes by name, and what each means for what is asked next.

Used in the NVML child, and in the sidecar by the replay's descriptions. Values only. The names are NVML's own
without `NVML_ERROR_`, in lower case; they are values of the label `error`.

Source: nvml.h, nvmlReturn_t; the numbers are part of the library's ABI.
"""

from __future__ import annotations

SUCCESS = 0

NAMES: dict[int, str] = {
    1: "uninitialized",
    2: "invalid_argument",
    3: "not_supported",
    4: "no_permission",
    5: "already_initialized",
    6: "not_found",
    7: "insufficient_size",
    8: "insufficient_power",
    9: "driver_not_loaded",
    10: "timeout",
    11: "irq_issue",
    12: "library_not_found",
    13: "function_not_found",
    14: "corrupted_inforom",
    15: "gpu_is_lost",
    16: "reset_required",
    17: "operating_system",
    18: "lib_rm_version_mismatch",
    19: "in_use",
    20: "memory",
    21: "no_data",
    22: "vgpu_ecc_not_supported",
    23: "insufficient_resources",
    24: "freq_not_supported",
    25: "argument_version_mismatch",
    26: "deprecated",
    27: "not_ready",
    28: "gpu_not_found",
    29: "invalid_state",
    30: "reset_type_not_supported",
    999: "unknown",
}

CODES: dict[str, int] = {name: code for code, name in NAMES.items()}

GARBAGE = "garbage"
"""The error of a call that succeeded with something that cannot be: no code of NVML's."""

UNSUPPORTED = frozenset(
    {
        "not_supported",
        "function_not_found",
        "invalid_argument",  # how drivers answer for a threshold, field or link that they do not know
        "argument_version_mismatch",
        "deprecated",
        "vgpu_ecc_not_supported",
        "freq_not_supported",
    }
)
"""This GPU or driver does not have it: a normal state, asked again only after a long while."""

DEVICE_DOWN = frozenset({"gpu_is_lost", "reset_required", "gpu_not_found"})
"""Nothing can be had from this GPU until it returns."""

LIBRARY_DOWN = frozenset({"uninitialized", "driver_not_loaded", "lib_rm_version_mismatch"})
"""Nothing can be had from any GPU; only a new process can help."""


def name_of(code: object) -> str:
    """Give the name of a return code; those of the future share one, so that a label stays bounded."""
    if code == SUCCESS:
        return "success"
    return NAMES.get(code, "other") if isinstance(code, int) else "other"
