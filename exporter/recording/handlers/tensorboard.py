"""TensorBoard: the numbers of events as scalars, their messages as texts.

Used in the training process, on its worker's thread, when the user has a SummaryWriter; nothing of TensorBoard
is imported here.
"""

from __future__ import annotations

from typing import Any

from exporter.recording.event_values import Event


class TensorBoardHandler:
    """Adds each number as `<type>/<name>` and the message as `<type>/message`, at the event's time.

    The writer is a `SummaryWriter`, or what has its `add_scalar` and `add_text`; `step` names the datum that is the step.
    """

    def __init__(self, writer: Any, *, step: str = "step") -> None:
        self._writer = writer
        self._step = step

    def handle(self, event: Event) -> None:
        """Add what the event has."""
        step = event.data.get(self._step)
        number = step if type(step) is int else None
        for name, value in event.data.items():
            if not isinstance(value, str) and name != self._step:
                self._writer.add_scalar(
                    f"{event.type}/{name}", float(value), global_step=number, walltime=event.timestamp
                )
        if event.message is not None:
            self._writer.add_text(
                f"{event.type}/message", event.message, global_step=number, walltime=event.timestamp
            )
