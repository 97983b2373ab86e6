"""Every sick script of the catalogue and its healthy twin through the command: which causes are named, with what status.

    python benchmarks/sick_scripts.py --budget 40

Causes that exist only between two scripts are looked for with `compare sick twin`, the others with `explain` on each.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import bareloop
from bareloop.diagnosis.causes import CAUSES
from bareloop.diagnosis.evidence import Finding

SCRIPTS = Path(__file__).parent.parent / "tests" / "scripts"


def described(findings: Sequence[Finding], code: str, script: str) -> str:
    """Status of a cause among the findings of a script, with what it saved."""
    found = [finding for finding in findings if finding.cause == code and finding.script == script]
    if not found:
        return "-"
    finding = found[0]
    if finding.saving_s_per_step is None or finding.low is None or finding.high is None:
        return finding.status
    numbers = [finding.saving_s_per_step * 1e3, finding.low * 1e3, finding.high * 1e3]
    return f"{finding.status} {numbers[0]:.2f} ms [{numbers[1]:.2f}, {numbers[2]:.2f}]"


def main() -> None:
    """Prints a table: cause, sick, twin."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=40.0, help="seconds for each report")
    parser.add_argument("--only", nargs="*", help="codes of causes")
    arguments = parser.parse_args()
    print("| cause | sick | twin |\n|---|---|---|")
    for cause in CAUSES:
        if arguments.only and cause.code not in arguments.only:
            continue
        sick, twin = (str(SCRIPTS / f"{cause.code}_{kind}.py") for kind in ("sick", "twin"))
        if cause.contrast is not None:
            findings = bareloop.compare(sick, twin, budget_s=arguments.budget).findings
            cells = [described(findings, cause.code, script) for script in ("a", "b")]
        else:
            reports = [bareloop.explain(script, budget_s=arguments.budget) for script in (sick, twin)]
            cells = [described(report.findings, cause.code, "a") for report in reports]
        print(f"| {cause.code} | {cells[0]} | {cells[1]} |", flush=True)


if __name__ == "__main__":
    main()
