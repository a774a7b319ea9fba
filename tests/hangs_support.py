"""Ending of jobs that hang, with their descendants."""

from __future__ import annotations

import subprocess

import psutil


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants.

    A signal to the process group would miss the workers of torchrun, which have sessions of their own.
    """
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    for child in children:
        if child.is_running():
            child.kill()
    psutil.wait_procs(children, timeout=60)
