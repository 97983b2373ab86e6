"""A user's module for test_flop_count_per_micro_step: the forms in which parameters are counted."""


def count_parameters(model):
    """All of them."""
    return sum(p.numel() for p in model.parameters())


class Meter:
    """A method and a static method."""

    def flops(self, model):
        """Six per parameter."""
        return 6 * sum(p.numel() for p in model.parameters())

    @staticmethod
    def num_parameters(model):
        """All of them."""
        return len(list(model.parameters()))


def inline(model):
    """The sum in the middle of a loop."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    named = sum(p.numel() for name, p in model.named_parameters())
    return trained, named
