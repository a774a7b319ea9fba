"""Progress of an inferred loop: the numbers of steps and epochs."""

from __future__ import annotations

from exporter import training


class LoopProgress:
    """Steps and epochs of a loop in this process.

    Attributes:
        steps: Number of steps in this process.
        counts_epochs: False if a library reports the epochs.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.counts_epochs = True
        self._restored_step = 0  # of the checkpoint from which the job resumed
        self._epochs = 0
        self._steps_at_epoch = 0  # at the end of the latest epoch

    @property
    def step(self) -> int:
        """Number of steps, including the steps before the checkpoint from which the job resumed."""
        return self._restored_step + self.steps

    def resume_at(self, step: int) -> None:
        """Count steps from the step of a checkpoint, unless the training has begun."""
        if self.steps == 0:
            self._restored_step = max(self._restored_step, step)

    def end_epoch(self) -> None:
        """Record the end of an epoch, unless the epoch had no step or a library reports the epochs."""
        if self.steps > self._steps_at_epoch and self.counts_epochs:
            self._steps_at_epoch = self.steps
            if self._epochs == 0:
                training.record(epoch=0)  # the counter of epochs counts the increase from the first number
            self._epochs += 1
            training.record(epoch=self._epochs)
