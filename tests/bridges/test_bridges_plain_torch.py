"""The bridge to loops without a framework: what is concluded from what they ask torch to do."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import indent

import pytest
from bridges_support import AUTO, Job, job, wanted

pytestmark = [wanted("torch"), pytest.mark.timeout(120)]

PRELUDE = """
import copy, os, pickle, sys, tempfile, threading, time, warnings
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
ROOT = tempfile.mkdtemp(dir=os.environ["EXPORTER_FEED_DIR"] + "/..")

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

SCENARIOS = """
from exporter.bridges import torch_loop
torch_loop.install_source()

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
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{ROOT}/whole.pt")
        torch.save(model.state_dict(), f"{ROOT}/weights.pt")
    print("ordinary", gauges())

def resumed():
    model, optimizer = made()
    optimizer.load_state_dict(torch.load(f"{ROOT}/whole.pt")["optimizer"])
    for (batch,) in loader(8):
        turn(model, optimizer, batch)
    print("resumed", gauges())

def accumulation():
    model, optimizer = made(torch.optim.SGD)
    for index, (batch,) in enumerate(loader(24)):
        (model(batch).pow(2).mean() / 3).backward()
        if index % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()

def accumulation_over_the_end():
    model, optimizer = made(torch.optim.SGD)
    for index, (batch,) in enumerate(batch for _ in range(2) for batch in loader(20)):
        model(batch).pow(2).mean().backward()
        if index % 2:
            optimizer.step()

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
            thread = threading.Thread(target=optimizer.step)
            thread.start()
            thread.join()
        parameter.register_post_accumulate_grad_hook(update)
    for (batch,) in loader(12):
        model(batch).pow(2).mean().backward()
    for _ in range(2):
        model(batch).pow(2).mean().backward()

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

def divided():
    model, optimizer = made(torch.optim.SGD)
    losses = []
    for index, (batch,) in enumerate(loader(40)):
        loss = model(batch).pow(2).mean()
        (loss / 4).backward()
        losses.append(loss.item())
        if index % 4 == 3 or index == 9:
            optimizer.step()
            optimizer.zero_grad()
            print(f"divided{index}", gauges())
            print("means", sum(losses) / len(losses))
            losses.clear()

def shared():
    model, optimizer = made(torch.optim.SGD)
    sums = [model(torch.randn(size, 4)).pow(2).sum() for size in (3, 7)]
    print("means", sum(each.item() for each in sums) / 10)
    for each in sums:
        (each / 10).backward()
    optimizer.step()
    print("shared", gauges())

def closure():
    model, _ = made()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    for (batch,) in loader(8):
        def again():
            optimizer.zero_grad()
            loss = model(batch).pow(2).mean()
            loss.backward()
            return loss
        first = optimizer.step(again)
    print("closure", gauges())
    print("closure begins from", first.item())

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
    print("scaled", gauges())

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
        optimizer.zero_grad()
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss
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

def workers():
    model, optimizer = made()
    for (batch,) in loader(12, num_workers=1):
        turn(model, optimizer, batch)

def distributed_checkpoint():
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    model, optimizer = made()
    for (batch,) in loader(8):
        turn(model, optimizer, batch)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{ROOT}/dcp")
    dcp.async_save({"model": weights, "optimizer": state}, checkpoint_id=f"{ROOT}/later").result()
    failing = dcp.async_save({"model": weights, "optimizer": state}, checkpoint_id="/proc/nowhere")
    print("later failed", failing.exception() is not None)
    dcp.async_save({"model": weights}, checkpoint_id=f"{ROOT}/weights_later").result()

def pickled():
    model, optimizer = made()
    for (batch,) in loader(8):
        turn(model, optimizer, batch)
        pickle.dumps((model, optimizer, copy.deepcopy(optimizer)))
    functions = torch.save, torch.autograd.backward, nn.utils.clip_grad_norm_
    assert pickle.loads(pickle.dumps(functions)) == functions

for scenario in (looking, ordinary, resumed, accumulation, accumulation_over_the_end, gan, inner_steps, within_backward, without_loader, estimated, divided, shared, closure,
                 validation_with_gradients, evaluated_beside, validation_cut_short, scaled, failing, failing_torch, compiled, threads,
                 workers, distributed_checkpoint, pickled):
    torch_loop.ACTIVE.fallback.yields()
    begin(scenario.__name__)
    scenario()
torch_loop.ACTIVE.fallback.yields()
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return job(tmp_path_factory.mktemp("plain"), PRELUDE + SCENARIOS)


STEPS, VALIDATED = "steps_total mode=train", "steps_total mode=validation"
SAMPLES, BATCHES, EPOCHS = "samples_total mode=train", "microbatches_total", "epochs_total"
SAVES, SAVED = "phase checkpoint_save_sync", "checkpoints_total result=ok"
EXPECTED: dict[str, dict[str, float | None]] = {
    # A look at the data is no training.
    "looking": {STEPS: None, SAMPLES: None, "phase iteration": 0},
    # A file with an optimizer's state is a checkpoint, and one without is only time.
    "ordinary": {
        STEPS: 6,
        VALIDATED: 4,
        SAMPLES: 24,
        BATCHES: 6,
        EPOCHS: 2,
        SAVED: 2,
        SAVES: 4,
        "phase forward": 5,
        "phase backward": 6,
        "phase optimizer": 6,
        "gauge step": 6,
        "gauge learning_rate": 0.125,
        "gauge epoch": 2,
    },
    # An optimizer that counts its steps says where a loop begins.
    "resumed": {STEPS: 2, "gauge step": 8},
    "accumulation": {STEPS: 2, BATCHES: 6},
    "accumulation_over_the_end": {STEPS: 5, EPOCHS: 2},
    # Two optimizers on a batch are one step, and both are optimizer time.
    "gan": {STEPS: 3, "phase optimizer": 6},
    # An optimizer that steps again on a batch has made another step.
    "inner_steps": {STEPS: 6},
    "within_backward": {STEPS: 3 + 2},
    "without_loader": {STEPS: 5},
    # The first evaluation is before there is a training.
    "estimated": {STEPS: 4, "phase validation": 1},
    "closure": {STEPS: 2},
    "validation_with_gradients": {STEPS: 4, VALIDATED: 6},
    "evaluated_beside": {STEPS: 6, SAMPLES: 24, "phase validation": 0},
    "validation_cut_short": {STEPS: 4, VALIDATED: 2},
    "scaled": {
        STEPS: 3,
        "skipped_steps_total reason=overflow": 1,
        "gauge loss_scale": 512,
        "nonfinite_total kind=loss value=inf": 1,
    },
    "failing": {STEPS: 3},
    "failing_torch": {STEPS: 2, "checkpoints_total result=failed": 1},
    "compiled": {STEPS: 2},
    # Other threads and workers are not the training.
    "threads": {STEPS: 3, SAMPLES: 12},
    "workers": {STEPS: 3},
    # An asynchronous checkpoint has succeeded when it is written.
    "distributed_checkpoint": {
        **{f"checkpoints_total kind={kind} result=ok": 1 for kind in ("sync", "async")},
        "checkpoints_total kind=async result=failed": 1,
        "phase checkpoint_save_async": 3,
    },
    # What the job pickles is no save.
    "pickled": {STEPS: 2, SAVES: 0},
}


@pytest.mark.parametrize("run", EXPECTED)
def test_what_a_loop_does_is_told(told: Job, run: str) -> None:
    assert told.numbers(run, EXPECTED[run]) == EXPECTED[run]


def test_what_the_job_sees_is_as_before_and_nothing_was_told_out_of_order(told: Job) -> None:
    for line in (
        "raised amid an iteration",
        "torch raised grad can be implici",
        "save raised",
        "later failed True",
    ):
        assert line in told.done.stdout
    assert "training_misuse_total" not in told.page
    assert "exporter" not in told.done.stderr


def test_values_and_times_are_the_jobs_own(told: Job) -> None:
    gauges = told.told()["ordinary"]

    assert gauges["training.loss,mode=train"] > 0
    assert gauges["training.grad_norm"] > 0
    assert 0 < told.told()["scaled"]["training.loss,mode=train"] < 100  # not the scaled one
    assert told.phases("closure")["backward"] >= 4
    seconds = told.value("training_phase_seconds_total", "estimated", phase="validation")
    assert 0.15 <= (seconds or 0) < 0.15 + 5


def test_the_loss_of_accumulated_batches_is_their_mean_and_not_the_divided_one(told: Job) -> None:
    means = [float(line.split()[1]) for line in told.done.stdout.splitlines() if line.startswith("means ")]
    shown = [told.told()[name]["training.loss,mode=train"] for name in ("divided3", "divided7", "divided9")]

    assert shown == pytest.approx(means[:3], rel=1e-5)
    assert told.told()["shared"]["training.loss,mode=train"] == pytest.approx(means[3], rel=1e-5)


def test_the_loss_of_an_optimizer_with_a_closure_is_the_one_that_its_step_returns(told: Job) -> None:
    line = next(line for line in told.done.stdout.splitlines() if line.startswith("closure begins from "))

    assert told.told()["closure"]["training.loss,mode=train"] == pytest.approx(
        float(line.split()[-1]), rel=1e-5
    )


def test_compiling_is_a_phase_of_its_own_and_torch_has_nothing_to_warn_of(tmp_path: Path) -> None:
    program = """
