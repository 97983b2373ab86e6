import math
import random
from collections.abc import Callable

import pytest

INSIDE = 0.03
RHO = 0.5


@pytest.fixture(name="rounds")
def rounds_fixture() -> Callable[..., list[list[float]]]:
    """Simulated log ratios, `[launch][round]`, of a shared machine."""
    return simulated_rounds


def simulated_rounds(
    chance: random.Random, launches: int, count: int, *, process: float, true: float = 0.0
) -> list[list[float]]:
    """An effect of the process, AR(1) noise in the launch, and an outlier in one round of twenty."""
    result: list[list[float]] = []
    for _ in range(launches):
        centre = true + chance.gauss(0, process)
        noise = chance.gauss(0, INSIDE)
        values: list[float] = []
        for _ in range(count):
            outlier = chance.choice((-1, 1)) * chance.uniform(0.1, 0.4) if chance.random() < 0.05 else 0.0
            values.append(centre + noise + outlier)
            noise = RHO * noise + chance.gauss(0, INSIDE * math.sqrt(1 - RHO**2))
        result.append(values)
    return result
