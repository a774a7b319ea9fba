"""Bridge to loops without a framework: steps, phases and losses inferred from calls of torch."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import indent

import pytest
from bridges_support import (
    AUTO,
    FAILED_SAVES,
    SAMPLES,
    SAVES,
    STEPS,
    VALIDATION_STEPS,
    Job,
    job_fixture,
    needs,
    run_job,
    run_script,
)

pytestmark = [needs("torch"), pytest.mark.timeout(120)]

PRELUDE = """
import copy, pickle, sys, threading, time, warnings
import torch
from torch import nn
from programs.torch_parts import loader, model_and_optimizer, train_step
"""

LOOPS_PROGRAM = """
from exporter.bridges import plain_torch
plain_torch.install()
from programs import loops, torch_loops
loops.run_loops(torch_loops)
"""
ended_job = job_fixture(PRELUDE + LOOPS_PROGRAM, "torch")

EXPECTED: dict[str, dict[str, float | None]] = {
    # Forward passes alone are not training.
    "forward_passes_only": {STEPS: None, SAMPLES: None, "phase iteration": 0},
    # A file with optimizer state is a checkpoint; another file only adds time to the phase.
    "ordinary": {
        STEPS: 6,
        VALIDATION_STEPS: 4,
        SAMPLES: 24,
        "microbatches_total": 6,
        "epochs_total": 2,
        SAVES: 2,
        "phase checkpoint_save_sync": 4,
        "phase forward": 5,
        "phase backward": 6,
        "phase optimizer": 6,
        "gauge step": 6,
        "gauge learning_rate": 0.125,
        "gauge epoch": 2,
    },
    "accumulation": {STEPS: 3, "microbatches_total": 10},
    "accumulation_over_the_end": {STEPS: 5, "epochs_total": 2},
    "optimizer_closure": {STEPS: 2},
    # Counts are exact although not every loss is read.
    "losses_of_many_steps": {STEPS: 5, SAMPLES: 20, "microbatches_total": 5},
    # Two optimizers on a batch are one step, and both are optimizer time.
    "two_optimizers": {STEPS: 3, "phase optimizer": 6},
    # A second step of an optimizer on a batch is a separate step.
    "several_steps_of_a_batch": {STEPS: 6},
    "optimizer_steps_within_backward": {STEPS: 3 + 2},
    # Batches are counted where they are used: by the validation, or after it.
    "fetched_before_eval": {STEPS: 60, SAMPLES: 1200, VALIDATION_STEPS: 21},
    "fetched_ahead_of_a_validation": {STEPS: 2, SAMPLES: 8, VALIDATION_STEPS: 2},
    "prefetching_on_a_thread": {STEPS: 20, SAMPLES: 80, "microbatches_total": 20},
    "nested_optimizers": {STEPS: 3},
    "steps_without_loader": {STEPS: 5},
    # The first evaluation precedes the training.
    "loss_estimated_in_eval_mode": {STEPS: 4, "phase validation": 1},
    "validation_with_gradients": {STEPS: 4, VALIDATION_STEPS: 6},
    "teacher_in_eval_mode": {STEPS: 6, SAMPLES: 24, "phase validation": 0},
    "validation_cut_short": {STEPS: 4, VALIDATION_STEPS: 2},
    "saves_between_steps": {STEPS: 15},
    "gradient_scaler": {
        STEPS: 3,
        "skipped_steps_total reason=overflow": 1,
        "gauge loss_scale": 512,
        "nonfinite_total kind=loss value=inf": 1,
    },
    "failing_loop": {STEPS: 3},
    "failing_torch_calls": {STEPS: 2, FAILED_SAVES: 1},
    "compiled_step": {STEPS: 2},
    # Other threads are not the training.
    "loader_on_another_thread": {STEPS: 3, SAMPLES: 12},
    # An asynchronous checkpoint succeeds when the file is written.
    "distributed_checkpoint": {
        **{f"checkpoints_total kind={kind} result=ok": 1 for kind in ("sync", "async")},
        "checkpoints_total kind=async result=failed": 1,
        "phase checkpoint_save_async": 3,
    },
    # Pickling is not a save.
    "pickled_model_and_optimizer": {STEPS: 2, "phase checkpoint_save_sync": 0},
}


@pytest.mark.parametrize("run", EXPECTED)
def test_a_loop_is_recorded(ended_job: Job, run: str) -> None:
    assert ended_job.differences(EXPECTED[run], run) == {}


@pytest.mark.parametrize(
    "line",
    ["raised amid an iteration", "torch raised grad can be implici", "save raised", "later failed True"],
)
def test_exceptions_reach_the_job_unchanged(ended_job: Job, line: str) -> None:
    assert line in ended_job.process.stdout


def test_gradient_norms_unscaled_losses_and_phases_are_recorded(ended_job: Job) -> None:
    assert ended_job.gauges("ordinary")["grad_norm"] > 0
    assert 0 < ended_job.gauges("gradient_scaler")["loss,mode=train"] < 100  # not the scaled loss
    assert (ended_job.quantity_value("phase backward", "optimizer_closure") or 0) >= 4
    seconds = ended_job.value(
        "training_phase_seconds_total", "loss_estimated_in_eval_mode", phase="validation"
    )
    # The estimation sleeps 0.15 s. The first estimation, which precedes the training, is not counted.
    assert 0.15 <= (seconds or 0) <= ended_job.own_value("seconds_of_estimate_and_step")


def test_the_epoch_is_absent_in_a_loop_without_a_loader(ended_job: Job) -> None:
    assert ended_job.gauges("steps_without_loader").get("epoch") is None
    assert ended_job.gauges("ordinary")["epoch"] == 2


def test_the_loss_matches_the_log_of_the_job_or_is_absent(ended_job: Job) -> None:
    printed_lines = ended_job.process.stdout.splitlines()
    loss_pairs = [line.split()[1:] for line in printed_lines if line.startswith("loss ")]  # recorded, own
    own_losses = [None if own == "None" else pytest.approx(float(own), rel=1e-5) for _, own in loss_pairs]

    assert [None if recorded == "None" else float(recorded) for recorded, _ in loss_pairs] == own_losses
    # A term for each job that prints losses.
    assert len(loss_pairs) == 3 + 1 + 2 + 6 + 3 + 1 + 1 + 1 + 1 + 1 + 2 + 1


# Unchanged jobs -----------------------------------------------------------------------------------------------


def test_an_unchanged_job_has_the_output_and_status_as_without_the_exporter_and_compiling_is_a_phase(
    tmp_path: Path,
) -> None:
    program = """
