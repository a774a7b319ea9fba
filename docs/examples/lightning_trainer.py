import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel

from exporter.bridges import lightning

# callbacks= is not needed under `python -m exporter run`.
trainer = pl.Trainer(max_epochs=2, callbacks=[lightning.callback()])
trainer.fit(BoringModel())
