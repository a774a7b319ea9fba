"""Shared parts of the bridges: hooks on methods and imports, the active source, the tracker of open blocks, and batch sizes."""

from __future__ import annotations

import importlib
import importlib.util
import signal
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from bridges_support import STEPS, run_job
from programs import code_of
from programs.loop_tracker import call_hooks_in_any_order

from exporter import patching
from exporter.bridges.batches import samples_and_tokens
from exporter.bridges.sources import ActiveSource, Source, Strength
from exporter.patching import Around, Hook, patch, patch_existing


class Library:
    """Class of another library with a method that bridges patch."""

    def work(self, number: int, *, fail: bool = False) -> int:
        if fail:
            raise KeyError("the job's own")
        return number + 1


@pytest.fixture
def library() -> type[Library]:
    return type("Copy", (), dict(vars(Library)))  # the same method in a separate class


def observe_calls(observed_values: list[Any]) -> Hook:
    """Return a hook that collects the argument and the outcome of each call."""

    def hook(_self: object, number: int, **_rest: object) -> Around:
        observed_values.append(number)
        observed_values.append((yield))

    return hook


def raise_before(*_args: Any, **_kwargs: Any) -> Around:
    raise RuntimeError("a bridge's own")


def raise_after(*_args: Any, **_kwargs: Any) -> Around:
    yield
    raise RuntimeError("a bridge's own")


def raise_timeout(*_args: object) -> None:
    raise TimeoutError("the job's own")


def send_signal_before(*_args: Any, **_kwargs: Any) -> Around:
    signal.raise_signal(signal.SIGUSR1)
    yield


def send_signal_after(*_args: Any, **_kwargs: Any) -> Around:
    yield
    signal.raise_signal(signal.SIGUSR1)


def test_a_patched_method_returns_and_raises_as_before(library: type[Library]) -> None:
    observed_values: list[Any] = []
    for _ in range(2):  # the second patch changes nothing
        patch(library, "work", observe_calls(observed_values))

    assert library().work(1) == 2
    with pytest.raises(KeyError, match="the job's own") as error_info:
        library().work(3, fail=True)
    assert observed_values[:3] == [1, (2, None), 3]
    assert isinstance(observed_values[3][1], KeyError)
    if sys.version_info >= (3, 11):  # before 3.11, a bare raise repeats the frame
        files = {Path(frame.filename).name for frame in traceback.extract_tb(error_info.value.__traceback__)}
        assert files == {Path(__file__).name}


@pytest.mark.parametrize("hook", [raise_before, raise_after, lambda *_args: None])
def test_a_hook_that_raises_or_does_not_observe_the_call_changes_nothing(
    library: type[Library], hook: Hook
) -> None:
    patch_existing(library, ("missing", "work"), hook)  # names that the library lacks are skipped

    assert hasattr(library.work, "__wrapped__")
    assert library().work(1) == 2


@pytest.mark.parametrize("hook", [send_signal_before, send_signal_after])
def test_the_error_of_a_signal_handler_during_a_hook_reaches_the_job(
    library: type[Library], hook: Hook
) -> None:
    patch_existing(library, ("work",), hook)
    previous_handler = signal.signal(signal.SIGUSR1, raise_timeout)
    try:
        with pytest.raises(TimeoutError):
            library().work(1)
    finally:
        signal.signal(signal.SIGUSR1, previous_handler)


# Hooks that are called after an import ----------------------------------------------------------------------------


