"""NVML calls with timing and a uniform error.

Runs in the NVML child. Each thread has an instance; the pipe thread reads `current` of the main thread. Garbage in a structure can
make pynvml raise any exception (text that is not UTF-8, a count beyond an array): every exception is a failed call.
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
"""NVML's return codes by their names in nvml.h, without NVML_ERROR_ and in lower case."""

_NAMES = {code: name for name, code in CODES.items()} | {SUCCESS: "success"}

GARBAGE = "garbage"
"""Error of a call that succeeded with an impossible result; not an NVML code."""

UNSUPPORTED = frozenset(
    {
        "not_supported",
        "function_not_found",
        "invalid_argument",  # drivers' error for an unknown threshold, field or link
        "argument_version_mismatch",
        "deprecated",
        "vgpu_ecc_not_supported",
        "freq_not_supported",
    }
)
"""The GPU or driver does not support the call: a normal state, retried after ten minutes."""

DEVICE_DOWN = frozenset({"gpu_is_lost", "reset_required", "gpu_not_found"})
"""All calls on the GPU fail until the GPU returns."""

LIBRARY_DOWN = frozenset({"uninitialized", "driver_not_loaded", "lib_rm_version_mismatch"})
"""No GPU can be read; only a new process can help."""


def name_of(code: object) -> str:
    """Return the name of a return code; unknown codes share a name, so that labels stay bounded."""
    return _NAMES.get(code, "other") if isinstance(code, int) else "other"


@dataclass(frozen=True, slots=True)
class CallUnderWay:
    """Call in progress."""

    name: str  # pynvml's function
    gpu: int | None  # NVML's index; None for a call on no GPU
    began: float  # on the library's clock


class CallFailedError(Exception):
    """Failed call."""

    def __init__(self, call: str, error: str) -> None:
        super().__init__(f"{call}: {error}")
        self.call = call  # pynvml's function
        self.error = error  # a key of `CODES`, `garbage`, or `success` if pynvml raises it as an error


class NvmlLibrary:
    """NVML for a single thread; the binding is the module pynvml."""

    def __init__(self, binding: Any, *, clock: Callable[[], float]) -> None:
        self.binding = binding
        self.calls = 0
        self.seconds = 0.0  # in all calls
        self.last_seconds = 0.0  # in the last call
        # Errors by call and error, without readings that a GPU does not support.
        self.errors: Counter[tuple[str, str]] = Counter()
        self.current: CallUnderWay | None = None  # None between calls
        self.subject: int | None = None  # index of the GPU that is being read
        self._clock = clock
        # Old bindings lack the second class.
        self._errors = (binding.NVMLError, getattr(binding, "NVMLLibraryMismatchError", binding.NVMLError))

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of pynvml; raises CallFailedError if the call fails."""
        function = getattr(self.binding, name, None)
        if function is None:  # the binding is older than the function
            self.last_seconds = 0.0
            raise CallFailedError(name, "function_not_found")
        started = self._clock()
        self.current = CallUnderWay(name, self.subject, started)
        try:
            try:
                return function(*arguments)
            except self._errors as error:
                if name_of(getattr(error, "value", None)) != "insufficient_size":
                    raise
                # The binding reads the number of items first; more items may arrive before the second read.
                return function(*arguments)
        except self._errors as error:
            error_name = name_of(getattr(error, "value", 13))  # a library mismatch is a missing function
            raise CallFailedError(name, error_name) from None
        except Exception:  # noqa: BLE001 - border to pynvml: see above
            raise CallFailedError(name, GARBAGE) from None
        finally:
            self.current = None
            self.calls += 1
            self.last_seconds = self._clock() - started
            self.seconds += self.last_seconds

    def count_error(self, call: str, error: str) -> None:
        """Count a failure."""
        self.errors[call, error] += 1
