"""Explanation of a hang from stacks: ranks are grouped by the line in which they wait, and the most suspected group is first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from exporter.feed.stacks import StackAnswer
from exporter.recording.stacks import Frame

COLLECTIVES = frozenset(
    [
        *("all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "barrier", "monitored_barrier"),
        *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_coalesced", "gather"),
        *("gather_object", "scatter", "scatter_object_list", "broadcast_object_list", "all_to_all"),
        *(
            "all_to_all_single",
            "reduce_scatter",
            "reduce_scatter_tensor",
            "send",
            "recv",
            "batch_isend_irecv",
        ),
    ]
)
"""Functions of torch.distributed that may wait for other ranks."""
GRADIENT_SYNC_PHASE = "grad_sync"
"""Phase in which a rank counts as waiting for other ranks, whatever the function."""
_WRAPPERS = frozenset(
    ["wrapper", "inner", "_fn", "decorate_context", "__call__", "_call_impl", "_wrapped_call_impl"]
)
"""Decorators and call wrappers of libraries, which are skipped in favor of the function that they call."""
_AUTOGRAD_FUNCTION = "_engine_run_backward"
"""Function of torch in which the thread that started a backward pass waits for the autograd engine."""
AUTOGRAD = "backward (autograd engine)"
"""Function name for a rank that waits in the autograd engine, whose C++ threads run the all-reduces of DDP."""
DEFAULT_GROUP = "default"
"""Name of the default process group."""
TIE_SENTENCE = "The stacks do not show which of these groups the others wait for."
MAX_SHOWN_GROUPS = 6
"""Maximum number of groups in the sentence of an explanation."""
MAX_SHOWN_RANGES = 12
"""Maximum number of ranges in a list of ranks."""


@dataclass(frozen=True, slots=True)
class RankStack:
    """Function and line in which a rank waits."""

    rank: int
    function: str  # as `wait_position` returns it
    location: str  # file:line of the innermost frame of the job's code, or of the stack without such a frame
    phase: str = ""  # empty if unknown
    # number of enqueued collectives by process group of torch.distributed; empty for a rank without a process group
    collective_counts: Mapping[str, int] = field(default_factory=dict)
    is_in_collective: bool = False  # True if the rank waits for other ranks


@dataclass(frozen=True, slots=True)
class _Position:
    """Key of a group of ranks."""

    location: str
    function: str
    phase: str
    is_in_process_group: bool


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that wait in the same line, function and phase.

    Ranks without a process group form separate groups if other ranks are in a process group.
    """

    function: str
    location: str
    ranks: tuple[int, ...]
    phase: str
    # lowest number of collectives that any of these ranks has enqueued in `process_group`; None if unknown
    collective_count: int | None
    is_in_collective: bool  # True if all these ranks wait for other ranks
    process_group: str = DEFAULT_GROUP  # compared process group, the same in all groups of ranks
    # True if other ranks are in a process group of torch.distributed and these ranks are in none
    is_outside_process_groups: bool = False

    def collectives_text(self) -> str:
        """Return the number of enqueued collectives as text, such as `12 collectives`, or `in no process group`. Empty if unknown."""
        if self.is_outside_process_groups:
            return "in no process group"
        if self.collective_count is None:
            return ""
        name = "" if self.process_group == DEFAULT_GROUP else f" of process group {self.process_group}"
        return f"{self.collective_count:,} collectives{name}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Groups of the ranks of a hang, and the ranks that did not answer."""

    groups: tuple[RankGroup, ...]  # the suspected group first
    is_tie: bool  # True if the order of suspicion does not separate the first two groups
    kernel_states: Mapping[int, str]  # of the ranks that did not answer, by rank

    @property
    def has_odd_group(self) -> bool:
        """True if the first group is more suspected than the others, or if a single rank is the only group."""
        if len(self.groups) == 1:
            return len(self.groups[0].ranks) == 1
        return bool(self.groups) and not self.is_tie

    def sentence(self) -> str:
        """Return a sentence for each of the first groups, a sentence for each rank that did not answer, and a notice of a tie."""
        parts = [_group_sentence(group) for group in self.groups[:MAX_SHOWN_GROUPS]]
        hidden_groups = len(self.groups) - MAX_SHOWN_GROUPS
        if hidden_groups > 0:
            parts.append(f"{hidden_groups} more groups.")
        parts += [
            f"Rank {rank} did not answer: {state}." for rank, state in sorted(self.kernel_states.items())
        ]
        if self.is_tie:
            parts.append(TIE_SENTENCE)
        return " ".join(parts)


def rank_stack(answer: StackAnswer) -> RankStack | None:
    """Return where the rank of a stack file waits, or None for a process without a rank."""
    if answer.rank is None:
        return None
    function, frame = wait_position(answer.main.frames)
    name = function.rpartition(".")[2]
    return RankStack(
        rank=answer.rank,
        function=function,
        location=location_of(frame),
        phase=answer.phase or "",
        collective_counts=answer.collective_counts,
        is_in_collective=name in COLLECTIVES or function == AUTOGRAD or answer.phase == GRADIENT_SYNC_PHASE,
    )


