"""Causes that were seen, and what their ablations gave, to findings with a status."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from bareloop.benchmark import Difference, difference, saving_status
from bareloop.diagnosis.causes import CAUSES
from bareloop.diagnosis.evidence import Cause, Finding
from bareloop.diagnosis.measure import Measured, Suspect
from bareloop.diagnosis.ranking import order
from bareloop.trace import Trace

__all__ = ["findings", "suspects"]


def suspects(traces: Mapping[str, Trace]) -> list[Suspect]:
    """Every cause of the catalogue that these runs show, alone or (with two of them) against each other."""
    found = []
    for script, trace in traces.items():
        others = [other for name, other in traces.items() if name != script]
        for cause in CAUSES:
            evidence = cause.detect(trace) if cause.detect is not None else None
            if evidence is None and cause.contrast is not None and others:
                evidence = cause.contrast(trace, others[0])
            if evidence is not None:
                found.append(Suspect(script=script, cause=cause, evidence=evidence))
    return found


def findings(seen: Sequence[Suspect], traces: Mapping[str, Trace], measured: Measured) -> tuple[Finding, ...]:
    """One finding per suspect, largest shown saving first."""
    return order([_finding(suspect, traces[suspect.script], measured) for suspect in seen])


def _finding(suspect: Suspect, trace: Trace, measured: Measured) -> Finding:
    cause, evidence = suspect.cause, suspect.evidence
    status, reason = cause.status, cause.no_ablation
    saving = control = None
    if cause.ablate is not None:
        if suspect.key in measured.errors:
            status, reason = _untried(cause), measured.errors[suspect.key]
        elif not any(measured.paired(_of(suspect.key))):
            status, reason = _untried(cause), "ablations were switched off"
        else:
            saving, control = _saving(suspect, measured), _control(suspect, measured)
            step_s = fmean([times for launch in measured.paired(_of(suspect.script)) for times in launch])
            status, reason = saving_status(saving, control, step_s), ""
    return Finding(
        cause=cause.code,
        title=cause.title,
        script=suspect.script,
        status=status,
        evidence=evidence.text,
        counts=evidence.counts,
        saving_s_per_step=None if saving is None else saving.estimate,
        low=None if saving is None else saving.low,
        high=None if saving is None else saving.high,
        setting=cause.setting(trace),
        fix=cause.fix(trace, evidence),
        changes_math=cause.changes_math,
        location=evidence.location,
        reason=reason,
        control_low=None if control is None else control.low,
        control_high=None if control is None else control.high,
    )


def _untried(cause: Cause) -> str:
    """A pattern that changes the math is a counted fact without any ablation; a mere cost was not examined."""
    return "counted" if cause.changes_math else "not_examined"


def _of(key: str) -> Callable[[Mapping[str, float]], float | None]:
    return lambda times: times.get(key)


def _saving(suspect: Suspect, measured: Measured) -> Difference | None:
    """Plain turns minus turns with the cause away, seconds per step. Both plain turns of the round are the baseline."""
    script, key = suspect.script, suspect.key

    def saved(times: Mapping[str, float]) -> float | None:
        if key not in times:
            return None
        plain = [times[name] for name in (script, f"{script}:null") if name in times]
        return fmean(plain) - times[key]

    return difference(measured.paired_medians(saved), pool=True)


def _control(suspect: Suspect, measured: Measured) -> Difference | None:
    """The null ablation: a plain turn minus the other plain turn of the same round."""
    script, null = suspect.script, f"{suspect.script}:null"
    return difference(
        measured.paired_medians(lambda times: times[script] - times[null] if null in times else None), pool=True
    )
