"""A first script that trains nothing: it prepares data for the second."""

import time

import torch
from own_log import DIRECTORY

torch.save(torch.randn(80, 8), DIRECTORY / "data.pt")
time.sleep(2)