model, optimizer = made()
model = torch.compile(model, backend="eager")
@torch.compile(backend="eager")
def update():
    optimizer.step()
for (batch,) in loader(12):
    model(batch).pow(2).mean().backward()
    update()
"""
    plain = job(tmp_path / "without", "import warnings; warnings.simplefilter('always')" + PRELUDE + program)
    told = job(
        tmp_path / "with",
        "import warnings; warnings.simplefilter('always')" + PRELUDE + program,
        AUTO | {"EXPORTER_RUN": "mine"},
    )

    assert told.value("training_steps_total", "mine", mode="train") == 3
    assert told.phases()["compile"] >= 2
    assert (told.value("training_badput_seconds_total", cause="compile") or 0) > 0
    assert re.sub(r"[\d.:]+", "", told.done.stderr) == re.sub(r"[\d.:]+", "", plain.done.stderr)


# Without a line of code ---------------------------------------------------------------------------------------

UNCHANGED = """
model, optimizer = made()
for epoch in range(2):
    for (batch,) in loader(12):
        turn(model, optimizer, batch)
print("loss is", float(model.weight.sum()) < 1e9, file=sys.stderr)
"""


def test_a_job_that_is_not_changed_prints_and_ends_as_before(tmp_path: Path) -> None:
    ending = "\nsys.exit(3)"
    plain = job(tmp_path / "without", PRELUDE + UNCHANGED + ending, check=False)
    told = job(tmp_path / "with", PRELUDE + UNCHANGED + ending, AUTO, check=False)

    assert plain.done.returncode == told.done.returncode == 3
    assert (plain.done.stdout, plain.done.stderr) == (told.done.stdout, told.done.stderr)
    assert "training_steps_total" not in plain.page
    assert told.value("training_steps_total", mode="train") == 6


def test_a_loop_that_ends_in_order_is_finished_and_one_that_fails_is_not(tmp_path: Path) -> None:
    ended = job(tmp_path / "ended", PRELUDE + UNCHANGED, AUTO)
    failed = job(
        tmp_path / "failed",
        PRELUDE
        + UNCHANGED.replace("turn(model, optimizer, batch)", "turn(model, optimizer, batch); 1 / epoch"),
        AUTO,
        check=False,
    )

    assert failed.done.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert ended.value("training_uncommitted_seconds") == 0
    assert (ended.value("training_productive_seconds_total") or 0) > 0
    assert failed.value("training_productive_seconds_total") == 0
    assert failed.value("training_steps_total", mode="train") == 1


def test_a_loop_that_ends_in_order_on_a_thread_of_its_own_is_finished(tmp_path: Path) -> None:
    indented = UNCHANGED.replace("\n", "\n    ")
    program = (
        f"def train():{indented}\nthread = threading.Thread(target=train)\nthread.start()\nthread.join()\n"
    )
    told = job(tmp_path, PRELUDE + program, AUTO)

    assert told.value("training_steps_total", mode="train") == 6
    assert told.value("training_uncommitted_seconds") == 0
    assert (told.value("training_productive_seconds_total") or 0) > 0


ITERATED = """for (batch,) in training.batches(loader(12)):
    with training.training_iteration():
        turn(model, optimizer, batch)
