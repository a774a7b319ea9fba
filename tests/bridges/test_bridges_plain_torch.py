"""Bridge for loops without a framework: steps, phases and losses inferred from calls of torch."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import indent

import pytest
from bridges_support import AUTO, FAILED, SAMPLES, SAVED, STEPS, VALIDATED, Job, job, loops, script, wanted

pytestmark = [wanted("torch"), pytest.mark.timeout(120)]

PRELUDE = """
import copy, pickle, sys, threading, time, warnings
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def loader(samples, size=4, **options):
    return DataLoader(TensorDataset(torch.randn(samples, 4)), batch_size=size, **options)

def made(kind=torch.optim.Adam, **options):
    model = nn.Linear(4, 1)
    return model, kind(model.parameters(), lr=0.125, **options)

def turn(model, optimizer, batch):
    optimizer.zero_grad()
    loss = model(batch).pow(2).mean()
    loss.backward()
    optimizer.step()
"""

LOOPS = """
from exporter.bridges import plain_torch
plain_torch.install()

def expect(loss):
    print("loss", gauges().get("loss,mode=train"), loss)

def looking():
    for (batch,) in loader(8):
        made()[0](batch)

def ordinary():
    model, optimizer = made()
    next(iter(loader(4)))
    for epoch in range(2):
        for (batch,) in loader(12):
            optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for (batch,) in loader(8):
                model(batch)
        model.train()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "whole.pt")
        torch.save(model.state_dict(), "weights.pt")

def accumulation():
    model, optimizer = made(torch.optim.SGD)
    losses = []
    for index, (batch,) in enumerate(loader(40)):
        loss = model(batch).pow(2).mean()
        (loss / 4).backward()
        losses.append(loss.item())
        if index % 4 == 3 or index == 9:
            optimizer.step()
            optimizer.zero_grad()
            expect(sum(losses) / len(losses))
            losses.clear()

def accumulation_over_the_end():
    model, optimizer = made(torch.optim.SGD)
    for index, (batch,) in enumerate(batch for _ in range(2) for batch in loader(20)):
        model(batch).pow(2).mean().backward()
        if index % 2:
            optimizer.step()

def shares_of_a_mean():
    model, optimizer = made(torch.optim.SGD)
    sums = [model(torch.randn(size, 4)).pow(2).mean() for size in (3, 7)]
    (sums[0] * 0.3).backward()
    (sums[1] * 0.7).backward()
    optimizer.step()
    expect(0.3 * sums[0].item() + 0.7 * sums[1].item())

def divided_and_scaled():
    model, optimizer = made(torch.optim.SGD)
    for factor in (1024, 1.0):
        losses = []
        for (batch,) in loader(16):
            loss = model(batch).pow(2).mean()
            ((loss / 4) * factor).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        expect(sum(losses) / 4)

def a_single_pass_with_a_factor():
    model, optimizer = made(torch.optim.SGD)
    scales = (
        lambda loss: loss / 4,
        lambda loss: (loss / 4) * 1.0,
        lambda loss: (loss / 4) * 1024,
        lambda loss: (loss * torch.ones(2)[:1] / 4).mean(),
        lambda loss: -(loss * 0.5).view(1).squeeze(),
        lambda loss: loss * torch.tensor([0.0]),
    )
    for scale in scales:
        scale(model(torch.randn(4, 4)).pow(2).mean()).backward()
        optimizer.step()
        expect(None)

def factors_of_one():
    model, optimizer = made(torch.optim.SGD)
    for scale in (lambda loss: loss / 1, lambda loss: loss * 1.0, lambda loss: loss.mean() * torch.tensor(1)):
        loss = model(torch.randn(4, 4)).pow(2).mean()
        scale(loss).backward()
        optimizer.step()
        expect(loss.item())

def divided_and_scaled_by_one():
    model, optimizer = made(torch.optim.SGD)
    losses = []
    for (batch,) in loader(16):
        loss = model(batch).pow(2).mean()
        ((loss / 4) * 1.0).mean().backward()
        losses.append(loss.item())
    optimizer.step()
    expect(sum(losses) / 4)

def losses_of_many_steps():
    from exporter.bridges import loss as losses
    before = losses.EVERY_STEP, losses.HOST_SECONDS
    losses.EVERY_STEP, losses.HOST_SECONDS = 2, 60.0
    model, optimizer = made(torch.optim.SGD)
    log = []
    for (batch,) in loader(20):
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        log.append(loss.item())
    losses.EVERY_STEP, losses.HOST_SECONDS = before
    expect(log[1])  # the last loss that was read

