"""A record as text for a terminal: the verdicts first, then one table of findings, then what they rest on.

Only ASCII is drawn, so a log file and a CI page show what a terminal shows; color is the one thing that a terminal
adds. 80 columns are enough: nothing is cut off, cells wrap.
"""

import io
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence

from rich.box import Box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from bareloop.diagnosis.evidence import Comparison, Diagnosis, Difference, Finding
from bareloop.renderers import sentences, units
from bareloop.trace import PHASES, Phases, Trace

__all__ = ["print_report", "render"]

RULE = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
"""No frame, one rule of hyphens under the head."""
WIDTHS = (60, 140)
"""Narrowest and widest report, in columns: longer lines are hard to read."""
WIDE = 110
"""From this width on, what to change gets a column of its own."""
STATUS = {
    "shown": ("bold green", "saves time when taken away"),
    "counted": ("cyan", "certainly there, no saving resolved"),
    "not_examined": ("yellow", "not tried"),
    "refuted": ("dim", "saves nothing when taken away"),
}
"""rich style and meaning of each status."""


def render(record: Comparison | Diagnosis, *, width: int | None = None, color: bool | None = None) -> str:
    """The report as text.

    Args:
        width: columns; None takes the terminal's, 100 without one; held between 60 and 140.
        color: None colors for a terminal, unless NO_COLOR is set.
    """
    if color is None:
        color = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    if width is None:
        width = shutil.get_terminal_size((100, 24)).columns
    width = max(WIDTHS[0], min(WIDTHS[1], width))
    file = io.StringIO()
    console = Console(
        file=file,
        width=width,
        force_terminal=color,
        force_jupyter=False,
        color_system="standard" if color else None,
        no_color=not color,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    blocks = _comparison(record, width) if isinstance(record, Comparison) else _diagnosis(record, width)
    for block in blocks:
        console.print(Padding(block, (1, 0, 0, 0)))
    return "\n".join(line.rstrip() for line in file.getvalue().strip("\n").split("\n")) + "\n"


def print_report(record: Comparison | Diagnosis) -> None:
    """Prints the report, also to a terminal that can't show every character and to a reader that has seen enough."""
    encoding = sys.stdout.encoding or "ascii"
    text = render(record).encode(encoding, "backslashreplace").decode(encoding)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes standard output once more at its end and would complain there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _comparison(record: Comparison, width: int) -> Iterable[RenderableType]:
    yield _title("a", record.a.script, "b", record.b.script)
    verdicts = (
        ("Work", sentences.work(record)),
        ("Math", sentences.math(record)),
        ("Speed", sentences.speed(record)),
    )
    yield _verdicts(verdicts)
    speed = record.speed
    phases = {"a": record.phases.get("a") or record.a.phases, "b": record.phases.get("b") or record.b.phases}
    step_s = {"a": speed.a_s_per_step or _step_s(phases["a"]), "b": speed.b_s_per_step or _step_s(phases["b"])}
    yield _findings(record.findings, step_s, width, one_script=False)
    rest = sentences.unexplained(record)
    facts = [("Together", sentences.together(one, step_s[one.script], name=one.script)) for one in record.combined]
    facts += [("Unexplained", rest)] if rest is not None else []
    if facts:
        yield _facts(facts)
    differences = (*record.work.differences, *record.math.differences)
    if differences:
        yield _differences(differences)
    if any(phases.values()):
        yield _phases(phases)
    yield _facts(
        [
            ("Own cost", _own_cost(phases, record.wall_s, record.budget_s, one_script=False)),
            *_machine({"a": record.a, "b": record.b}),
            *(("Note", note) for note in _notes(record.notes, {"a": record.a, "b": record.b})),
        ]
    )


def _diagnosis(record: Diagnosis, width: int) -> Iterable[RenderableType]:
    yield _title("", record.script)
    yield _step_sentence(record)
    step_s = record.timing.s_per_step if record.timing is not None else _step_s(record.phases)
    yield _findings(record.findings, {"a": step_s, "b": step_s}, width, one_script=True)
    if record.combined:
        yield _facts([("Together", sentences.together(one, step_s, name="")) for one in record.combined])
    if record.phases is not None:
        yield _phases({"a": record.phases})
    facts = [("Work", sentences.ledger(record.work))]
    planned = sentences.plan(record.work)
    if planned is not None:
        facts.append(("Plan", planned))
    if record.counts is not None:
        facts.append(("Per step", sentences.counted(record.counts)))
    facts.append(("Own cost", _own_cost({"a": record.phases}, record.wall_s, record.budget_s, one_script=True)))
    facts += _machine({"": record.trace})
    facts += [("Note", note) for note in _notes(record.notes, {"": record.trace})]
    yield _facts(facts)


def _title(*words: str) -> Text:
    """E.g. ("a", "trainer.py", "b", "loop.py"): which letter is which script."""
    text = Text.assemble(("bareloop", "dim"))
    for letter, script in zip(words[::2], words[1::2], strict=True):
        text.append("   ")
        text.append(f"{letter} = " if letter else "", style="dim")
        text.append(units.plain(script), style="bold")
    return text


def _verdicts(rows: Sequence[tuple[str, sentences.Verdict]]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1, overflow="fold")
    for name, verdict in rows:
        lines = [Text(units.plain(sentence)) for sentence in verdict.sentences]
        if verdict.basis:
            lines.append(Text(units.plain(verdict.basis), style="dim"))
        grid.add_row(Text(name, style="bold"), Text(verdict.word, style=verdict.style), Group(*lines))
    return grid


def _step_sentence(record: Diagnosis) -> RenderableType:
    timing, phases = record.timing, record.phases
    if timing is None:
        text = Text("No step was timed", style="bold yellow")
        if phases is not None:
            text.append(f"; {units.milliseconds(phases.step_s)} in the window that told the phases apart")
    else:
        text = Text("A step takes ")
        text.append(units.milliseconds(timing.s_per_step), style="bold")
        text.append(f" {units.interval(timing.low, timing.high, like=timing.s_per_step)}")
    shares = sentences.per_step(phases) if phases is not None else ""
    text.append(f": {shares}." if shares else ".")
    if timing is None:
        return text
    basis = f"95 % interval over {units.count(timing.launches, 'launch', 'launches')}, "
    basis += f"{units.count(timing.rounds, 'round')} of turns of {units.count(timing.steps_per_turn, 'step')}"
    if timing.control is not None:
        control = timing.control
        basis += f"; the script against itself {units.ratio(control.ratio)} {units.span(control.low, control.high)}"
    if timing.resolution is not None:
        basis += f"; savings under {timing.resolution * 100:.2g} % can't be seen in this budget"
    return Group(text, Text(basis, style="dim"))


def _findings(
    findings: Sequence[Finding], step_s: Mapping[str, float | None], width: int, *, one_script: bool
) -> RenderableType:
    """One table, in the order of the record: largest shown saving first. step_s: seconds per step of each script."""
    if not findings:
        return Text("Findings: no known cause is in this script." if one_script else "Findings: no known cause.")
    wide = width >= WIDE
    table = Table(
        box=RULE, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), leading=1, header_style="bold", expand=True
    )
    if not one_script:
        table.add_column("In", no_wrap=True)
    table.add_column("Saves per step", no_wrap=True, min_width=14)
    table.add_column("Cause and evidence" if wide else "Cause, evidence, what to change", ratio=3, overflow="fold")
    if wide:
        table.add_column("What to change", ratio=2, overflow="fold")
    for finding in findings:
        evidence, change = _evidence(finding), _change(finding)
        first = () if one_script else (Text(finding.script, style="bold"),)
        saving = _saving(finding, step_s.get(finding.script))
        last = (evidence, change) if wide else (Group(evidence, _bullet("->", change)),)
        table.add_row(*first, saving, *last)
    present = {finding.status for finding in findings}
    legend = "; ".join(f"{name.replace('_', ' ')}: {text}" for name, (_, text) in STATUS.items() if name in present)
    return Group(table, Text(f"\n{legend}", style="dim"))


