"""Errors of a GPU that its owner should know of: memory, remapped rows, retired pages, what to do about it.

Used in the NVML child. Counters leave as the driver has them: the volatile ones fall to 0 when it is loaded.
"""

from __future__ import annotations

import ctypes

from exporter.collectors.nvml.conversions import GarbageError, count, small

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from exporter.collectors.nvml.gpu import Gpu
    from exporter.collectors.nvml.options import Options

_TYPES = {"corrected": 0, "uncorrected": 1}
_SCOPES = {"volatile": 0}
_SCOPES_DETAILS = {"aggregate": 1}
_LOCATIONS = {"dram": 2, "sram": 7}
_CAUSES = {"sbe": 0, "dbe": 1}
_BANKS = ("max", "high", "partial", "low", "none")

_RECOVERY_ACTION = 230
_MOST_ACTIONS = 64


def read_medium(gpu: Gpu, out: dict[str, Any]) -> None:
    """Read what the driver wants to be done."""
    action = gpu.fields((_RECOVERY_ACTION,)).get(_RECOVERY_ACTION)
    out["recovery_action"] = None
    if action is not None and 0 <= action < _MOST_ACTIONS:
        out["recovery_action"] = action


def read_slow(gpu: Gpu, options: Options, out: dict[str, Any]) -> None:
    """Read the error counters."""
    scopes = {**_SCOPES, **_SCOPES_DETAILS} if options.details else _SCOPES
    errors = {}
    for kind, kind_number in _TYPES.items():
        for scope, scope_number in scopes.items():
            for location, location_number in _LOCATIONS.items():
                number = gpu.ask(
                    f"ecc.{kind}.{scope}.{location}",
                    "nvmlDeviceGetMemoryErrorCounter",
                    kind_number,
                    scope_number,
                    location_number,
                    convert=count,
                )
                if number is not None:
                    errors[f"{kind}/{scope}/{location}"] = number
    out["ecc_errors"] = errors or None
    modes = gpu.ask("ecc_mode", "nvmlDeviceGetEccMode", convert=_two_modes)
    out["ecc_mode"] = None
    if modes is not None:
        out["ecc_mode"] = (
            {"current": modes[0], "pending": modes[1]} if options.details else {"current": modes[0]}
        )
    out["sram_threshold"] = _sram_threshold(gpu)
    rows = gpu.ask("remapped_rows", "nvmlDeviceGetRemappedRows", convert=_rows)
    correctable, uncorrectable, pending, failed = rows or (None, None, None, None)
    out["remapped_rows"] = rows and {"correctable": correctable, "uncorrectable": uncorrectable}
    out["remapped_rows_pending"], out["remapped_rows_failed"] = pending, failed
    if options.row_remap_histogram:
        out["row_remap_banks"] = gpu.ask(
            "row_remap_histogram", "nvmlDeviceGetRowRemapperHistogram", convert=_banks
        )
    pages = {
        name: gpu.ask(f"retired_pages.{name}", "nvmlDeviceGetRetiredPages", number, convert=len)
        for name, number in _CAUSES.items()
    }
    out["retired_pages"] = {name: number for name, number in pages.items() if number is not None} or None
    out["retired_pages_pending"] = gpu.ask(
        "retired_pages_pending", "nvmlDeviceGetRetiredPagesPendingStatus", convert=_flag
    )


def _sram_threshold(gpu: Gpu) -> int | None:
    structure = getattr(gpu.library.binding, "c_nvmlEccSramErrorStatus_v1_t", None)
    if structure is None:
        return None
    status = structure()
    if gpu.ask("sram_threshold", "nvmlDeviceGetSramEccErrorStatus", ctypes.byref(status)) is None:
        return None
    return int(status.bThresholdExceeded != 0)


def _rows(rows: Any) -> tuple[int, int, int, int]:
    correctable, uncorrectable, pending, failed = rows
    return small(correctable), small(uncorrectable), _flag(pending), _flag(failed)


def _banks(histogram: Any) -> dict[str, int]:
    return {name: small(getattr(histogram, name)) for name in _BANKS}


def _two_modes(pair: Any) -> tuple[int, int]:
    current, pending = pair
    return _flag(current), _flag(pending)


def _flag(number: int) -> int:
    if number not in (0, 1):
        raise GarbageError(number)
    return number