def scaled_by_hand():
    model, optimizer = made(torch.optim.SGD)
    (model(torch.randn(4, 4)).pow(2).mean() * 1024).backward()
    optimizer.step()
    expect(None)

def unknown_shares():
    model, optimizer = made(torch.optim.SGD)
    for size in (3, 7):
        (model(torch.randn(size, 4)).pow(2).sum() / 100).backward()
    optimizer.step()
    expect(None)

def two_losses_of_a_batch():
    model, optimizer = made(torch.optim.SGD)
    for (batch,) in loader(4):
        model(batch).pow(2).mean().backward()
        model(-batch).pow(2).mean().backward()
        optimizer.step()
        expect(None)

def microbatches_in_a_closure():
    model, optimizer = made(torch.optim.SGD)
    for (batch,) in loader(7):
        losses = []
        def train():
            for part in batch.split(3):
                loss = torch.zeros(1).add_(model(part).pow(2).mean())
                losses.append(loss.item() * len(part) / len(batch))
                loss.mul_(len(part) / len(batch))
                loss.backward()
        optimizer.step(train)
        expect(sum(losses))

def closure():
    model, _ = made()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    for (batch,) in loader(8):
        def again():
            optimizer.zero_grad()
            loss = model(batch).pow(2).mean()
            loss.backward()
            return loss
        optimizer.step(again)
    expect(None)

def gan():
    (generator, first), (critic, second) = made(), made(torch.optim.SGD)
    for (batch,) in loader(12):
        turn(critic, second, batch)
        turn(generator, first, batch)

def inner_steps():
    model, optimizer = made()
    for (batch,) in loader(8):
        for _ in range(3):
            turn(model, optimizer, batch)

def within_backward():
    model = nn.Linear(4, 1)
    for parameter in model.parameters():
        def update(parameter, optimizer=torch.optim.SGD([parameter], lr=0.125)):
            optimizer.step()
        parameter.register_post_accumulate_grad_hook(update)
    for (batch,) in loader(12):
        model(batch).pow(2).mean().backward()
    for _ in range(2):
        model(batch).pow(2).mean().backward()

def fetched_before_eval():
    model, optimizer = made()
    for _ in range(3):
        for (batch,) in loader(400, 20):
            model.train()
            turn(model, optimizer, batch)
        for (batch,) in loader(140, 20):
            model.eval()
            with torch.no_grad():
                model(batch)

def fetched_ahead_of_a_validation():
    model, optimizer = made()
    batches = iter(loader(16))
    turn(model, optimizer, next(batches)[0])
    ahead = next(batches)[0]
    model.eval()
    for (batch,) in loader(8):
        model(batch)
    model.train()
    turn(model, optimizer, ahead)

def prefetching_on_a_thread():
    def train():
        model, optimizer = made()
        for _ in range(2):
            batches = iter(loader(40))
            ahead = next(batches)
            while ahead is not None:
                batch, ahead = ahead, next(batches, None)
                turn(model, optimizer, batch[0])
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()

def nested_optimizers():
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner
            super().__init__(inner.param_groups, {"lr": 0.125})
        def step(self, closure=None):
            for _ in range(3):
                self.inner.step()
    model, inner = made(torch.optim.SGD)
    outer = Lookahead(inner)
    for (batch,) in loader(12):
        turn(model, outer, batch)

def without_loader():
    (generator, first), (critic, second) = made(), made(torch.optim.SGD)
    for _ in range(5):
        turn(critic, second, torch.randn(4, 4))
        turn(generator, first, torch.randn(4, 4))

def estimated():
    model, optimizer = made()
    @torch.no_grad()
    def estimate_loss():
        model.eval()
        for _ in range(3):
            model(torch.randn(4, 4)).pow(2).mean().item()
            time.sleep(0.05)
        model.train()
    for index in range(4):
        if index % 2 == 0:
            estimate_loss()
        turn(model, optimizer, torch.randn(4, 4))

def validation_with_gradients():
    model, optimizer = made()
    for _ in range(2):
        for (batch,) in loader(8):
            turn(model, optimizer, batch)
        model.eval()
        for (batch,) in loader(12):
            with torch.no_grad():
                model(batch)
        model.train()

