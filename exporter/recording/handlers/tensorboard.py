"""TensorBoard: the numbers of events as scalars, their messages as texts.

Used in the training process, on its delivery's thread, when the user has a SummaryWriter; nothing of TensorBoard
is imported here.
"""

from __future__ import annotations

from typing import Any, Protocol

from exporter.recording.event_values import Event


class Writer(Protocol):
    """What is needed of a `SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, *, global_step: int | None, walltime: float) -> Any:
        """Add one point."""
        ...

    def add_text(self, tag: str, text_string: str, *, global_step: int | None, walltime: float) -> Any:
        """Add one text."""
        ...


class TensorBoardHandler:
    """Adds each number as `<type>/<name>` and the message as `<type>/message`, at the event's time.

    Args:
        writer: A `torch.utils.tensorboard.SummaryWriter`, or what has its `add_scalar` and `add_text`.
        step: The datum that is the global step, where it is a whole number.
    """

    def __init__(self, writer: Writer, *, step: str = "step") -> None:
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
