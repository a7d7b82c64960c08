"""Every test draws the same numbers and may compile as many graphs, whatever ran before it."""

import sys

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _uncompiled():
    yield
    if "torch._dynamo" in sys.modules:  # the compiler takes only so many models of one class
        torch.compiler.reset()
