"""Meanings of NVIDIA's Xid error codes.

Source: NVIDIA's Xid catalog (docs.nvidia.com/deploy/xid-errors).
"""

from __future__ import annotations

XID_MEANINGS = {
    13: "illegal instruction or address in a kernel",
    31: "memory page fault of the program",
    43: "the program stopped on the GPU",
    45: "the driver ended the program",
    46: "the GPU stopped processing",
    48: "uncorrectable memory error",  # double-bit ECC error
    54: "auxiliary power is not connected",
    61: "microcontroller breakpoint",
    62: "microcontroller halted",
    63: "a memory row is to be remapped",
    64: "a memory row could not be remapped",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "many correctable memory errors",
    94: "contained memory error: only its program ended",
    95: "uncontained memory error",
    109: "context switch timeout",
    110: "security fault",
    119: "timeout of the GPU's firmware (GSP)",
    120: "error of the GPU's firmware (GSP)",
    121: "error of the link to the CPU (C2C)",
    136: "NVLink training failed",
    140: "uncorrected memory error",  # unrecovered ECC error
    143: "GPU initialization failed",
    **dict.fromkeys(range(144, 151), "NVLink 5 error"),
    154: "the recovery action changed",
    155: "NVLink error defined by software",
    156: "a resource was retired",
    158: "fatal timeout of the GPU",
}


def with_meaning(xid: str) -> str:
    """Return an Xid with its meaning in parentheses, such as "79 (GPU has fallen off the bus)".

    An Xid without a known meaning is returned unchanged.
    """
    meaning = XID_MEANINGS.get(int(xid)) if xid.isdecimal() else None
    return f"{xid} ({meaning})" if meaning else xid
