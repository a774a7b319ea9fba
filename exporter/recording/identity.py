"""Identity: which run and which rank a process is, from what its launcher put into the environment.

Used in the training process, once, when recording begins.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from exporter.recording.values import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

LONGEST_TEXT = 256
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


class Identity(Value):
    """Who records.

    Attributes:
        run: `EXPORTER_RUN`, else the Slurm job id, else torchelastic's run id unless `none`, else `default`.
        rank: Global rank; None for a process that has none, such as torchrun's agent.
        local_rank: Rank on this node; None where the launcher says nothing.
        role: `trainer`, or `agent` for torchrun's.
        node: Host name.
        labels: What describes the process, on an info family only.
    """

    __slots__ = ("run", "rank", "local_rank", "role", "node", "labels")

    def __init__(
        self,
        run: str,
        rank: int | None,
        local_rank: int | None = None,
        role: str = "trainer",
        node: str = "",
        labels: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.run: Final = run
        self.rank: Final = rank
        self.local_rank: Final = local_rank
        self.role: Final = role
        self.node: Final = node
        self.labels: Final = labels


def identity_from(environment: Mapping[str, str], *, agent: bool = False, run_id: str = "") -> Identity:
    """Read the identity of this process; a variable that makes no sense is passed over.

    Args:
        environment: Usually `os.environ`.
        agent: Whether this process is torchrun's agent, which has no rank.
        run_id: The run's id as torchelastic's agent knows it; its workers have it in their environment.
    """
    elastic_run = run_id or environment.get("TORCHELASTIC_RUN_ID", "")
    run = (
        environment.get("EXPORTER_RUN")
        or environment.get("SLURM_JOB_ID")
        or (elastic_run if elastic_run != "none" else "")
        or "default"
    )
    return Identity(
        run=clean_text(run) or "default",
        rank=None if agent else _first_number(environment, _RANKS, otherwise=0),
        local_rank=None if agent else _first_number(environment, _LOCAL_RANKS, otherwise=None),
        role="agent" if agent else "trainer",
        node=clean_text(os.uname().nodename),
    )


def identity() -> Identity:
    """Give the identity of this process, with what `exporter.configure` has said; from its environment before."""
    return _Known.find()


def identify_by(find: Callable[[], Identity]) -> None:
    """Say what knows the identity of this process; the composition root does."""
    _Known.find = staticmethod(find)


class _Known:
    find: Callable[[], Identity] = staticmethod(lambda: identity_from(os.environ))


def clean_text(text: str) -> str:
    """Make text fit for a label value: no surrogates, no control characters, a bounded length."""
    kept = (character if character.isprintable() else "?" for character in text[:LONGEST_TEXT])
    return "".join(kept)


def _first_number(
    environment: Mapping[str, str], names: tuple[str, ...], otherwise: int | None
) -> int | None:
    for name in names:
        text = environment.get(name, "").strip()
        if text.isascii() and text.isdigit() and len(text) <= 9:
            return int(text)
    return otherwise
