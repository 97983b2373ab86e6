"""Lean does what stock does, to the bit: every setting of one process, run by both."""

from pathlib import Path

import pytest
from matrix.catalogue import ONE_PROCESS
from matrix.settings import Setting
from matrix.verdict import ALL_EVENTS, NO_EVENTS, problems

pytestmark = pytest.mark.usefixtures("frozen_heap")


@pytest.mark.parametrize("watch", [ALL_EVENTS, NO_EVENTS], ids=["all events", "no events"])
@pytest.mark.parametrize("setting", ONE_PROCESS, ids=lambda setting: setting.name)
def test_lean_equals_stock(setting: Setting, watch: tuple[str, ...], tmp_path: Path) -> None:
    found = problems(setting, tmp_path, watch)
    assert not found, "\n".join(found)


def test_settings_are_told_apart_by_their_names() -> None:
    names = [setting.name for setting in ONE_PROCESS]
    assert len(set(names)) == len(names) >= 40