warnings.simplefilter("always")
model, optimizer = model_and_optimizer()
compiled = torch.compile(model, backend="eager")
@torch.compile(backend="eager")
def update():
    optimizer.step()
for (batch,) in loader(12):
    compiled(batch).pow(2).mean().backward()
    update()
print("loss is", float(model.weight.sum()) < 1e9, file=sys.stderr)
sys.exit(3)
"""
    unrecorded_job = run_job(tmp_path / "without", PRELUDE + program, check=False, library="torch")
    ended_job = run_job(tmp_path / "with", PRELUDE + program, AUTO, check=False)

    assert unrecorded_job.process.returncode == ended_job.process.returncode == 3
    assert ended_job.process.stdout == unrecorded_job.process.stdout
    assert re.sub(r"[\d.:]+", "", ended_job.process.stderr) == re.sub(
        r"[\d.:]+", "", unrecorded_job.process.stderr
    )
    assert "training_steps_total" not in unrecorded_job.page
    assert ended_job.quantity_value(STEPS) == 3
    assert (ended_job.quantity_value("phase compile") or 0) >= 2
    assert (ended_job.value("training_badput_seconds_total", cause="compile") or 0) > 0


IMPORTS = "from programs.torch_processes import *\n"


@pytest.mark.parametrize(
    ("call", "is_finished"),
    [
        ("train()", True),
        ("train_and_raise()", False),
        ("run_in_thread(train)", True),
        ("run_in_child('fork', train)", True),
        ("run_in_child('fork', train_and_raise)", False),
        ("run_in_child('spawn', train)", True),
        ("run_in_child('spawn', train_and_exit_with_an_error)", False),
    ],
)
def test_the_work_of_a_loop_is_productive_unless_its_process_fails(
    tmp_path: Path, call: str, is_finished: bool
) -> None:
    ended_job = run_job(tmp_path, IMPORTS + call, AUTO, check=False, library="torch")

    assert ended_job.quantity_value(STEPS) == 3
    assert (ended_job.quantity_value("uncommitted_seconds") == 0) is is_finished
    assert (ended_job.quantity_value("productive_seconds_total") != 0) is is_finished


def test_an_error_at_the_interactive_prompt_does_not_fail_the_completed_training(tmp_path: Path) -> None:
    launch = "subprocess.run([sys.executable, '-i', 'train.py'], input=b'1 / 0')"
    ended_job = run_script(tmp_path, f"{IMPORTS}train()\n", launch)

    assert "ZeroDivisionError" in ended_job.process.stderr
    assert ended_job.differences({STEPS: 3, "uncommitted_seconds": 0}) == {}


ITERATIONS_PROGRAM = """
model, optimizer = model_and_optimizer()
for (batch,) in training.batches(loader(12)):
    with training.training_iteration():
        train_step(model, optimizer, batch)
