"""Job that waits where its argument says: in its first step (`first`), in a save (`save`) or after a step (`hang`)."""

import sys
import time

from exporter import training

waiting_place = sys.argv[1]


def wait_for_peer(seconds: float) -> None:
    """Wait, as a collective without a timeout does."""
    time.sleep(seconds)


if waiting_place == "first":
    with training.training_iteration():
        wait_for_peer(600)
for step in range(100_000):
    with training.training_iteration():
        time.sleep(0.05)
        if step == 5 and waiting_place == "save":
            with training.checkpoint_save(step):
                wait_for_peer(8)
        if step == 5 and waiting_place == "hang":
            wait_for_peer(15)
