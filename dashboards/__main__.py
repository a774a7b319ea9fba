"""Command `python -m dashboards [--check]`: write the dashboards' JSON files, or compare the files with the code."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from dashboards.board import Board
from dashboards.catalogue import BOARDS

MAX_DIFF_LINES = 200
DIRECTORY = Path(__file__).resolve().parent / "json"


def json_text(board: Board) -> str:
    """Return the content of a dashboard's JSON file."""
    return json.dumps(board.model(), indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def write(directory: Path = DIRECTORY) -> None:
    """Write the JSON files of all dashboards and delete all other JSON files of the directory."""
    for board in BOARDS:
        (directory / f"{board.uid}.json").write_text(json_text(board), encoding="utf-8")
    for path in directory.glob("*.json"):
        if path.stem not in {board.uid for board in BOARDS}:
            path.unlink()


def differences(directory: Path = DIRECTORY) -> Iterator[str]:
    """Yield the differences between the JSON files and the code as lines of a unified diff."""
    expected = {f"{board.uid}.json": json_text(board) for board in BOARDS}
    existing = {path.name: path.read_text(encoding="utf-8") for path in directory.glob("*.json")}
    for name in sorted(expected.keys() | existing.keys()):
        yield from difflib.unified_diff(
            existing.get(name, "").splitlines(),
            expected.get(name, "").splitlines(),
            name,
            f"{name} (code)",
            lineterm="",
            n=1,
        )


def main(arguments: Sequence[str]) -> int:
    """Write or compare the JSON files. Return 1 if compared files differ."""
    parser = argparse.ArgumentParser(prog="python -m dashboards", description=__doc__)
    parser.add_argument(
        "--check",
        action="store_true",
        help="write no file; exit with status 1 if a JSON file differs from the code",
    )
    if not parser.parse_args(arguments).check:
        write()
        return 0
    diff_lines = list(differences())
    sys.stdout.writelines(f"{line}\n" for line in diff_lines[:MAX_DIFF_LINES])
    if len(diff_lines) > MAX_DIFF_LINES:
        sys.stdout.write(f"… {len(diff_lines) - MAX_DIFF_LINES} more lines of the diff are omitted\n")
    return 1 if diff_lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
