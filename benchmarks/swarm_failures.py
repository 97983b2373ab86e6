"""What a swarm does when its peers fail: a matrix of failures, each run many times, with a verdict on every gradient.

    python benchmarks/swarm_failures.py --engine torchft --case kill --runs 10 --out runs.jsonl
    python benchmarks/swarm_failures.py --report runs.jsonl

Peers (three; four where all but one die) train an MLP of 18,755 parameters on scikit-learn's digits, micro-batches of 8 of
50 ms, to a target of 512 samples. When all have made three steps together the failure happens, and the run goes on until
the survivors have made three more. Each applied gradient is then held against what the peers had to give
(`failures/judge.py`). A partition needs root: each peer lives in a network namespace, and the router between them drops
every packet from and to the victim. Runs take 10 to 40 s, nearly all of it waiting, so that two may go on side by side.
"""

import argparse
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from failures.cases import CASES, PEERS, Course
from failures.outcome import LIMIT_S, Outcome, judge, report, summary
from failures.run import Run, Stuck


def main() -> None:
    """Runs cases, or prints the table of what was run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", choices=sorted(LIMIT_S), default=["hivemind", "torchft"])
    parser.add_argument("--case", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--steps", type=int, default=3, help="before the failure, and after it")
    parser.add_argument("--side-by-side", type=int, default=2, help="runs at a time")
    parser.add_argument("--out", type=Path, help="append a line for each run here; what it has is not run again")
    parser.add_argument("--keep", type=Path, help="keep the logs of runs with violations in this folder")
    parser.add_argument("--report", type=Path, nargs="+", help="print the table of these files instead")
    options = parser.parse_args()
    if options.report:
        print(report([json.loads(line) for path in options.report for line in path.read_text().splitlines()]))
        return
    done = (
        [json.loads(line) for line in options.out.read_text().splitlines()]
        if options.out is not None and options.out.exists()
        else []
    )
    made = {(outcome["engine"], outcome["case"], outcome["seed"]) for outcome in done}
    plan = [
        (engine, case, seed)
        for seed in range(options.seed, options.seed + options.runs)
        for case in options.case
        for engine in options.engine
        if (engine, case, seed) not in made
    ]
    lanes = [_lane(plan[lane :: options.side_by_side], options) for lane in range(options.side_by_side)]
    signal.signal(signal.SIGTERM, _end)
    try:
        codes = [os.waitstatus_to_exitcode(os.waitpid(lane, 0)[1]) for lane in lanes]
    except BaseException:
        for lane in lanes:
            os.kill(lane, signal.SIGTERM)
            os.waitpid(lane, 0)  # it ends its peers first
        raise
    sys.exit(max(codes))


def _end(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # once is enough: a second one would disturb the tidying up
    sys.exit(128 + number)


def _lane(plan: Sequence[tuple[str, str, int]], options: argparse.Namespace) -> int:
    """Makes these runs one after another in a process without threads, from which peers can be forked; its pid."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        signal.signal(signal.SIGTERM, _end)
        for engine, case, seed in plan:
            outcome = one(engine, case, seed, count=options.steps, keep=options.keep)
            line = json.dumps(asdict(outcome)) + "\n"
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(line)
            print(summary(outcome), flush=True)
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def one(engine: str, case: str, seed: int, *, count: int = 3, keep: Path | None = None) -> Outcome:
    """Lets the failure happen to a swarm, and judges it."""
    run = Run(engine, seed, count=count, namespaces=len(PEERS) + 1 if case == "partition" else 0)
    outcome = None
    try:
        try:
            course = CASES[case][1](run)
        except Stuck as error:
            run.troubles.append(str(error))
            course = Course(survivors=tuple(run.stories), since=math.inf)
        run.finish(course.survivors)
        outcome = judge(run, case, course)
        return outcome
    finally:
        wanted = keep is not None and (outcome is None or outcome.violations)
        run.close(keep / f"{engine}-{case}-{seed}" if keep is not None and wanted else None)


if __name__ == "__main__":
    main()
