"""The catalogue: generated documents, names of families, and each collector on this machine."""

from __future__ import annotations

import importlib
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from collectors_support import NEEDS_JOB, assert_sound, options_turned_on, text_of
from places import PROJECT
from waiting import WAIT_LIMIT_SECONDS

import exporter
from exporter.collectors.catalogue import CATALOGUE, CollectorEntry
from exporter.collectors.status import SPECS as STATUS_SPECS
from exporter.errors import CollectError
from exporter.families import FamilySpec
from exporter.recording.reserved import RESERVED, RESERVED_PREFIXES

BASE_UNITS = {"", "seconds", "bytes", "hertz", "celsius", "ratio", "joules", "watts", "volts"}


def all_specs() -> list[FamilySpec]:
    """Return all specifications of the package."""
    for module_info in pkgutil.walk_packages(exporter.__path__, "exporter."):
        if not module_info.name.endswith("__main__"):
            try:
                importlib.import_module(module_info.name)
            except ModuleNotFoundError as error:
                if str(error.name).startswith("exporter"):
                    raise  # a missing framework is accepted, a missing module of the package is not
    modules = [module for name, module in sys.modules.items() if name.startswith("exporter.")]
    return [
        spec
        for module in modules
        for member in vars(module).values()
        for spec in (member if isinstance(member, tuple) else (member,))
        if isinstance(spec, FamilySpec)
    ]


def test_the_reference_and_the_reserved_names_are_up_to_date() -> None:
    completed = subprocess.run(
        [sys.executable, "docs/generate_metrics.py", "--check"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert completed.returncode == 0, completed.stderr


def test_the_reference_is_generated_without_opentelemetry() -> None:
    script = (
        "import runpy, sys; sys.modules['opentelemetry'] = None; sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )

    completed = subprocess.run(
        [sys.executable, "-c", script, str(PROJECT / "docs/generate_metrics.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert completed.returncode == 0, completed.stderr
    assert completed.stderr == ""


@pytest.mark.parametrize(
    ("name", "collector"),
    [
        ("host_load1", "cpu"),
        ("gpu_up", "gpu"),
        ("training_energy_joules_total", "energy"),
        ("training_steps_total", "feed"),
        ("training_process_up", "processes"),
    ],
)
def test_the_reference_names_the_collector(name: str, collector: str) -> None:
    lines = (PROJECT / "docs/METRICS.md").read_text(encoding="utf-8").splitlines()
    (table_row,) = [line for line in lines if line.startswith(f"| `{name}` |")]

    assert table_row.endswith(f"| `{collector}` |")


def test_the_reference_lists_the_details_of_a_family_below_its_table() -> None:
    reference = (PROJECT / "docs/METRICS.md").read_text(encoding="utf-8")
    (table_row,) = [line for line in reference.splitlines() if line.startswith("| `training_run_state` |")]

    assert "0 for all other states. [Details](#training_run_state). |" in table_row
    below_table = reference.partition(table_row)[2]
    assert (
        "\n#### training_run_state\n\n- `starting`: no step or validation batch has finished.\n"
        in below_table
    )


def test_no_two_specifications_share_a_name() -> None:
    spec_by_name: dict[str, FamilySpec] = {}
    for spec in all_specs():
        assert spec_by_name.setdefault(spec.name.removesuffix("_total"), spec) == spec


def test_every_sample_name_of_a_machine_family_is_reserved() -> None:
    names = [spec.name for entry in CATALOGUE for spec in entry.specs]

    for name in (*names, "host_cpu_seconds", "exporter_build", "up"):
        assert name.startswith(RESERVED_PREFIXES) or name in RESERVED


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: str(entry.name))
def test_an_entry_of_the_catalogue_describes_its_collector(entry: CollectorEntry) -> None:
    collector = entry.factory(**options_turned_on(entry))

    assert collector.name == entry.name
    assert collector.specs == entry.specs
    assert entry.options.deadline < entry.options.interval
    for spec in entry.specs:
        stem = spec.name.removesuffix({"counter": "_total", "info": "_info"}.get(spec.type, ""))
        assert (spec.type == "counter") == spec.name.endswith("_total")
        assert spec.unit in BASE_UNITS
        assert stem.endswith(f"_{spec.unit}" if spec.unit else "")
        assert spec.help.endswith(".")
        assert spec.source
        assert not {"job", "instance", "le", "quantile", "pid"} & set(spec.labels)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs Linux")
@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: str(entry.name))
def test_each_collector_reads_this_machine_without_a_problem_except_missing_permissions(
    entry: CollectorEntry,
) -> None:
    collector = entry.factory(**options_turned_on(entry))
    try:
        collected = collector.collect()
    except CollectError as error:  # a sandbox may lack the permission
        assert error.reason == "permission"  # noqa: PT017  # either outcome passes the test
        return

    assert_sound(collector, collected)
    assert {reason for reason, _ in collected.problems} <= {"permission"}
    assert collected or collected.unsupported or collected.problems or entry.name in NEEDS_JOB


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing_wrong_with_the_names_of_all_families() -> None:
    specs = [*STATUS_SPECS, *(spec for entry in CATALOGUE for spec in entry.specs)]
    families = [spec.family({("x",) * len(spec.labels): 1.0}) for spec in specs]
    completed = subprocess.run(
        ["promtool", "check", "metrics"],
        input=text_of(families),
        text=True,
        capture_output=True,
        check=False,
        timeout=WAIT_LIMIT_SECONDS,
    )

    assert completed.returncode == 0, completed.stderr
    assert completed.stdout == ""
    assert completed.stderr == ""
