"""Writes a notebook with a plain loop: the first cell prepares, the second trains."""

import sys

import nbformat

PREPARE = """import sys, time
sys.path.insert(0, SOURCES)
import torch
from own_log import SECONDS, begin_step, end_step, log
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(80, 8), torch.randn(80, 1)), batch_size=4)"""
TRAIN = """for _ in range(2):
    begin_step()
    for inputs, targets in loader:
        time.sleep(SECONDS)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        end_step(loss.item(), len(inputs))
        begin_step()
    log("epoch")
time.sleep(3)"""
sources, path = sys.argv[1:]
cells = [nbformat.v4.new_code_cell(text) for text in (f"SOURCES = {sources!r}\n{PREPARE}", TRAIN)]
kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), path)
