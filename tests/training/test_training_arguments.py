"""What a job passes: numbers of other libraries count, and nothing that it passes raises, or harms what it tells else."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
from bridges_support import wanted
from training_support import Memory, begun_anew, configured, exported, misuses, of, told

from exporter import training
from exporter.recording.values import StatReading
from exporter.training.attributes import Unusable, plain_value, shown, taken
from exporter.training.recording import TRAINING

np: Any = pytest.importorskip("numpy")
torch: Any = importlib.import_module("torch") if importlib.util.find_spec("torch") else None


def tensors(*numbers: float) -> list[Any]:
    """Tensors of these numbers, where torch is installed."""
    return [torch.tensor(number) for number in numbers] if torch is not None else []


class Odd:
    """An object whose every method raises."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __repr__(self) -> str:
        raise RuntimeError("repr")

    def __bool__(self) -> bool:
        raise RuntimeError("bool")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("eq")

    def __hash__(self) -> int:
        raise RuntimeError("hash")

    def __float__(self) -> float:
        raise RuntimeError("float")


class OddText(str):
    """A text whose every comparison raises."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("eq")

    def __hash__(self) -> int:
        raise RuntimeError("hash")


class OddNumber(int):
    """A number that cannot be compared, or be made a float."""

    def __float__(self) -> float:
        raise RuntimeError("float")

    def __lt__(self, other: int) -> bool:
        raise RuntimeError("lt")


itself: list[Any] = []
itself.append(itself)
ODD = [Odd(), OddText("x"), OddNumber(3), itself, {}, [1], 10**400, 10**5000, "\ud800", np.array([1, 2])]
CALLS: list[Callable[[Any], object]] = [
    lambda odd: training.record(loss=odd, samples=odd, tokens=odd, epoch=odd, learning_rate=odd),
    lambda odd: training.record(mode=odd),
    lambda odd: training.describe(model=odd, step_target=odd, world_size=odd, flops_per_token=odd),
    lambda odd: training.step(odd, seconds=odd),
    lambda odd: training.step(mode=odd),
    training.checkpoint_saved,
    lambda odd: training.checkpoint_saved(1, kind=odd, ok=odd, seconds=odd, bytes=odd),
    training.skipped_step,
    training.interruption,
    training.on_app_start,
    training.on_training_single_iteration_start,
    training.on_training_single_iteration_end,
    lambda odd: training.on_train_start(odd, odd, odd, odd, odd),
    lambda odd: training.on_save_checkpoint_start(odd, odd),
    lambda odd: training.on_save_checkpoint_success(odd, odd),
    training.on_save_checkpoint_end,
    training.on_train_end,
]
BLOCKS: list[Callable[[Any], Any]] = [
    training.background,
    training.checkpoint_save,
    training.phase,
    training.span,
    training.timed_span,
    training.training_loop,
    lambda odd: training.span("name", odd, odd, key=odd),
    lambda odd: training.timed_span("name", odd, odd),
]


def fed() -> tuple[StatReading, ...]:
    """What a sidecar would read now of the training."""
    TRAINING.drain()
    return tuple(TRAINING.series())


@pytest.mark.parametrize("number", [np.int64(100), np.uint8(100), *tensors(100)], ids=repr)
def test_steps_are_whole_numbers_of_any_library(number: Any) -> None:
    with begun_anew():
        with training.training_loop(train_iterations_start=number):
            with training.training_iteration():
                pass
            with training.checkpoint_save(number + 1):
                pass
        training.checkpoint_saved(number + 2)
        training.describe(step_target=number)

        assert (told().first_step, of("training.step")) == (100, 101.0)
        assert of("training.checkpoint_last_step") == 102.0
        assert of("training.step_target") == 100.0
        assert not misuses()


@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize("odd", ODD, ids=lambda odd: type(odd).__name__)
def test_nothing_that_is_passed_raises_or_keeps_a_body_from_running(
    odd: Any, tells: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with begun_anew():
        if tells:
            configured(telemetry={}, export_all=True)
        ran = 0
        for call in CALLS:
            call(odd)
        for block in BLOCKS:
            with block(odd):
                ran += 1
        with training.training_loop(train_iterations_start=7), training.training_iteration():
            ran += 1
        fed()

        assert ran == len(BLOCKS) + 1
        assert "defect" not in capfd.readouterr().err


@wanted("torch")
def test_a_tensor_without_a_value_is_unusable() -> None:
    assert isinstance(taken(torch.zeros(1, device="meta")), Unusable)


def test_a_value_that_contains_itself_is_told_as_far_as_it_makes_sense() -> None:
    assert "<list>" in str(plain_value(itself))
    assert shown(10**5000) == "<int>"


def test_static_and_class_methods_can_be_decorated_from_outside() -> None:
    class Model:
        @training.model_forward()
        @staticmethod
        def add(left: int, right: int) -> int:
            return left + right

        @training.model_forward()
        @classmethod
        def name(cls) -> str:
            return cls.__name__

    assert [Model.add(1, 2), Model().add(1, 2), Model().name()] == [3, 3, "Model"]


def test_a_span_of_any_name_is_exported_under_a_text() -> None:
    with begun_anew():
        memory: Memory = configured(telemetry={}, export_all=True)
        with training.application(), training.timed_span([1]), training.span(Odd()):  # type: ignore[arg-type]  # so are jobs
            pass

        names = [name for what, name in exported(memory).names() if what == "start"]
        assert names == ["application", "<list>", "<Odd>"]
