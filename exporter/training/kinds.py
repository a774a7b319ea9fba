"""Kinds of blocks: the standard kinds with one-logger's span names, and kinds with user-defined names.

The time of a block counts for the phase of its kind, or, if the kind has no phase, for the surrounding phase. A block for a new phase
needs a row in `phases.py`, a constant in this file and a function in `api.py`.
"""

from __future__ import annotations

from exporter.recording.conversion import to_name
from exporter.recording.value_class import value_class
from exporter.training.misuse import report
from exporter.training.phases import PHASES

MAX_USER_KINDS = 1000
"""Limit of user-defined kinds. Further names that are not names of phases have the kind `UNNAMED`."""
MAX_BLOCK_NAME_CHARACTERS = 256
"""Maximum length of a user-defined name. Longer names are cut."""
OTHER = "other"


@value_class
class BlockKind:
    """Kind of a block: its phase, span name, callbacks and nesting rules."""

    call: str  # the API call that creates the block, such as `data_loading` or `span('name')`
    phase: str | None  # phase of the block's time; None for the surrounding phase
    span_name: str  # the exported name
    callback_stem: str = ""  # common part of the names of the two callbacks; "" without callbacks
    is_exclusive: bool = True  # True if a thread or task, and for an application or loop the process, has at most one open block
    is_inferred: bool = False  # True if a bridge enters the block, which the job's own blocks replace

    @property
    def begin_name(self) -> str:
        """Name of the callback that starts a block; without callbacks, the name of the call."""
        return f"on_{self.callback_stem}_start" if self.callback_stem else self.call

    @property
    def end_name(self) -> str:
        """Name of the callback that ends a block; without callbacks, the name of the call."""
        return f"on_{self.callback_stem}_end" if self.callback_stem else self.call

    def __repr__(self) -> str:
        return f"<{self.call}>"


APPLICATION = BlockKind("application", None, "application", "app")
DISTRIBUTED_INIT = BlockKind(
    "distributed_init", "rendezvous", "distributed_code_initialization", "distributed_init"
)
MODEL_INIT = BlockKind("model_init", "model_init", "model_initialization", "model_init")
DATALOADER_INIT = BlockKind(
    "dataloader_init", "dataloader_init", "data_loader_initialization", "dataloader_init"
)
OPTIMIZER_INIT = BlockKind("optimizer_init", "optimizer_init", "optimizer_initialization", "optimizer_init")
CHECKPOINT_LOAD = BlockKind("checkpoint_load", "checkpoint_load", "checkpoint_load", "load_checkpoint")
TRAINING_LOOP = BlockKind("training_loop", None, "training_loop", "train")
TRAINING_ITERATION = BlockKind(
    "training_iteration", "iteration", "training_single_iteration", "training_single_iteration"
)
VALIDATION_LOOP = BlockKind("validation_loop", "validation", "validation_loop", "validation")
VALIDATION_ITERATION = BlockKind(
    "validation_iteration", "validation", "validation_single_iteration", "validation_single_iteration"
)
TESTING_LOOP = BlockKind("testing_loop", "test", "testing_loop", "testing")
# In one-logger, this span name is in capitals, and there is no callback.
TESTING_ITERATION = BlockKind("testing_iteration", "test", "TESTING_SINGLE_ITERATION")
CHECKPOINT_SAVE = BlockKind(
    "checkpoint_save", "checkpoint_save_sync", "checkpoint_save_sync", "save_checkpoint"
)
DATA_LOADING = BlockKind("data_loading", "data_loading", "data_loading")
MODEL_FORWARD = BlockKind("model_forward", "forward", "model_forward")
MODEL_BACKWARD = BlockKind("model_backward", "backward", "model_backward")
ZERO_GRAD = BlockKind("zero_grad", "zero_grad", "zero_grad")
OPTIMIZER_UPDATE = BlockKind("optimizer_update", "optimizer", "optimizer_update")
INFERRED_LOOP = BlockKind("training_loop", None, "training_loop", is_inferred=True)
INFERRED_ITERATION = BlockKind(
    "training_iteration", "iteration", "training_single_iteration", is_inferred=True
)