def _saving(finding: Finding, step_s: float | None) -> RenderableType:
    amount, interval = sentences.saving(finding, step_s)
    lines = [Text(finding.status.replace("_", " "), style=STATUS.get(finding.status, ("", ""))[0])]
    if amount != "-":
        lines.append(Text(amount, style="bold" if finding.status == "shown" else ""))
    if interval:
        lines.append(Text(interval, style="dim"))
    return Group(*lines)


def _evidence(finding: Finding) -> RenderableType:
    lines = [Text(units.plain(finding.title or finding.cause), style="bold"), Text(units.plain(finding.evidence))]
    if finding.reason:
        lead = "not examined: " if finding.status == "not_examined" else ""
        lines.append(Text(units.plain(f"{lead}{finding.reason}"), style="dim"))
    if finding.location:
        lines.append(Text(_short(finding.location), style="dim"))
    return Group(*lines)


def _change(finding: Finding) -> Text:
    """The one thing to change, and whether that changes results."""
    if finding.status == "refuted":
        return Text("leave it as it is", style="dim")
    text = Text(units.plain(finding.setting or finding.fix or "nothing is known that removes it"))
    if finding.setting:
        text.stylize("bold")
    if finding.changes_math:
        text.append(" (changes the math)", style="yellow")
    return text


def _bullet(mark: str, text: Text) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1, overflow="fold")
    grid.add_row(mark, text)
    return grid


