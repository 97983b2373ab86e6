"""The expression that a frame is evaluating, and whose code a file is."""

import contextlib
import linecache
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import bareloop
from bareloop.profiler.probes import sites
from bareloop.profiler.probes.sites import Site, caller_outside_torch, expression, origin, site_at

seen: list[str] = []


class Truth:
    def __bool__(self) -> bool:
        seen.append(expression(sys._getframe(1)))
        return False


def here(*_: object) -> Truth:
    seen.append(expression(sys._getframe(1)))
    return Truth()


def ask() -> Truth:
    return Truth()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (lambda: 1 + len([here(1)]), ["here(1)"]),
        (lambda: here("h\u00e9", 2), ['here("h\\u00e9", 2)']),
        (lambda: here(
            1,
            2,
        ), ["here( 1, 2, )"]),
        (lambda: 1 if ask() or ask() else 2, ["ask()", "ask()"]),
        (lambda: not ask(), ["not ask()"]),
    ],
)  # fmt: skip
def test_the_running_expression_is_cut_out_of_its_line(body: Callable[[], object], expected: list[str]) -> None:
    seen.clear()
    body()
    assert seen == expected


def test_without_columns_the_line_stands_for_the_expression(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "_span", lambda code, instruction: (None, None, None, None))
    seen.clear()
    here(3)  # the line
    assert seen == ["here(3)  # the line"]


def test_source_that_is_not_at_hand_is_empty() -> None:
    seen.clear()
    exec(compile("here()", "<nowhere>", "exec"), {"here": here})
    assert seen == [""]
    linecache.cache.pop("<nowhere>", None)


def test_the_place_is_above_torch_and_contextlib() -> None:
    found: list[Site] = []

    class Watched(torch.nn.Module):
        def forward(self) -> None:
            found.append(site_at(caller_outside_torch(sys._getframe().f_back)[0]))

    watched = Watched()
    watched()
    with contextlib.ExitStack() as stack:
        stack.callback(watched)
    assert found[0].source == "watched()"
    assert [site.function.rpartition(".")[2] for site in found] == ["test_the_place_is_above_torch_and_contextlib"] * 2
    assert all(site.location.startswith(f"{__file__}:") and site.in_user_code for site in found)


@pytest.mark.parametrize(
    ("filename", "whose"),
    [
        (sites.__file__, "own"),
        (str(Path(bareloop.__file__).parent / "trainer" / "epoch.py"), "library"),
        (torch.nn.__file__, "torch"),
        (pytest.__file__, "library"),
        (os.__file__, "library"),
        ("<frozen runpy>", "wrapper"),
        ("train.py", "user"),
        (__file__, "user"),
    ],
)
def test_origin_of_a_file(filename: str, whose: str) -> None:
    assert origin(filename) == whose
