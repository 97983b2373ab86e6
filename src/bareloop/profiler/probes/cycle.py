"""Where a step ends when a script has one optimizer, or several.

A step is one round of all optimizers that step. With one optimizer every call of its step ends it. With several (a
GAN) the round ends with the one that steps least often; among equals with the one that comes last in the round.
"""

__all__ = ["Cycle"]


class Cycle:
    """Learns the round from the order in which optimizers step."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        """id(optimizer) -> calls of its step."""
        self._round: list[int] = []
        self._last_in_round: int | None = None

    def stepped(self, optimizer: int) -> bool:
        """Counts one call of `step`; True when this call ends a step of the run."""
        self.counts[optimizer] = self.counts.get(optimizer, 0) + 1
        if self._round and optimizer == self._round[0] and len(set(self._round)) == len(self.counts):
            self._last_in_round = self._round[-1]
            self._round = []
        self._round.append(optimizer)
        return optimizer == self._ending()

    def _ending(self) -> int:
        fewest = min(self.counts.values())
        # A round under way leaves those that have stepped in it one ahead: that is a tie, not a difference.
        rare = [key for key, count in self.counts.items() if count <= fewest + 1]
        if len(rare) == len(self.counts):
            return self._last_in_round if self._last_in_round in self.counts else list(self.counts)[-1]
        return min(rare, key=lambda key: self.counts[key])

    def per_step(self, optimizer: int) -> float:
        """Calls of this optimizer's step per step of the run."""
        return self.counts[optimizer] / max(1, self.counts[self._ending()])