@pytest.fixture
def module_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module onto the import path, and return its name."""
    name = f"imported_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text("answer = 5\nloaders = __spec__.loader, __loader__\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_a_hook_is_called_once_after_the_import_and_is_then_removed(
    module_name: str,
) -> None:
    modules, finders = list[ModuleType](), list(sys.meta_path)
    patching.when_imported(module_name, lambda module: module.missing)
    patching.when_imported(module_name, modules.append)
    assert importlib.util.find_spec(module_name) is not None  # finds the module without importing it
    assert modules == []

    module = importlib.import_module(module_name)

    assert modules == [module]
    assert module.answer == 5
    assert {type(loader).__name__ for loader in module.loaders} == {"SourceFileLoader"}
    assert sys.meta_path == finders


def test_a_hook_waits_for_a_module_that_cannot_be_imported_yet(module_name: str, tmp_path: Path) -> None:
    modules: list[ModuleType] = []
    source = tmp_path / f"{module_name}.py"
    valid_source = source.read_text()
    source.write_text("raise ValueError('not yet')")
    patching.when_imported(module_name, modules.append)
    with pytest.raises(ValueError, match="not yet"):
        importlib.import_module(module_name)
    source.write_text(valid_source + "\n# another size, so that the bytecode cache is not used\n")

    importlib.invalidate_caches()
    importlib.import_module(module_name)

    assert len(modules) == 1


def test_a_hook_on_a_module_that_is_being_imported_is_called_after_the_import(
    module_name: str, tmp_path: Path
) -> None:
    hook = f"from exporter import patching\nmodules = []\npatching.when_imported({module_name!r}, modules.append)\n"
    (tmp_path / f"{module_name}.py").write_text(f"{hook}assert not modules\n")
    (tmp_path / f"{module_name}_next.py").touch()

    module = importlib.import_module(module_name)
    importlib.import_module(f"{module_name}_next")

    assert module.modules == [module]


# The active source -------------------------------------------------------------------------------------------------------


class CountingSource(Source):
    def __init__(self, strength: Strength) -> None:
        self.strength = strength
        self.superseded_count = 0

    def superseded(self) -> None:
        self.superseded_count += 1


def test_a_stronger_source_replaces_a_weaker_source_and_is_released_to_the_fallback() -> None:
    active, fallback = ActiveSource(), CountingSource(Strength.INFERRED)
    leading, second_leading = CountingSource(Strength.LEADING), CountingSource(Strength.LEADING)
    instrumented = CountingSource(Strength.INSTRUMENTED)
    active.set_fallback(fallback)

    assert active.source is fallback
    assert active.activate(instrumented)
    assert active.activate(leading)
    assert active.activate(leading)
    assert not active.activate(instrumented)
    assert not active.activate(second_leading)
    active.release(second_leading)
    assert active.source is leading
    active.release(leading)
    assert active.source is fallback
    assert fallback.superseded_count == 1
    assert instrumented.superseded_count == 1
    assert leading.superseded_count == 0


# The tracker ---------------------------------------------------------------------------------------------------


def test_in_any_order_of_hooks_no_block_stays_open_and_every_step_is_counted(tmp_path: Path) -> None:
    ended_job = run_job(tmp_path, code_of(call_hooks_in_any_order))
    steps, open_level_count = map(int, ended_job.process.stdout.split())

    assert open_level_count == 0
    assert steps > 50
    assert ended_job.differences({STEPS: steps, "misuse_total": None}) == {}


# Batches ------------------------------------------------------------------------------------------------------


class Shaped:
    """Tensor that has only a shape."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (Shaped(4, 3), (4, None)),
        ([Shaped(5, 3), Shaped(5)], (5, None)),
        ((Shaped(5, 3), {"y": Shaped(5)}), (5, None)),
        ({"input_ids": Shaped(2, 8), "labels": Shaped(2, 8)}, (2, 16)),
        ({"image": Shaped(6, 3, 8, 8)}, (6, None)),
        (["a", "b", "c"], (3, None)),
        ([[Shaped(7)], [Shaped(7)]], (7, None)),
        *((countless, (None, None)) for countless in (Shaped(), None, object(), {}, [], "text", 5)),
        ({"input_ids": Shaped(16)}, (16, None)),
    ],
)
def test_the_samples_of_a_batch_are_counted_from_its_shapes(
    batch: object, expected: tuple[int | None, int | None]
) -> None:
    assert samples_and_tokens(batch) == expected
