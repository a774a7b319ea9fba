"""Job that trains three steps and then waits forever for a lock that the main thread itself holds."""

import threading

from exporter import training

lock = threading.Lock()


def save_state() -> None:
    """Acquire the lock a second time."""
    with lock:
        lock.acquire()


for _ in range(3):
    with training.training_iteration():
        pass
save_state()
