"""Flax and Optax: a model that JAX compiles; with an argument, with the lines that `run` prints."""

import sys
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from own_log import SECONDS, begin_step, end_job, end_step

IS_INSTRUMENTED = "instrumented" in sys.argv
if IS_INSTRUMENTED:
    from exporter import training

model = nn.Dense(1)
inputs, targets = jax.random.normal(jax.random.key(0), (8, 8)), jnp.ones((8, 1))
parameters = model.init(jax.random.key(1), inputs)
transform = optax.adam(0.01)
state = transform.init(parameters)


@jax.jit
def update(parameters, state):
    loss, gradients = jax.value_and_grad(
        lambda weights: jnp.mean((model.apply(weights, inputs) - targets) ** 2)
    )(parameters)
    changes, state = transform.update(gradients, state)
    return optax.apply_updates(parameters, changes), state, loss


update(parameters, state)  # compiles
begin_step()
for _ in range(40):
    time.sleep(SECONDS)
    parameters, state, loss = update(parameters, state)
    if IS_INSTRUMENTED:
        training.step()
        training.record(loss=loss, samples=len(inputs))
    end_step(float(loss), len(inputs))
    begin_step()
if not IS_INSTRUMENTED:
    time.sleep(25)  # `run` prints its message after 20 s
end_job()
