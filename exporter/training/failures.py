"""Exit reasons: mapping from exceptions to `END_REASONS`."""

from __future__ import annotations

import errno

from exporter.recording.signal_safety import is_from_signal_handler

_CLASSES = {
    "user": ("KeyboardInterrupt",),
    "gpu_memory": ("OutOfMemoryError",),
    "gpu": ("AcceleratorError",),
    "nccl_timeout": ("DistBackendError",),
    "network": ("DistNetworkError", "DistStoreError", "ConnectionError", "TimeoutError"),
    "host": ("MemoryError",),
    "storage": ("EOFError",),
}
"""Names of exception classes by reason."""
_TEXTS = {
    "gpu_memory": ("out of memory",),
    "nccl_timeout": ("NCCL",),
    "gpu": ("CUDA error", "CUDNN", "cuBLAS", "CUBLAS"),
    "storage": ("No space left",),
    "network": ("Connection reset", "Connection refused", "Connection closed"),
    "host": ("DataLoader worker",),
}
"""Parts of the text of a RuntimeError by reason."""
_STORAGE = frozenset({errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.ESTALE})


def reason_of(exception: BaseException) -> str:
    """Return the exit reason for an exception that ends the job, or "" for an orderly exit. Never raises."""
    if isinstance(exception, SystemExit):
        code = exception.code
        return "" if code is None or (isinstance(code, int) and code == 0) else "exit"
    if isinstance(exception, GeneratorExit):
        return ""
    for exception_class in type(exception).__mro__:
        for reason, names in _CLASSES.items():
            if exception_class.__name__ in names:
                return reason
    try:
        if isinstance(exception, OSError) and exception.errno in _STORAGE:
            return "storage"
        text = str(exception) if isinstance(exception, RuntimeError) else ""
    except Exception as error:  # `__str__` of the job's own exception class, or an `errno` without a hash
        if is_from_signal_handler(error):
            raise
        text = ""
    reasons = (reason for reason, parts in _TEXTS.items() if any(part in text for part in parts))
    return next(reasons, "exit")
