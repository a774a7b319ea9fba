"""Context managers: the job's work as blocks, each also a decorator; one-logger's names, and more of the same.

Used in the training process. Short blocks are in `exporter.training.hot`; these are the rare ones. A block's body always
runs, and what it raises always comes out again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from time import monotonic

from exporter.errors import OneLoggerError
from exporter.training import calls, hot, kinds
from exporter.training.arguments import taken
from exporter.training.decorating import decorated
from exporter.training.kinds import Kind
from exporter.training.names import SpanName
from exporter.training.spans import Span
from exporter.training.types import Attributes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    from typing_extensions import Self

    AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])
    Item = TypeVar("Item")


class Block:
    """A block that is entered rarely: entering it gives its span.

    Args:
        kind: Of the span.
        values: Gives what is to be told at its begin, asked when it is entered.
        make: What else `calls.begin` is to be given.
    """

    __slots__ = ("kind", "span", "_make", "_values")

    def __init__(self, kind: Kind, values: Callable[[], dict[str, Any]] | None = None, **make: Any) -> None:
        self.kind = kind
        self.span: Span | None = None
        self._values = values
        self._make = make

    def __enter__(self) -> Span:
        values = None if self._values is None else self._values()
        try:
            self.span = calls.begin(self.kind, self.kind.call, entered=True, values=values, **self._make)
        except OneLoggerError as error:  # the body does not run, so nobody leaves the block
            calls.end(self.kind, self.kind.call, entered=True, exception=error)
            raise
        return self.span

    def __exit__(
        self, kind: type[BaseException] | None, exception: BaseException | None, traceback: object
    ) -> None:
        calls.end(self.kind, self.kind.call, span=self.span, entered=True, exception=exception)

    def __call__(self, function: AnyFunction) -> AnyFunction:
        """Decorate a function, a coroutine function or a generator function: each call is one block."""
        return decorated(function, lambda: Block(self.kind, self._values, **self._make))


def application() -> Block:
    """Make a block of the whole job."""
    return Block(kinds.APPLICATION, calls.application_values)


def distributed_init() -> Block:
    """Make a block in which the ranks find each other."""
    return Block(kinds.DISTRIBUTED_INIT)


def model_init() -> Block:
    """Make a block in which the model is made."""
    return Block(kinds.MODEL_INIT)


def dataloader_init() -> Block:
    """Make a block in which the data loaders are made."""
    return Block(kinds.DATALOADER_INIT)


def optimizer_init() -> Block:
    """Make a block in which the optimizer is made."""
    return Block(kinds.OPTIMIZER_INIT)


def checkpoint_load() -> Block:
    """Make a block in which a checkpoint is loaded."""
    return Block(kinds.CHECKPOINT_LOAD)


def training_loop(
    train_iterations_start: int,
    train_samples_start: int | None = None,
    train_iterations_target_or_fn: int | Callable[[], int] | None = None,
    train_samples_target_or_fn: int | Callable[[], int] | None = None,
) -> Block:
    """Make a block of a training loop.

    Args:
        train_iterations_start: Steps that the job has done before, such as those of the checkpoint it resumes.
        train_samples_start: Samples that it has trained on before; None for steps times the global batch size.
        train_iterations_target_or_fn: The step at which it is to end; None for what was configured.
        train_samples_target_or_fn: The same in samples.
    """
    return Block(
        kinds.TRAINING_LOOP,
        lambda: calls.loop_values(
            "training_loop",
            train_iterations_start,
            train_samples_start,
            train_iterations_target_or_fn,
            train_samples_target_or_fn,
        ),
    )


def validation_loop() -> Block:
    """Make a block of a validation."""
    return Block(kinds.VALIDATION_LOOP)


def testing_loop() -> Block:
    """Make a block of a test."""
    return Block(kinds.TESTING_LOOP)


def checkpoint_save(global_step: int) -> Block:
    """Make a block in which a checkpoint is saved; left in order it is a success, where saves are synchronous.

    Args:
        global_step: The step that is saved.
    """
    return Block(
        kinds.CHECKPOINT_SAVE,
        lambda: calls.save_values(global_step),
        name=kinds.SAVE_NAMES[calls.save_strategy()],
    )


def span(
    name: SpanName,
    span_attributes: Attributes | Mapping[str, Any] | None = None,
    start_event_attributes: Attributes | None = None,
    **attributes: Any,
) -> Block:
    """Make a block of any name; one that is a phase counts as that phase, any other as the phase around it.

    Args:
        name: Of the span.
        span_attributes: Of the span.
        start_event_attributes: Of its start.
        attributes: More of the span's.
    """
    given = Attributes(attributes)
    given.add_attributes(Attributes.of(span_attributes))
    return Block(
        kinds.kind_named(name, phase=False),
        name=name,
        span_attributes=given,
        start_event_attributes=start_event_attributes,
    )


class background:  # noqa: N801  # it is called like a function
    """A block of work beside the training, on any thread: it is in no phase.

    Args:
        task: What it does: `checkpoint_upload`, `checkpoint_finalize`, `prefetch`, `eval_async` …
    """

    __slots__ = ("_began", "_task")

    def __init__(self, task: str) -> None:
        self._task = task
        self._began = 0.0

    def __enter__(self) -> Self:
        self._began = monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, exception: object, traceback: object) -> None:
        calls.say("background", task=taken(self._task), seconds=monotonic() - self._began)

    def __call__(self, function: AnyFunction) -> AnyFunction:
        """Decorate a function: each call is one block."""
        return decorated(function, lambda: background(self._task))


def batches(loader: Iterable[Item]) -> Iterator[Item]:
    """Iterate over a loader; the time that each batch is waited for counts as `data_loading`."""
    iterator = iter(loader)
    while True:
        with hot.data_loading():
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item
