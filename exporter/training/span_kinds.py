"""Kinds of spans in one table, and the codes under which the span buffers note them: the kind's number times 8, plus what.

The standard kinds have one-logger's names; any other name is given a kind when it is first used. Blocks, decorators and
callbacks are made from the rows of the table.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from exporter.training.attributes import Name, SpanName, name_of
from exporter.training.metrics import report
from exporter.training.phases import PHASES

BEGIN, END, ENTER, EXIT, FAIL, BEGAN, ENDED = range(7)
"""What happened to a span: begun and ended by a callback; entered, left and left by an exception as a block (the value is
the time); begun and ended with more to say (`Began`, `Ended`)."""
VALUES = 2
"""What the job's callables gave; the value is a dictionary."""
CALL = 3
"""Any other call; the value is a `Call`."""
NUMBERS = 8
"""From here on: a number of `record`; plus its place in `FIELDS`, plus that of the mode in `MODES` times 8."""
FIELDS = ("loss", "grad_norm", "learning_rate", "loss_scale", "samples", "tokens", "microbatches", "epoch")
MODES = ("train", "validation", "test")
FIRST_KIND = 8
FIRST_CODE = FIRST_KIND * 8

MOST_NAMES = 1000
"""Names of the job's own that are told apart; the rest is `other`."""
OTHER = "other"


@dataclass(eq=False, slots=True, repr=False)
class Kind:
    """What spans of one name have in common."""

    name: SpanName  # as it is exported
    phase: str | None  # what its time counts as; None where it counts as the phase around it
    call: str  # what the job writes to make one, as a block
    doc: str = ""  # what its block is, in words
    callbacks: str = ""  # what the callbacks that begin and end one are named after
    rule: str = "S2"  # of one-logger, broken by beginning a second one inside the first
    end_rule: str = "S5"  # of one-logger, broken by ending one that has not begun
    single: bool = True  # one may not be within another
    guessed: bool = False  # concluded by a bridge; what the job tells itself takes its place
    number: int = field(init=False)  # its place among all kinds
    code: int = field(init=False)  # of its first mark
    begin: str = field(init=False)
    end: str = field(init=False)

    def __post_init__(self) -> None:
        self.number = FIRST_KIND + len(KINDS)
        self.code = self.number * 8
        self.begin = f"on_{self.callbacks}_start" if self.callbacks else self.call
        self.end = f"on_{self.callbacks}_end" if self.callbacks else self.call
        KINDS.append(self)

    def __reduce__(self) -> tuple[Callable[..., Kind], tuple[object, ...]]:
        """Be the same kind in another process, where those of the job's own names may have other numbers."""
        return _same_kind, (name_of(self.name), self.call)

    def __repr__(self) -> str:
        return f"<Kind {self.number}: {self.name}>"


KINDS: list[Kind] = []
"""All, each at its number less `FIRST_KIND`; it only grows."""

# fmt: off
APPLICATION = Kind("application", None, "application", "the whole job", "app")
DISTRIBUTED_INIT = Kind("distributed_code_initialization", "rendezvous", "distributed_init",
                        "the time in which the ranks find each other", "distributed_init")
MODEL_INIT = Kind("model_initialization", "model_init", "model_init", "the making of the model", "model_init")
DATALOADER_INIT = Kind("data_loader_initialization", "dataloader_init", "dataloader_init",
                       "the making of the data loaders", "dataloader_init")
OPTIMIZER_INIT = Kind("optimizer_initialization", "optimizer_init", "optimizer_init",
                      "the making of the optimizer", "optimizer_init")
CHECKPOINT_LOAD = Kind("checkpoint_load", "checkpoint_load", "checkpoint_load",
                       "the loading of a checkpoint", "load_checkpoint", "S3", "S4")
TRAINING_LOOP = Kind("training_loop", None, "training_loop", "a training loop", "train")
TRAINING_ITERATION = Kind("training_single_iteration", "iteration", "training_iteration",
                          "one training iteration: one step of the optimizer, all its micro-batches included",
                          "training_single_iteration", "S3", "S4")
VALIDATION_LOOP = Kind("validation_loop", "validation", "validation_loop", "a validation", "validation")
VALIDATION_ITERATION = Kind("validation_single_iteration", "validation", "validation_iteration",
                            "one batch of a validation", "validation_single_iteration", "S3", "S4")
TESTING_LOOP = Kind("testing_loop", "test", "testing_loop", "a test", "testing")
TESTING_ITERATION = Kind("TESTING_SINGLE_ITERATION", "test", "testing_iteration", "one batch of a test",
                         "", "S3", "S4")
CHECKPOINT_SAVE = Kind("checkpoint_save_sync", "checkpoint_save_sync", "checkpoint_save",
                       "the saving of a checkpoint", "save_checkpoint", "S3", "S5")
DATA_LOADING = Kind("data_loading", "data_loading", "data_loading", "waiting for data")
MODEL_FORWARD = Kind("model_forward", "forward", "model_forward", "a forward pass")
MODEL_BACKWARD = Kind("model_backward", "backward", "model_backward", "a backward pass")
ZERO_GRAD = Kind("zero_grad", "zero_grad", "zero_grad", "setting gradients to zero")
OPTIMIZER_UPDATE = Kind("optimizer_update", "optimizer", "optimizer_update", "an optimizer's step")
GUESSED_LOOP = Kind("training_loop", None, "training_loop", guessed=True)
GUESSED_ITERATION = Kind("training_single_iteration", "iteration", "training_iteration", guessed=True)
# fmt: on

LOOPS = frozenset({TRAINING_LOOP, GUESSED_LOOP})
ITERATIONS = frozenset({TRAINING_ITERATION, GUESSED_ITERATION})
STEPS = ITERATIONS | {VALIDATION_ITERATION, TESTING_ITERATION}
SHORT = (DATA_LOADING, MODEL_FORWARD, MODEL_BACKWARD, ZERO_GRAD, OPTIMIZER_UPDATE)
"""Kinds whose begin and end mean nothing but time."""
BY_NAME = {name_of(kind.name): kind for kind in KINDS if not kind.guessed} | {
    "checkpoint_save_async": CHECKPOINT_SAVE
}
"""The standard kinds by the names of their spans."""

_LOCK = threading.RLock()  # a signal handler may name a span while its thread names another
_NAMED: dict[tuple[str, bool], Kind] = {(str(kind.phase), True): kind for kind in SHORT}
"""Kinds of names, by name and whether it is called as a phase."""


def kind_named(name: object, *, phase: bool) -> Kind:
    """Give the kind of a name, made now or earlier; a `phase` that is none is misuse, counted once."""
    text = name_of(name)[:256] or OTHER
    if not text.isprintable():
        text = "".join(each if each.isprintable() else "?" for each in text)
    known = _NAMED.get((text, phase))
    if known is not None:
        return known
    with _LOCK:
        for kind in SHORT:
            if kind.name == text:
                return kind
        if phase and text not in PHASES:
            report("phase", "unknown_phase", f"one of {', '.join(PHASES)}, not {text!r}; use span(name)")
        if len(_NAMED) >= MOST_NAMES and text != OTHER:
            return kind_named(OTHER, phase=False)
        call = f"{'phase' if phase else 'span'}({text!r})"
        own = name if isinstance(name, Name) else text
        _NAMED[text, phase] = kind = Kind(own, text if text in PHASES else None, call, single=False)
        return kind


def _same_kind(name: str, call: str) -> Kind:
    return kind_named(name, phase=call.startswith("phase")) if "(" in call else BY_NAME[name]
