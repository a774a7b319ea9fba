"""What this process was configured to tell, and the provider of core one-logger's API.

Used in the training process, by its own threads. The recording of training asks `current()` what was configured, and
is told of each change through `on_change`. Before configuration nothing is exported, and nothing is a misuse.

Configuring is loud: settings that cannot be raise `OneLoggerError`, before training begins. Calls in the wrong order
are misuse, counted and logged; they raise only where the job chose `PROPAGATE_EXCEPTIONS`.

After a fork the child is not configured: it must not write under its parent's identity.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from exporter.errors import OneLoggerError
from exporter.training.configuration import OneLoggerConfig, TrainingTelemetryConfig
from exporter.training.delivery import Sink
from exporter.training.names import StandardTrainingJobEventName
from exporter.training.reports import report
from exporter.training.types import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

    from typing_extensions import Self

    from exporter.training.events import ErrorEvent, Event
    from exporter.training.names import SpanName
    from exporter.training.recorder import Recorder
    from exporter.training.spans import Span
    from exporter.training.types import Attributes, TracingTimestamp

    class SpanRecording(Protocol):
        """What records the spans that a job makes by itself; on the job's threads, never raising."""

        def start_span(
            self,
            name: SpanName,
            span_attributes: Attributes | None,
            start_event_attributes: Attributes | None,
            start_time: TracingTimestamp | None,
            parent_span: Span | None,
        ) -> Span:
            """Begin one, in the parent that is given or else in what this thread or task is in."""
            ...

        def stop_span(
            self, span: Span, stop_event_attributes: Attributes | None, stop_time: TracingTimestamp | None
        ) -> None:
            """End one."""
            ...

        def span_event(self, span: Span, event: Event) -> None:
            """Record an event of one, of a standard one too."""
            ...

        def span_error(self, span: Span, event: ErrorEvent) -> None:
            """Record an error of the application in one, of a standard one too."""
            ...

        def active_spans(self, name: SpanName) -> list[Span]:
            """Give those of a name that have not ended."""
            ...


CONFIGURE_FIRST = "configure the provider before: with_base_config(…), then configure_provider()"


_SWITCHED = (
    ("is_train_iterations_enabled", StandardTrainingJobEventName.TRAINING_METRICS_UPDATE.value),
    ("is_validation_iterations_enabled", StandardTrainingJobEventName.VALIDATION_METRICS_UPDATE.value),
    ("is_test_iterations_enabled", StandardTrainingJobEventName.TESTING_METRICS_UPDATE.value),
)
"""A field of the training's configuration → the event that is not exported where it is false."""


class Configured:
    """What was configured.

    Attributes:
        settings: The application's.
        training: The training job's; None until it is known.
        sink: Takes the records to the exporters.
        recorder: The job's own, of core one-logger's API; None where the provider made it.
        forced_off: Whether `force_disable_logging` was called.
    """

    __slots__ = ("settings", "training", "sink", "recorder", "forced_off")

    def __init__(
        self,
        settings: OneLoggerConfig,
        training: TrainingTelemetryConfig | None,
        sink: Sink,
        recorder: Recorder | None = None,
    ) -> None:
        self.settings = settings
        self.training = training
        self.sink = sink
        self.recorder = recorder
        self.forced_off = False

    @property
    def enabled(self) -> bool:
        """Whether this process tells anything."""
        return self.settings.enable_for_current_rank and not self.forced_off


class _State:
    """The one configuration of this process."""

    configured: Configured | None = None
    lock = threading.Lock()
    listeners: list[Callable[[Configured], None]] = []  # noqa: RUF012  # the process's
    instances: dict[type, Any] = {}  # noqa: RUF012  # likewise
    recording: SpanRecording | None = None


def current() -> Configured | None:
    """Give what was configured; None before."""
    return _State.configured


def on_change(listener: Callable[[Configured], None]) -> None:
    """Have a callable told what is configured, now if it is, and whenever it changes.

    It is called on the job's thread that makes the change, and must not raise.
    """
    _State.listeners.append(listener)
    if _State.configured is not None:
        listener(_State.configured)


