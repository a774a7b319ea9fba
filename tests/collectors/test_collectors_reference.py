"""What is made from the collectors' specifications: the reference, the reserved names, the catalogue."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest
from places import PROJECT

import exporter
from exporter.collectors.catalogue import CATALOGUE, CollectorEntry
from exporter.families import FamilySpec
from exporter.recording.reserved import RESERVED, RESERVED_PREFIXES

ROOT = PROJECT

BASE_UNITS = {"", "seconds", "bytes", "hertz", "celsius", "ratio", "joules", "watts", "volts"}


def all_specs() -> list[FamilySpec]:
    """Every specification in the package, whether its module lists it or not."""
    for found in pkgutil.walk_packages(exporter.__path__, "exporter."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
    modules = [module for name, module in sys.modules.items() if name.startswith("exporter.")]
    return [
        spec
        for module in modules
        for member in vars(module).values()
        for spec in (member if isinstance(member, tuple) else (member,))
        if isinstance(spec, FamilySpec)
    ]


def test_the_reference_and_the_reserved_names_are_up_to_date() -> None:
    checked = subprocess.run(
        [sys.executable, "docs/generate_metrics.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert checked.returncode == 0, checked.stderr


def test_every_family_in_the_code_is_in_the_reference() -> None:
    text = (ROOT / "docs/METRICS.md").read_text(encoding="utf-8")
    specs = all_specs()

    assert len(specs) > 50
    assert [spec.name for spec in specs if f"| `{spec.name}` |" not in text] == []


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
def test_the_reference_tells_the_collector(name: str, collector: str) -> None:
    text = (ROOT / "docs/METRICS.md").read_text(encoding="utf-8")
    [row] = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]

    assert row.endswith(f"| `{collector}` |")


def test_no_two_specifications_share_a_name() -> None:
    by_name: dict[str, FamilySpec] = {}
    for spec in all_specs():
        assert by_name.setdefault(spec.name.removesuffix("_total"), spec) == spec


def test_every_form_of_a_name_of_the_machine_is_reserved() -> None:
    names = [spec.name for entry in CATALOGUE for spec in entry.specs]

    for name in (*names, "host_cpu_seconds", "exporter_build", "up"):
        assert name.startswith(RESERVED_PREFIXES) or name in RESERVED


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: str(entry.name))
def test_an_entry_of_the_catalogue_describes_its_collector(entry: CollectorEntry) -> None:
    collector = entry.factory(**{each.name: True for each in entry.settings if each.default is False})

    assert collector.name == entry.name
    assert collector.specs == entry.specs
    assert entry.deadline_seconds < entry.interval_seconds
    for spec in entry.specs:
        stem = spec.name.removesuffix({"counter": "_total", "info": "_info"}.get(spec.type, ""))
        assert (spec.type == "counter") == spec.name.endswith("_total")
        assert spec.unit in BASE_UNITS
        assert stem.endswith(f"_{spec.unit}" if spec.unit else "")
        assert spec.help.endswith(".")
        assert spec.source
        assert not {"job", "instance", "le", "quantile", "pid"} & set(spec.labels)
