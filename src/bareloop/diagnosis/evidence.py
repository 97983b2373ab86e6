"""The records that a diagnosis is made of: differences, verdicts, findings."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from bareloop.trace import Counts, Ledger, Phases, Trace

__all__ = [
    "COMPARISON_SCHEMA",
    "DIAGNOSIS_SCHEMA",
    "Cause",
    "Combined",
    "Comparison",
    "Control",
    "Diagnosis",
    "Difference",
    "Evidence",
    "Finding",
    "MathVerdict",
    "SpeedVerdict",
    "Timing",
    "Unexplained",
    "WorkVerdict",
]

COMPARISON_SCHEMA = "bareloop.comparison/1"
DIAGNOSIS_SCHEMA = "bareloop.diagnosis/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What a cause saw in a trace: facts only, its saving is for the ablation to say."""

    text: str
    """One sentence with the counts, e.g. "2 host reads per micro-step test the loss for NaN"."""
    counts: Mapping[str, Any]
    location: str | None = None
    """file:line."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """What `ablate` needs to know, JSON values only: it is sent to the process that runs the script."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """A named pattern that costs time or changes the work or the math. A record of functions, one file each.

    A cause never declares itself shown: `status` comes from the ablation alone.
    """

    code: str
    title: str
    detect: Callable[[Trace], Evidence | None] | None = None
    """Evidence of the pattern in one run."""
    contrast: Callable[[Trace, Trace], Evidence | None] | None = None
    """Evidence in the first run of a pattern that exists only against the second one (compare asks both ways)."""
    ablate: Callable[[Mapping[str, Any]], AbstractContextManager[None]] | None = None
    """Context manager entered in the script's process, with `Evidence.data`: the cause is away inside, back after."""
    no_ablation: str = ""
    """Why `ablate` is None, in a sentence for the report."""
    status: str = "counted"
    """Status of a finding that was not ablated: "counted" for differences of work or math, else "not_examined"."""
    setting: Callable[[Trace], str | None] = lambda trace: None
    """The setting that removes it in this framework and version; None where no setting exists."""
    fix: Callable[[Trace, Evidence], str] = lambda trace, evidence: ""
    """What to change, one imperative sentence; where no setting exists it says so and why."""
    changes_math: bool = False
    """True when taking the cause away changes results."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A cause in a run, with evidence and a status."""

    cause: str
    title: str
    script: str
    """"a" or "b"; "a" in a diagnosis of one script."""
    status: str
    """"shown", "counted", "refuted" or "not_examined" (see docs/how-it-works.md)."""
    evidence: str
    counts: Mapping[str, Any]
    saving_s_per_step: float | None
    """Seconds per step that the ablation saved; None when it was not ablated."""
    low: float | None
    high: float | None
    """95 % interval of the saving, seconds per step."""
    setting: str | None
    fix: str
    changes_math: bool
    location: str | None
    reason: str = ""
    """Why it was not examined, or what bounds it."""
    control_low: float | None = None
    control_high: float | None = None
    """95 % interval of the null ablation's saving in the same turns: what "nothing" looks like."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Combined:
    """All causes of a script that have an ablation, taken away in the same turns: savings that overlap count once, and
    savings that are each too small to be shown can be shown together."""

    script: str
    """"a" or "b"."""
    causes: tuple[str, ...]
    status: str
    """As `Finding.status`: "shown", "counted" or "refuted"."""
    saving_s_per_step: float
    low: float
    high: float
    """95 % interval of the saving, seconds per step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A quantity in which two runs differ."""

    quantity: str
    a: Any
    b: Any
    step: int | None = None
    """The first step at which it differs, for quantities of math."""
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkVerdict:
    """Do the two scripts do the same work per step, and plan the same?"""

    verdict: str
    """"equal", "different" or "undecided" (a quantity that decides could not be observed on one side)."""
    differences: tuple[Difference, ...]
    unknown: tuple[str, ...] = ()
    """Quantities that could not be observed on one side or both."""
    sentence: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class MathVerdict:
    """Do they compute the same numbers?"""

    verdict: str
    """"equal", "different" or "undecided"."""
    first_difference: Mapping[str, Any] | None
    """{step, quantity} of the first quantity that differs, in the order of computation."""
    differences: tuple[Difference, ...]
    steps_compared: int = 0
    largest_relative_difference: float | None = None
    sentence: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """A against A, in the same turns."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedVerdict:
    """How long b takes against a."""

    per: str
    """"step", "sample" or "token": what the ratio is per."""
    ratio: float | None
    """Time of b over time of a, per `per`."""
    low: float | None
    high: float | None
    verdict: str
    """What b is against a: "slower", "faster", "equal" or "undecided"."""
    control: Control | None
    launches: int = 0
    rounds: int = 0
    """Rounds of turns in all launches together."""
    steps_per_turn: int = 0
    a_s_per_step: float | None = None
    b_s_per_step: float | None = None
    resolution: float | None = None
    """Differences under this share can't be seen in this budget, 0..1."""
    mode: str = "turns"
    """"turns", or "whole runs" when the two did not fit in memory together."""
    per_step_ratio: float | None = None
    per_sample_ratio: float | None = None
    per_token_ratio: float | None = None
    sentence: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """How long a step of one script takes, for a diagnosis without a second script."""

    s_per_step: float
    low: float
    high: float
    launches: int
    rounds: int
    steps_per_turn: int
    control: Control | None
    """The null ablation against the plain script: what "no difference" looks like."""
    resolution: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Unexplained:
    """What is left of the difference per step when the shown savings are taken off, seconds per step (b minus a)."""

    s_per_step: float
    low: float
    high: float
    share: float | None
    sentence: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The answer to `bareloop compare a b`."""

    a: Trace
    b: Trace
    work: WorkVerdict
    math: MathVerdict
    speed: SpeedVerdict
    findings: tuple[Finding, ...]
    """Largest shown saving first."""
    unexplained: Unexplained | None
    combined: tuple[Combined, ...] = ()
    """What all causes of a script save together, where it has several that can be taken away."""
    phases: Mapping[str, Phases | None] = field(default_factory=dict)
    """"a", "b" -> phases."""
    wall_s: float = 0.0
    budget_s: float = 0.0
    notes: tuple[str, ...] = ()
    version: str = ""
    schema: str = COMPARISON_SCHEMA


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The answer to `bareloop explain script`."""

    script: str
    trace: Trace
    work: Ledger
    """The ledger of all processes together (`Trace.work`)."""
    phases: Phases | None
    counts: Counts | None
    """Counts of the first process (`Trace.counts`)."""
    timing: Timing | None
    findings: tuple[Finding, ...]
    combined: tuple[Combined, ...] = ()
    """What all causes save together, where several can be taken away."""
    wall_s: float = 0.0
    budget_s: float = 0.0
    notes: tuple[str, ...] = ()
    version: str = ""
    schema: str = DIAGNOSIS_SCHEMA
