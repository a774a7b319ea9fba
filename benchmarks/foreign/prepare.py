"""A script that does not train: it prepares data for the next script."""

import time

import torch
from own_log import DIRECTORY

torch.save(torch.randn(80, 8), DIRECTORY / "data.pt")
time.sleep(2)
