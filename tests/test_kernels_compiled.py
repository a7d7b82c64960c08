"""Every launch compiled ahead of time for GPUs that are not here, and what can be read off the result.

No spills, no double precision, 128-bit accesses, 64-bit row offsets, no atomics, the bytes of the floor table, and a
persistent grid that is resident as a whole. The tests print one line for each; `pytest -rP` shows them as a table.
"""

import itertools
import os
import re

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels cannot be compiled", allow_module_level=True)

from normexp.kernels import launch, triton_backward, triton_forward
from tests.kernel_compiler import (
    MULTIPROCESSORS,
    TARGETS,
    Types,
    access_widths,
    activation_bytes,
    backward_call,
    compiled,
    forward_call,
    reduction_call,
    resident_programs,
    resources,
)

bfloat16, float16, float32 = torch.bfloat16, torch.float16, torch.float32
BRAIN, BRAIN_ADD = Types(bfloat16, bfloat16), Types(bfloat16, bfloat16, bfloat16)
SINGLE, SINGLE_ADD = Types(float32, float32), Types(float32, float32, float32)
HALF, HALF_ADD = Types(float16, float16), Types(float16, float16, float16)
MASTER, MASTER_ADD = Types(bfloat16, float32), Types(bfloat16, float32, bfloat16)
STREAM_ADD = Types(bfloat16, float32, float32)  # a float32 residual stream

FLOORS = {  # bytes per element: forward, backward
    BRAIN: (4, 6), HALF: (4, 6), MASTER: (4, 6), SINGLE: (8, 12),
    BRAIN_ADD: (8, 8), HALF_ADD: (8, 8), MASTER_ADD: (8, 8), SINGLE_ADD: (16, 16), STREAM_ADD: (12, 16),
}  # fmt: skip
WIDTHS = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536]  # one for each block
ALL = list(itertools.product(TARGETS, FLOORS, (False, True), WIDTHS))
QUICK = [
    *itertools.product(["sm_90"], [BRAIN, STREAM_ADD], [False, True], [256, 1024, 2048, 4096, 8192, 16_384, 32_768]),
    *itertools.product(["sm_90"], [SINGLE, SINGLE_ADD], [True], [1024, 8192, 16_384, 65_536]),
    *itertools.product(["sm_80", "sm_100", "gfx942"], [BRAIN, STREAM_ADD], [True], [1024, 8192, 16_384]),
]
CASES = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in ALL]


def check_code(binary, target: str) -> None:
    assert "atomic" not in binary.asm["ttir"]
    if target != "gfx942":
        assert not re.search(r"\.f64|[ls][dt]\.local", binary.asm["ptx"])


def check_row_offsets(binary) -> None:
    """A row index times a stride is taken in 64 bits: each factor is extended before the product."""
    products = re.findall(r"arith\.muli .* : (?:tensor<[\dx]*)?(i\d+)", binary.asm["ttir"])
    assert products
    assert set(products) == {"i64"}


def check_vectors(binary, call, n: int) -> None:
    """Everything but the statistics is read and written 128 bits at a time, where a thread has as many of a row."""
    if "ptx" not in binary.asm or n < 1024 or n % 16:
        return
    loads, stores = access_widths(binary, "ld"), access_widths(binary, "st")
    statistics = 4 * call.constants["ROWS"]  # mean and 1/rms, of this tile and of the next
    assert set(loads) <= {128, 32}
    assert set(stores) <= {128, 32}
    assert loads[32] <= statistics
    assert stores[32] <= statistics


def report(name: str, case, call, binary, read: float, written: float, floor: int) -> None:
    target, types, centre, n = case
    registers, spilt = resources(binary, target)
    norm = "layer" if centre else "rms"
    print(
        f"{target:7} {name:8} {norm:5} {types!s:14} N={n:<6} {call.constants['ROWS']}x{call.constants['BLOCK']:<5} "
        f"warps {call.options['num_warps']:2} registers {registers:3} spilt {spilt} shared {binary.metadata.shared:6} "
        f"bytes/element {read:g} + {written:g}, floor {floor}"
    )