"""
ADDITIONS_PROGRAM = """
model, optimizer = model_and_optimizer()
with exporter.span("preparing"):
    training.describe(model="mine")
for (batch,) in loader(40):
    training.record(tokens=100)
    train_step(model, optimizer, batch)
    training.step()
"""
GRADIENTS_CODE = """
for _ in range(6):
    model(torch.randn(4, 4)).mean().backward()
    model.zero_grad()
"""
JOBS: dict[str, tuple[str, dict[str, float | None]]] = {
    # The bridge pauses in an instrumented job, and no step is counted twice.
    "a loop": (
        f"with training.training_loop(train_iterations_start=0):{indent(ITERATIONS_PROGRAM, '    ')}",
        {STEPS: 3, "phase backward": 0},
    ),
    "iterations": (ITERATIONS_PROGRAM, {STEPS: 3, "phase backward": 0}),
    "steps before": (
        ITERATIONS_PROGRAM.replace("with training.training_iteration()", "training.step()\n    if True"),
        {STEPS: 3, "phase backward": 0},
    ),
    # Instrumentation that only adds values does not pause the bridge.
    "additions": (
        ADDITIONS_PROGRAM,
        {STEPS: 10, "tokens_total mode=train": 1000, "phase backward": 10, "run_info model=mine": 1},
    ),
    # Inspecting a model is not training, and gradients can be cleared anywhere in the loop.
    "input gradients of a model": (f"model = nn.Linear(4, 1).eval(){GRADIENTS_CODE}", {STEPS: None}),
    "gradients kept": (
        f"model, optimizer = model_and_optimizer(){GRADIENTS_CODE}optimizer.step()",
        {STEPS: 1},
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_step_of_a_torch_job_is_counted_once_with_and_without_instrumentation(
    tmp_path: Path, name: str
) -> None:
    program, expected = JOBS[name]
    ended_job = run_job(tmp_path, f"{PRELUDE}from exporter import training\n{program}", AUTO, library="torch")

    assert ended_job.differences(expected) == {}


GAN_WITH_REQUESTED_SPANS = """
from exporter.bridges import plain_torch
from exporter.training.recorder import TRAINING
plain_torch.install()
exporter.events.register(lambda event: None, types="span.*")  # requests the spans of phases
(generator, first), (critic, second) = model_and_optimizer(), model_and_optimizer(torch.optim.SGD)
own_seconds = 0.0
for (batch,) in loader(32):
    for model, optimizer in ((generator, first), (critic, second)):
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        start_time = time.monotonic()
        optimizer.step()
        own_seconds += time.monotonic() - start_time
        time.sleep(0.03)
print("own seconds", own_seconds)
print("own recorded_seconds", TRAINING.clock.phases["optimizer"].seconds)
"""


def test_work_after_the_step_of_either_optimizer_is_no_optimizer_time_while_spans_are_requested(
    tmp_path: Path,
) -> None:
    ended_job = run_job(tmp_path, PRELUDE + GAN_WITH_REQUESTED_SPANS, library="torch")

    # The job sleeps 0.48 s after the steps.
    assert 0 < ended_job.own_value("recorded_seconds") <= ended_job.own_value("seconds")


OWN_OPTIMIZER_PROGRAM = """
from exporter.bridges import leading_optimizer
leading_optimizer.UNSEEN_SECONDS = 0.2
model = nn.Linear(4, 1)
for _ in range(5):
    model(torch.randn(4, 4)).pow(2).mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
    time.sleep(0.1)
"""


def test_steps_of_an_optimizer_without_torch_are_not_counted_and_the_call_that_counts_them_is_logged(
    tmp_path: Path,
) -> None:
    ended_job = run_job(tmp_path, PRELUDE + OWN_OPTIMIZER_PROGRAM, AUTO, library="torch")

    assert ended_job.process.stderr.count("no step of a torch optimizer") == 1
    assert "training.step()" in ended_job.process.stderr
    assert ended_job.quantity_value(STEPS) is None


def test_values_that_need_a_device_synchronization_are_absent(tmp_path: Path) -> None:
    program = """
from exporter.bridges.loop import LoopTracker
tracker = LoopTracker()
tracker.record("loss", torch.tensor(1.5, requires_grad=True))
tracker.record("loss", torch.empty((), device="meta"))
tracker.record("loss", torch.ones(2))
tracker.record("grad_norm", torch.tensor([2.5]))
print("values", json.dumps(gauges()))
"""
    ended_job = run_job(tmp_path, PRELUDE + program, library="torch")

    assert (
        ended_job.differences({"gauge loss,mode=train": 1.5, "gauge grad_norm": 2.5, "misuse_total": None})
        == {}
    )
