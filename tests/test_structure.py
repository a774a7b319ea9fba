"""Structure of the package: imports between its parts, public names, effects of the import; and names of test files."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import conftest

import exporter

PACKAGE = Path(exporter.__file__).parent
PROJECT = PACKAGE.parent

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "diagnoses": set(),
    "recording": {"errors"},
    "feed": {
        "errors",
        "recording.exponential",
        "recording.limits",
        "recording.stacks",
        "recording.value_class",
        "recording.values",
    },
    "recorder": {"errors", "version", "recording", "responder", "feed", "training"},
    "process": {"errors", "feed", "recorder", "recording", "training"},
    "": {"errors", "version", "process", "recording", "training"},
    "monitor": {"errors", "recording"},
    "patching": {"recording.notices", "recording.signal_safety"},
    "elastic": {"errors", "feed.runs", "patching", "recording"},
    "training": {"errors", "recording"},
    "bridges": {"elastic", "errors", "patching", "recording", "training"},
    "one_logger": {"bridges", "errors", "recording", "training"},
    "autoload": set(),
    "families": {"errors"},
    "config": {"errors"},
    "collectors": {"config", "diagnoses", "errors", "families", "feed", "recording.values", "version"},
    "replay": {"collectors", "config", "errors"},
    "ledger": {
        "config",
        "diagnoses",
        "errors",
        "families",
        "feed",
        "collectors.energy",
        "collectors.job",
        "recording.reserved",
        "recording.values",
        "training.phases",
    },
    "responder": {
        "feed.entries",
        "feed.stacks",
        "recording.stacks",
        "recording.value_class",
        "training.collectives",
    },
    "hangs": {"collectors.job", "collectors.kernel_files", "errors", "families", "feed", "recording.stacks"},
    "exposition": {"families", "recording.exponential", "recording.reserved"},
    "web": {"config", "errors", "exposition", "families"},
    "status": {"collectors.status", "diagnoses", "families", "feed", "training.phases"},
    "cli": {"*"},
    "__main__": {"cli"},
}
"""Allowed imports of the package, by part: a folder or a file of the package. ARCHITECTURE.md has the same table."""

THIRD_PARTY: dict[str, set[str]] = {
    "bridges": {"exporter_auto", "torch"},
    "one_logger": {"opentelemetry"},
    "config": {"yaml"},
    "families": {"prometheus_client"},
    "collectors": {"prometheus_client", "psutil", "pynvml"},
    "replay": {"pynvml", "yaml"},
    "ledger": {"prometheus_client"},
    "exposition": {"prometheus_client"},
    "status": {"jinja2", "markupsafe", "prometheus_client"},
    "web": {"h11", "bcrypt", "prometheus_client"},
    "cli": {"opentelemetry", "prometheus_client", "psutil"},
}
"""Allowed imports of third-party packages, by part."""

FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """Return the part of a file: its folder directly below the package, or its own name; "" for the package's `__init__.py`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


@functools.cache
def import_statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Return the import statements of a file, including those in functions and type-checking blocks."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def imports_of(path: Path) -> set[str]:
    """Return the modules that a file imports."""
    modules: set[str] = set()
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        else:
            assert node.level == 0, f"{path}: relative import"
            modules.add(node.module or "")
            if node.module == "exporter":
                modules.update(f"exporter.{alias.name}" for alias in node.names)
    return modules


def test_a_file_imports_only_what_the_table_allows() -> None:
    part_by_path = {path: part_of(path) for path in FILES}
    assert set(part_by_path.values()) <= set(MAY_IMPORT), (
        "add a new folder or file to MAY_IMPORT and ARCHITECTURE.md"
    )

    assert [
        f"{path.relative_to(PACKAGE)} imports {module}"
        for path, part in part_by_path.items()
        for module in imports_of(path)
        if not may_import(part, module)
    ] == []


def test_the_simulated_job_uses_the_public_api_like_a_job_of_a_user() -> None:
    imported = imports_of(PACKAGE / "cli/simulated_job.py")
    own_modules = {module for module in imported if module.partition(".")[0] == "exporter"}

    public_names = {f"exporter.{name}" for name in exporter.__all__}
    assert own_modules <= {"exporter", "exporter.cli.child", *public_names}  # `child` starts the ranks


def may_import(part: str, module: str) -> bool:
    """Return True if the tables allow a part to import a module."""
    top_level, _, own_name = module.partition(".")
    if module == "exporter":
        return True
    if top_level == "exporter":
        imported_part = own_name.split(".")[0]
        allowed_modules = MAY_IMPORT[part]
        return (
            imported_part == part
            or "*" in allowed_modules
            or any(f"{own_name}.".startswith(f"{allowed}.") for allowed in allowed_modules)
        )
    return (
        top_level in sys.stdlib_module_names
        or top_level == "typing_extensions"
        or top_level in THIRD_PARTY.get(part, set())
    )


def graph_of_files() -> dict[str, set[str]]:
    """Return the modules of the package that each module imports, also in functions and type-checking blocks."""
    modules = {".".join(("exporter", *module_parts(path))): path for path in FILES}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        imports = imports_of(path) & modules.keys()
        for node in import_statements(path):
            if isinstance(node, ast.ImportFrom):
                submodules = {f"{node.module}.{alias.name}" for alias in node.names} & modules.keys()
                imports |= submodules
                if len(submodules) == len(node.names):  # only submodules, and no name of the package itself
                    imports.discard(node.module or "")
        graph[module] = imports - {module, "exporter"}
    return graph


