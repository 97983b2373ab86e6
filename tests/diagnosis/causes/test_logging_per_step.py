"""What is written in each step: finding it, and writing nothing."""

import importlib.util
import inspect
import io
import logging
import sys
from pathlib import Path

import pytest
import tqdm.std

from bareloop.diagnosis.causes.logging_per_step import CAUSE
from bareloop.diagnosis.substitution import NothingToReplace
from bareloop.trace import Builtin, FunctionCount

FILE = Path(__file__).with_name("writing_script.py")


@pytest.fixture
def writing_script():
    spec = importlib.util.spec_from_file_location("writing_script", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def function(name, per_step=1.0, file="/x/site-packages/some/file.py"):
    return FunctionCount(file=file, line=1, function=name, per_step=per_step, caller="train.py:40")


def line(name, per_step=1.0, location="train.py:30"):
    return Builtin(name=name, location=location, function="main", per_step=per_step)


@pytest.mark.parametrize(
    "name",
    ["tqdm.set_postfix", "tqdm.display", "Logger._log", "SummaryWriter.add_scalar", "Trainer.log", "Live.refresh"],
)
def test_functions_that_write(make_trace, name):
    evidence = CAUSE.detect(make_trace(counts={"functions": (function(name),)}))
    assert evidence is not None
    assert evidence.counts == {f"{name}_per_step": 1.0}
    assert evidence.location == "train.py:40"


def test_lines_that_write(make_trace):
    trace = make_trace(counts={"builtins": (line("print", 3.0), line("flush", location="train.py:31"))})
    evidence = CAUSE.detect(trace)
    assert evidence is not None
    assert evidence.counts == {"print_per_step": 3.0, "flush_per_step": 1.0}
    assert evidence.data["lines"] == [["train.py", 30], ["train.py", 31]]
    assert CAUSE.setting(trace) is None


@pytest.mark.parametrize(
    "counts",
    [
        None,
        {"functions": (function("tqdm.display", 0.1), function("tqdm.update"), function("tqdm.__iter__"))},
        {"functions": (function("Logger.info"), function("catalog"), function("Net.log_prob"))},
        {"builtins": (line("print", 0.01), line("append"))},
        {"builtins": (line("write", location="/x/site-packages/tqdm/std.py:450"),)},
    ],
    ids=["no counts", "a plain bar", "a logger switched off", "a print in 100 steps", "tqdm's own write"],
)
def test_a_quiet_loop_is_not_reported(make_trace, counts):
    assert CAUSE.detect(make_trace(counts=counts)) is None


def test_settings_of_frameworks(make_trace):
    def setting(framework, *names):
        return CAUSE.setting(make_trace(framework=framework, counts={"functions": tuple(map(function, names))}))

    assert setting("transformers", "Trainer.log") == "logging_steps=500"
    assert setting("transformers", "tqdm.refresh") == "disable_tqdm=True"
    assert setting("lightning", "tqdm.refresh") == "callbacks=[TQDMProgressBar(refresh_rate=50)]"
    assert setting("lightning", "CSVLogger.log_metrics") == "log_every_n_steps=50"


def test_writers_are_silent_for_one_step_and_only_those(untouched, writing_script, capsys, caplog):
    start = inspect.getsourcelines(writing_script.write_all)[1]
    data = {
        "functions": [
            [tqdm.std.__file__, "tqdm.set_postfix"],
            [tqdm.std.__file__, "tqdm.refresh"],
            [logging.__file__, "Logger._log"],
        ],
        "lines": [[writing_script.__file__, start + offset] for offset in (2, 3, 4, 5)],
        "names": ["print", "write", "flush"],
    }
    file, ablation = io.StringIO(), []

    def at_step(step):
        print("the script's end of step", step)
        if step == 0:
            ablation.append(CAUSE.ablate(data))
            ablation[0].__enter__()
        if step == 1:
            ablation[0].__exit__(None, None, None)

    tqdm.std.tqdm(range(1), file=io.StringIO()).close()  # the first bar of a process sets attributes of the class
    with untouched():
        writing_script.train(file, at_step)
    written = file.getvalue()
    assert "0\n" in written and "2\n" in written and "1\n" not in written
    assert "step=0" in written and "step=2" in written and "step=1" not in written
    assert caplog.messages == ["record 0", "error 0", "error 1", "record 2", "error 2"]
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "step 0",
        "to stdout 0",
        "the script's end of step 0",
        "the script's end of step 1",
        "step 2",
        "to stdout 2",
        "the script's end of step 2",
    ]
    assert "write" not in vars(sys.stdout) if hasattr(sys.stdout, "__dict__") else True


def test_what_cant_be_replaced_is_said():
    with (
        pytest.raises(NothingToReplace),
        CAUSE.ablate({"functions": [["train.py", "nowhere.tqdm.display"]], "lines": []}),
    ):
        pass
