import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel

from exporter.bridges import lightning as lightning_bridge

# The callback is not needed under `training-exporter run`.
trainer = pl.Trainer(max_epochs=2, callbacks=[lightning_bridge.callback()])
trainer.fit(BoringModel())
