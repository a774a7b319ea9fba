"""Migration of source files from `nv_one_logger` to `exporter.one_logger`.

    python -m exporter.one_logger.migrate [--write] PATH...

Prints a unified diff of each Python file; directories are searched for `*.py`. `--write` also changes the files. The migration
rewrites import statements, and module names in calls such as `import_module`, `find_spec` and `patch`. On standard error, it lists
unknown names, other strings with a module name, and files that cannot be read or parsed. The exit status is 1 if anything is
listed, otherwise 0.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PEER_NAME = "nv_one_logger"
PACKAGE_NAME = "exporter.one_logger"
PACKAGE = Path(__file__).resolve().parent
MODULE_ARGUMENTS = frozenset({"import_module", "__import__", "find_spec", "importorskip", "patch", "setattr"})
"""Functions whose first argument may be the name of a module, or of an object in a module."""
NOT_MODULES = frozenset({f"{PEER_NAME}.exporter_configs"})
"""Names that look like a module and stay unchanged: the entry point group, which `exporter.one_logger` reads too."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Replacement of bytes of a file."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class Migration:
    """Result for a file.

    Attributes:
        problems: Line number and text of each problem.
    """

    old_source: bytes
    new_source: bytes
    problems: tuple[tuple[int, str], ...]


def migrate(source: bytes) -> Migration:
    """Return the migrated source of a file.

    Raises:
        SyntaxError: The source is not Python.
    """
    visitor = _Visitor(source)
    visitor.visit(ast.parse(source))
    migrated_source = source
    for edit in sorted(visitor.edits, key=lambda edit: edit.start, reverse=True):
        migrated_source = migrated_source[: edit.start] + edit.text.encode() + migrated_source[edit.end :]
    return Migration(source, migrated_source, tuple(visitor.problems))