"""


@pytest.mark.parametrize(
    ("loop", "steps", "is_told"),
    [
        (f"with training.training_loop(train_iterations_start=0):\n{indent(ITERATED, '    ')}", 3, False),
        (ITERATED, 3, False),
        (ITERATED.replace("with training.training_iteration()", "training.step()\n    if True"), 3, False),
        ("for (batch,) in loader(40):\n    turn(model, optimizer, batch)\n    training.step()", 10, True),
    ],
    ids=["a loop", "iterations", "steps before", "steps afterwards"],
)
def test_a_job_that_tells_itself_is_left_to_itself_and_no_step_is_counted_twice(
    tmp_path: Path, loop: str, steps: int, is_told: bool
) -> None:
    program = f"from exporter import training\nmodel, optimizer = made()\n{loop}"
    told = job(tmp_path, PRELUDE + program, AUTO)

    assert told.value("training_steps_total", mode="train") == steps
    assert ("backward" in told.phases()) is is_told


def test_a_job_that_only_adds_to_what_is_told_is_told(tmp_path: Path) -> None:
    program = """
from exporter import span, training
model, optimizer = made()
with span("preparing"):
    training.describe(model="mine", flops_per_sample=10)
for (batch,) in loader(12):
    training.record(tokens=100)
    turn(model, optimizer, batch)
