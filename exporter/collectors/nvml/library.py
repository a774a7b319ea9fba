"""The border to NVML: every call goes through here, is timed, and fails in one way.

Used in the NVML child. Names of pynvml's functions and their arguments come in; what they return, or one
`CallFailedError`, goes out. An instance belongs to one thread (the one that samples, or the one that waits for
events); the watch thread only looks at `current`.

pynvml is foreign code on top of foreign code: besides NVMLError it raises whatever garbage in a structure
makes Python raise (text that is no UTF-8, counts beyond an array). All of that is a failed call here.
"""

from __future__ import annotations

from exporter.collectors.nvml.codes import GARBAGE, name_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


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
        field_seconds: What NVML itself says that reading field values took it.
        current: The call under way: its name, the GPU's index, when it began; None between calls.
        subject: The GPU that is being worked on.
    """

    __slots__ = ("binding", "costs", "errors", "field_seconds", "current", "subject", "_clock", "_errors")

    def __init__(self, binding: Any, *, clock: Callable[[], float]) -> None:
        self.binding = binding
        self.costs: dict[str, list[float]] = {}
        self.errors: dict[tuple[str, str], int] = {}
        self.field_seconds = 0.0
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