def wait_position(frames: Sequence[Frame]) -> tuple[str, Frame | None]:
    """Return the function in which the job waits, and the innermost frame of the job's own code.

    The function is the library function that this frame called, without wrappers, or `AUTOGRAD` in the autograd engine. If the
    frame called a function in C, such as `time.sleep`, the function is the one of the frame. For a stack without code of the job,
    the function and the frame are the innermost; for an empty stack, they are `unknown` and None.
    """
    job_index = next((index for index, frame in enumerate(frames) if not frame.library), None)
    if job_index is None:
        return (frames[0].function, frames[0]) if frames else ("unknown", None)
    library_frames = frames[:job_index]
    if any(frame.function.rpartition(".")[2] == _AUTOGRAD_FUNCTION for frame in library_frames):
        return AUTOGRAD, frames[job_index]
    for frame in reversed(library_frames):
        if frame.function.rpartition(".")[2] not in _WRAPPERS:
            return frame.function, frames[job_index]
    return frames[job_index].function, frames[job_index]


def location_of(frame: Frame | None) -> str:
    """Return `file:line` of a frame, with the bare file name, or an empty text without a frame."""
    return "" if frame is None else f"{PurePosixPath(frame.file).name}:{frame.line}"


def explain(stacks: Iterable[RankStack], kernel_states: Mapping[int, str] | None = None) -> Explanation:
    """Return the groups of ranks that wait in the same line, function and phase, the most suspected group first.

    Groups are compared by these criteria, in this order:

    1. Groups in no process group precede the others, if any rank is in a process group.
    2. Groups that have enqueued fewer collectives in the compared process group precede the others. Groups outside of this
       process group are last.
    3. Groups with a rank outside a collective precede groups whose ranks all wait in a collective.
    4. Smaller groups precede larger groups.

    *kernel_states* are the states of the ranks that did not answer, as text by rank.
    """
    stacks_by_position: dict[_Position, list[RankStack]] = defaultdict(list)
    stacks = list(stacks)
    for stack in stacks:
        position = _Position(stack.location, stack.function, stack.phase, bool(stack.collective_counts))
        stacks_by_position[position].append(stack)
    process_group = compared_group(stacks)
    has_process_groups = any(position.is_in_process_group for position in stacks_by_position)
    groups = [
        _group(
            members,
            process_group,
            is_outside_process_groups=has_process_groups and not position.is_in_process_group,
        )
        for position, members in stacks_by_position.items()
    ]
    groups.sort(key=lambda group: (*_suspicion_key(group), group.ranks))
    is_tie = len(groups) > 1 and _suspicion_key(groups[0]) == _suspicion_key(groups[1])
    return Explanation(tuple(groups), is_tie, dict(kernel_states or {}))


def compared_group(stacks: Sequence[RankStack]) -> str:
    """Return the process group in which the ranks' numbers of collectives differ most.

    Returns the default group in a tie that includes it, and if no rank is in a process group.
    """
    counts_by_group: dict[str, list[int]] = defaultdict(list)
    for stack in stacks:
        for name, count in stack.collective_counts.items():
            counts_by_group[name].append(count)
    differences = {name: max(counts) - min(counts) for name, counts in counts_by_group.items()}
    return max(
        differences, key=lambda name: (differences[name], name == DEFAULT_GROUP), default=DEFAULT_GROUP
    )


def _group(members: Sequence[RankStack], process_group: str, *, is_outside_process_groups: bool) -> RankGroup:
    """Return the group of the ranks at a position, with the lowest number of collectives of these ranks."""
    collective_counts = [
        member.collective_counts[process_group]
        for member in members
        if process_group in member.collective_counts
    ]
    return RankGroup(
        function=members[0].function,
        location=members[0].location,
        ranks=tuple(sorted(member.rank for member in members)),
        phase=members[0].phase,
        collective_count=min(collective_counts, default=None),
        is_in_collective=all(member.is_in_collective for member in members),
        process_group=process_group,
        is_outside_process_groups=is_outside_process_groups,
    )


def _suspicion_key(group: RankGroup) -> tuple[bool, float, bool, int]:
    """Return the criteria 1 to 4 of `explain` as a sort key: the group with the smallest key is the most suspected."""
    collective_count = float("inf") if group.collective_count is None else group.collective_count
    return not group.is_outside_process_groups, collective_count, group.is_in_collective, len(group.ranks)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as ranges, such as `0-2, 4-7`. After `MAX_SHOWN_RANGES` ranges, the number of the remaining ranks follows."""
    ranges: list[list[int]] = []  # consecutive ranks
    for rank in ranks:
        if ranges and ranges[-1][-1] == rank - 1:
            ranges[-1].append(rank)
        else:
            ranges.append([rank])
    texts = [
        f"{consecutive[0]}-{consecutive[-1]}" if len(consecutive) > 1 else str(consecutive[0])
        for consecutive in ranges
    ]
    if len(texts) > MAX_SHOWN_RANGES:
        hidden_ranks = sum(map(len, ranges[MAX_SHOWN_RANGES:]))
        texts = [*texts[:MAX_SHOWN_RANGES], f"and {hidden_ranks} more"]
    return ", ".join(texts)


def _group_sentence(group: RankGroup) -> str:
    """Return a sentence such as `Ranks 0-2, 4: all_reduce (train.py:88), grad_sync, 12 collectives`."""
    noun = "Rank" if len(group.ranks) == 1 else "Ranks"
    parts = [f"{group.function} ({group.location})" if group.location else group.function]
    if group.phase:
        parts.append(group.phase)
    if group.collectives_text():
        parts.append(group.collectives_text())
    return f"{noun} {ranks_text(group.ranks)}: {', '.join(parts)}."
