"""Command `python -m dashboards [--check]`: write the JSON files of the dashboards, or check them."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from dashboards.board import Board
from dashboards.catalogue import BOARDS

MOST_LINES = 200
DIRECTORY = Path(__file__).resolve().parent / "json"


def text_of(board: Board) -> str:
    """Return the content of a dashboard's file."""
    return json.dumps(board.model(), indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def write(directory: Path = DIRECTORY) -> None:
    """Write all dashboards, and remove files of removed dashboards."""
    for board in BOARDS:
        (directory / f"{board.uid}.json").write_text(text_of(board), encoding="utf-8")
    for path in directory.glob("*.json"):
        if path.stem not in {board.uid for board in BOARDS}:
            path.unlink()


def differences(directory: Path = DIRECTORY) -> Iterator[str]:
    """Yield the differences between the files and the code, as lines of a diff."""
    wanted = {f"{board.uid}.json": text_of(board) for board in BOARDS}
    found = {path.name: path.read_text(encoding="utf-8") for path in directory.glob("*.json")}
    for name in sorted(wanted.keys() | found.keys()):
        yield from difflib.unified_diff(
            found.get(name, "").splitlines(),
            wanted.get(name, "").splitlines(),
            name,
            f"{name} (code)",
            lineterm="",
            n=1,
        )


def main(arguments: Sequence[str]) -> int:
    """Write or check the files; returns 1 if checked files differ."""
    parser = argparse.ArgumentParser(prog="python -m dashboards", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 when files differ")
    if not parser.parse_args(arguments).check:
        write()
        return 0
    found = list(differences())
    sys.stdout.writelines(f"{line}\n" for line in found[:MOST_LINES])
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
