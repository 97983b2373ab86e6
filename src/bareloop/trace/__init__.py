"""Facts about one run, and nothing else: no torch, no opinions, JSON in and out."""

from bareloop.trace.codec import decode, encode
from bareloop.trace.counts import Builtin, Collective, Copy, Counts, FunctionCount, HostRead
from bareloop.trace.environment import Environment
from bareloop.trace.phases import PHASES, Phases
from bareloop.trace.run import SCHEMA, ProcessFacts, Trace
from bareloop.trace.work import Group, Ledger, Optimizer, Planned, StepFacts

__all__ = [
    "PHASES",
    "SCHEMA",
    "Builtin",
    "Collective",
    "Copy",
    "Counts",
    "Environment",
    "FunctionCount",
    "Group",
    "HostRead",
    "Ledger",
    "Optimizer",
    "Phases",
    "Planned",
    "ProcessFacts",
    "StepFacts",
    "Trace",
    "decode",
    "encode",
]
