import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel

from exporter.bridges import lightning

# callbacks= is not needed under `training-exporter run`.
trainer = pl.Trainer(max_epochs=2, callbacks=[lightning.callback()])
trainer.fit(BoringModel())
