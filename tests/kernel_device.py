"""Cases of the fused kernels on the device where they run: the CPU in Triton's interpreter, else a GPU."""

import torch

from tests import kernel_cases
from tests.kernel_cases import DEVICE, INTERPRETED, Case, assert_as_exact_as_eager, on


def case(*arguments, **changes) -> Case:
    with torch.device("cpu"):  # the same numbers everywhere
        return on(kernel_cases.case(*arguments, **changes), DEVICE)


def assert_exact(made: Case) -> None:
    assert_as_exact_as_eager(made, "triton", truncated=INTERPRETED)
