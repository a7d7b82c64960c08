"""Breaks a copy of the kernels on purpose, one place at a time: the test that is named beside each break must fail.

`pytest -m slow -rP tests/test_kernels_mutants.py` prints the table: mutant -> test.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent

EXACT = "interpreted::TestAgainstFloat64::test_shapes[float32-(17, 128)-{}-dtype0]"
NARROW = "interpreted::TestAgainstFloat64::test_shapes[float32-(2, 3, 41)-{}-dtype0]"
WIDE = "interpreted::TestAgainstFloat64::test_wide_rows[(5, 16385)-{}-dtype0]"

MUTANTS = {  # what is lost: file, line before and after, the test that must fail
    "1/N of the mean": (
        "triton_forward",
        "average = tl.sum(value, 1) / N",
        "average = tl.sum(value, 1)",
        EXACT.format("layer_norm"),
    ),
    "1/N of the mean square": (
        "triton_forward",
        "tl.rsqrt(tl.sum(value * value, 1) / N + eps)",
        "tl.rsqrt(tl.sum(value * value, 1) + eps)",
        EXACT.format("rms_norm"),
    ),
    "1/N of the projection": ("triton_backward", "normalised, 1) / N", "normalised, 1)", EXACT.format("rms_norm")),
    "eps": ("triton_forward", "value, 1) / N + eps)", "value, 1) / N)", "interpreted::test_hard_rows[rms_norm-zero]"),
    "eps of a looped row": (
        "triton_forward",
        "square / N + eps",
        "square / N + 1.0",
        "interpreted::test_rows_wider_than_a_block[(1, 65536)-rms_norm]",
    ),
    "the mask of the variance": (
        "triton_forward",
        "value = tl.where(inside, value - average[:, None], 0.0)\n    scale",
        "value = value - average[:, None]\n    scale",
        NARROW.format("layer_norm"),
    ),
    "the mask of a load": (
        "triton_forward",
        "column[None, :], mask=inside, other=0.0)",
        "column[None, :])",
        NARROW.format("rms_norm"),
    ),
    "the mask of a store": (
        "triton_forward",
        "normalised.to(y.dtype.element_ty), mask=inside)",
        "normalised.to(y.dtype.element_ty), mask=(row < M + 8)[:, None] & (column < 2 * N)[None, :])",
        NARROW.format("rms_norm"),
    ),
    "64 bits of the row offsets": (
        "triton_forward",
        "row = start + tl.arange(0, ROWS).to(tl.int64)",
        "row = start.to(tl.int32) + tl.arange(0, ROWS)",
        "compiled::test_forward[sm_90-bf16/bf16-rms-1024]",
    ),
    "the rounding before the gain": (
        "triton_forward",
        "if ROUND_FIRST:",
        "if False:",
        "interpreted::test_the_two_orders_of_casting_differ_and_are_the_formulas[input]",
    ),
    "the offset of the gain": (
        "triton_forward",
        ".to(WIDE) + offset)[None, :]",
        ".to(WIDE))[None, :]",
        "interpreted::TestAgainstFloat64::test_float32_parameters_and_offset[rms_norm-dtype0]",
    ),
    "the branch of a norm without a weight": (
        "triton_forward",
        "        gain = tl.full([1, 1], 1.0, WIDE)\n    else:",
        "        return tl.full([1, 1], 1.0, WIDE)\n    if True:",
        "compiled::test_what_is_left_out_compiles_without_spills[1024-True-weight]",
    ),
    "the rounding of the stored sum": (
        "triton_forward",
        "        value = stored.to(WIDE)\n",
        "",
        "interpreted::test_what_is_normalised_is_the_sum_as_it_is_stored[add_rms_norm]",
    ),
    "the rest of a running mean": (
        "triton_forward",
        "low = step - (average + step - average)",
        "low = 0 * step",
        "interpreted::test_hard_rows[layer_norm-large mean, looped]",
    ),
    "the barrier before the second pass": (
        "triton_forward",
        "    tl.debug_barrier()",
        "    pass",
        "compiled::test_a_barrier_stands_between_the_passes_of_a_looped_row[sm_90]",
    ),
    "the barrier before the partial sums": (
        "triton_backward",
        "        tl.debug_barrier()  # the partial",
        "        pass  # the partial",
        "compiled::test_a_barrier_stands_between_the_passes_of_a_looped_row[sm_90]",
    ),
    "the barrier that makes a tile be read again": (
        "triton_backward",
        "            tl.debug_barrier()  # or",
        "            pass  # or",
        "compiled::test_backward[sm_90-bf16/bf16-rms-16384]",
    ),
    "one partial sum of dweight": (
        "triton_backward",
        "tile_rows(start, column, programs, N, ROWS)",
        "tile_rows(start, column, programs - 1, N, ROWS)",
        EXACT.format("rms_norm"),
    ),
    "the earlier tiles of a looped dweight": (
        "triton_backward",
        "is_first == 0",
        "is_first == 2",
        WIDE.format("rms_norm"),
    ),
    "the projection in dx": (
        "triton_backward",
        "gradient = upstream - normalised * projection[:, None]",
        "gradient = upstream",
        EXACT.format("rms_norm"),
    ),
    "the mean in dx": ("triton_backward", "gradient -= average[:, None]", "pass", EXACT.format("layer_norm")),
    "the gradient of the sum": (
        "triton_backward",
        "gradient += load_wide(dtotal",
        "load_wide(dtotal",
        EXACT.format("add_rms_norm"),
    ),
    "every other tile of the persistent grid": (
        "triton_backward",
        "in tl.range(program * ROWS, M, tl.num_programs(0)",
        "in tl.range(program * ROWS, M, 2 * tl.num_programs(0)",
        "interpreted::test_many_rows[70000]",
    ),
    "the last rows of the grid": (
        "launch",
        "ceil_div(m, rows), registers=limit",
        "max(m // rows, 1), registers=limit",
        "compiled::test_launches_cover_every_row_and_column",
    ),
    "the care for unaligned rows": (
        "launch",
        "if not aligned:",
        "if False:",
        "compiled::test_backward[sm_90-bf16/bf16-layer-41]",
    ),
    "the alignment of the addresses": (
        "calls",
        "tensor.data_ptr() % 16 or ",
        "",
        "compiled::test_alignment_is_that_of_addresses_strides_and_width",
    ),
    "the second derivative": (
        "fused",
        "differentiable_gradients if torch.is_grad_enabled() else fused_gradients",
        "fused_gradients",
        "operations::test_a_gradient_penalty_is_the_formulas",
    ),
    "the absence of an unused gradient": (
        "fused",
        "ctx.set_materialize_grads(False)",
        "pass",
        "memory::test_an_unused_gradient_is_not_materialised",
    ),
    "the refusal of torch.func": (
        "fused",
        "if torch._C._are_functorch_transforms_active():",
        "if False:",
        "operations::test_transforms_of_torch_func_are_refused",
    ),
    "the check of shapes": (
        "__init__",
        "if operand.shape != shape:",
        "if False:",
        "operations::test_wrong_operands_are_refused_before_they_are_read[rms_norm]",
    ),
    "the look at every operand": (
        "formula",
        "any(type(tensor) not in PLAIN for tensor in tensors)",
        "type(tensors[0]) not in PLAIN",
        "operations::test_a_subclass_among_the_operands_is_seen",
    ),
}


def copy_to(folder: Path) -> None:
    shutil.copytree(ROOT / "normexp", folder / "normexp", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)


def run(folder: Path, test: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TRITON_INTERPRET": "0" if test.startswith("compiled") else "1"}
    file, _, name = test.partition("::")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider"]
    command.append(f"tests/test_kernels_{file}.py::{name}")
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_the_named_tests_pass_without_a_mutant(tmp_path):
    copy_to(tmp_path)
    for test in sorted({test for *_, test in MUTANTS.values()}):
        done = run(tmp_path, test)
        assert done.returncode == 0, done.stdout[-4000:]
        assert " passed" in done.stdout


@pytest.mark.parametrize("lost", MUTANTS)
def test_a_mutant_fails_the_test_that_is_named(lost, tmp_path):
    module, before, after, test = MUTANTS[lost]
    copy_to(tmp_path)
    file = tmp_path / "normexp" / "kernels" / f"{module}.py"
    source = file.read_text()
    assert before in source, "the mutant is out of date"
    file.write_text(source.replace(before, after))
    done = run(tmp_path, test)
    print(f"without {lost:45} -> {test}: {done.stdout.splitlines()[-1] if done.stdout else done.returncode}")
    assert done.returncode == 1, done.stdout[-4000:]
    assert " failed" in done.stdout
