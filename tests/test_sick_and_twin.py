"""Each cause is found in its sick script and not in its healthy twin, run as the command runs them."""

import time
from pathlib import Path

import pytest

from bareloop.diagnosis.causes import CAUSES
from bareloop.diagnosis.evidence import Cause
from bareloop.diagnosis.findings import suspects
from bareloop.profiler.command import command_from_words
from bareloop.profiler.inspect import inspect
from bareloop.profiler.options import Options

SCRIPTS = Path(__file__).parent / "scripts"
MAY_SHARE = {
    # Both scripts of these pairs are a transformers.Trainer, which has these by nature.
    "nan_check_per_step": {"flop_count_per_micro_step", "module_tree_walk_per_micro_step"},
    "data_parallel_wrapper": {
        "flop_count_per_micro_step",
        "global_batch_differs",
        "module_tree_walk_per_micro_step",
        "nan_check_per_step",
    },
}


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.code)
def test_the_sick_script_has_it_and_the_twin_has_not(cause: Cause) -> None:
    commands = {
        name: command_from_words([str(SCRIPTS / f"{cause.code}_{kind}.py")])
        for name, kind in (("a", "sick"), ("b", "twin"))
    }
    seen = inspect(commands, Options(), time.monotonic() + 120)
    found = suspects({name: one.trace for name, one in seen.items()})
    assert cause.code in {suspect.cause.code for suspect in found if suspect.script == "a"}
    assert cause.code not in {suspect.cause.code for suspect in found if suspect.script == "b"}
    extra = {suspect.cause.code for suspect in found} - {cause.code} - MAY_SHARE.get(cause.code, set())
    assert not extra, "a pair differs in one thing"