def evaluated_beside():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.layers = nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        def forward(self, batch):
            return self.layers(self.norm(batch))
        def train(self, mode=True):
            super().train(mode)
            self.norm.eval()
            return self
    model, teacher = Model(), made()[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    for _ in range(2):
        model.train()
        for (batch,) in loader(12):
            turn(model, optimizer, batch)
            teacher.eval()

def validation_cut_short():
    model, optimizer = made()
    for _ in range(2):
        for (batch,) in loader(8):
            turn(model, optimizer, batch)
        with torch.no_grad():
            for (batch,) in loader(12):
                break

def saved_between():
    model, optimizer = made(torch.optim.SGD)
    for _ in range(3):
        model.train()
        for _ in range(5):
            turn(model, optimizer, torch.randn(4, 4))
        model.eval()
        with torch.no_grad():
            model(torch.randn(4, 4))
        torch.save(model.state_dict(), "model.pt")

def scaled():
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for index, (batch,) in enumerate(loader(12)):
        loss = model(batch).pow(2).mean()
        if index == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

def failing():
    model, optimizer = made()
    try:
        for index, (batch,) in enumerate(loader(12)):
            loss = model(batch).pow(2).mean()
            if index == 1:
                raise ZeroDivisionError("amid an iteration")
            loss.backward()
            optimizer.step()
    except ZeroDivisionError as error:
        print("raised", error)
    for (batch,) in loader(8):
        turn(model, optimizer, batch)

def failing_torch():
    model, optimizer = made()
    for (batch,) in loader(8):
        try:
            model(batch).backward()
        except RuntimeError as error:
            print("torch raised", str(error)[:20])
        turn(model, optimizer, batch)
    try:
        torch.save({"optimizer": optimizer.state_dict()}, "/nowhere/at/all.pt")
    except RuntimeError as error:
        print("save raised")

def compiled():
    model, optimizer = made()
    @torch.compile(backend="eager")
    def whole(batch):
        turn(model, optimizer, batch)
    for (batch,) in loader(8):
        whole(batch)

def threads():
    def background():
        for (batch,) in loader(400):
            batch.sum()
    thread = threading.Thread(target=background)
    thread.start()
    model, optimizer = made()
    for (batch,) in loader(12):
        turn(model, optimizer, batch)
    thread.join()

def distributed_checkpoint():
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    model, optimizer = made()
    for (batch,) in loader(8):
        turn(model, optimizer, batch)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id="sharded")
    dcp.async_save({"model": weights, "optimizer": state}, checkpoint_id="later").result()
    failing = dcp.async_save({"model": weights, "optimizer": state}, checkpoint_id="/proc/nowhere")
    print("later failed", failing.exception() is not None)
    dcp.async_save({"model": weights}, checkpoint_id="weights_later").result()

def pickled():
    model, optimizer = made()
    for (batch,) in loader(8):
        turn(model, optimizer, batch)
        pickle.dumps((model, optimizer, copy.deepcopy(optimizer)))
    functions = torch.save, torch.autograd.backward, nn.utils.clip_grad_norm_
    assert pickle.loads(pickle.dumps(functions)) == functions