class _Visitor(ast.NodeVisitor):
    """Collector of the edits and problems of a file."""

    def __init__(self, source: bytes) -> None:
        self.edits: list[Edit] = []
        self.problems: list[tuple[int, str]] = []
        self._source = source
        self._line_offsets = [0]  # byte offset of each line, after the byte order mark
        for line in source.removeprefix(b"\xef\xbb\xbf").splitlines(keepends=True):
            self._line_offsets.append(self._line_offsets[-1] + len(line))
        self._mark_length = len(source) - self._line_offsets[-1]  # of a byte order mark; 0 without one
        self._rewritten: set[ast.expr] = set()  # strings with an edit

    def visit_Import(self, node: ast.Import) -> None:
        """Rewrite `import nv_one_logger.x` so that the statement binds the same names."""
        for alias in node.names:
            if not _is_peer(alias.name):
                continue
            module = _replacement(alias.name)
            self._check_module(node.lineno, module)
            if alias.asname is not None:
                text = f"{module} as {alias.asname}"
            elif alias.name == PEER_NAME:
                text = f"{PACKAGE_NAME} as {PEER_NAME}"
            else:  # imports the module, and binds the name of the package
                module_alias = alias.name.removeprefix(f"{PEER_NAME}.").replace(".", "_")
                text = f"{module} as _{module_alias}, {PACKAGE_NAME} as {PEER_NAME}"
            self.edits.append(Edit(*self._span(alias), text))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Rewrite `from nv_one_logger.x import y`."""
        if node.level or node.module is None or not _is_peer(node.module):
            return
        start, end = self._span(node)
        match = re.match(rb"from[\s\\]+(nv_one_logger)\b", self._source[start:end])
        if match is not None:
            self.edits.append(Edit(start + match.start(1), start + match.end(1), PACKAGE_NAME))
        module = _replacement(node.module)
        if self._check_module(node.lineno, module):
            for alias in node.names:
                if alias.name not in {"*", *_names(module)}:
                    self._add_problem(node.lineno, f"{module} has no {alias.name}")

    def visit_Call(self, node: ast.Call) -> None:
        """Rewrite a module name that is the first argument of a call."""
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        argument = node.args[0] if node.args else None
        if name in MODULE_ARGUMENTS and isinstance(argument, ast.Constant) and _is_peer(argument.value):
            start, end = self._span(argument)
            offset = self._source.find(PEER_NAME.encode(), start, end)
            if offset >= 0:
                self._rewritten.add(argument)
                self.edits.append(Edit(offset, offset + len(PEER_NAME), PACKAGE_NAME))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Report any other string that names the package or a module."""
        if _is_peer(node.value) and node not in self._rewritten and node.value not in NOT_MODULES:
            self._add_problem(node.lineno, f"the string {node.value!r} is not changed")

    def _check_module(self, line: int, module: str) -> bool:
        """Return True if a module exists. Otherwise add a problem."""
        exists = _file_of(module) is not None
        if not exists:
            self._add_problem(line, f"{module} does not exist")
        return exists

    def _add_problem(self, line: int, text: str) -> None:
        self.problems.append((line, text))

    def _span(self, node: ast.expr | ast.stmt | ast.alias) -> tuple[int, int]:
        """Return the byte offsets of the start and the end of a node in the source."""
        start = self._line_offsets[node.lineno - 1] + node.col_offset
        end = self._line_offsets[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        return self._mark_length + start, self._mark_length + end


def _is_peer(name: object) -> bool:
    """Return True for the name of one-logger's package, or of a module or object in the package."""
    return isinstance(name, str) and (name == PEER_NAME or name.startswith(f"{PEER_NAME}."))


def _replacement(module: str) -> str:
    """Return the name of a module in this package, such as `exporter.one_logger.api` for `nv_one_logger.api`."""
    return PACKAGE_NAME + module.removeprefix(PEER_NAME)


def _file_of(module: str) -> Path | None:
    """Return the file of `exporter.one_logger` or of a module in it; None if the file does not exist."""
    path = PACKAGE.joinpath(*module.removeprefix(PACKAGE_NAME).split("."))
    files = (file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file())
    return next(files, None)


@cache
def _names(module: str) -> frozenset[str]:
    """Return the names that can be imported from a module, without importing the module."""
    path = _file_of(module)
    if path is None:
        return frozenset()
    names = {file.stem for file in path.parent.glob("*") if path.name == "__init__.py"}
    for statement in ast.parse(path.read_bytes()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            names |= set(ast.literal_eval(statement.value))
    return frozenset(names)


def _python_files(paths: Sequence[str]) -> Iterator[Path]:
    """Yield each path of a file, and the Python files in each directory."""
    for path in map(Path, paths):
        yield from sorted(path.rglob("*.py")) if path.is_dir() else (path,)


def main(arguments: Sequence[str] | None = None) -> int:
    """Migrate files, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m exporter.one_logger.migrate",
        description="Rewrite imports of nv_one_logger to exporter.one_logger, and print a diff.",
    )
    parser.add_argument("--write", action="store_true", help="change the files")
    parser.add_argument("path", nargs="+", help="Python file, or directory of Python files")
    options = parser.parse_args(arguments)
    is_complete = True
    for path in _python_files(options.path):
        try:
            migration = migrate(path.read_bytes())
            old_lines = migration.old_source.decode().splitlines(keepends=True)
            new_lines = migration.new_source.decode().splitlines(keepends=True)
            if options.write and migration.new_source != migration.old_source:
                path.write_bytes(migration.new_source)
        except (OSError, SyntaxError, ValueError) as error:
            sys.stderr.write(f"{path}: {error}\n")
            is_complete = False
            continue
        sys.stdout.writelines(difflib.unified_diff(old_lines, new_lines, f"{path}", f"{path} (migrated)"))
        for line, problem in migration.problems:
            sys.stderr.write(f"{path}:{line}: {problem}\n")
            is_complete = False
    return 0 if is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