def module_parts(path: Path) -> tuple[str, ...]:
    """Return the names in the dotted name of a module below `exporter`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def cycles_of(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules that are on a cycle or between two cycles.

    The function repeatedly removes all modules that import no remaining module or that no remaining module imports.
    """
    remaining = dict(graph)
    while True:
        imported_modules = {module for imports in remaining.values() for module in imports}
        ends = {
            module for module, imports in remaining.items() if not imports or module not in imported_modules
        }
        if not ends:
            return sorted(remaining)
        remaining = {module: imports - ends for module, imports in remaining.items() if module not in ends}


def test_no_file_and_no_folder_is_part_of_an_import_cycle() -> None:
    files = graph_of_files()
    folders: dict[str, set[str]] = {}
    for module, imports in files.items():
        part = module.split(".")[1] if "." in module else ""
        folders.setdefault(part, set()).update({target.split(".")[1] for target in imports} - {part})

    assert cycles_of(files) == []
    assert cycles_of(folders) == []


def test_the_import_table_matches_the_architecture_document() -> None:
    document = (PROJECT / "ARCHITECTURE.md").read_text(encoding="utf-8")

    for part, allowed in MAY_IMPORT.items():
        file_or_folder = f"`{part}`" if part else "`exporter/__init__`"
        row = next((line for line in document.splitlines() if line.startswith(f"| {file_or_folder} |")), "")
        cells = [cell.strip() for cell in row.split("|")]
        assert len(cells) > 3, f"no row for {file_or_folder}"
        package_cell = (
            "anything" if "*" in allowed else ", ".join(f"`{module}`" for module in sorted(allowed)) or "none"
        )
        third_party_cell = (
            ", ".join(f"`{module}`" for module in sorted(THIRD_PARTY.get(part, set()))) or "none"
        )
        assert cells[2:4] == [package_cell, third_party_cell], file_or_folder


def test_every_file_that_the_architecture_document_names_exists() -> None:
    document = (PROJECT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    names = sorted(set(re.findall(r"`([a-z_/]+\.py)`", document)))

    assert len(names) > 30
    assert [name for name in names if not ((PACKAGE / name).exists() or (PROJECT / name).exists())] == []


def test_dunder_all_is_sorted_and_importable() -> None:
    assert exporter.__all__ == sorted(exporter.__all__)
    for name in exporter.__all__:
        assert getattr(exporter, name) is not None


def test_dir_shows_the_public_names() -> None:
    assert dir(exporter) == exporter.__all__


IMPORT_EFFECTS = """
import json, sys, threading
modules_before = set(sys.modules)
effects = []
def hook(event, arguments):
    if event == "open":
        effects.append(str(arguments[0]))
    elif event in ("socket.connect", "subprocess.Popen", "os.fork", "os.mkdir", "os.rename"):
        effects.append(event)
sys.addaudithook(hook)
import exporter
from exporter import Aggregation, Stat
loaded = {name.split(".")[0] for name in set(sys.modules) - modules_before}
print(json.dumps({
    "third_party_modules": sorted(loaded - {"exporter"} - sys.stdlib_module_names),
    "threads": threading.active_count(),
    "effects": [effect for effect in effects if not effect.endswith((".py", ".pyc")) and ".pyc." not in effect],
}))
"""
"""Program that prints the third-party modules, the number of threads, and the effects of the import.

An effect is an opened file other than source or bytecode, a connection, a process, or a change of the filesystem.
"""


def test_importing_loads_no_other_package_starts_no_thread_and_opens_no_file(tmp_path: Path) -> None:
    bare = tmp_path / "bare"  # an interpreter without preloaded site packages
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    program = f"import sys; sys.path.append({str(PROJECT)!r})\n{IMPORT_EFFECTS}"

    # Python itself writes the bytecode of changed files (`-B` prevents the write).
    completed = subprocess.run(
        [str(bare / "bin/python"), "-B", "-c", program], capture_output=True, text=True, check=True
    )

    assert json.loads(completed.stdout) == {"third_party_modules": [], "threads": 1, "effects": []}


SHARED_NAMES = {"Aggregation", "ConsoleHandler", "Event", "EventHandler", "Stat", "Timer"}
"""Names that the compatibility modules have in common with the libraries that they replace."""
COMPATIBILITY = {"elastic", "monitor", "one_logger", "training"}
"""Compatibility modules; `training` has the spans and events that `one_logger` exports under the names of one-logger."""


def test_a_class_name_means_one_class() -> None:
    paths_by_class: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not (
                node.name in SHARED_NAMES and part_of(path) in COMPATIBILITY
            ):
                paths_by_class.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))

    assert {name: paths for name, paths in paths_by_class.items() if len(paths) > 1} == {}


def test_the_files_that_start_first_or_in_one_worker_exist() -> None:
    existing_files = {path.stem for path in (PROJECT / "tests").rglob("test_*.py")}

    assert {*conftest.SLOWEST_FILES, *conftest.FILES_THAT_IMPORT_TORCH} - existing_files == set()
