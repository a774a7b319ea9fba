"""Whether this process is torchrun's agent, which has no rank.

Used in the training process. Nothing in an agent's environment says that it is one: it is known by what it does, which
whoever watches it reports here. A forked child is no agent because its parent is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping


class AgentWatch:
    """What is known so far.

    Attributes:
        run_id: The run's id as torchelastic has it; "" while it is not known.
    """

    def __init__(self) -> None:
        self._pid = 0
        self._identify: Callable[[], object] = lambda: None
        self._changed: Callable[[], None] = lambda: None
        self.run_id = ""

    def on_change(self, identify: Callable[[], object], changed: Callable[[], None]) -> None:
        """Say what tells who this process is, and what is to be called when that changes; neither may raise."""
        self._identify, self._changed = identify, changed

    @property
    def is_agent(self) -> bool:
        """Whether this process is one."""
        return self._pid == os.getpid()

    def seen(self, run_id: str = "", *, environment: Mapping[str, str] = os.environ) -> None:
        """Note that this process acts as an agent; again is harmless and cheap.

        Args:
            run_id: The run's id, where it is known.
            environment: One that torchelastic has made for a worker is believed first.
        """
        if (self.is_agent and (not run_id or run_id == self.run_id)) or (
            not self.is_agent and "TORCHELASTIC_RUN_ID" in environment
        ):
            return
        self.declare(run_id)

    def declare(self, run_id: str = "") -> None:
        """Note it whatever the environment says: an agent may be started by a worker of another."""
        before = self._identify()
        self._pid = os.getpid()
        self.run_id = run_id or self.run_id
        if self._identify() != before:
            self._changed()


AGENT = AgentWatch()
"""This process."""
