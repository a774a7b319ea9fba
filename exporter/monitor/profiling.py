"""Timing a block for Prometheus and for torch.profiler at once.

Used in the training process, on the caller's thread. torch is used where the job has loaded it, and not
otherwise; without a running profiler its range costs about a microsecond.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from time import perf_counter
from typing import Any, TypeVar

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


class ProfiledTimer:
    """Times one `with` block, or every call of a function that it decorates, and shows it in torch's profiler.

    Args:
        name: Of the range in the profiler's trace.
        add: Where the seconds go.
    """

    __slots__ = ("_add", "_began", "_name", "_range")

    def __init__(self, name: str, add: Callable[[float], object]) -> None:
        self._name = name
        self._add = add
        self._began = 0.0
        self._range: AbstractContextManager[object] = nullcontext()

    def __enter__(self) -> None:
        self._range = _profiler_range(self._name)
        self._range.__enter__()
        self._began = perf_counter()

    def __exit__(self, *exception: object) -> None:
        seconds = perf_counter() - self._began
        self._range.__exit__(*exception)  # type: ignore[arg-type]  # the three that Python gives
        self._add(seconds)

    def __call__(self, function: AnyFunction) -> AnyFunction:
        """Decorate a function."""
        name, add = self._name, self._add

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with ProfiledTimer(name, add):
                return function(*args, **kwargs)

        return timed  # type: ignore[return-value]  # the same signature, by wraps


def _profiler_range(name: str) -> AbstractContextManager[object]:
    profiler = getattr(sys.modules.get("torch"), "profiler", None)
    return nullcontext() if profiler is None else profiler.record_function(name)
