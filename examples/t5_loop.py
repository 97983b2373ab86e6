"""A tiny T5 with a loop on accelerate: three passes over the data, validation after each.

torchrun --nproc-per-node 2 examples/t5_loop.py
"""

import torch
from accelerate import Accelerator
from t5_task import EPOCHS, LEARNING_RATE, arguments, collator, rows, t5
from torch.optim import AdamW
from torch.utils.data import DataLoader
from tqdm import tqdm


@torch.no_grad()
def validate(model: torch.nn.Module, loader: DataLoader, accelerator: Accelerator) -> float:
    """Mean loss over the validation pairs of all processes."""
    model.eval()
    losses = torch.stack([model(**batch).loss for batch in loader])
    model.train()
    return accelerator.gather(losses).mean().item()


def main() -> None:
    options = arguments(__doc__)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    bare = t5(options)
    training, validation = rows()
    collate = collator(bare)
    model, optimizer, loader, validation_loader = accelerator.prepare(
        bare,
        AdamW(bare.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True),
        DataLoader(training, batch_size=options.batch, shuffle=True, collate_fn=collate),
        DataLoader(validation, batch_size=options.batch, collate_fn=collate),
    )

    model.train()
    steps = 0
    for epoch in range(EPOCHS):
        for batch in tqdm(loader, desc=f"epoch {epoch + 1}", disable=not accelerator.is_main_process):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if steps == options.steps:
                break
        if steps == options.steps:
            break
        accelerator.print(f"epoch {epoch + 1}: validation loss {validate(model, validation_loader, accelerator):.3f}")
    # No accelerator.end_training(): there is no tracker to end, and a model that dies after its process group is gone
    # can hang in gloo, whose thread then waits for Python's lock while the model's end waits for the thread.


if __name__ == "__main__":
    main()
