"""Kinds of spans, and the codes of the marks about them.

Used in the training process. A mark is a code and a value; the code of one about a span is the number of its kind and
what happened to it. The standard kinds have one-logger's names; any other name is given a kind when it is first used.
"""

from __future__ import annotations

import threading

from exporter.training.names import (
    Name,
    SpanName,
    StandardSpanName,
    StandardTrainingJobSpanName,
    name_of,
)
from exporter.training.phases import PHASES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

BEGIN, END, ENTER, EXIT, FAIL, BEGAN, ENDED, TOLD = range(8)
"""What happened to a span: begun and ended by a callback; entered, left and left by an exception as a block; the same
of a rare span, whose value is a `Began` or `Ended`; told an attribute or an event. The value is the time otherwise."""

VALUES = 2
"""What the job's callables gave; the value is a dictionary."""
CALL = 3
"""Any other call; the value is a `Call`."""
NUMBERS = 8
"""From here on: a number of `record`; the code is this, plus the number's place in `FIELDS`, plus that of the mode
in `MODES` times 8."""
FIELDS = ("loss", "grad_norm", "learning_rate", "loss_scale", "samples", "tokens", "microbatches", "epoch")
MODES = ("train", "validation", "test")
FIRST_KIND = 8
"""Codes of spans begin at this number times 8."""

MOST_NAMES = 1000
"""Names of the job's own that are told apart; the rest is `other`."""
OTHER = "other"


class Kind:
    """What spans of one name have in common.

    Attributes:
        number: Its place among all kinds.
        code: Of its first mark.
        name: The span's, as it is exported.
        phase: What its time counts as; None where it counts as the phase around it.
        call: What the job writes to make one, as a block.
        begin: The callback that begins one.
        end: The callback that ends one.
        rule: Of one-logger, broken by beginning a second one inside the first.
        end_rule: Of one-logger, broken by ending one that has not begun.
        single: Whether one may not be within another.
    """

    __slots__ = ("number", "code", "name", "phase", "call", "begin", "end", "rule", "end_rule", "single")

    def __init__(
        self,
        number: int,
        name: SpanName,
        phase: str | None,
        call: str,
        callbacks: str = "",
        rule: str = "S2",
        end_rule: str = "S5",
        *,
        single: bool = True,
    ) -> None:
        self.number = number
        self.code = number * 8
        self.name = name
        self.phase = phase
        self.call = call
        self.begin = f"on_{callbacks}_start" if callbacks else call
        self.end = f"on_{callbacks}_end" if callbacks else call
        self.rule = rule
        self.end_rule = end_rule
        self.single = single

    def __reduce__(self) -> tuple[Callable[..., Kind], tuple[object, ...]]:
        """Be the same kind in another process, where those of the job's own names may have other numbers."""
        return _kind_again, (self.number, str(self.name), self.call.startswith("phase"))

    def __repr__(self) -> str:
        return f"<Kind {self.number}: {self.name}>"


_JOB = StandardTrainingJobSpanName
_NUMBERS = iter(range(FIRST_KIND, FIRST_KIND + 100))