@pytest.mark.parametrize(("target", "types", "centre", "n"), CASES)
def test_forward(target, types, centre, n):
    call = forward_call(types, centre, n, target)
    binary = compiled(call, target)
    read, written = activation_bytes(binary, call)
    floor = FLOORS[types][0]
    report("forward", (target, types, centre, n), call, binary, read, written, floor)
    check_code(binary, target)
    check_row_offsets(binary)
    check_vectors(binary, call, n)
    again = (types.residual or types.x).itemsize if call.kernel is triton_forward.forward_looped else 0
    assert read + written == floor + again  # the second reading of a looped row comes from the cache
    if n <= 16_384:
        assert resources(binary, target)[1] == 0


@pytest.mark.parametrize(("target", "types", "centre", "n"), CASES)
def test_backward(target, types, centre, n):
    call = backward_call(types, centre, n, target)
    binary = compiled(call, target)
    read, written = activation_bytes(binary, call)
    floor = FLOORS[types][1]
    report("backward", (target, types, centre, n), call, binary, read, written, floor)
    check_code(binary, target)
    check_row_offsets(binary)
    check_vectors(binary, call, n)
    twice = call.kernel is triton_backward.backward_looped or call.constants["REREAD"]
    again = types.x.itemsize + (types.residual or types.x).itemsize if twice else 0
    assert read + written == floor + again
    assert n > 8192 or not twice
    assert resources(binary, target)[1] == 0
    assert resident_programs(binary, call, target) >= call.programs / MULTIPROCESSORS[target]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [bfloat16, float32])
def test_reduction(target, dtype):
    call = reduction_call(dtype, 4096, target)
    binary = compiled(call, target)
    check_code(binary, target)
    assert resources(binary, target)[1] == 0


@pytest.mark.parametrize("make", [forward_call, backward_call])
def test_an_odd_width_compiles_without_wide_accesses(make):
    """Rows of 257 bfloat16 begin at odd addresses: a vector access would fault."""
    call = make(BRAIN, True, 257, "sm_90")
    binary = compiled(call, "sm_90")
    tile = call.constants["ROWS"] * call.constants["BLOCK"]
    assert tile > 257
    widths = re.findall(r"(?:ld|st)\.global(?:\.v(\d))?\.b(\d+)", binary.asm["ptx"])
    assert {int(vector or 1) * int(bits) for vector, bits in widths} <= {16, 32, 128}
    wide = [line for line in binary.asm["ptx"].splitlines() if re.search(r"global\.v\d", line)]
    assert len(wide) <= 4  # the parameters alone, whose base is aligned


def variant(call) -> tuple:
    """What Triton compiles anew for: constants, warps, types, and divisibility of what is specialised."""
    fixed = {parameter.name for parameter in call.kernel.params if parameter.do_not_specialize}
    numbers = [
        (name, value == 1, value % 16 == 0, value < 2**31)
        for name, value in zip(call.kernel.arg_names, call.arguments, strict=False)
        if isinstance(value, int) and name not in fixed
    ]
    return (
        call.kernel.__name__,
        tuple(sorted(map(str, call.constants.items()))),
        tuple(call.options.items()),
        tuple(numbers),
    )


@pytest.mark.parametrize("n", [257, 1024, 16_384, 65_536])
def test_the_number_of_rows_does_not_multiply_the_variants(n):
    rows = [*range(1, 40), 127, 128, 1000, 4096, 4097, 32_767, 70_000, 1 << 20, (1 << 20) + 3, 3 << 20, 1 << 22]
    for make in forward_call, backward_call:
        assert len({variant(make(BRAIN, True, n, "sm_90", m)) for m in rows}) == 1
    assert len({launch.reduction(m, n, 32).rows for m in range(1, 5000)}) == 9


def test_launches_cover_every_row_and_column():
    for n in [1, 2, 3, 41, *WIDTHS, 100_000]:
        for m in 1, 2, 15, 131, 132, 133, 70_000:
            forward = launch.forward(m, n, 32)
            assert forward.programs * forward.rows >= m
            for centre, mixed in itertools.product((False, True), repeat=2):
                backward = launch.backward(m, n, centre, mixed, 132, 32)
                assert 1 <= backward.programs <= -(-m // backward.rows)
                for plan in forward, backward:
                    assert plan.looped or plan.block >= n
                    assert 1 <= plan.warps <= 32
