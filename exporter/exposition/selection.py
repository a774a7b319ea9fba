"""A page of some families only: what `/metrics?name[]=…` asks for.

Used in the sidecar, on a worker thread. A whole body comes in, as it was rendered; its lines go out, or do not. Pure
functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

_END = b"# EOF"


def select(body: bytes, names: Iterable[str]) -> bytes:
    """Keep some families, whole: OpenMetrics knows no histogram without its buckets.

    Args:
        body: In either format, plain.
        names: Of families, or of samples that stand for theirs (`step_seconds_count`); `*` stands for any characters,
            `?` for one.
    """
    wanted = _matcher(names)
    known: dict[bytes, bool] = {}
    kept: list[bytes] = []
    waiting: list[bytes] = []  # lines of a family that was not asked for yet
    family, whole = b"", False
    for line in body.split(b"\n")[:-1]:  # not splitlines: a label may have a carriage return
        if line == _END:
            kept.append(line)
            continue
        header = line.startswith(b"# ")
        name = line.split(b" ", 3)[2] if header else line.partition(b"{")[0].partition(b" ")[0]
        if header and name != family:
            family, whole, waiting = name, False, []
        if name not in known:
            known[name] = wanted(name)
        if known[name] and not whole:
            whole = True
            kept += waiting
        (kept if whole else waiting).append(line)
    return b"".join([line + b"\n" for line in kept])


def _matcher(names: Iterable[str]) -> Callable[[bytes], bool]:
    names = tuple(names)
    exact = {name.encode() for name in names}
    patterns = [name for name in names if "*" in name or "?" in name]

    def wanted(name: bytes) -> bool:
        return name in exact or any(fnmatchcase(name.decode(), pattern) for pattern in patterns)

    return wanted