PHASE_KINDS = (DATA_LOADING, MODEL_FORWARD, MODEL_BACKWARD, ZERO_GRAD, OPTIMIZER_UPDATE)
"""Kinds of the phases inside a step."""
LOOPS = frozenset({TRAINING_LOOP, INFERRED_LOOP})
ITERATIONS = frozenset({TRAINING_ITERATION, INFERRED_ITERATION})
STEPS = ITERATIONS | {VALIDATION_ITERATION, TESTING_ITERATION}
"""Kinds of training iterations, and of the batches of validations and tests.

Blocks of `STEPS` and `PHASE_KINDS` are *hot*. They have a span only if an observer or an event handler requests spans of the kind.
"""
KINDS = (
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
    *PHASE_KINDS,
)
"""Standard kinds, without the inferred kinds."""
UNNAMED = BlockKind("span", None, OTHER, is_exclusive=False)
"""Kind of a block whose name is empty or above the limit `MAX_USER_KINDS`."""

_BY_SPAN_NAME = {kind.span_name: kind for kind in KINDS} | {"checkpoint_save_async": CHECKPOINT_SAVE}
_PHASE_KIND_BY_PHASE = {str(kind.phase): kind for kind in PHASE_KINDS}
_PHASE_KIND_BY_SPAN_NAME = {kind.span_name: kind for kind in PHASE_KINDS}
_USER_KINDS: dict[tuple[str, bool], BlockKind] = {}


def standard_kind(name: object) -> BlockKind | None:
    """Return the standard kind that has a span name, or None."""
    return _BY_SPAN_NAME.get(to_name(name))


def named_kind(name: object, *, is_phase: bool) -> BlockKind:
    """Return the kind of `phase(name)` if *is_phase* is true, otherwise the kind of `span(name)`.

    The time counts for the phase *name*. If *name* is the span name of a member of `PHASE_KINDS`, the time counts for the phase of the
    member: `span("model_forward")` counts for the phase `forward`. For any other name, the kind has no phase, and the first call of
    `phase(name)` is reported as misuse.

    `phase(name)` has a standard kind if the name belongs to a member of `PHASE_KINDS`. Blocks of all other kinds returned here can be
    nested in a block of the same kind.
    """
    text = to_name(name)[:MAX_BLOCK_NAME_CHARACTERS]
    if not text.isprintable():
        text = "".join(character if character.isprintable() else "?" for character in text)
    known_kind = _USER_KINDS.get((text, is_phase))
    if known_kind is not None:
        return known_kind
    phase_kind = _PHASE_KIND_BY_PHASE.get(text) or _PHASE_KIND_BY_SPAN_NAME.get(text)
    if is_phase and phase_kind is not None:
        return phase_kind
    phase = text if text in PHASES else None
    if phase_kind is not None:
        phase = phase_kind.phase
    if is_phase and phase is None:
        report("phase", "unknown_phase", f"one of {', '.join(PHASES)}, not {text!r}; use span(name)")
    if not text or (phase is None and len(_USER_KINDS) >= MAX_USER_KINDS):
        return UNNAMED
    call = f"{'phase' if is_phase else 'span'}({text!r})"
    kind = BlockKind(call, phase, text, is_exclusive=False)
    return _USER_KINDS.setdefault((text, is_phase), kind)


def restored_kind(span_name: str, call: str) -> BlockKind:
    """Return the kind of a block that is unpickled or copied. The block of an inferred kind becomes a block of the standard kind."""
    if call == UNNAMED.call:
        return UNNAMED
    if "(" in call:  # the call of a user-defined kind has its name as argument
        return named_kind(span_name, is_phase=call.startswith("phase"))
    return _BY_SPAN_NAME[span_name]