"""
recorded = loops(PRELUDE, LOOPS)

EXPECTED: dict[str, dict[str, float | None]] = {
    # A look at the data is no training.
    "looking": {STEPS: None, SAMPLES: None, "phase iteration": 0},
    # A file with optimizer state is a checkpoint; another file only adds time to the phase.
    "ordinary": {
        STEPS: 6,
        VALIDATED: 4,
        SAMPLES: 24,
        "microbatches_total": 6,
        "epochs_total": 2,
        SAVED: 2,
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
    "closure": {STEPS: 2},
    # Counts are exact although not every loss is read.
    "losses_of_many_steps": {STEPS: 5, SAMPLES: 20, "microbatches_total": 5},
    # Two optimizers on a batch are one step, and both are optimizer time.
    "gan": {STEPS: 3, "phase optimizer": 6},
    # A second step of an optimizer on a batch is a separate step.
    "inner_steps": {STEPS: 6},
    "within_backward": {STEPS: 3 + 2},
    # Batches are counted where they are used: by the validation, or after it.
    "fetched_before_eval": {STEPS: 60, SAMPLES: 1200, VALIDATED: 21},
    "fetched_ahead_of_a_validation": {STEPS: 2, SAMPLES: 8, VALIDATED: 2},
    "prefetching_on_a_thread": {STEPS: 20, SAMPLES: 80, "microbatches_total": 20},
    "nested_optimizers": {STEPS: 3},
    "without_loader": {STEPS: 5},
    # The first evaluation precedes the training.
    "estimated": {STEPS: 4, "phase validation": 1},
    "validation_with_gradients": {STEPS: 4, VALIDATED: 6},
    "evaluated_beside": {STEPS: 6, SAMPLES: 24, "phase validation": 0},
    "validation_cut_short": {STEPS: 4, VALIDATED: 2},
    "saved_between": {STEPS: 15},
    "scaled": {
        STEPS: 3,
        "skipped_steps_total reason=overflow": 1,
        "gauge loss_scale": 512,
        "nonfinite_total kind=loss value=inf": 1,
    },
    "failing": {STEPS: 3},
    "failing_torch": {STEPS: 2, FAILED: 1},
    "compiled": {STEPS: 2},
    # Other threads are not the training.
    "threads": {STEPS: 3, SAMPLES: 12},
    # An asynchronous checkpoint succeeds when the file is written.
    "distributed_checkpoint": {
        **{f"checkpoints_total kind={kind} result=ok": 1 for kind in ("sync", "async")},
        "checkpoints_total kind=async result=failed": 1,
        "phase checkpoint_save_async": 3,
    },
    # Pickling is not a save.
    "pickled": {STEPS: 2, "phase checkpoint_save_sync": 0},
}


@pytest.mark.parametrize("run", EXPECTED)
def test_a_loop_is_recorded(recorded: Job, run: str) -> None:
    assert recorded.unlike(EXPECTED[run], run) == {}


@pytest.mark.parametrize(
    "line",
    ["raised amid an iteration", "torch raised grad can be implici", "save raised", "later failed True"],
)
def test_exceptions_reach_the_job_unchanged(recorded: Job, line: str) -> None:
    assert line in recorded.done.stdout


def test_values_and_times_match_the_log_of_the_job(recorded: Job) -> None:
    assert recorded.gauges("ordinary")["grad_norm"] > 0
    assert 0 < recorded.gauges("scaled")["loss,mode=train"] < 100  # not the scaled loss
    assert (recorded.number("phase backward", "closure") or 0) >= 4
    seconds = recorded.value("training_phase_seconds_total", "estimated", phase="validation")
    assert 0.15 <= (seconds or 0) < 0.15 + 5


def test_the_epoch_is_absent_until_a_loader_is_exhausted(recorded: Job) -> None:
    assert recorded.gauges("without_loader").get("epoch") is None
    assert recorded.gauges("ordinary")["epoch"] == 2


def test_the_loss_matches_the_log_of_the_job_or_is_absent(recorded: Job) -> None:
    lines = [line.split() for line in recorded.done.stdout.splitlines() if line.startswith("loss ")]
    expected = [None if line[2] == "None" else pytest.approx(float(line[2]), rel=1e-5) for line in lines]

    assert [None if line[1] == "None" else float(line[1]) for line in lines] == expected
    assert len(lines) == 3 + 1 + 2 + 6 + 3 + 1 + 1 + 1 + 1 + 1 + 2 + 1


# Without a line of code ---------------------------------------------------------------------------------------


def test_a_job_that_is_not_changed_prints_warns_and_ends_as_before_and_compiling_is_a_phase(
    tmp_path: Path,
) -> None:
    program = """
warnings.simplefilter("always")
model, optimizer = made()
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
    plain = job(tmp_path / "without", PRELUDE + program, check=False)
    recorded = job(tmp_path / "with", PRELUDE + program, AUTO, check=False)

    assert plain.done.returncode == recorded.done.returncode == 3
    assert recorded.done.stdout == plain.done.stdout
    assert re.sub(r"[\d.:]+", "", recorded.done.stderr) == re.sub(r"[\d.:]+", "", plain.done.stderr)
    assert "training_steps_total" not in plain.page
    assert recorded.number(STEPS) == 3
    assert (recorded.number("phase compile") or 0) >= 2
    assert (recorded.value("training_badput_seconds_total", cause="compile") or 0) > 0


TRAINING = """
def train():
    model, optimizer = made()
    for (batch,) in loader(12):
        turn(model, optimizer, batch)

def fail():
    train()
    1 / 0

def leave():
    train()
    sys.exit(1)

def wait_for(child):
    child.start()
    child.join()

def child(method, target):
    wait_for(torch.multiprocessing.get_context(method).Process(target=target))

if __name__ == "__main__":
"""


