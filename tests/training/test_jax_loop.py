"""Losses of a JAX training loop, recorded as arrays and compared with the log of the loop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bridges_support import SAMPLES, STEPS, needs, run_job

pytestmark = [needs("jax"), pytest.mark.timeout(240)]

LOOP = """
import jax
import jax.numpy as jnp
from exporter import training

@jax.jit
def step(weights, batch, targets):
    def loss_of(weights):
        return jnp.mean((batch @ weights - targets) ** 2)
    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return weights - 0.1 * gradients, loss, jnp.sqrt(jnp.sum(gradients ** 2))

weights = jnp.zeros(4)
batch = jax.random.normal(jax.random.key(1), (8, 4))
log = []
with training.training_loop(0):
    for number in range(6):
        with training.training_iteration():
            weights, loss, norm = step(weights, batch, batch.sum(axis=1))
            shaped = loss if number % 2 else loss.reshape(1)
            training.record(loss=shaped, grad_norm=norm, samples=len(batch))
        log.append(float(loss))
        jax.block_until_ready(loss)
        training.record(loss=shaped)  # the array is computed
        print("loss", json.dumps([gauges().get("loss,mode=train"), float(loss), shaped.shape]))
print("values", json.dumps(gauges()))
"""


def test_the_recorded_losses_of_a_jax_loop_equal_those_of_its_log(tmp_path: Path) -> None:
    result = run_job(tmp_path, LOOP, {"JAX_PLATFORMS": "cpu"})
    loss_lines = [line for line in result.process.stdout.splitlines() if line.startswith("loss ")]
    losses = [json.loads(line.removeprefix("loss ")) for line in loss_lines]

    assert [recorded for recorded, _, _ in losses] == [pytest.approx(logged) for _, logged, _ in losses]
    assert [shape for _, _, shape in losses] == [[1], []] * 3
    assert result.differences({STEPS: 6, SAMPLES: 48, "misuse_total": None}) == {}
    assert result.gauges()["grad_norm"] > 0
