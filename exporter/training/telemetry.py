"""The seam between the recording of training and a configured telemetry, such as one-logger's.

Used in the training process. The recording counts families with or without a telemetry. A telemetry adds rules (which
calls are misuse), values that the job has left to callables, and records of spans for exporters. `Telemetry` itself adds
nothing; `exporter.one_logger.records` has the one that does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from exporter.training.attributes import TracingTimestamp

if TYPE_CHECKING:
    from exporter.training.checkpoints import Save
    from exporter.training.events import ErrorEvent, Event
    from exporter.training.open_spans import OpenSpan
    from exporter.training.progress import Loop


class Telemetry:
    """What a configuration adds; this one adds nothing.

    Attributes:
        configured: The rules are in force, and spans that begin now are recorded.
        trains: The configuration of the training is known.
        enabled: This process records at all.
        propagates: Misuse is raised at the call.
        application_name: For records that say whose they are; None where it is not known.
        now: Gives the time of what is interpreted; set by whoever interprets.
    """

    configured = False
    trains = False
    enabled = True
    propagates = False
    application_name: str | None = None

    def __init__(self) -> None:
        self.now: Callable[[], TracingTimestamp] = TracingTimestamp.now

    # On the job's threads --------------------------------------------------------------------------------

    def ask(self, *fields: str) -> dict[str, Any]:
        """Give what the configuration says of some fields now, callables asked; never raises."""
        del fields
        return {}

    def ask_application(self) -> dict[str, Any]:
        """Give what the begin of an application tells; never raises."""
        return {}

    # Told by whoever interprets --------------------------------------------------------------------------

    def wants(self, name: str) -> bool:
        """Tell whether a span of this name is exported."""
        del name
        return False

    def span_began(self, opened: OpenSpan) -> None:
        """Take a span that has begun."""

    def span_event(self, opened: OpenSpan, event: Event) -> None:
        """Take an event that the job has added to an open span."""

    def span_error(self, opened: OpenSpan, event: ErrorEvent) -> None:
        """Take an error in an open span."""

    def span_ended(self, opened: OpenSpan) -> None:
        """Take a span that has stopped."""

    def application_began(self, opened: OpenSpan, values: Mapping[str, Any]) -> None:
        """Take the begin of an application, with what `ask_application` gave."""

    def training_configured(self, opened: OpenSpan, values: Mapping[str, Any]) -> None:
        """Take the configuration of the training, which became known within an application."""

    def loop_began(self, opened: OpenSpan, loop: Loop, wall: float) -> None:
        """Take the begin of a training loop."""

    def loop_ended(self, opened: OpenSpan) -> None:
        """Take the end of a training loop."""

    def step_ended(
        self, opened: OpenSpan | None, loop: Loop, seconds: float, wall: float, world_size: int
    ) -> None:
        """Take a completed training step; `opened` is its loop's span where that is open."""

    def validation_step_ended(self, seconds: float) -> None:
        """Take a completed validation batch."""

    def evaluation_ended(self, opened: OpenSpan, completed: int) -> None:
        """Take the end of a validation or a test, after so many training steps."""

    def save_began(self, opened: OpenSpan, save: Save) -> None:
        """Take the begin of a save."""

    def save_succeeded(self, opened: OpenSpan, save: Save, at: TracingTimestamp) -> None:
        """Take the success of a save; `opened` is the span that it is an event of."""

    def save_ended(self, opened: OpenSpan, save: Save, seconds: float) -> None:
        """Take the end of a save, as far as it held up the training."""


NO_TELEMETRY = Telemetry()
