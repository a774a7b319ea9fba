"""The border to NVML: every call goes through here, is timed, and fails in one way.

Used in the NVML child; an instance belongs to one thread, the watch thread only looks at `current`. Besides NVMLError
pynvml raises whatever garbage in a structure makes Python raise (text that is no UTF-8, counts beyond an array): all of
that is a failed call here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
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
    return _NAMES.get(code, "other") if isinstance(code, int) else "other"


class CallFailedError(Exception):
    """A call that gave no value."""

    def __init__(self, call: str, error: str) -> None:
        super().__init__(f"{call}: {error}")
        self.call = call  # pynvml's name of it
        self.error = error  # a key of `CODES`, `garbage`, or `success` where pynvml makes an error of it


class Library:
    """NVML as one thread uses it; the binding is the module pynvml."""

    def __init__(self, binding: Any, *, clock: Callable[[], float]) -> None:
        self.binding = binding
        self.costs: dict[str, list[float]] = {}  # by call: how often, and how many seconds in all
        # By call and error: how often; what a GPU merely does not have is not counted.
        self.errors: Counter[tuple[str, str]] = Counter()
        # The call under way: its name, the GPU's index, when it began; None between calls.
        self.current: tuple[str, int | None, float] | None = None
        self.subject: int | None = None  # the GPU that is being worked on
        self._clock = clock
        # Old bindings do not have the second one.
        self._errors = (binding.NVMLError, getattr(binding, "NVMLLibraryMismatchError", binding.NVMLError))

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of pynvml; raises CallFailedError: it gave no value."""
        function = getattr(self.binding, name, None)
        if function is None:  # the binding is older than the function
            raise CallFailedError(name, "function_not_found")
        cost = self.costs.setdefault(name, [0, 0.0])
        began = self._clock()
        self.current = (name, self.subject, began)
        try:
            try:
                return function(*arguments)
            except self._errors as error:
                if name_of(getattr(error, "value", None)) != "insufficient_size":
                    raise
                # The binding asks how many there are before it asks for them; more may come in between.
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
        self.errors[call, error] += 1
