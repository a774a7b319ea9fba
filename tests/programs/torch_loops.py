"""Training loops of plain torch without a framework. Each function is a loop.

`programs.loops.run_loops` calls the functions in sequence in the same process; each call is a separate run.
"""

# ruff: noqa: B023, TRY301 - loops as users write them

from __future__ import annotations

import copy
import pickle
import threading
import time
from typing import Any

import torch
from torch import nn

from programs.loops import print_losses
from programs.torch_parts import loader, model_and_optimizer, train_step


def forward_passes_only() -> None:
    for (batch,) in loader(8):
        model_and_optimizer()[0](batch)


def ordinary() -> None:
    model, optimizer = model_and_optimizer()
    next(iter(loader(4)))
    for _ in range(2):
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


def accumulation() -> None:
    model, optimizer = model_and_optimizer(torch.optim.SGD)
    losses = []
    for index, (batch,) in enumerate(loader(40)):
        loss = model(batch).pow(2).mean()
        (loss / 4).backward()
        losses.append(loss.item())
        if index % 4 == 3 or index == 9:
            optimizer.step()
            optimizer.zero_grad()
            print_losses(sum(losses) / len(losses))
            losses.clear()


def accumulation_over_the_end() -> None:
    model, optimizer = model_and_optimizer(torch.optim.SGD)
    for index, (batch,) in enumerate(batch for _ in range(2) for batch in loader(20)):
        model(batch).pow(2).mean().backward()
        if index % 2:
            optimizer.step()


def shares_of_a_mean() -> None:
    model, optimizer = model_and_optimizer(torch.optim.SGD)
    sums = [model(torch.randn(size, 4)).pow(2).mean() for size in (3, 7)]
    (sums[0] * 0.3).backward()
    (sums[1] * 0.7).backward()
    optimizer.step()
    print_losses(0.3 * sums[0].item() + 0.7 * sums[1].item())


def divided_and_scaled() -> None:
    model, optimizer = model_and_optimizer(torch.optim.SGD)
    for factor in (1024, 1.0):
        losses = []
        for (batch,) in loader(16):
            loss = model(batch).pow(2).mean()
            ((loss / 4) * factor).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        print_losses(sum(losses) / 4)


def a_single_pass_with_a_factor() -> None:
    model, optimizer = model_and_optimizer(torch.optim.SGD)
    scales = (
        lambda loss: loss / 4,
        lambda loss: (loss / 4) * 1.0,
        lambda loss: (loss / 4) * 1024,
        lambda loss: (loss * torch.ones(2)[:1] / 4).mean(),
        lambda loss: -(loss * 0.5).view(1).squeeze(),
        lambda loss: loss * torch.tensor([0.0]),
    )
    for scale in scales:
        scale(model(torch.randn(4, 4)).pow(2).mean()).backward()  # type: ignore[no-untyped-call]  # torch has no types here
        optimizer.step()
        print_losses(None)


def factors_of_one() -> None:
    model, optimizer = model_and_optimizer(torch.optim.SGD)
    for scale in (lambda loss: loss / 1, lambda loss: loss * 1.0, lambda loss: loss.mean() * torch.tensor(1)):
        loss = model(torch.randn(4, 4)).pow(2).mean()
        scale(loss).backward()  # type: ignore[no-untyped-call]  # torch has no types here
        optimizer.step()
        print_losses(loss.item())


def divided_and_scaled_by_one() -> None:
    model, optimizer = model_and_optimizer(torch.optim.SGD)
    losses = []
    for (batch,) in loader(16):
        loss = model(batch).pow(2).mean()
        ((loss / 4) * 1.0).mean().backward()
        losses.append(loss.item())
    optimizer.step()
    print_losses(sum(losses) / 4)


def losses_of_many_steps() -> None:
    from exporter.bridges import loss as losses

    original_settings = losses.INITIAL_STEPS, losses.READ_SECONDS
    losses.INITIAL_STEPS, losses.READ_SECONDS = 2, 60.0
    model, optimizer = model_and_optimizer(torch.optim.SGD)
    own_losses = []
    for (batch,) in loader(20):
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        own_losses.append(loss.item())
    losses.INITIAL_STEPS, losses.READ_SECONDS = original_settings
    print_losses(own_losses[1])  # the bridge reads the losses of the first two steps


