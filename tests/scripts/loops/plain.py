"""A plain loop with what scripts do around it: late imports, sys.argv, another folder, workers, an exit handler."""

import argparse
import atexit
import os
import pathlib
import sys
import tempfile


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--evaluate-every", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--mark", type=pathlib.Path)
    arguments = parser.parse_args()
    assert "sitecustomize" not in sys.argv[0]
    os.chdir(tempfile.gettempdir())

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(1024, 64), torch.randint(0, 10, (1024,)))
    loader = DataLoader(data, batch_size=32, shuffle=True, num_workers=arguments.workers)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if arguments.mark:
        atexit.register(lambda: arguments.mark.with_suffix(".exit").write_text("exit handler ran"))
    done = 0
    try:
        for _ in range(arguments.epochs):
            for inputs, labels in loader:
                loss = criterion(model(inputs), labels) / arguments.accumulate
                loss.backward()
                done += 1
                if done % arguments.accumulate == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                if arguments.evaluate_every and done % arguments.evaluate_every == 0:
                    model.eval()
                    with torch.no_grad():
                        for held_out, _ in DataLoader(data, batch_size=512):
                            model(held_out)
                    model.train()
    finally:
        if arguments.mark:
            arguments.mark.with_suffix(".finally").write_text(str(done))


if __name__ == "__main__":
    main()
