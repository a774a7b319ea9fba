"""Training jobs of Accelerate. Each function is a job.

`programs.loops.run_loops` calls the functions in sequence in the same process; each call is a separate run.
"""

from __future__ import annotations

import contextlib

from programs.accelerate_parts import train


def logged_values() -> None:
    accelerator, _ = train(epochs=2, gradient_accumulation_steps=2)
    accelerator.log({"train_loss": 99.0, "eval_loss": 0.5, "lr": 0.25, "epoch": 2}, step=4)
    accelerator.end_training()


def saves_and_load() -> None:
    accelerator, model = train()
    accelerator.save_state("state")
    accelerator.save_model(model, "weights")
    with contextlib.suppress(Exception):
        accelerator.save_state("/proc/nowhere")
    accelerator.save_state("again")
    accelerator.load_state("state")


def failing_loop() -> None:
    try:
        train(fail=True)
    except ZeroDivisionError as error:
        print("raised", error)
    train()
