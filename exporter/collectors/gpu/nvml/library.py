"""NVML calls with timing and a uniform exception.

Runs in the NVML child. Each thread that calls NVML has its own instance; the pipe thread reads `current` of the main
thread's. Garbage in a structure can make pynvml raise any exception, for example UnicodeDecodeError or IndexError, so
every exception is treated as a failed call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SUCCESS = 0

CODES: dict[str, int] = {
    name: code
    for code, name in enumerate(
        (
            *("uninitialized", "invalid_argument", "not_supported", "no_permission", "already_initialized"),
            *("not_found", "insufficient_size", "insufficient_power", "driver_not_loaded", "timeout"),
            *("irq_issue", "library_not_found", "function_not_found", "corrupted_inforom", "gpu_is_lost"),
            *("reset_required", "operating_system", "lib_rm_version_mismatch", "in_use", "memory", "no_data"),
            *("vgpu_ecc_not_supported", "insufficient_resources", "freq_not_supported"),
            *("argument_version_mismatch", "deprecated", "not_ready", "gpu_not_found", "invalid_state"),
            "reset_type_not_supported",
        ),
        start=1,
    )
} | {"unknown": 999}
"""NVML's return codes by name: the name in nvml.h in lower case, without NVML_ERROR_."""

_NAMES = {code: name for name, code in CODES.items()} | {SUCCESS: "success"}

GARBAGE = "garbage"
"""Error of a call that succeeded with an impossible result; not an NVML code."""

UNSUPPORTED_ERRORS = frozenset(
    {
        "not_supported",
        "function_not_found",
        "invalid_argument",  # returned for an unknown threshold, field or link
        "argument_version_mismatch",
        "deprecated",
        "vgpu_ecc_not_supported",
        "freq_not_supported",
    }
)
"""Errors of calls that the GPU or the driver does not support, which is a normal state."""

DEVICE_DOWN_ERRORS = frozenset({"gpu_is_lost", "reset_required", "gpu_not_found"})
"""Errors after which the calls on the GPU are expected to fail until the GPU is attached again."""

LIBRARY_DOWN_ERRORS = frozenset({"uninitialized", "driver_not_loaded", "lib_rm_version_mismatch"})
"""Errors after which this process can read no GPU."""


def name_of(code: object) -> str:
    """Return the name of a return code. Unknown codes share a name, to limit the number of label values."""
    return _NAMES.get(code, "other") if isinstance(code, int) else "other"


@dataclass(frozen=True, slots=True)
class CallInProgress:
    """NVML call in progress."""

    name: str  # pynvml's function
    gpu: int | None  # NVML's index; None for a call on no GPU
    started_at: float  # on the library's clock


class CallFailedError(Exception):
    """Failed NVML call."""

    def __init__(self, call: str, error: str) -> None:
        super().__init__(f"{call}: {error}")
        self.call = call  # pynvml's function
        self.error = error  # a key of `CODES`, `garbage`, or `success` where pynvml raises this code


class NvmlLibrary:
    """NVML functions for a single thread, with the duration of the calls and their errors."""

    def __init__(self, binding: Any, *, clock: Callable[[], float]) -> None:
        self.binding = binding  # the module pynvml
        self.calls = 0  # number of calls
        self.seconds = 0.0  # duration of all calls
        self.last_seconds = 0.0  # duration of the last call
        self.last_ended_at = 0.0  # on the library's clock; end of the last call
        # By call and error; calls that a GPU does not support are not counted.
        self.errors: Counter[tuple[str, str]] = Counter()
        self.current: CallInProgress | None = None  # None between calls
        self.current_gpu: int | None = None  # index of the GPU that is being read
        self._clock = clock
        # Old versions of pynvml have no NVMLLibraryMismatchError.
        self._error_classes = (
            binding.NVMLError,
            getattr(binding, "NVMLLibraryMismatchError", binding.NVMLError),
        )

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of pynvml. Raises CallFailedError if the call fails."""
        function = getattr(self.binding, name, None)
        if function is None:  # pynvml is older than the function
            self.last_seconds = 0.0
            raise CallFailedError(name, "function_not_found")
        start_time = self._clock()
        self.current = CallInProgress(name, self.current_gpu, start_time)
        try:
            try:
                return function(*arguments)
            except self._error_classes as error:
                if name_of(getattr(error, "value", None)) != "insufficient_size":
                    raise
                # pynvml reads the number of items before the items, and the number can grow in between.
                return function(*arguments)
        except self._error_classes as error:
            # NVMLLibraryMismatchError has no code: the library lacks a function.
            code = getattr(error, "value", CODES["function_not_found"])
            raise CallFailedError(name, name_of(code)) from None
        except Exception:  # noqa: BLE001 - pynvml can raise any exception, see above
            raise CallFailedError(name, GARBAGE) from None
        finally:
            self.current = None
            self.calls += 1
            self.last_ended_at = self._clock()
            self.last_seconds = self.last_ended_at - start_time
            self.seconds += self.last_seconds

    def now(self) -> float:
        """Return the time on the library's clock."""
        return self._clock()

    def count_error(self, call: str, error: str) -> None:
        """Count an error of a call."""
        self.errors[call, error] += 1
