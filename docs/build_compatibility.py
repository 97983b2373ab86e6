"""Writes docs/trainer-compatibility.md: what the catalogue of behaviours shows of the stock trainer and of lean.

python docs/build_compatibility.py

Runs every behaviour of tests/trainer/behaviours on both, which takes about a minute. tests/trainer/test_behaviours.py
does the same and fails when the page is not what it found.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import transformers

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "trainer-compatibility.md"
sys.path.insert(0, str(ROOT / "tests" / "trainer"))

from behaviours import CATALOGUE  # noqa: E402
from behaviours.judging import Outcome, judge  # noqa: E402

__all__ = ["page"]

HEAD = """# Trainer compatibility

What `transformers.Trainer` {version} does and people rely on, each shown by a check in `tests/trainer/behaviours/` that runs
on the stock class and on `bareloop.lean` of it. The list was made from transformers' own trainer tests, in our words and
code; the last area is not in them. This page is generated from a run: `python docs/build_compatibility.py`.

{holds} of {total} behaviours hold for the stock trainer, {ours} for lean; {equal} leave the same bits behind: log history,
state, weights, optimizer and the names of all files.

- **lean**: "same bits" (holds and leaves them), "holds" (with other bits), or "does not hold".
- **how**: "lean" where the lean loop trained, with the parts of it that ran the stock way (what the user overrides is called
  as the stock loop calls it); "stock loop" with the reason where it fell back; "-" where the behaviour trains nothing.

Not in the list: what needs an accelerator, the hub, several processes, or packages that are not part of the tests
(bitsandbytes, GaLore, Apollo, LOMO, schedule-free, Liger, optuna, ray, wandb), and what never touches a trainer
(collators, parsing of arguments, pure functions). Several processes are compared in
`tests/trainer/test_equal_two_processes.py`.
"""


def page(outcomes: Mapping[str, tuple[Outcome, Outcome]]) -> str:
    """The page for the outcomes (stock, lean) of every behaviour by name."""
    pairs = outcomes.values()
    lines = [
        HEAD.format(
            version=transformers.__version__,
            total=len(CATALOGUE),
            holds=sum(stock.failure is None for stock, _ in pairs),
            ours=sum(lean.failure is None for _, lean in pairs),
            equal=sum(_agree(stock, lean) for stock, lean in pairs),
        )
    ]
    area = None
    for behaviour in CATALOGUE:
        if behaviour.area != area:
            area = behaviour.area
            lines += ["", f"## {area.capitalize()}", "", "| behaviour | stock | lean | how |", "|---|---|---|---|"]
        stock, lean = outcomes[behaviour.name]
        sentence = behaviour.says.replace("|", "\\|")
        lines.append(f"| {sentence} | {_verdict(stock)} | {_compared(stock, lean)} | {_how(lean)} |")
    return "\n".join(lines) + "\n"


def _verdict(outcome: Outcome) -> str:
    return "holds" if outcome.failure is None else "does not hold"


def _agree(stock: Outcome, lean: Outcome) -> bool:
    return stock.failure is None and lean.failure is None and (stock.runs, stock.files) == (lean.runs, lean.files)


def _compared(stock: Outcome, lean: Outcome) -> str:
    return "same bits" if _agree(stock, lean) else _verdict(lean)


def _how(lean: Outcome) -> str:
    if lean.fallbacks:
        return "stock loop: " + "; ".join(lean.fallbacks)
    if not lean.lean_runs:
        return "-"
    return "lean" + (f" ({', '.join(lean.stock_parts)} the stock way)" if lean.stock_parts else "")


if __name__ == "__main__":
    from bareloop.trainer.hf import lean

    PAGE.write_text(page({each.name: (judge(each, each.base), judge(each, lean(each.base))) for each in CATALOGUE}))
