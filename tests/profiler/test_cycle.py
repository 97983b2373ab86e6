"""Where a step ends, for every order in which optimizers may step."""

from bareloop.profiler.probes.cycle import Cycle


def ends(order: str) -> str:
    """The order with a bar after each call that ended a step."""
    cycle = Cycle()
    return "".join(name + ("|" if cycle.stepped(ord(name)) else "") for name in order)


def test_one_optimizer_ends_a_step_each_time() -> None:
    assert ends("AAAA") == "A|A|A|A|"


def test_two_that_alternate_end_it_together() -> None:
    # The very first call can't be known to be half a step; the agent merges it when the second optimizer appears.
    assert ends("DGDGDG") == "D|G|DG|DG|"


def test_the_rarer_one_ends_it() -> None:
    assert ends("DDDGDDDGDDDG") == "D|D|D|G|DDDG|DDDG|"


def test_calls_per_step() -> None:
    cycle = Cycle()
    for name in "DDDGDDDG":
        cycle.stepped(ord(name))
    assert cycle.per_step(ord("D")) == 3.0
    assert cycle.per_step(ord("G")) == 1.0
