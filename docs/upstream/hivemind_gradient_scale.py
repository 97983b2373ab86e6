"""hivemind 1.1.12: micro-batches of different sizes give a gradient of the wrong scale.

    python hivemind_gradient_scale.py

One peer, one parameter, micro-batches of 3, 5 and 8 samples with a mean loss each. The reference is PyTorch's gradient of
the 16 samples in one batch. `GradientAverager` weights the micro-batches by size / first size, and then divides by the
number of micro-batches where it should divide by the sum of those weights.
"""

import hivemind
import torch
from hivemind.optim.grad_averager import GradientAverager


def gradient(weight: torch.nn.Parameter, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    weight.grad = None
    torch.nn.functional.mse_loss(inputs @ weight, targets).backward()
    assert weight.grad is not None
    return weight.grad.clone()


def main() -> None:
    torch.manual_seed(0)
    weight, sizes = torch.nn.Parameter(torch.randn(4)), (3, 5, 8)
    inputs, targets = torch.randn(sum(sizes), 4), torch.randn(sum(sizes))
    pooled = gradient(weight, inputs, targets)

    dht = hivemind.DHT(start=True, nat_port_map=False)
    averager = GradientAverager([weight], dht=dht, prefix="scale", start=False)
    for part, answers in zip(inputs.split(sizes), targets.split(sizes), strict=True):
        gradient(weight, part, answers)
        averager.accumulate_grads_(batch_size=len(part))
    averager.load_accumulators_into_averager_()
    with averager.get_tensors() as (ours,):
        scale = (ours @ pooled / pooled.square().sum()).item()
        error = (ours - pooled).abs().max().item() / pooled.abs().max().item()
    dht.shutdown()
    print(f"sizes {sizes}: gradient is {scale:.3f} times that of the pooled batch, largest error {error:.2f} of it")
    print("fault: present" if error > 1e-4 else "fault: gone")


if __name__ == "__main__":
    main()
