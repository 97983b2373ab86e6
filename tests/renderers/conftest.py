"""The stored records, as fixtures."""

import runpy
from pathlib import Path

import pytest

from bareloop.diagnosis.evidence import Comparison, Diagnosis

RECORDS = runpy.run_path(str(Path(__file__).with_name("records.py")))


@pytest.fixture
def comparison() -> Comparison:
    return RECORDS["comparison"]()


@pytest.fixture
def unequal_comparison() -> Comparison:
    return RECORDS["unequal_comparison"]()


@pytest.fixture
def diagnosis() -> Diagnosis:
    return RECORDS["diagnosis"]()
