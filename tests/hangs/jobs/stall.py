"""Job that waits after its first steps as requested by its argument, then continues."""

import sys
import time

from exporter import training

kind = sys.argv[1]


def wait_for_peer(seconds: float) -> None:
    """Wait, as a collective without a timeout does."""
    time.sleep(seconds)


if kind == "first":
    with training.training_iteration():
        wait_for_peer(600)
for step in range(100_000):
    with training.training_iteration():
        time.sleep(0.05)
        if step == 5 and kind == "save":
            with training.checkpoint_save(step):
                wait_for_peer(8)
        if step == 5 and kind == "hang":
            wait_for_peer(15)
