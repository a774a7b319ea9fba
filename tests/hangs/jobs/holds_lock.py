"""Job that hangs in a C call, which holds the interpreter lock until the test kills the job."""

import re
import time

from exporter import training

for _ in range(3):
    with training.training_iteration():
        time.sleep(0.5)
# A regular expression that backtracks for longer than any test runs, without releasing the lock.
re.match(r"(a+)+$", "a" * 40 + "b")
