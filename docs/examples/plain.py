import torch

from exporter import training

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
with training.training_loop(train_iterations_start=0):
    for batch in training.batches(torch.randn(100, 32, 8)):
        with training.training_iteration():
            loss = model(batch).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            training.record(loss=loss, samples=len(batch))