@pytest.mark.parametrize(
    ("call", "is_finished"),
    [
        ("train()", True),
        ("fail()", False),
        ("wait_for(threading.Thread(target=train))", True),
        ("child('fork', train)", True),
        ("child('fork', fail)", False),
        ("child('spawn', train)", True),
        ("child('spawn', leave)", False),
    ],
)
def test_a_loop_has_done_its_work_unless_its_process_fails(
    tmp_path: Path, call: str, is_finished: bool
) -> None:
    recorded = script(tmp_path, f"{PRELUDE}{TRAINING}    {call}\n")

    assert recorded.number(STEPS) == 3
    assert (recorded.number("uncommitted_seconds") == 0) is is_finished
    assert (recorded.number("productive_seconds_total") != 0) is is_finished


def test_a_mistake_at_the_prompt_ends_no_training(tmp_path: Path) -> None:
    launch = "subprocess.run([sys.executable, '-i', 'train.py'], input=b'1 / 0')"
    recorded = script(tmp_path, f"{PRELUDE}{TRAINING}    train()\n", launch)

    assert "ZeroDivisionError" in recorded.done.stderr
    assert recorded.unlike({STEPS: 3, "uncommitted_seconds": 0}) == {}


ITERATIONS = """
model, optimizer = made()
for (batch,) in training.batches(loader(12)):
    with training.training_iteration():
        turn(model, optimizer, batch)
"""
ADDITIONS = """
model, optimizer = made()
with exporter.span("preparing"):
    training.describe(model="mine")
for (batch,) in loader(40):
    training.record(tokens=100)
    turn(model, optimizer, batch)
    training.step()
"""
GRADIENTS = """
for _ in range(6):
    model(torch.randn(4, 4)).mean().backward()
    model.zero_grad()
"""
JOBS: dict[str, tuple[str, dict[str, float | None]]] = {
    # The bridge pauses in an instrumented job, and no step is counted twice.
    "a loop": (
        f"with training.training_loop(train_iterations_start=0):{indent(ITERATIONS, '    ')}",
        {STEPS: 3, "phase backward": 0},
    ),
    "iterations": (ITERATIONS, {STEPS: 3, "phase backward": 0}),
    "steps before": (
        ITERATIONS.replace("with training.training_iteration()", "training.step()\n    if True"),
        {STEPS: 3, "phase backward": 0},
    ),
    # Instrumentation that only adds values does not pause the bridge.
    "additions": (
        ADDITIONS,
        {STEPS: 10, "tokens_total mode=train": 1000, "phase backward": 10, "run_info model=mine": 1},
    ),
    # Inspecting a model is not training, and gradients can be cleared anywhere in the loop.
    "an attack": (f"model = nn.Linear(4, 1).eval(){GRADIENTS}", {STEPS: None}),
    "gradients kept": (f"model, optimizer = made(){GRADIENTS}optimizer.step()", {STEPS: 1}),
}


@pytest.mark.parametrize("name", JOBS)
def test_an_unchanged_torch_job_is_recorded(tmp_path: Path, name: str) -> None:
    program, expected = JOBS[name]
    recorded = job(tmp_path, f"{PRELUDE}from exporter import training\n{program}", AUTO)

    assert recorded.unlike(expected) == {}


OWN_OPTIMIZER = """
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


def test_steps_of_an_optimizer_that_is_not_torchs_are_missed_with_the_lines_that_add_them(
    tmp_path: Path,
) -> None:
    recorded = job(tmp_path, PRELUDE + OWN_OPTIMIZER, AUTO)

    assert recorded.done.stderr.count("no step of a torch optimizer") == 1
    assert "training.step()" in recorded.done.stderr
    assert recorded.number(STEPS) is None


def test_values_that_need_a_device_synchronisation_are_absent(tmp_path: Path) -> None:
    program = """
from exporter.bridges.loop import LoopTracker
tracker = LoopTracker()
tracker.record("loss", torch.tensor(1.5, requires_grad=True))
tracker.record("loss", torch.empty((), device="meta"))
tracker.record("loss", torch.ones(2))
tracker.record("grad_norm", torch.tensor([2.5]))
print("values", json.dumps(gauges()))
"""
    recorded = job(tmp_path, PRELUDE + program)

    assert recorded.unlike({"gauge loss,mode=train": 1.5, "gauge grad_norm": 2.5, "misuse_total": None}) == {}
