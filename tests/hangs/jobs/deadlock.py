"""Job that acquires a lock twice after its first steps."""

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
