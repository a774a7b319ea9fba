"""The seam between the recording of training and a configured telemetry, such as one-logger's.

Used in the training process. The recording counts families with or without a telemetry. A telemetry adds rules (which
calls are misuse), values that the job has left to callables, and records of spans for exporters. `Telemetry` itself adds
nothing; `exporter.one_logger.records` has the one that does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from exporter.training.attributes import TracingTimestamp

if TYPE_CHECKING:
    from exporter.training.events import ErrorEvent, Event
    from exporter.training.spans import Span


def _nothing(*_: Any) -> None:
    """Take what nobody asks for."""


class Telemetry:
    """What a configuration adds; this one adds nothing. The methods from `wants` on are for whoever interprets.

    Attributes:
        configured: The rules are in force, and spans that begin now are recorded.
        trains: The configuration of the training is known.
        enabled: This process records at all.
        propagates: Misuse is raised at the call.
        application_name: For records that say whose they are; None where it is not known.
        now: Gives the time of what is interpreted; set by whoever interprets.
        wants: Tells whether a span of this name is exported.
    """

    configured = False
    trains = False
    enabled = True
    propagates = False
    application_name: str | None = None
    now: Callable[[], TracingTimestamp] = staticmethod(TracingTimestamp.now)

    def ask(self, *_fields: str) -> dict[str, Any]:
        """Give what the configuration says of some fields now, callables asked; never raises."""
        return {}

    def ask_application(self) -> dict[str, Any]:
        """Give what the begin of an application tells; never raises."""
        return {}

    wants: Callable[[str], bool] = staticmethod(lambda _name: False)
    span_began: Callable[[Span], None] = staticmethod(_nothing)
    span_ended: Callable[[Span], None] = staticmethod(_nothing)
    span_event: Callable[[Span, Event], None] = staticmethod(_nothing)
    span_error: Callable[[Span, ErrorEvent], None] = staticmethod(_nothing)
    application_began = training_configured = loop_began = loop_ended = _nothing
    step_ended = validation_step_ended = evaluation_ended = _nothing
    save_began = save_succeeded = save_ended = _nothing


NO_TELEMETRY = Telemetry()
