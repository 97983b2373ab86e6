"""Launches whose scripts wait for each other, with causes taken away in some of their turns."""

import os
import time
from pathlib import Path

import pytest

from bareloop.profiler.command import command_from_words
from bareloop.profiler.turns import AblationBroke, Launched, Participant, TurnKind, memory_allows, time_launch
from bareloop.trace import PHASES

LOOPS = Path(__file__).parent.parent / "scripts" / "loops"


@pytest.fixture(autouse=True)
def _trial_ablations(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(Path(__file__).parent / "ablations")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")])))


def kind(key: str, participant: str, do: str | None = None, steps: int = 5) -> TurnKind:
    cause = {"module": "trial_ablations", "data": {"do": do}}
    return TurnKind(
        key=key, participant=participant, steps=steps, discard=1, ablation=None if do is None else {"causes": [cause]}
    )


def launch(kinds: list[TurnKind], rounds: int = 2, *words: str, together: bool = True) -> Launched:
    command = command_from_words([str(LOOPS / "plain.py"), *words])
    people = {kind.participant: Participant(command=command, warmup=3, optimizers=1) for kind in kinds}
    orders = [[kind.key for kind in kinds]] * rounds
    return time_launch(people, kinds, orders, deadline_s=time.monotonic() + 90, together=together)


def test_every_round_is_complete_and_phases_add_up() -> None:
    launched = launch([kind("a", "a"), kind("b", "b"), kind("a:slow", "a", "slow"), kind("a:null", "a")], 3)
    assert len(launched.rounds) == 3
    for turns in launched.rounds:
        assert set(turns) == {"a", "b", "a:slow", "a:null"}
        for turn in turns.values():
            assert turn.steps == 5
            assert set(turn.phases) == set(PHASES)
            assert sum(turn.phases.values()) == pytest.approx(turn.s_per_step)
            assert 0 < turn.probe_s < turn.s_per_step
    slow = sum(turns["a:slow"].phases["forward"] for turns in launched.rounds)
    plain = sum(turns["a:null"].phases["forward"] for turns in launched.rounds)
    assert slow > 3 * plain, "an ablation works in its turn and is gone after it"


def test_an_ablation_that_refuses_is_an_error_of_its_own() -> None:
    launched = launch([kind("a", "a"), kind("a:refuse", "a", "refuse")])
    assert launched.errors == {"a:refuse": "RuntimeError: nothing to take away"}
    assert [set(turns) for turns in launched.rounds] == [{"a"}, {"a"}]


def test_an_ablation_that_breaks_the_script_is_not_the_scripts_fault() -> None:
    with pytest.raises(AblationBroke, match="no_such_method") as broken:
        launch([kind("a", "a"), kind("a:break", "a", "break")])
    assert broken.value.key == "a:break"


def test_whole_runs_alternate_where_memory_is_short() -> None:
    launched = launch([kind("a", "a"), kind("b", "b")], together=False)
    assert [set(turns) for turns in launched.rounds] == [{"a", "b"}, {"a", "b"}]


def test_a_script_that_runs_out_of_steps_gives_the_rounds_it_made() -> None:
    # 32 steps per pass; 3 of warm-up, then 6 per turn: 4 turns and a bit.
    launched = launch([kind("a", "a"), kind("a:null", "a")], 4, "--epochs", "1")
    assert len(launched.rounds) == 2
    assert "ran out of steps" in launched.notes[0]


def test_memory() -> None:
    assert memory_allows([1 << 20])
    assert not memory_allows([1 << 60])
