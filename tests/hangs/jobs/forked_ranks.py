"""Launcher of a script on several ranks of this machine, like torchrun. The ranks are forked, so that torch is imported once.

The arguments are the number of ranks, the script, and the arguments of the script.
"""

import os
import runpy
import socket
import sys

import torch.distributed  # noqa: F401  # for the ranks

ranks, *sys.argv = sys.argv[1:]
with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
os.environ |= {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
for rank in range(int(ranks)):
    if os.fork() == 0:
        os.environ["RANK"] = str(rank)
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
for _ in range(int(ranks)):
    os.wait()