"""
    told = job(tmp_path, PRELUDE + program, AUTO)

    assert told.value("training_steps_total", mode="train") == 3
    assert told.value("training_tokens_total", mode="train") == 300
    assert told.phases()["backward"] == 3
    assert 'model="mine"' in told.page


def test_a_mistake_at_the_prompt_ends_no_training(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PRELUDE + UNCHANGED)
    typed = "exec(open('train.py').read())\n1 / 0\n"
    told = job(
        tmp_path,
        f"import subprocess, sys; subprocess.run([sys.executable, '-i'], input={typed.encode()!r})",
        AUTO,
    )

    assert "ZeroDivisionError" in told.done.stderr
    assert told.value("training_steps_total", mode="train") == 6
    assert told.value("training_uncommitted_seconds") == 0


@pytest.mark.parametrize(
    ("method", "ending", "finished"),
    [
        ("fork", "pass", True),
        ("fork", "1 / 0", False),
        ("spawn", "pass", True),
        ("spawn", "sys.exit(1)", False),
    ],
)
def test_a_child_of_multiprocessing_has_done_its_work_unless_it_fails(
    tmp_path: Path, method: str, ending: str, finished: bool
) -> None:
    program = f"""
def train():
    model, optimizer = made()
    for (batch,) in loader(12):
        turn(model, optimizer, batch)
    {ending}

if __name__ == "__main__":
    child = torch.multiprocessing.get_context("{method}").Process(target=train)
    child.start()
    child.join()