APPLICATION = Kind(next(_NUMBERS), StandardSpanName.APPLICATION, None, "application", "app")
DISTRIBUTED_INIT = Kind(next(_NUMBERS), _JOB.DIST_INIT, "rendezvous", "distributed_init", "distributed_init")
MODEL_INIT = Kind(next(_NUMBERS), _JOB.MODEL_INIT, "model_init", "model_init", "model_init")
DATALOADER_INIT = Kind(
    next(_NUMBERS), _JOB.DATA_LOADER_INIT, "dataloader_init", "dataloader_init", "dataloader_init"
)
OPTIMIZER_INIT = Kind(
    next(_NUMBERS), _JOB.OPTIMIZER_INIT, "optimizer_init", "optimizer_init", "optimizer_init"
)
CHECKPOINT_LOAD = Kind(
    next(_NUMBERS), _JOB.CHECKPOINT_LOAD, "checkpoint_load", "checkpoint_load", "load_checkpoint", "S3", "S4"
)
TRAINING_LOOP = Kind(next(_NUMBERS), _JOB.TRAINING_LOOP, None, "training_loop", "train")
TRAINING_ITERATION = Kind(
    next(_NUMBERS),
    _JOB.TRAINING_SINGLE_ITERATION,
    "iteration",
    "training_iteration",
    "training_single_iteration",
    "S3",
    "S4",
)
VALIDATION_LOOP = Kind(next(_NUMBERS), _JOB.VALIDATION_LOOP, "validation", "validation_loop", "validation")
VALIDATION_ITERATION = Kind(
    next(_NUMBERS),
    _JOB.VALIDATION_SINGLE_ITERATION,
    "validation",
    "validation_iteration",
    "validation_single_iteration",
    "S3",
    "S4",
)
TESTING_LOOP = Kind(next(_NUMBERS), _JOB.TESTING_LOOP, "test", "testing_loop", "testing")
TESTING_ITERATION = Kind(
    next(_NUMBERS), _JOB.TESTING_SINGLE_ITERATION, "test", "testing_iteration", "", "S3", "S4"
)
CHECKPOINT_SAVE = Kind(
    next(_NUMBERS),
    _JOB.CHECKPOINT_SAVE_SYNC,
    "checkpoint_save_sync",
    "checkpoint_save",
    "save_checkpoint",
    "S3",
)
DATA_LOADING = Kind(next(_NUMBERS), _JOB.DATA_LOADING, "data_loading", "data_loading")
MODEL_FORWARD = Kind(next(_NUMBERS), _JOB.MODEL_FORWARD, "forward", "model_forward")
MODEL_BACKWARD = Kind(next(_NUMBERS), _JOB.MODEL_BACKWARD, "backward", "model_backward")
ZERO_GRAD = Kind(next(_NUMBERS), _JOB.ZERO_GRAD, "zero_grad", "zero_grad")
OPTIMIZER_UPDATE = Kind(next(_NUMBERS), _JOB.OPTIMIZER_UPDATE, "optimizer", "optimizer_update")

SAVE_NAMES = {"sync": _JOB.CHECKPOINT_SAVE_SYNC, "async": _JOB.CHECKPOINT_SAVE_ASYNC}
"""By strategy."""

KINDS: list[Kind] = [
    APPLICATION,
    DISTRIBUTED_INIT,
    MODEL_INIT,
    DATALOADER_INIT,
    OPTIMIZER_INIT,
    CHECKPOINT_LOAD,
    TRAINING_LOOP,
    TRAINING_ITERATION,
    VALIDATION_LOOP,
    VALIDATION_ITERATION,
    TESTING_LOOP,
    TESTING_ITERATION,
    CHECKPOINT_SAVE,
    DATA_LOADING,
    MODEL_FORWARD,
    MODEL_BACKWARD,
    ZERO_GRAD,
    OPTIMIZER_UPDATE,
]
"""All, each at its number less `FIRST_KIND`; it only grows."""
STANDARD = len(KINDS)
"""Kinds that are the same in every process."""

_LOCK = threading.RLock()  # a signal handler may name a span while its thread names another
_NAMED: dict[tuple[str, bool], Kind] = {
    ("forward", True): MODEL_FORWARD,
    ("backward", True): MODEL_BACKWARD,
    ("data_loading", True): DATA_LOADING,
    ("zero_grad", True): ZERO_GRAD,
    ("optimizer", True): OPTIMIZER_UPDATE,
}
"""Kinds of the job's own names, by name and whether it is called as a phase."""
_INNER = {str(kind.name): kind for kind in KINDS[-5:]}


def kind_named(name: object, *, phase: bool) -> Kind:
    """Give the kind of a name, made now or earlier.

    Args:
        name: Text, or a member of an enumeration of texts.
        phase: Whether a name in `PHASES` is that phase. Of `timed_span` it is too, except that one-logger's own
            names come first.
    """
    text = _text(name)
    known = _NAMED.get((text, phase))
    if known is not None:
        return known
    with _LOCK:
        if text in _INNER:
            return _INNER[text]
        if len(_NAMED) >= MOST_NAMES and text != OTHER:
            return kind_named(OTHER, phase=False)
        call = f"{'phase' if phase else 'span'}({text!r})"
        kind = Kind(
            KINDS[-1].number + 1,
            name if isinstance(name, Name) else text,
            text if text in PHASES else None,
            call,
            single=False,
        )
        KINDS.append(kind)
        _NAMED[text, phase] = kind
        return kind


def _text(name: object) -> str:
    kept = "".join(character if character.isprintable() else "?" for character in name_of(name)[:256])
    return kept or OTHER


def _kind_again(number: int, name: str, phase: bool) -> Kind:
    standard = number - FIRST_KIND < STANDARD
    return KINDS[number - FIRST_KIND] if standard else kind_named(name, phase=phase)