def scaled_by_hand() -> None:
    model, optimizer = model_and_optimizer(torch.optim.SGD)
    (model(torch.randn(4, 4)).pow(2).mean() * 1024).backward()
    optimizer.step()
    print_losses(None)


def unknown_shares() -> None:
    model, optimizer = model_and_optimizer(torch.optim.SGD)
    for size in (3, 7):
        (model(torch.randn(size, 4)).pow(2).sum() / 100).backward()
    optimizer.step()
    print_losses(None)


def two_losses_of_a_batch() -> None:
    model, optimizer = model_and_optimizer(torch.optim.SGD)
    for (batch,) in loader(4):
        model(batch).pow(2).mean().backward()
        model(-batch).pow(2).mean().backward()
        optimizer.step()
        print_losses(None)


def microbatches_in_a_closure() -> None:
    model, optimizer = model_and_optimizer(torch.optim.SGD)
    for (batch,) in loader(7):
        losses = []

        def train() -> Any:
            for part in batch.split(3):
                loss = torch.zeros(1).add_(model(part).pow(2).mean())
                losses.append(loss.item() * len(part) / len(batch))
                loss.mul_(len(part) / len(batch))
                loss.backward()

        optimizer.step(train)
        print_losses(sum(losses))


def optimizer_closure() -> None:
    model, _ = model_and_optimizer()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    for (batch,) in loader(8):

        def closure() -> Any:
            optimizer.zero_grad()
            loss = model(batch).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    print_losses(None)


def two_optimizers() -> None:
    generator, generator_optimizer = model_and_optimizer()
    critic, critic_optimizer = model_and_optimizer(torch.optim.SGD)
    for (batch,) in loader(12):
        train_step(critic, critic_optimizer, batch)
        train_step(generator, generator_optimizer, batch)


def several_steps_of_a_batch() -> None:
    model, optimizer = model_and_optimizer()
    for (batch,) in loader(8):
        for _ in range(3):
            train_step(model, optimizer, batch)


def optimizer_steps_within_backward() -> None:
    model = nn.Linear(4, 1)
    for parameter in model.parameters():

        def update(_: Any, optimizer: Any = torch.optim.SGD([parameter], lr=0.125)) -> None:  # noqa: B008
            optimizer.step()

        parameter.register_post_accumulate_grad_hook(update)
    for (batch,) in loader(12):
        model(batch).pow(2).mean().backward()
    for _ in range(2):
        model(batch).pow(2).mean().backward()


def fetched_before_eval() -> None:
    model, optimizer = model_and_optimizer()
    for _ in range(3):
        for (batch,) in loader(400, 20):
            model.train()
            train_step(model, optimizer, batch)
        for (batch,) in loader(140, 20):
            model.eval()
            with torch.no_grad():
                model(batch)


def fetched_ahead_of_a_validation() -> None:
    model, optimizer = model_and_optimizer()
    batches = iter(loader(16))
    train_step(model, optimizer, next(batches)[0])
    ahead = next(batches)[0]
    model.eval()
    for (batch,) in loader(8):
        model(batch)
    model.train()
    train_step(model, optimizer, ahead)


def prefetching_on_a_thread() -> None:
    def train() -> Any:
        model, optimizer = model_and_optimizer()
        for _ in range(2):
            batches = iter(loader(40))
            ahead = next(batches)
            while ahead is not None:
                batch, ahead = ahead, next(batches, None)
                train_step(model, optimizer, batch[0])

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()


def nested_optimizers() -> None:
    class Lookahead(torch.optim.Optimizer):  # type: ignore[misc]  # torch has no types here
        def __init__(self, inner: Any) -> None:
            self.inner = inner
            super().__init__(inner.param_groups, {"lr": 0.125})

        def step(self, closure: Any = None) -> Any:
            for _ in range(3):
                self.inner.step()

    model, inner = model_and_optimizer(torch.optim.SGD)
    outer = Lookahead(inner)
    for (batch,) in loader(12):
        train_step(model, outer, batch)


def steps_without_loader() -> None:
    generator, generator_optimizer = model_and_optimizer()
    critic, critic_optimizer = model_and_optimizer(torch.optim.SGD)
    for _ in range(5):
        train_step(critic, critic_optimizer, torch.randn(4, 4))
        train_step(generator, generator_optimizer, torch.randn(4, 4))


