"""Grouping of the stacks of a hanging run: the suspected group comes first, and a tie is marked."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.feed.stacks import StackAnswer
from exporter.hangs.explanation import (
    AUTOGRAD,
    MAX_SHOWN_RANGES,
    RankStack,
    explain,
    rank_stack,
    ranks_text,
    wait_position,
)
from exporter.recording.stacks import Frame, ThreadStack


def waiting_rank(rank: int, function: str, location: str, collective_count: int | None = None) -> RankStack:
    is_in_collective = function == "all_reduce"
    collective_counts = {} if collective_count is None else {"default": collective_count}
    return RankStack(rank, function, location, "iteration", collective_counts, is_in_collective)


def test_the_rank_with_fewer_collectives_comes_first() -> None:
    stacks = [waiting_rank(rank, "all_reduce", "train.py:88", 1234) for rank in (0, 1, 2, 4, 5, 6, 7)]
    explanation = explain([*stacks, waiting_rank(3, "read_shard", "data.py:40", 1233)])

    assert explanation.sentence() == (
        "Rank 3: read_shard (data.py:40), iteration, 1,233 collectives."
        " Ranks 0-2, 4-7: all_reduce (train.py:88), iteration, 1,234 collectives."
    )


def test_without_numbers_of_collectives_the_rank_outside_a_collective_comes_first() -> None:
    stacks = [
        waiting_rank(0, "all_reduce", "t.py:1"),
        waiting_rank(1, "load", "t.py:9"),
        waiting_rank(2, "load", "t.py:9"),
    ]

    assert [group.ranks for group in explain(stacks).groups] == [(1, 2), (0,)]


def test_ranks_are_compared_in_the_process_group_in_which_they_differ() -> None:
    late_rank = RankStack(1, "load", "t.py:9", collective_counts={"default": 7, "tp": 3})
    collective_stacks = [
        RankStack(rank, "all_reduce", "t.py:1", collective_counts={"default": 7, "tp": 4}) for rank in (0, 2)
    ]
    explanation = explain([*collective_stacks, late_rank])

    assert explanation.sentence() == (
        "Rank 1: load (t.py:9), 3 collectives of process group tp."
        " Ranks 0, 2: all_reduce (t.py:1), 4 collectives of process group tp."
    )


def test_a_rank_that_joined_no_process_group_comes_first() -> None:
    waiting_ranks = [waiting_rank(rank, "all_reduce", "train.py:88", 1234) for rank in (0, 1, 2)]
    restarted_rank = RankStack(3, "load_checkpoint", "train.py:20")
    explanation = explain([*waiting_ranks, restarted_rank])

    assert explanation.sentence() == (
        "Rank 3: load_checkpoint (train.py:20), in no process group."
        " Ranks 0-2: all_reduce (train.py:88), iteration, 1,234 collectives."
    )


def test_a_rank_that_is_no_member_of_the_compared_process_group_comes_last() -> None:
    late_rank = RankStack(1, "load", "t.py:9", collective_counts={"default": 7, "tp": 3})
    waiting_rank_of_tp = RankStack(0, "all_reduce", "t.py:1", collective_counts={"default": 7, "tp": 4})
    other_rank = RankStack(2, "recv", "t.py:5", collective_counts={"default": 7}, is_in_collective=True)
    explanation = explain([other_rank, waiting_rank_of_tp, late_rank])

    assert [group.ranks for group in explanation.groups] == [(1,), (0,), (2,)]


def test_ranks_of_a_job_without_process_groups_are_compared_by_their_functions() -> None:
    explanation = explain([waiting_rank(0, "all_reduce", "t.py:1"), waiting_rank(1, "load", "t.py:9")])

    assert (
        explanation.sentence() == "Rank 1: load (t.py:9), iteration. Rank 0: all_reduce (t.py:1), iteration."
    )


def test_groups_that_no_rule_separates_are_called_a_tie() -> None:
    explanation = explain([waiting_rank(0, "load", "t.py:1", 5), waiting_rank(1, "read", "t.py:2", 5)])

    assert explanation.is_tie
    assert not explanation.has_odd_group
    assert "do not show which" in explanation.sentence()


def test_ranks_in_one_line_with_different_phases_form_groups() -> None:
    stacks = [
        RankStack(0, "train", "t.py:1", "grad_sync", is_in_collective=True),
        RankStack(1, "train", "t.py:1", "forward"),
    ]
    explanation = explain(stacks)

    assert explanation.has_odd_group
    assert explanation.sentence() == "Rank 1: train (t.py:1), forward. Rank 0: train (t.py:1), grad_sync."


@pytest.mark.parametrize(("phase", "is_waiting"), [("grad_sync", True), ("forward", False)])
def test_a_rank_waits_for_ranks_in_the_phase_that_synchronizes_gradients(
    phase: str, is_waiting: bool
) -> None:
    stack = ThreadStack("MainThread", (Frame("/job/t.py", 1, "train"),))
    stack_of_rank = rank_stack(StackAnswer("1", "p", 7, 0.0, "night", 1, stack, phase=phase))

    assert stack_of_rank is not None
    assert stack_of_rank.is_in_collective is is_waiting


def test_a_tie_of_process_groups_is_compared_in_the_default_group() -> None:
    stacks = [
        RankStack(0, "all_reduce", "t.py:1", collective_counts={"tp": 4, "default": 7}),
        RankStack(1, "load", "t.py:9", collective_counts={"tp": 3, "default": 6}),
    ]

    assert [group.process_group for group in explain(stacks).groups] == ["default", "default"]


@pytest.mark.parametrize(("ranks", "is_odd"), [((0, 1), False), ((0,), True)])
def test_a_single_group_is_no_tie_and_is_suspected_if_it_has_a_single_rank(
    ranks: tuple[int, ...], is_odd: bool
) -> None:
    explanation = explain([waiting_rank(rank, "all_reduce", "t.py:1") for rank in ranks])

    assert not explanation.is_tie
    assert explanation.has_odd_group is is_odd


def test_a_stack_without_frames_has_no_location() -> None:
    stack_of_rank = rank_stack(StackAnswer("1", "p", 7, 0.0, "night", 1, ThreadStack("MainThread", ())))

    assert stack_of_rank is not None
    assert explain([stack_of_rank]).sentence() == "Rank 1: unknown."


def test_a_rank_without_an_answer_is_named_with_the_reason() -> None:
    explanation = explain(
        [waiting_rank(0, "all_reduce", "t.py:1", 6)], {3: "main thread stopped by a signal"}
    )

    assert "Rank 3 did not answer: main thread stopped by a signal." in explanation.sentence()


def test_sixty_four_ranks_fit_into_a_few_lines() -> None:
    stacks = [waiting_rank(rank, "all_reduce", "t.py:1", 9) for rank in range(64) if rank != 17]
    sentence = explain([*stacks, waiting_rank(17, "load", "d.py:3", 8)]).sentence()

    assert "Rank 17: load (d.py:3)" in sentence
    assert len(sentence) < 200  # the numbers of all ranks, one by one, have more characters


def test_more_than_six_groups_are_shortened() -> None:
    sentence = explain([waiting_rank(rank, f"f{rank}", "t.py:1", rank) for rank in range(64)]).sentence()

    assert "58 more groups." in sentence


def test_a_wrapper_between_the_job_and_the_library_is_skipped() -> None:
    frames = [
        Frame("/x/site-packages/torch/distributed/c10d.py", 1, "all_reduce", library=True),
        Frame(
            "/x/site-packages/torch/distributed/logger.py",
            2,
            "_exception_logger.<locals>.wrapper",
            library=True,
        ),
        Frame("/job/train.py", 88, "main"),
    ]

    function, frame = wait_position(frames)

    assert function == "all_reduce"
    assert frame == frames[2]


def test_a_stack_that_ends_in_the_autograd_engine_has_the_engine_as_its_position() -> None:
    frames = [
        Frame("/x/site-packages/torch/autograd/graph.py", 1, "_engine_run_backward", library=True),
        Frame("/x/site-packages/torch/_tensor.py", 2, "Tensor.backward", library=True),
        Frame("/job/train.py", 88, "main"),
    ]

    assert wait_position(frames)[0] == AUTOGRAD


@given(st.sets(st.integers(0, 300), min_size=1, max_size=60))
@example(set(range(0, 2 * MAX_SHOWN_RANGES, 2)))
def test_a_list_of_ranks_has_the_lowest_ranks_and_the_number_of_the_others(ranks: set[int]) -> None:
    shown_ranges, _, hidden_text = ranks_text(sorted(ranks)).partition(", and ")
    shown_ranks: list[int] = []
    for rank_range in shown_ranges.split(", "):
        lowest, _, highest = rank_range.partition("-")
        shown_ranks += range(int(lowest), int(highest or lowest) + 1)
    hidden_count = int(hidden_text.split()[0]) if hidden_text else 0

    assert shown_ranks == sorted(ranks)[: len(shown_ranks)]
    assert len(shown_ranks) + hidden_count == len(ranks)
    assert (hidden_count > 0) is bool(hidden_text)
