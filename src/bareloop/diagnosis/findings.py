"""Causes that were seen, and what their ablations gave, to findings with a status."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from bareloop.benchmark import Difference, difference, saving_status
from bareloop.diagnosis.causes import CAUSES
from bareloop.diagnosis.evidence import Cause, Combined, Finding
from bareloop.diagnosis.measure import Measured, Suspect, all_key
from bareloop.diagnosis.ranking import order
from bareloop.trace import Trace

__all__ = ["combined", "findings", "suspects"]


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


def combined(seen: Sequence[Suspect], measured: Measured) -> tuple[Combined, ...]:
    """What all causes of a script save together, for each script that has several with an ablation."""
    found = []
    for script in sorted({suspect.script for suspect in seen}):
        key = all_key(script)
        saving = _saving(script, key, measured)
        if saving is None or key in measured.errors:
            continue
        causes = [one for one in seen if one.script == script and one.cause.ablate and one.key not in measured.errors]
        found.append(
            Combined(
                script=script,
                causes=tuple(one.cause.code for one in causes),
                status=saving_status(saving, _control(script, measured), _step_s(script, measured)),
                saving_s_per_step=saving.estimate,
                low=saving.low,
                high=saving.high,
            )
        )
    return tuple(found)


def _finding(suspect: Suspect, trace: Trace, measured: Measured) -> Finding:
    cause, evidence = suspect.cause, suspect.evidence
    status, reason = cause.status, cause.no_ablation
    saving = control = None
    if cause.ablate is not None:
        if suspect.key in measured.errors:
            status, reason = _untried(cause), measured.errors[suspect.key]
        elif not any(measured.paired(_of(suspect.key))):
            why = "no round with it taken away was completed" if measured.ablated else "ablations were switched off"
            status, reason = _untried(cause), why
        else:
            saving, control = _saving(suspect.script, suspect.key, measured), _control(suspect.script, measured)
            status, reason = saving_status(saving, control, _step_s(suspect.script, measured)), ""
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


def _step_s(script: str, measured: Measured) -> float:
    return fmean([times for launch in measured.paired(_of(script)) for times in launch])


def _saving(script: str, key: str, measured: Measured) -> Difference | None:
    """Plain turns minus the turns of this key, seconds per step. Both plain turns of the round are the baseline."""

    def saved(times: Mapping[str, float]) -> float | None:
        if key not in times:
            return None
        plain = [times[name] for name in (script, f"{script}:null") if name in times]
        return fmean(plain) - times[key]

    return difference(measured.paired_medians(saved), pool=True)


def _control(script: str, measured: Measured) -> Difference | None:
    """The null ablation: a plain turn minus the other plain turn of the same round."""
    null = f"{script}:null"
    return difference(
        measured.paired_medians(lambda times: times[script] - times[null] if null in times else None), pool=True
    )
