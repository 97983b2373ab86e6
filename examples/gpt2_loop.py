"""A small GPT-2 on the standard library's sources, one pass, with the loop people write themselves.

Per step it does the work of `gpt2_trainer.py`: as many samples and tokens, and the optimizer that the Trainer takes
by default (fused AdamW without weight decay, linear schedule). The math is not the same: nothing is clipped here, and
the batches come in another order.
"""

import math

import torch
from gpt2_task import arguments, gpt2, rows
from torch.optim import AdamW
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import default_data_collator, get_linear_schedule_with_warmup


def main() -> None:
    options = arguments(__doc__)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = gpt2(options).to(device)
    loader = DataLoader(rows(options), batch_size=options.batch, shuffle=True, collate_fn=default_data_collator)
    optimizer = AdamW(model.parameters(), lr=5e-5, weight_decay=0.0, fused=True)
    steps = options.steps if options.steps > 0 else math.ceil(len(loader) / options.accumulate)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=0, num_training_steps=steps)

    model.train()
    progress = tqdm(total=steps)
    for index, batch in enumerate(loader, start=1):
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        loss = model(**batch).loss / options.accumulate
        loss.backward()
        if index % options.accumulate == 0 or index == len(loader):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress.update()
            if progress.n == steps:
                break
    progress.close()


if __name__ == "__main__":
    main()