def record_by(recording: SpanRecording | None) -> None:
    """Have the spans that the job makes by itself recorded by this; the recording of training registers here."""
    _State.recording = recording


def recording() -> SpanRecording | None:
    """Give what records the spans that the job makes by itself; None where each recorder does it alone."""
    return _State.recording


def misuse(call: str, rule: str, expected: str) -> None:
    """Report a misuse of the providers.

    Raises:
        OneLoggerError: The job chose to have it raised.
    """
    report(call, rule, expected)
    configured = _State.configured
    if configured is not None and configured.settings.propagates:
        raise OneLoggerError(f"{call}: {expected}")


def configure(settings: OneLoggerConfig, sink: Sink, recorder: Recorder | None = None) -> bool:
    """Set the configuration of this process, once.

    Returns:
        Whether this was the first time.
    """
    with _State.lock:
        if _State.configured is not None:
            return False
        told = settings.telemetry_config
        training = told if isinstance(told, TrainingTelemetryConfig) else None
        configured = Configured(settings, training, sink, recorder)
        _State.configured = configured
    _tell(configured)
    return True


def forget() -> None:
    """Begin as an unconfigured process; in a forked child, and in tests."""
    _State.configured = None
    _State.lock = threading.Lock()
    _State.instances.clear()


def set_training(configured: Configured, training: TrainingTelemetryConfig) -> bool:
    """Set the training job's configuration, once.

    Returns:
        Whether this was the first time.
    """
    with _State.lock:
        if configured.training is not None:
            return False
        configured.training = training
    _tell(configured)
    return True


def _tell(configured: Configured) -> None:
    training = configured.training
    if training is not None:
        switched_off = [event for flag, event in _SWITCHED if training.value(flag) is False]
        configured.sink.leave_out(switched_off)
    for listener in _State.listeners:
        listener(configured)


class Singleton:
    """A class with one object per process, given by `instance()`; it cannot be called."""

    def __init__(self) -> None:
        name = type(self).__name__
        raise TypeError(f"{name} cannot be instantiated directly. Use {name}.instance() instead.")

    @classmethod
    def instance(cls) -> Self:
        """Give the object of this process."""
        with _State.lock:
            made: Self | None = _State.instances.get(cls)
            if made is None:
                made = object.__new__(cls)
                made.begin()
                _State.instances[cls] = made
            return made

    def begin(self) -> None:
        """Set up a new object."""


class OneLoggerProvider(Singleton):
    """The provider of core one-logger's API: a configuration and a recorder, for spans that are not a training's."""

    def configure(self, config: OneLoggerConfig, recorder: Recorder) -> None:
        """Set the configuration and the recorder, once per process; a second time is a misuse and changes nothing.

        Raises:
            OneLoggerError: The configuration is none.
        """
        if not isinstance(config, OneLoggerConfig):
            raise OneLoggerError(f"config must be a OneLoggerConfig, not {shown(config)}")
        sink = getattr(recorder, "sink", None)
        if not configure(config, sink if isinstance(sink, Sink) else Sink(()), recorder):
            misuse("OneLoggerProvider.configure", "configured_twice", "to be called once per process")

    @property
    def recorder(self) -> Recorder:
        """The recorder; before configuration one that exports to nobody."""
        from exporter.training.training_recorder import get_recorder  # noqa: PLC0415  # made of what is here

        return get_recorder()

    @property
    def config(self) -> OneLoggerConfig:
        """The configuration, which is not to be changed.

        Raises:
            OneLoggerError: There is none yet.
        """
        if _State.configured is None:
            raise OneLoggerError(CONFIGURE_FIRST)
        return _State.configured.settings

    @property
    def one_logger_ready(self) -> bool:
        """Whether it was configured."""
        return _State.configured is not None

    @property
    def one_logger_enabled(self) -> bool:
        """Whether it was configured and tells anything."""
        return _State.configured is not None and _State.configured.enabled

    def force_disable_logging(self) -> None:
        """Tell nothing from now on."""
        configured = _State.configured
        if configured is not None:
            configured.forced_off = True
            _tell(configured)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget)
