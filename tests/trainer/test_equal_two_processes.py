"""Lean does what stock does, to the bit: every setting of two gloo processes, run by both in one pair of processes."""

import pytest
from matrix.catalogue import TWO_PROCESSES
from matrix.pair import run_pair
from matrix.ranks import MISCOUNTING
from matrix.settings import Setting

Answers = dict[str, list[str]]


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """The problems of each setting that this session asks for, and of one in which a rank is wrong."""
    here = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    asked = {params["setting"].name for params in here if params.get("setting") in TWO_PROCESSES}
    wanted = [setting.name for setting in TWO_PROCESSES if setting.name in asked]
    return run_pair([*wanted, MISCOUNTING.name], tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize("setting", TWO_PROCESSES, ids=lambda setting: setting.name)
def test_lean_equals_stock_on_two_processes(setting: Setting, answers: Answers) -> None:
    assert answers[setting.name] == [], "\n".join(answers[setting.name])


def test_a_rank_that_counts_otherwise_is_found(answers: Answers) -> None:
    """The referee of two processes finds what is wrong on one of them."""
    found = answers[MISCOUNTING.name]
    assert any(problem.startswith("rank 1: Mine(lean)") and "total_flos" in problem for problem in found), found
    assert not any("lean(Mine)" in problem for problem in found), found
