"""Failures: what an exception that ends a job's work says about the reason.

Used in the training process, on the thread on which it was raised. Only the exception's class, its text and its
operating-system error are looked at.
"""

from __future__ import annotations

import errno

_BY_CLASS = {
    "KeyboardInterrupt": "user",
    "OutOfMemoryError": "gpu_memory",
    "AcceleratorError": "gpu",
    "DistNetworkError": "network",
    "DistStoreError": "network",
    "DistBackendError": "nccl_timeout",
    "MemoryError": "host",
    "ConnectionError": "network",
    "TimeoutError": "network",
    "EOFError": "storage",
}
_BY_TEXT = (
    ("out of memory", "gpu_memory"),
    ("NCCL", "nccl_timeout"),
    ("CUDA error", "gpu"),
    ("CUDNN", "gpu"),
    ("cuBLAS", "gpu"),
    ("CUBLAS", "gpu"),
    ("No space left", "storage"),
    ("Connection reset", "network"),
    ("Connection refused", "network"),
    ("Connection closed", "network"),
    ("DataLoader worker", "host"),
)
_STORAGE = frozenset({errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.ESTALE})


class Failure:
    """An exception that left a block.

    Attributes:
        kind: The name of its class.
        reason: One of `exporter.recording.values.END_REASONS`; "" where the program ended as it wanted, by `sys.exit()`.
    """

    __slots__ = ("kind", "reason")

    def __init__(self, kind: str, reason: str) -> None:
        self.kind = kind
        self.reason = reason

    @classmethod
    def of(cls, exception: BaseException) -> Failure:
        """Recognise an exception; never raises."""
        return cls(type(exception).__name__, reason_of(exception))


def reason_of(exception: BaseException) -> str:
    """Tell why an exception ends the job; never raises."""
    if isinstance(exception, SystemExit):
        return "" if exception.code in {None, 0} else "exit"
    if isinstance(exception, GeneratorExit):
        return ""
    for each in type(exception).__mro__:
        if each.__name__ in _BY_CLASS:
            return _BY_CLASS[each.__name__]
    if isinstance(exception, OSError) and exception.errno in _STORAGE:
        return "storage"
    if isinstance(exception, RuntimeError):
        text = _text(exception)
        for part, reason in _BY_TEXT:
            if part in text:
                return reason
    return "exit"


def _text(exception: BaseException) -> str:
    try:
        return str(exception)
    except Exception:  # noqa: BLE001  # the job's own class
        return ""