def loss_estimated_in_eval_mode() -> None:
    model, optimizer = model_and_optimizer()

    @torch.no_grad()  # type: ignore[untyped-decorator]  # torch has no types here
    def estimate_loss() -> Any:
        model.eval()
        for _ in range(3):
            model(torch.randn(4, 4)).pow(2).mean().item()
            time.sleep(0.05)
        model.train()

    for index in range(4):
        start_time = time.monotonic()
        if index % 2 == 0:
            estimate_loss()
        train_step(model, optimizer, torch.randn(4, 4))
        if index == 2:
            print("own seconds_of_estimate_and_step", time.monotonic() - start_time)


def validation_with_gradients() -> None:
    model, optimizer = model_and_optimizer()
    for _ in range(2):
        for (batch,) in loader(8):
            train_step(model, optimizer, batch)
        model.eval()
        for (batch,) in loader(12):
            with torch.no_grad():
                model(batch)
        model.train()


def teacher_in_eval_mode() -> None:
    class Model(nn.Module):  # type: ignore[misc]  # torch has no types here
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layers = nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

        def forward(self, batch: Any) -> Any:
            return self.layers(self.norm(batch))

        def train(self, mode: Any = True) -> Any:
            super().train(mode)
            self.norm.eval()
            return self

    model, teacher = Model(), model_and_optimizer()[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    for _ in range(2):
        model.train()
        for (batch,) in loader(12):
            train_step(model, optimizer, batch)
            teacher.eval()


def validation_cut_short() -> None:
    model, optimizer = model_and_optimizer()
    for _ in range(2):
        for (batch,) in loader(8):
            train_step(model, optimizer, batch)
        with torch.no_grad():
            for (_batch,) in loader(12):
                break


def saves_between_steps() -> None:
    model, optimizer = model_and_optimizer(torch.optim.SGD)
    for _ in range(3):
        model.train()
        for _ in range(5):
            train_step(model, optimizer, torch.randn(4, 4))
        model.eval()
        with torch.no_grad():
            model(torch.randn(4, 4))
        torch.save(model.state_dict(), "model.pt")


def gradient_scaler() -> None:
    model, optimizer = model_and_optimizer()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for index, (batch,) in enumerate(loader(12)):
        loss = model(batch).pow(2).mean()
        if index == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def failing_loop() -> None:
    model, optimizer = model_and_optimizer()
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
        train_step(model, optimizer, batch)


def failing_torch_calls() -> None:
    model, optimizer = model_and_optimizer()
    for (batch,) in loader(8):
        try:
            model(batch).backward()
        except RuntimeError as error:
            print("torch raised", str(error)[:20])
        train_step(model, optimizer, batch)
    try:
        torch.save({"optimizer": optimizer.state_dict()}, "/nowhere/at/all.pt")
    except RuntimeError:
        print("save raised")


def compiled_step() -> None:
    model, optimizer = model_and_optimizer()

    @torch.compile(backend="eager")  # type: ignore[untyped-decorator]  # torch has no types here
    def train(batch: Any) -> Any:
        train_step(model, optimizer, batch)

    for (batch,) in loader(8):
        train(batch)


def loader_on_another_thread() -> None:
    def read_batches() -> Any:
        for (batch,) in loader(400):
            batch.sum()

    thread = threading.Thread(target=read_batches)
    thread.start()
    model, optimizer = model_and_optimizer()
    for (batch,) in loader(12):
        train_step(model, optimizer, batch)
    thread.join()


def distributed_checkpoint() -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = model_and_optimizer()
    for (batch,) in loader(8):
        train_step(model, optimizer, batch)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id="sharded")
    dcp.async_save({"model": weights, "optimizer": state}, checkpoint_id="later").result()
    failing = dcp.async_save({"model": weights, "optimizer": state}, checkpoint_id="/proc/nowhere")
    print("later failed", failing.exception() is not None)
    dcp.async_save({"model": weights}, checkpoint_id="weights_later").result()


def pickled_model_and_optimizer() -> None:
    model, optimizer = model_and_optimizer()
    for (batch,) in loader(8):
        train_step(model, optimizer, batch)
        pickle.dumps((model, optimizer, copy.deepcopy(optimizer)))
    functions = torch.save, torch.autograd.backward, nn.utils.clip_grad_norm_
    assert pickle.loads(pickle.dumps(functions)) == functions