"""
    (tmp_path / "train.py").write_text(PRELUDE + program)
    told = job(
        tmp_path, "import subprocess, sys; subprocess.run([sys.executable, 'train.py'], check=True)", AUTO
    )

    assert told.value("training_steps_total", mode="train") == 3
    assert (told.value("training_uncommitted_seconds") == 0) is finished
    assert (told.value("training_productive_seconds_total") != 0) is finished


BY_HAND = """
model = nn.Sequential(nn.Linear(4, 1))
def by_hand(batch):
    model.zero_grad()
    loss = model(batch).pow(2).mean()
    loss.backward()
    for parameter in model.parameters():
        parameter.data.add_(parameter.grad, alpha=-0.125)
    return loss
for epoch in range(2):
    model.train()
    for _ in range(5):
        loss = by_hand(torch.randn(4, 4))
    model.eval()
    with torch.no_grad():
        model(torch.randn(4, 4))
    time.sleep(0.1)
model.train()
for _ in range(3):
    loss = by_hand(torch.randn(4, 4))
"""


def test_a_loop_that_changes_its_model_by_hand_is_told_by_where_it_clears_the_gradients(
    tmp_path: Path,
) -> None:
    told = job(
        tmp_path, PRELUDE + BY_HAND + "torch_loss = loss.item(); model.eval(); print('told', gauges())", AUTO
    )

    assert told.value("training_steps_total", mode="train") == 13
    assert told.phases()["validation"] == 3
    assert (told.value("training_phase_seconds_total", phase="validation") or 0) >= 0.2
    assert (told.value("training_productive_seconds_total") or 0) > 0


def test_gradients_that_an_optimizer_is_to_use_or_that_belong_to_no_training_end_no_turn(
    tmp_path: Path,
) -> None:
    """An optimizer's loop may clear them where it likes; a model that only is looked into is not trained."""
    beside = "\nfor index in range(6):\n    model(torch.randn(4, 4)).mean().backward()\n    model.zero_grad()"
    attack = job(tmp_path / "attack", PRELUDE + "model = nn.Linear(4, 1).eval()" + beside, AUTO)
    kept = job(tmp_path / "kept", PRELUDE + "model, optimizer = made()" + beside + "\noptimizer.step()", AUTO)

    assert not attack.value("training_steps_total", mode="train")
    assert kept.value("training_steps_total", mode="train") == 1


@pytest.mark.parametrize("optimizer", ["torch.optim.SGD(model.parameters(), lr=0.1)", "None"])
def test_a_save_between_evaluation_and_training_makes_no_step(tmp_path: Path, optimizer: str) -> None:
    program = f"""
model = nn.Sequential(nn.Linear(4, 1))
optimizer = {optimizer}
for epoch in range(3):
    model.train()
    for _ in range(5):
        (optimizer or model).zero_grad()
        model(torch.randn(4, 4)).pow(2).mean().backward()
        if optimizer:
            optimizer.step()
    model.eval()
    with torch.no_grad():
        model(torch.randn(4, 4))
    torch.save(model.state_dict(), "model.pt")
"""

    assert job(tmp_path, PRELUDE + program, AUTO).value("training_steps_total", mode="train") == 15


def test_values_that_cannot_be_had_without_waiting_are_left_out(tmp_path: Path) -> None:
    program = """
from exporter.bridges.loop import LoopTracker
tracker = LoopTracker()
tracker.record("loss", torch.tensor(1.5, requires_grad=True))
tracker.record("loss", torch.empty((), device="meta"))
tracker.record("loss", torch.ones(2))
tracker.record("grad_norm", torch.tensor([2.5]))
tracker.record("grad_norm", 3)
print("told", gauges())
from exporter.training.recording import TRAINING
print([series.definition.name for series in TRAINING.series() if "misuse" in series.definition.name])
"""
    told = job(tmp_path, PRELUDE + program)

    assert told.told()["told"]["training.loss,mode=train"] == 1.5
    assert told.told()["told"]["training.grad_norm"] == 3
    assert told.done.stdout.endswith("[]\n")
