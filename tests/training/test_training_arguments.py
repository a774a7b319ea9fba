"""Arguments of the training API: numbers of any library are accepted, and no argument raises or affects other values."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_logger_support import configure, unconfigured, wait_for_delivery
from training_support import misuse_counts, publish_and_read, published_value, summary_values, train

from exporter import one_logger, training
from exporter.recording.conversion import Unconvertible, to_scalar

pytestmark = pytest.mark.usefixtures("unconfigured_process")

EXPORT_ALL = (one_logger.ExportCustomizationMode.EXPORT_ALL_SPANS,)
np: Any = pytest.importorskip("numpy")


def refuse(*_: object) -> Any:
    raise RuntimeError


class RaisingObject:
    """Object that raises in its special methods and at any access to an unknown attribute."""

    __getattr__ = __repr__ = __bool__ = __eq__ = __hash__ = __float__ = refuse


class IncomparableText(str):
    """String that raises in comparisons for equality and when it is hashed."""

    __slots__ = ()
    __eq__ = __hash__ = refuse


class UnconvertibleNumber(int):
    """Number that raises when compared with `<` or converted to a float."""

    __float__ = __lt__ = refuse


recursive_list: list[Any] = []
recursive_list.append(recursive_list)
HOSTILE_VALUES = [
    RaisingObject(),
    IncomparableText("x"),
    UnconvertibleNumber(3),
    recursive_list,
    {},
    [1],
    10**400,
    10**5000,
    "\ud800",
    np.array([1, 2]),
]
CALLS = [name for name in training.__all__ if name[0].islower() and name not in {"assert_that", "batches"}]


def hostile_arguments(name: str, hostile_value: Any) -> Iterator[dict[str, Any]]:
    """Yield hostile arguments of a call: the required arguments alone, with all optional arguments, and with each."""
    parameters = inspect.signature(getattr(training, name)).parameters.values()
    required_arguments = {
        parameter.name: hostile_value for parameter in parameters if parameter.default is parameter.empty
    }
    optional_arguments = {
        parameter.name: hostile_value for parameter in parameters if parameter.name not in required_arguments
    }
    yield from (
        required_arguments,
        required_arguments | optional_arguments,
        *(required_arguments | {parameter: hostile_value} for parameter in optional_arguments),
    )


def tensor(number: int) -> Any:
    return pytest.importorskip("torch", reason="torch is not installed").tensor(number)


@pytest.mark.parametrize("number_type", [np.int64, np.uint8, tensor])
def test_numbers_of_numpy_and_torch_are_accepted(number_type: Callable[[int], Any]) -> None:
    number = number_type(100)
    with training.training_loop(train_iterations_start=number):
        with training.training_iteration():
            pass
        with training.checkpoint_save(number + 1):
            pass
    training.checkpoint_saved(number + 2)
    training.describe(step_target=number)
    training.record(loss=number, tokens=number)

    assert (publish_and_read().first_step, published_value("training.step")) == (100, 101.0)
    assert published_value("training.checkpoint_last_step") == 102.0
    assert published_value("training.step_target") == 100.0
    assert (
        published_value("training.loss", mode="train"),
        published_value("training.tokens", mode="train"),
    ) == (100.0, 100)
    assert not misuse_counts()


@pytest.mark.parametrize("is_configured", [False, True])
@pytest.mark.parametrize(
    "hostile_value", HOSTILE_VALUES, ids=lambda hostile_value: type(hostile_value).__name__
)
def test_no_argument_raises_or_prevents_a_body_from_running(
    hostile_value: Any, is_configured: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    if is_configured:
        configure(telemetry={}, export=EXPORT_ALL)
    block_count = body_count = 0
    for name in CALLS:
        for arguments in hostile_arguments(name, hostile_value):
            block = getattr(training, name)(**arguments)
            if hasattr(block, "__exit__"):
                block_count += 1
                with block:
                    body_count += 1
    summary_values()

    assert body_count == block_count > 50
    assert "defect" not in capfd.readouterr().err


def test_a_tensor_without_a_value_or_with_several_values_is_refused() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")

    training.record(loss=torch.zeros(3))

    assert isinstance(to_scalar(torch.zeros(1, device="meta")), Unconvertible)
    assert misuse_counts() == {("record", "loss"): 1}


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


def test_a_span_whose_name_is_no_text_is_exported_under_the_name_of_its_type() -> None:
    memory = configure(telemetry={}, export=EXPORT_ALL)
    with training.application(), one_logger.timed_span([1]), training.span(RaisingObject()):  # type: ignore[arg-type]  # as in untyped jobs
        pass

    assert wait_for_delivery(memory).names() == ["application", "<list>", "<RaisingObject>"]


argument_values: st.SearchStrategy[Any] = st.sampled_from(
    [None, 0, -1, 3, 10**30, 2.5, math.nan, math.inf, "x", "", [1], {}, b"y", True]
)
calls = st.tuples(
    st.sampled_from([*CALLS, *["leave"] * 8, *["fail"] * 4]),
    st.lists(argument_values, min_size=13, max_size=13),
)


def call(name: str, arguments: list[Any], open_blocks: list[Any]) -> None:
    """Make a call and enter the block that it returns, or leave the innermost open block."""
    if name in {"leave", "fail"}:
        if open_blocks:
            error = ValueError("x") if name == "fail" else None
            assert not open_blocks.pop().__exit__(error and ValueError, error, None)
        return
    function = getattr(training, name)
    block = function(**dict(zip(inspect.signature(function).parameters, arguments, strict=False)))
    if hasattr(block, "__exit__") and not name.startswith("on_"):
        assert block.__enter__() is not None
        open_blocks.append(block)


@given(st.lists(calls, max_size=40), st.booleans())
def test_after_any_sequence_of_calls_the_next_job_is_recorded_correctly(
    sequence: list[Any], is_asynchronous: bool
) -> None:
    with unconfigured():
        strategy = "async" if is_asynchronous else "sync"
        memory = configure(telemetry={"save_checkpoint_strategy": strategy, "seq_length_or_fn": 8})
        training.on_app_start()
        open_blocks: list[Any] = []

        for name, arguments in sequence:
            call(name, arguments, open_blocks)
        while open_blocks:
            open_blocks.pop().__exit__(None, None, None)
        training.on_app_end()
        initial_steps = published_value("training.steps", mode="train") or 0
        wait_for_delivery(memory).records.clear()
        with training.application(), training.training_loop(train_iterations_start=10):
            train(5)

        updates = wait_for_delivery(memory).attributes("training_metrics_update")
        assert [update["num_iterations"] for update in updates] == [2, 4, 5]
        assert [update["current_iteration"] for update in updates] == [11, 13, 14]
        assert updates[-1]["train_tokens"] == 5 * 4 * 8
        assert published_value("training.steps", mode="train") == initial_steps + 5
        span_events = [record for record in memory.named_records if record[0] in {"start", "stop"}]
        assert (span_events[0], span_events[-1]) == (("start", "application"), ("stop", "application"))
        phase_seconds = [value for (name, _), value in summary_values().items() if name == "training.phase"]
        assert phase_seconds
        assert min(phase_seconds) >= 0


class UnboundProxy:
    """Lazy proxy without an object, whose class attribute raises."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("unbound")


