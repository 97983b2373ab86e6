"""hivemind 1.1.12: what the accumulating `opt.step()` costs beyond PyTorch's own accumulation (see hivemind issue 566).

    python hivemind_accumulation_cost.py

Counts, exact and the same on every machine: operators, and bytes that they read and write, of one micro-step beyond a
forward and backward pass into empty gradients; and elements of gradient kept between micro-steps, per parameter.
"""

import hivemind
import torch
from hivemind.optim.grad_averager import GradientAverager
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops = self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func is not torch.ops.aten.detach.default:
            self.ops += 1
            moved = out if func is torch.ops.aten.zero_.default else (args, kwargs, out)  # zero_ reads nothing
            self.bytes += sum(t.nbytes for t in tree_leaves(moved) if isinstance(t, torch.Tensor))
        return out


def backward(model: torch.nn.Module) -> None:
    model(torch.ones(2, 64)).sum().backward()


def counted(model: torch.nn.Module, set_to_none: bool | None, averager: GradientAverager | None) -> Counted:
    """The second micro-step of a round."""
    model.zero_grad()
    for _ in range(2):
        with Counted() as count:
            if set_to_none is not None:
                model.zero_grad(set_to_none=set_to_none)
            backward(model)
            if averager is not None:
                averager.accumulate_grads_(batch_size=2)
    return count


def main() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    parameters = list(model.parameters())
    size = sum(p.numel() for p in parameters)
    dht = hivemind.DHT(start=True, nat_port_map=False)
    averager = GradientAverager(parameters, dht=dht, prefix="cost", start=False)
    alone = counted(model, True, None)
    kept = sum(t.numel() for t in averager._grad_accumulators()) + sum(p.grad.numel() for p in parameters)  # type: ignore
    rows = {
        "PyTorch's own": (counted(model, None, None), size),
        "hivemind": (counted(model, True, averager), kept),
        "hivemind, zero_grad(set_to_none=False)": (counted(model, False, averager), kept),
    }
    dht.shutdown()
    for name, (count, elements) in rows.items():
        extra = (count.ops - alone.ops, (count.bytes - alone.bytes) / size, elements / size)
        print(f"{name}: {extra[0]:+d} ops, {extra[1]:+.1f} bytes and {extra[2]:.0f} gradient elements per parameter")
    print("fault: present" if kept >= 2 * size else "fault: gone")


if __name__ == "__main__":
    main()
