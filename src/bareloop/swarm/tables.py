"""What `bareloop swarm` prints: a run's peers, a plan, an address to give to others.

ASCII only, 80 columns are enough; names that came from the network are shown as text, never as markup. A live table costs
one redraw a reading; where the output is no terminal each view is printed once and whole.
"""

import io
import sys
from collections.abc import Iterable

from rich.box import Box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bareloop.swarm.plan import Plan
from bareloop.swarm.serve import Served
from bareloop.swarm.watch import Row, RunView

__all__ = ["follow", "plan_table", "served_text", "text_of", "watch_table"]

RULE = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
"""No frame, one rule of hyphens under the head."""
BAR = 24


def text_of(block: RenderableType, *, width: int = 100, color: bool = False) -> str:
    """A block as text, without spaces at the ends of lines."""
    file = io.StringIO()
    console = Console(
        file=file, width=width, force_terminal=color, force_jupyter=False, no_color=not color, legacy_windows=False
    )
    console.print(block)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip("\n").split("\n")) + "\n"


def follow(views: Iterable[RunView]) -> None:
    """Shows each view in place of the one before; below it where standard output is no terminal."""
    if not sys.stdout.isatty():
        for view in views:
            print(text_of(watch_table(view)), flush=True)
        return
    with Live(auto_refresh=False, vertical_overflow="ellipsis") as live:
        for view in views:
            live.update(watch_table(view), refresh=True)


def watch_table(view: RunView) -> RenderableType:
    """A run at one moment."""
    if not view.rows:
        return Text(_nobody(view))
    peers = f"{view.live} peer{'' if view.live == 1 else 's'}"
    head = [Text(f"{view.run_id}: round {view.round:,.0f}, {peers}, {_short(view.samples_per_s)} samples/s")]
    head.append(Text(_progress(view)))
    table = Table(box=RULE, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("peer", overflow="fold", min_width=10)
    for name in ("round", "samples", "per s", "round s", "mean s", "failed", "lost", "heard"):
        table.add_column(name, justify="right", no_wrap=True, overflow="crop")
    for row in view.rows:
        table.add_row(*map(Text, _cells(row)), style="dim" if row.stale else None)
    return Group(*head, Text(""), table, *(Text(f"\n{note}") for note in _notes(view)))


def plan_table(plan: Plan) -> RenderableType:
    """A plan: what a round takes, and what that means."""
    setup = plan.setup
    ratio = plan.compute_to_communication
    facts = [
        (
            "Swarm",
            f"{plan.peers:,} peers, {_short(sum(setup.samples_per_s))} samples/s together; engine {setup.engine}",
        ),
        (
            "Gradient",
            f"{_bytes(setup.gradient_bytes)} on the wire; the busiest peer sends {_bytes(plan.sent_bytes_per_peer)} a round",
        ),
        ("Round", f"{_seconds(plan.round_s)} for {setup.target_batch:,.0f} samples"),
        ("  computing", _seconds(plan.compute_s)),
        ("  gathering peers", _seconds(plan.prepare_s)),
        ("  averaging", _seconds(plan.average_s)),
        ("Compute / rest", "no communication" if ratio is None else f"{_short(ratio)}"),
        (
            "Efficiency",
            f"{plan.efficiency:.1%} of {_short(sum(setup.samples_per_s))} samples/s: {_short(plan.samples_per_s)}",
        ),
        ("Speed-up", f"{plan.speed_up:.2f}x the fastest peer alone"),
        ("Target batch", f"{plan.target_batch_for_efficiency:,.0f} or more keep {setup.efficiency:.0%}"),
    ]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in facts:
        table.add_row(Text(name), Text(value))
    notes = (
        [Text("\nSlower than the fastest peer alone: this swarm is not worth its network.")]
        if plan.speed_up < 1
        else []
    )
    if plan.extrapolated:
        notes.append(Text(f"\nExtrapolated: {'; '.join(plan.extrapolated)}."))
    return Group(table, *notes)


def served_text(served: Served) -> str:
    """What to give to others, and who can come."""
    listed = ", ".join(f'"{address}"' for address in served.addresses)
    lines = [
        *(f"address: {address}" for address in served.addresses),
        f'join:    swarm.join("RUN", target_batch=N, engine="{served.engine}", peers=[{listed}])',
        f"watch:   bareloop swarm watch RUN --engine {served.engine} --peers {served.addresses[0]}",
        "",
    ]
    if served.loopback:
        lines.append(
            "Only this machine can reach it. --host ADDRESS opens it: whoever reaches the port can then join the"
        )
        lines.append("run, read its records and put gradients into everybody's model. Keep it in a network you trust.")
    else:
        lines.append(
            "OPEN: whoever reaches the port can join the run, read its records and put gradients into everybody's"
        )
        lines.append("model; no password is asked. Let a firewall or a VPN decide who reaches it.")
    return "\n".join(lines) + "\n"


def _nobody(view: RunView) -> str:
    said = [f"{view.run_id}: no peer is seen."]
    if view.unreadable:
        said.append(f"{view.unreadable} records under this name can't be read.")
    if view.runs:
        said.append(f"Runs that publish here: {', '.join(view.runs)}.")
    elif view.runs is not None:
        said.append("No run publishes here.")
    if view.nodes is not None:
        said.append(f"The DHT answers ({view.nodes} nodes known); it can't list the names of its runs.")
    return " ".join(said)


def _progress(view: RunView) -> str:
    if not view.target:
        return f"{view.samples:,.0f} samples in this round; the target is not published"
    share = min(1.0, view.samples / view.target)
    done = round(share * BAR)
    return f"[{'#' * done}{'.' * (BAR - done)}] {view.samples:,.0f} of {view.target:,.0f} samples"


def _cells(row: Row) -> tuple[str, ...]:
    record = row.record
    return (
        record.peer,
        f"{record.round:,.0f}",
        f"{record.local_samples:,.0f}",
        _short(record.samples_per_s),
        "-" if record.round_s is None else f"{record.round_s:.1f}",
        "-" if record.average_s is None else f"{record.average_s:.2f}",
        "-" if record.failures is None else f"{record.failures:,.0f}",
        "-" if record.lost_samples is None else f"{record.lost_samples:,.0f}",
        f"silent {row.age_s:.0f} s" if row.stale else f"{row.age_s:.0f} s ago",
    )


def _notes(view: RunView) -> Iterable[str]:
    if view.failures or view.lost_samples:
        yield f"Failed averages: {view.failures or 0:,.0f}; samples lost: {view.lost_samples or 0:,.0f}."
    if view.plain:
        yield "A run of plain hivemind.Optimizer: rounds' times, failures and losses are not published."
    if view.unreadable:
        yield f"{view.unreadable} records can't be read and are not shown."


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 10 else f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def _bytes(size: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} B"