class RaisingMeta(type):
    """Metaclass whose special methods raise."""

    __hash__ = __eq__ = __instancecheck__ = __subclasscheck__ = refuse


class ObjectOfRaisingClass(metaclass=RaisingMeta):
    """Value of a class that can be neither hashed nor compared."""


@pytest.mark.parametrize("class_name", ["UnboundProxy", "ObjectOfRaisingClass"])
def test_values_whose_class_attribute_raises_never_raise(class_name: str) -> None:
    hostile = globals()[class_name]()  # a class as a parameter would raise in pytest
    body_count = 0
    for block in (
        training.phase(hostile),
        training.background(hostile),
        training.checkpoint_save(hostile),
        training.training_loop(hostile, hostile, hostile, hostile),
        training.span(hostile, hostile, hostile, more=hostile),
    ):
        with block:
            body_count += 1
    training.record(loss=hostile, tokens=hostile, epoch=hostile, mode=hostile)
    training.record(loss=hostile, learning_rate=hostile)
    training.describe(model=hostile, world_size=hostile, other=hostile)
    training.skipped_step(hostile)
    training.interruption(hostile)
    training.step(hostile, seconds=hostile, mode=hostile)
    training.checkpoint_saved(hostile, kind=hostile, seconds=hostile)

    assert body_count == 5
    assert misuse_counts()


def test_a_background_task_that_is_no_string_is_counted_as_misuse_and_as_other() -> None:
    with training.background(object()):  # type: ignore[arg-type]  # bad input
        time.sleep(0.01)

    assert misuse_counts() == {("background", "task"): 1}
    assert published_value("training.background", task="other") >= 0.01


def test_an_exception_with_an_error_number_that_cannot_be_hashed_propagates_unchanged() -> None:
    lost_device = OSError(["device"], "lost")
    with pytest.raises(OSError, match="lost") as caught, training.training_loop(0):
        raise lost_device

    assert caught.value is lost_device
    assert publish_and_read().failure == "exit"


def test_an_iteration_left_open_ends_when_the_next_application_starts() -> None:
    memory = configure(telemetry={})
    with training.application():
        pass
    training.on_training_single_iteration_start()
    with training.application(), training.training_loop(train_iterations_start=0):
        train(2)

    assert [
        update["num_iterations"] for update in wait_for_delivery(memory).attributes("training_metrics_update")
    ] == [2]