def _differences(differences: Sequence[Difference]) -> Table:
    """Quantities of work and math in which the two differ, side by side."""
    with_step = any(difference.step is not None for difference in differences)
    with_note = any(difference.note for difference in differences)
    table = Table(box=RULE, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("What differs", overflow="fold")
    table.add_column("a", justify="right", overflow="fold")
    table.add_column("b", justify="right", overflow="fold")
    if with_step:
        table.add_column("from step", justify="right")
    if with_note:
        table.add_column("", ratio=1, overflow="fold")
    for difference in differences:
        a, b = units.pair(difference.a, difference.b)
        row = [difference.quantity.replace("_", " "), a, b]
        if with_step:
            row.append("" if difference.step is None else str(difference.step))
        if with_note:
            row.append(units.plain(difference.note))
        table.add_row(*(Text(cell) for cell in row))
    return table


def _phases(phases: Mapping[str, Phases | None]) -> Table:
    """Milliseconds and shares per phase, the scripts side by side; phases that neither has are left out."""
    sides = {letter: timed for letter, timed in phases.items() if timed is not None}
    table = Table(box=RULE, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("Phase, ms per step")
    for letter in sides:
        table.add_column(letter if len(phases) > 1 else "ms", justify="right")
        table.add_column("%", justify="right")
    if len(sides) == 2:
        table.add_column("b - a", justify="right")
    names = [*PHASES, *(name for timed in sides.values() for name in timed.seconds if name not in PHASES)]
    for name in dict.fromkeys(names):
        seconds = [timed.seconds.get(name, 0.0) for timed in sides.values()]
        if any(round(second * 1e6) for second in seconds):
            table.add_row(*_phase_row(name, seconds, [timed.step_s for timed in sides.values()]))
    total = [timed.step_s for timed in sides.values()]
    table.add_row(*_phase_row("step", total, total), style="bold")
    return table


def _phase_row(name: str, seconds: Sequence[float], step_s: Sequence[float]) -> list[Text]:
    digits = units.decimals(max(step_s))
    cells = [name]
    for second, whole in zip(seconds, step_s, strict=True):
        cells.append(units.milliseconds(second, unit="", digits=digits))
        cells.append(f"{second / whole * 100:.1f}" if whole else "")
    if len(seconds) == 2:
        cells.append(units.milliseconds(seconds[1] - seconds[0], unit="", digits=digits))
    return [Text(cell) for cell in cells]


def _facts(rows: Iterable[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, min_width=11)
    grid.add_column(ratio=1, overflow="fold")
    for name, sentence in rows:
        grid.add_row(Text(name, style="bold"), Text(units.plain(sentence)))
    return grid


def _own_cost(phases: Mapping[str, Phases | None], wall_s: float, budget_s: float, *, one_script: bool) -> str:
    parts = []
    for letter, timed in phases.items():
        if timed is not None:
            share = f" ({units.percent(timed.probe_s / timed.step_s)})" if timed.step_s else ""
            where = "" if one_script else f" in {letter}"
            parts.append(f"{units.milliseconds(timed.probe_s)} per step{share}{where}")
    spent = f"{wall_s:.0f} s of the {budget_s:.0f} s budget" if budget_s else f"{wall_s:.0f} s"
    return f"bareloop's probes: {', '.join(parts) or 'not measured'}; the report took {spent}"


def _machine(traces: Mapping[str, Trace]) -> list[tuple[str, str]]:
    """One row when all ran in the same place, else one for each."""
    rows: dict[str, list[str]] = {}
    for letter, trace in traces.items():
        if trace.processes:
            rows.setdefault(_environment(trace), []).append(letter)
    several = len(rows) > 1
    return [("Ran on", f"{'+'.join(letters)}: {text}" if several else text) for text, letters in rows.items()]


def _environment(trace: Trace) -> str:
    seen = trace.first.environment
    packages = [f"{name} {version}" for name, version in sorted(seen.packages.items())]
    versions = [f"torch {seen.torch}" if seen.torch else "", *packages]
    machine = [
        seen.device_name or seen.device,
        units.count(seen.threads, "thread") + (f" on {units.count(seen.cores, 'core')}" if seen.cores else ""),
        f"{units.count(seen.loader_workers, 'loader worker')}" if seen.loader_workers is not None else "",
    ]
    return ", ".join(part for part in (*machine, *versions) if part)


def _notes(notes: Sequence[str], traces: Mapping[str, Trace]) -> list[str]:
    found = list(notes)
    for letter, trace in traces.items():
        for process in trace.processes:
            found += [f"{letter}: {note}" if letter else note for note in process.notes if note not in notes]
    return list(dict.fromkeys(found))


def _step_s(phases: Phases | None) -> float | None:
    return phases.step_s if phases is not None else None


def _short(location: str) -> str:
    """file:line from the package on, or its last three parts."""
    path = units.plain(location).replace("\\", "/")
    for marker in ("/site-packages/", "/dist-packages/"):
        if marker in path:
            return path.rsplit(marker, 1)[1]
    parts = path.split("/")
    return path if len(path) <= 50 or len(parts) <= 4 else "/".join(("...", *parts[-3:]))
