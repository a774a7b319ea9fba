"""Specifications of families: checks at construction, and the lists of the modules."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import exporter
from exporter.collectors.catalogue import CATALOGUE
from exporter.errors import CollectError
from exporter.families import MAX_PROBLEMS_PER_REASON, Collected, FamilyCache, FamilySpec

VALID_FIELDS: dict[str, Any] = {
    "name": "host_wait_seconds_total",
    "type": "counter",
    "unit": "seconds",
    "labels": ("device",),
    "help": "Time spent waiting.",
    "source": "/proc/wait",
}


def test_a_consistent_specification_is_accepted() -> None:
    assert FamilySpec(**VALID_FIELDS).labels == ("device",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "host_wait_seconds"}, "the name of type counter ends in _total"),
        ({"type": "gauge"}, "the name of type gauge does not end in _total"),
        ({"name": "host_wait_info", "type": "gauge", "unit": ""}, "gauge does not end in _info"),
        ({"type": "info", "unit": ""}, "the name of type info ends in _info"),
        ({"type": "timer"}, "no exposition type timer"),
        ({"unit": ""}, "is not the base unit at the end of the name"),
        ({"unit": "bytes"}, "is not the base unit at the end of the name"),
        ({"name": "host_Wait_seconds_total"}, "lower case"),
        ({"labels": ("device", "device")}, "not distinct"),
        ({"labels": ("not a name",)}, "not distinct lower case names"),
        ({"help": " "}, "help or source is empty"),
        ({"source": ""}, "help or source is empty"),
    ],
)
def test_a_specification_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FamilySpec(**VALID_FIELDS | changes)


def test_a_specification_is_written_with_keywords_only() -> None:
    with pytest.raises(TypeError):
        FamilySpec("host_load1", "gauge", "Load.")  # type: ignore[call-arg]


def test_a_cached_family_is_the_same_object_while_no_value_changes() -> None:
    cache, spec = FamilyCache(), FamilySpec(**VALID_FIELDS)
    family = cache.family(spec, {("sda",): 1.0})

    assert cache.family(spec, {("sda",): 1.0}) is family


@pytest.mark.parametrize(
    "values",
    [{("sda",): 2.0}, {("sdb",): 1.0}, {("sda",): 1.0, ("sdb",): 1.0}, {("sdb",): 1.0, ("sda",): 1.0}],
)
def test_a_cached_family_has_the_values_of_the_last_pass(values: dict[tuple[str, ...], float]) -> None:
    cache, spec = FamilyCache(), FamilySpec(**VALID_FIELDS)
    cache.family(spec, {("sda",): 1.0})

    assert cache.family(spec, values) == spec.family(values)
    assert cache.values(spec) == values


def test_a_family_without_values_is_absent_and_leaves_the_cache() -> None:
    cache, spec = FamilyCache(), FamilySpec(**VALID_FIELDS)
    cache.family(spec, {("sda",): 1.0})

    assert cache.family(spec, {}) is None
    assert cache.values(spec) is None


def test_the_problems_of_a_pass_are_limited_for_each_reason() -> None:
    collected = Collected()
    for number in range(MAX_PROBLEMS_PER_REASON + 2):
        with collected.part():
            raise CollectError(f"file {number}", reason="malformed")
    collected.fail(CollectError("a directory", reason="permission"))

    kept_problems = [("malformed", f"file {number}") for number in range(MAX_PROBLEMS_PER_REASON)]
    assert collected.problems == [*kept_problems, ("permission", "a directory")]


def sidecar_modules() -> list[ModuleType]:
    """Return the modules of the folders that publish families."""
    folders = ("collectors", "ledger", "exposition", "web", "cli")
    return [
        importlib.import_module(module_info.name)
        for folder in folders
        for module_info in pkgutil.walk_packages([f"{exporter.__path__[0]}/{folder}"], f"exporter.{folder}.")
    ]


def spec_constants(module: ModuleType) -> dict[str, FamilySpec]:
    """Return the specifications that a module assigns to names, by name."""
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    names = [
        target.id
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    ]
    values = {name: getattr(module, name) for name in names}
    return {
        name: getattr(value, "spec", value)
        for name, value in values.items()
        if isinstance(getattr(value, "spec", value), FamilySpec)
    }


def test_each_specification_is_a_constant_and_listed_in_a_tuple_of_specifications() -> None:
    modules = sidecar_modules()
    constant_specs = {spec for module in modules for spec in spec_constants(module).values()}
    listed_specs = {spec for module in modules for spec in getattr(module, "SPECS", ())}

    assert {spec.name for spec in constant_specs - listed_specs} == set()
    assert {spec.name for spec in listed_specs - constant_specs} == set()


def test_each_family_of_a_collector_of_the_catalogue_is_listed_once() -> None:
    for entry in CATALOGUE:
        names = [spec.name for spec in entry.specs]

        assert len(names) == len(set(names)), entry.name
