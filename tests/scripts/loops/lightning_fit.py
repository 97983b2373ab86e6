"""Lightning owns the loop; it accumulates over two batches and evaluates every 20."""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self.layer(batch[0]).pow(2).mean()

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.layer(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(4096, 16))
    trainer = lightning.Trainer(
        max_epochs=50,
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        val_check_interval=20,
        limit_val_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=8))
