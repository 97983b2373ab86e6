"""The trace: the record of one run."""

from dataclasses import dataclass

from bareloop.trace.counts import Counts
from bareloop.trace.environment import Environment
from bareloop.trace.phases import Phases
from bareloop.trace.work import Ledger, StepFacts

__all__ = ["SCHEMA", "ProcessFacts", "Trace"]

SCHEMA = "bareloop.trace/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessFacts:
    """What one training process did."""

    rank: int
    pid: int
    environment: Environment
    work: Ledger
    """This process's own share."""
    steps: tuple[StepFacts, ...]
    """The first optimizer steps, in order, from step 1."""
    counts: Counts | None = None
    """None when the run ended before its counting windows."""
    notes: tuple[str, ...] = ()
    """What a probe could not observe, in a sentence each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Facts about one run of one script."""

    script: str
    """The script as the user wrote it, e.g. "train.py"."""
    command: tuple[str, ...]
    processes: tuple[ProcessFacts, ...]
    """By rank; the first one speaks for the run where all do the same."""
    work: Ledger
    """All processes together."""
    phases: Phases | None = None
    """From timing windows of rank 0; None before any timing was made."""
    pilot_s_per_step: float | None = None
    """A rough step time, of a few plain steps of one launch: for planning, never for a verdict."""
    startup_s: float = 0.0
    """Seconds from the start of the command to its first optimizer step, two commands starting at once."""
    schema: str = SCHEMA

    @property
    def first(self) -> ProcessFacts:
        """The process with the lowest rank."""
        return self.processes[0]

    @property
    def counts(self) -> Counts | None:
        """Counts of the process with the lowest rank."""
        return self.processes[0].counts
