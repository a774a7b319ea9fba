"""The border to NVML: every call goes through here, is timed, and fails in one way.

Used in the NVML child. Names of pynvml's functions and their arguments come in; what they return, or one
`CallFailedError`, goes out. An instance belongs to one thread (the one that samples, or the one that waits for
events); the watch thread only looks at `current`.

pynvml is foreign code on top of foreign code: besides NVMLError it raises whatever garbage in a structure
makes Python raise (text that is no UTF-8, counts beyond an array). All of that is a failed call here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


class CallFailedError(Exception):
    """A call that gave no value.

    Attributes:
        call: pynvml's name of it.
        error: NVML's name of the error in lower case, `garbage`, or `success` where pynvml makes an error of it.
    """

    def __init__(self, call: str, error: str) -> None:
        super().__init__(f"{call}: {error}")
        self.call = call
        self.error = error


class Library:
    """NVML as one thread uses it.

    Args:
        binding: The module pynvml.
        clock: Monotonic seconds.

    Attributes:
        binding: As given, for structures.
        costs: By call: how often, and how many seconds in all.
        errors: By call and error: how often; what a GPU merely does not have is not counted.
        current: The call under way: its name, the GPU's index, when it began; None between calls.
        subject: The GPU that is being worked on.
    """

    def __init__(self, binding: Any, *, clock: Callable[[], float]) -> None:
        self.binding = binding
        self.costs: dict[str, list[float]] = {}
        self.errors: dict[tuple[str, str], int] = {}
        self.current: tuple[str, int | None, float] | None = None
        self.subject: int | None = None
        self._clock = clock
        # Old bindings do not have the second one.
        self._errors = (binding.NVMLError, getattr(binding, "NVMLLibraryMismatchError", binding.NVMLError))

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of pynvml.

        Raises:
            CallFailedError: It gave no value.
        """
        function = getattr(self.binding, name, None)
        if function is None:  # the binding is older than the function
            raise CallFailedError(name, "function_not_found")
        cost = self.costs.get(name)
        if cost is None:
            cost = self.costs[name] = [0, 0.0]
        began = self._clock()
        self.current = (name, self.subject, began)
        try:
            return function(*arguments)
        except self._errors as error:
            found = name_of(getattr(error, "value", 13))  # a library mismatch is a missing function
            raise CallFailedError(name, found) from None
        except Exception:  # noqa: BLE001 - border to pynvml: see above
            raise CallFailedError(name, GARBAGE) from None
        finally:
            self.current = None
            cost[0] += 1
            cost[1] += self._clock() - began

    def count_error(self, call: str, error: str) -> None:
        """Count a failure that should not be."""
        key = (call, error)
        self.errors[key] = self.errors.get(key, 0) + 1
