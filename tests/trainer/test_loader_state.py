"""Samplers and data that know where they are; what a loader makes of them is in `test_resume`."""

import random

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler

from bareloop.trainer.loader_state import TrackedBatches, random_state, restore_random_state


def test_random_state_comes_back() -> None:
    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()]

    draw()  # so that a second normal number is waiting in each
    state = random_state()
    first = draw()
    restore_random_state(state)
    assert draw() == first
    assert random_state() != state


def test_an_order_is_drawn_again_and_leaves_the_generators_alone() -> None:
    for generator in (None, torch.Generator().manual_seed(5)):
        batches = TrackedBatches(BatchSampler(RandomSampler(range(20), generator=generator), 3, False))
        list(batches)  # an epoch before
        order = iter(batches)
        whole = [next(order) for _ in range(3)]
        state = order.state_dict()
        whole += list(order)
        again, drawn = iter(batches), random_state()
        again.load_state_dict(state)
        assert random_state() == drawn
        assert whole[:3] + list(again) == whole
        assert (len(batches), batches.batch_size) == (7, 3)
