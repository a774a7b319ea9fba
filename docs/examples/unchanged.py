# This job contains no call of the exporter. Run with `training-exporter run -- python unchanged.py`.
import torch

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(torch.randn(512, 8), batch_size=32)
for batch in loader:
    optimizer.zero_grad()
    model(batch).pow(2).mean().backward()
    optimizer.step()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
