"""A page of some families only: what `/metrics?name[]=…` asks for.

Used in the sidecar, on a worker thread. A whole body comes in, as it was rendered; its lines go out, or do not. Pure
functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
    return _joined(lines for named, lines in _families(body) if not named or any(map(wanted, named)))


def omit(body: bytes, names: Iterable[str]) -> bytes:
    """Leave out families, and keep the others; names as in `select`."""
    unwanted = _matcher(names)
    return _joined(lines for named, lines in _families(body) if not any(map(unwanted, named)))


def _families(body: bytes) -> Iterator[tuple[set[bytes], list[bytes]]]:
    """Give the names of each family and its samples, and its lines; the end of the page has no name."""
    family, names, lines = b"", set[bytes](), list[bytes]()
    for line in body.split(b"\n")[:-1]:  # not splitlines: a label may have a carriage return
        header = line.startswith(b"# ")
        if line == _END:
            name = b""
        elif header:
            name = line.split(b" ", 3)[2]
        else:
            name = line.partition(b"{")[0].partition(b" ")[0]
        if header and name != family:
            yield names, lines
            family, names, lines = name, set(), []
        if name:
            names.add(name)
        lines.append(line)
    yield names, lines


def _joined(families: Iterable[list[bytes]]) -> bytes:
    return b"".join([line + b"\n" for lines in families for line in lines])


def _matcher(names: Iterable[str]) -> Callable[[bytes], bool]:
    names = tuple(names)
    exact = {name.encode() for name in names}
    patterns = [name for name in names if "*" in name or "?" in name]

    def wanted(name: bytes) -> bool:
        return name in exact or any(fnmatchcase(name.decode(), pattern) for pattern in patterns)

    return wanted
