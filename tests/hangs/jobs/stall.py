"""Job that waits at the place of the first argument: in the first step (`first`), in a save (`save`) or in a later step (`hang`)."""

import sys
import time

from exporter import training

waiting_place, peer = sys.argv[1:]


def wait_for_peer() -> None:
    """Wait for a writer of the FIFO `peer`, as a collective without a timeout does."""
    open(peer).close()  # noqa: PTH123  # one call, so that the stack is known


if waiting_place == "first":
    with training.training_iteration():
        wait_for_peer()
for step in range(100_000):
    with training.training_iteration():
        time.sleep(0.05)
        if step == 5 and waiting_place == "save":
            with training.checkpoint_save(step):
                wait_for_peer()
        if step == 5 and waiting_place == "hang":
            wait_for_peer()
