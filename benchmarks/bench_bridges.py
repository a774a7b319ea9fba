"""Measures what each bridge adds to a training step of its framework, with it and without it by turns in one run.

A step goes from one forward pass to the next, of a small transformer (a few milliseconds) and of a model that does almost
nothing, where the framework itself is what takes the time. It is measured in processor time of the training thread, which
other programs on the machine leave as it is. Prints one JSON document; a framework that is not
installed is left out.

    python benchmarks/bench_bridges.py [--quick]
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from report import report

SHARED = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
os.environ["EXPORTER_FEED_DIR"] = FEED = tempfile.mkdtemp(prefix="exporter-bench-", dir=SHARED)
os.environ["KERAS_BACKEND"] = "torch"
os.environ["HF_HUB_OFFLINE"] = "1"
warnings.simplefilter("ignore")

import torch  # noqa: E402  # after the environment

import exporter  # noqa: E402
from exporter.bridges import torch_loop  # noqa: E402
from exporter.bridges.sources import ACTIVE, NOBODY  # noqa: E402

QUICK = "--quick" in sys.argv
ROUNDS = 3 if QUICK else 9
STEPS = {"transformer": 20 if QUICK else 40, "tiny": 100 if QUICK else 200}
WIDTH, LENGTH, BATCH = 64, 32, 8


class Watched(torch.nn.Module):  # type: ignore[misc]  # torch is not looked into
    """A model that notes when it is called.

    Args:
        size: `transformer` or `tiny`.
    """

    def __init__(self, size: str) -> None:
        super().__init__()
        self.calls: list[float] = []
        self.inner: torch.nn.Module = torch.nn.Linear(WIDTH, 1)
        if size == "transformer":
            layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
            self.inner = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, batch: Any) -> Any:
        """Note the time."""
        self.calls.append(time.thread_time())
        return self.inner(batch).pow(2).mean()

    def steps(self) -> list[float]:
        """What each step took, the first ones left out."""
        return [after - before for before, after in pairwise(self.calls[5:])]


def loader(size: str) -> Any:
    shape = (LENGTH, WIDTH) if size == "transformer" else (WIDTH,)
    return torch.utils.data.DataLoader(torch.randn(BATCH * STEPS[size], *shape), batch_size=BATCH)


@contextmanager
def standing(*, on: bool) -> Iterator[None]:
    """Let the bridge for loops without a framework tell, or not."""
    teller = torch_loop.loop_source()
    ACTIVE.source = teller if on else NOBODY
    yield
    teller.yields()
    ACTIVE.source = NOBODY


def plain(size: str, on: bool) -> list[float]:
    model = Watched(size)
    optimizer = torch.optim.AdamW(model.parameters())
    with standing(on=on):
        for batch in loader(size):
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
    return model.steps()


def accelerate(size: str, on: bool) -> list[float]:
    from accelerate import Accelerator

    from exporter.bridges import accelerate as bridge

    bridge.tracker()
    with standing(on=on):
        accelerator = Accelerator(cpu=True)
        watched = Watched(size)
        model, optimizer, batches = accelerator.prepare(
            watched, torch.optim.AdamW(watched.parameters()), loader(size)
        )
        for batch in batches:
            accelerator.backward(model(batch))
            optimizer.step()
            optimizer.zero_grad()
    return watched.steps()


def lightning(size: str, on: bool) -> list[float]:
    import lightning.pytorch as pl

    from exporter.bridges import lightning as bridge

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Module(pl.LightningModule):  # type: ignore[misc]  # as above
        def __init__(self) -> None:
            super().__init__()
            self.model = Watched(size)

        def training_step(self, batch: Any) -> Any:
            return self.model(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    module = Module()
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[bridge.callback()] if on else [],
    )
    ACTIVE.source = NOBODY
    trainer.fit(module, loader(size))
    return module.model.steps()


def transformers(size: str, on: bool) -> list[float]:
    from transformers import Trainer, TrainingArguments

    from exporter.bridges import transformers as bridge

    class Model(Watched):
        def forward(self, batch: Any = None, **_others: Any) -> Any:
            return {"loss": super().forward(batch)}

    shape = (LENGTH, WIDTH) if size == "transformer" else (WIDTH,)
    data = [{"batch": each} for each in torch.randn(BATCH * STEPS[size], *shape)]
    arguments = TrainingArguments(
        FEED + "/out",
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    model = Model(size)
    callbacks = [bridge.callback()] if on else []
    ACTIVE.source = NOBODY
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123  # no path is needed for it
        standard, sys.stdout = sys.stdout, nowhere
        Trainer(model, arguments, train_dataset=data, callbacks=callbacks).train()
        sys.stdout = standard
    return model.steps()


def keras(size: str, on: bool) -> list[float]:
    import keras as framework

    from exporter.bridges import keras as bridge

    calls: list[float] = []

    class Timed(framework.layers.Dense):  # type: ignore[misc]  # nor is Keras
        def call(self, inputs: Any) -> Any:
            calls.append(time.thread_time())
            return super().call(inputs)

    width = 4 * WIDTH if size == "transformer" else 8
    model = framework.Sequential(
        [
            framework.layers.Input((WIDTH,)),
            Timed(width),
            framework.layers.Dense(width),
            framework.layers.Dense(1),
        ]
    )
    model.compile("adam", "mse")
    rows = BATCH * STEPS[size]
    callbacks = [bridge.callback()] if on else []
    ACTIVE.source = NOBODY
    model.fit(
        torch.randn(rows, WIDTH), torch.randn(rows, 1), batch_size=BATCH, verbose=0, callbacks=callbacks
    )
    return [after - before for before, after in pairwise(calls[8:])]


FRAMEWORKS: dict[str, Callable[[str, bool], list[float]]] = {
    "plain": plain,
    "accelerate": accelerate,
    "lightning": lightning,
    "transformers": transformers,
    "keras": keras,
}


def measure(run: Callable[[str, bool], list[float]], size: str) -> dict[str, float]:
    """One framework with the bridge and without it, by turns."""
    run(size, True)  # to warm up
    found: dict[bool, list[float]] = {True: [], False: []}
    for number in range(ROUNDS):
        for on in (True, False) if number % 2 else (False, True):
            gc.collect()
            found[on].append(statistics.median(run(size, on)))
    with_it, without = statistics.median(found[True]), statistics.median(found[False])
    return {
        "without_microseconds": round(without * 1e6, 1),
        "added_microseconds": round((with_it - without) * 1e6, 1),
        "ratio": round(with_it / without, 4),
    }


def main() -> None:
    torch.set_num_threads(1)
    results: dict[str, object] = {}
    for name, run in FRAMEWORKS.items():
        if name == "plain" or importlib.util.find_spec(name) is not None:
            results[name] = {size: measure(run, size) for size in STEPS}
    report({"torch": torch.__version__, "steps": STEPS, "rounds": ROUNDS, "results": results})
    exporter.shutdown()
    shutil.rmtree(FEED, ignore_errors=True)


if __name__ == "__main__":
    main()
