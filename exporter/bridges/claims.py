"""Who tells of the training: of several bridges in one process, the one that knows most.

Used in the training process. A Lightning job steps torch's optimizers and reads torch's loaders, so that two bridges see
each of its steps. Whoever tells holds the claim; a stronger teller takes it, a weaker one keeps silent until it is
free again.
"""

from __future__ import annotations

from typing import Any

WATCHING, INSTRUMENTED, LEADING = 0, 1, 2
"""How much a teller knows: what torch is asked to do; what the job says of itself in another library's words; each turn
of the framework's own loop."""


class Teller:
    """A bridge that can tell of the training; what torch is asked to do meanwhile is told to it.

    Attributes:
        strength: How much it knows.
    """

    strength = WATCHING

    def yields(self) -> None:
        """A stronger one takes over; what it had open is to be closed."""

    def tells_phases(self) -> bool:
        """Tell whether there is a course that phases of the main thread belong to, such as torch's compiling."""
        return False

    def fetch_begins(self) -> bool:
        """A batch is asked for from one of torch's loaders.

        Returns:
            Whether its end is to be told; the same holds for the others.
        """
        return False

    def fetch_ends(self, batch: Any, error: BaseException | None) -> None:
        """The batch is there, or the loader's first one is on its way (None), or none has come."""

    def backward_begins(self, tensors: Any) -> bool:
        """The backward pass from some tensors begins."""
        del tensors
        return False

    def backward_ends(self, error: BaseException | None) -> None:
        """The backward pass is over."""

    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer's step begins."""

    def optimizer_ends(self, optimizer: Any) -> None:
        """An optimizer's step is over; not called when it raises."""

    def optimizer_skipped(self) -> None:
        """A gradient scaler has left an optimizer's step out."""

    def optimizer_loaded(self, state: Any) -> None:
        """An optimizer has been given the state of an earlier one."""

    def loss_is(self, loss: Any) -> None:
        """A loss is about to be scaled."""

    def gradient_norm_is(self, norm: Any) -> None:
        """Gradients have been clipped; they had this norm."""

    def evaluates(self, module: Any) -> None:
        """A module has been set to evaluate."""

    def save_begins(self, saved: Any, *, at_once: bool) -> bool:
        """Something is written by torch, at once or on a thread of its own."""
        del saved, at_once
        return False

    def save_ends(self, result: Any, error: BaseException | None) -> None:
        """It is written, or has failed; of what is written by a thread, the result is the future."""


class Claims:
    """The claim, held by at most one teller.

    Attributes:
        holder: Who tells; `NOBODY` while nobody does.
        standing: Who tells while nobody else does.
    """

    def __init__(self) -> None:
        self.holder: Teller = NOBODY
        self.standing: Teller = NOBODY

    def stand(self, teller: Teller) -> None:
        """Let a teller hold the claim whenever nobody else does."""
        self.standing = teller
        if self.holder is NOBODY:
            self.holder = teller

    def take(self, teller: Teller) -> bool:
        """Ask for the claim.

        Returns:
            Whether it is the teller's now.
        """
        holder = self.holder
        if holder is teller:
            return True
        if holder is not NOBODY and holder is not self.standing and holder.strength >= teller.strength:
            return False
        self.holder = teller
        holder.yields()
        return True

    def release(self, teller: Teller) -> None:
        """Give it back; harmless for one that has not got it."""
        if self.holder is teller:
            self.holder = self.standing


NOBODY = Teller()
CLAIMS = Claims()
"""The claim of this process."""
