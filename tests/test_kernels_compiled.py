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

from normexp.kernels import calls, launch, triton_backward, triton_forward
from tests.kernel_compiler import (
    MULTIPROCESSORS,
    TARGETS,
    WANTED,
    Types,
    access_widths,
    activation_bytes,
    backward_call,
    compiled,
    forward_call,
    reduction_call,
    resident_programs,
    resources,
    threads,
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
ALIGNED = [(n, True) for n in WIDTHS]
UNALIGNED = [
    *((n, True) for n in (1, 8, 41, 100, 257, 1000, 5000, 8191, 16_383, 32_767)),  # rows begin anywhere
    *((n, False) for n in (64, 2048, 8192, 16_384)),  # the first one does already
]
ALL = list(itertools.product(TARGETS, FLOORS, (False, True), ALIGNED + UNALIGNED))
QUICK = [
    *itertools.product(["sm_90"], [BRAIN, STREAM_ADD], [False, True], ALIGNED[6:12]),
    *itertools.product(["sm_90"], [SINGLE_ADD], [True], [ALIGNED[2], ALIGNED[12]]),
    *itertools.product(["sm_90"], [BRAIN, STREAM_ADD], [True], [(41, True), (100, True), (8191, True), (8192, False)]),
    *itertools.product(["sm_90"], [BRAIN, SINGLE_ADD], [False], [(5000, True), (16_383, True), (64, False)]),
    *itertools.product(["sm_80", "sm_100", "gfx942"], [STREAM_ADD], [True], [(41, True), ALIGNED[6], ALIGNED[10]]),
]


def named(target, types, centre, shape):
    n, aligned = shape
    name = f"{target}-{types}-{'layer' if centre else 'rms'}-{n}{'' if aligned else '-unaligned'}"
    quick = (target, types, centre, shape) in QUICK
    return pytest.param(target, types, centre, shape, id=name, marks=() if quick else pytest.mark.slow)


CASES = [named(*case) for case in ALL]


def check_code(binary) -> None:
    assert "atomic" not in binary.asm["ttir"]
    code = binary.asm.get("ptx") or binary.asm["amdgcn"]
    assert not re.search(r"[._]f64|[ls][dt]\.local", code)


def check_row_offsets(binary, anywhere: bool = True) -> None:
    """A row index times a stride is taken in 64 bits: each factor is extended before the product.

    `anywhere` is also the number of a program times its rows; that of the reduction counts columns.
    """
    products = re.findall(rf"arith\.muli .* : (?:tensor<[\dx]*){'?' if anywhere else ''}(i\d+)", binary.asm["ttir"])
    assert products
    assert set(products) == {"i64"}


def check_vectors(binary, call, target: str, n: int) -> None:
    """Wide accesses alone cover the tile; narrow ones are statistics and a thread's few parameters."""
    tile = call.constants["ROWS"] * call.constants["BLOCK"]
    for kind, needed in zip(("load", "store"), activation_bytes(binary, call), strict=True):
        widths = access_widths(binary, kind)
        assert widths[128] * 16 * threads(call, target) >= tile * needed
        assert widths.total() - widths[128] <= 6
        assert n < 1024 or set(widths) <= {128, 32}


def report(name: str, case, call, binary, floor: int) -> None:
    target, types, centre, (n, aligned) = case
    registers, spilt = resources(binary, target)
    read, written = activation_bytes(binary, call)
    norm = "layer" if centre else "rms"
    print(
        f"{target:7} {name:8} {norm:5} {types!s:14} N={n:<6}{'' if aligned else 'unaligned '}"
        f"{call.constants['ROWS']}x{call.constants['BLOCK']:<5} "
        f"warps {call.options['num_warps']:2} registers {registers:3} spilt {spilt} shared {binary.metadata.shared:6} "
        f"bytes/element {read:g} + {written:g}, floor {floor}"
    )


SPILT = {  # bytes of a thread, at most, in unaligned rows that fill the widest tile but one: the README names them
    16_384: {"sm_80": 8, "sm_90": 40, "sm_100": 8},
    8192: {"sm_80": 24, "sm_100": 8},
}


def excused(call, target: str, shape: tuple[int, bool], widest: int) -> int:
    return SPILT[widest].get(target, 0) if call.constants["BLOCK"] == widest and shape in UNALIGNED else 0


@pytest.mark.parametrize(("target", "types", "centre", "shape"), CASES)
def test_forward(target, types, centre, shape):
    n, aligned = shape
    floor = FLOORS[types][0]
    for round_first in True, False:  # cast=input is what the configuration says
        call = forward_call(types, centre, n, target, aligned=aligned, round_first=round_first)
        binary = compiled(call, target, aligned)
        report("forward", (target, types, centre, shape), call, binary, floor)
        check_code(binary)
        check_row_offsets(binary)
        if aligned and n % 16 == 0:
            check_vectors(binary, call, target, n)
        again = (types.residual or types.x).itemsize if call.kernel is triton_forward.forward_looped else 0
        assert sum(activation_bytes(binary, call)) == floor + again  # the second reading comes from the cache
        assert resident_programs(binary, call, target) >= 1  # else it cannot be launched
        assert n > 16_384 or resources(binary, target)[1] <= excused(call, target, shape, 16_384)


@pytest.mark.parametrize(("target", "types", "centre", "shape"), CASES)
def test_backward(target, types, centre, shape):
    n, aligned = shape
    floor = FLOORS[types][1]
    call = backward_call(types, centre, n, target, aligned=aligned)
    binary = compiled(call, target, aligned)
    report("backward", (target, types, centre, shape), call, binary, floor)
    check_code(binary)
    check_row_offsets(binary)
    if aligned and n % 16 == 0:
        check_vectors(binary, call, target, n)
    twice = call.kernel is triton_backward.backward_looped or call.constants["REREAD"]
    again = types.x.itemsize + (types.residual or types.x).itemsize if twice else 0
    assert sum(activation_bytes(binary, call)) == floor + again
    assert n > 8192 or not twice
    assert resources(binary, target)[1] <= excused(call, target, shape, 8192)
    assert resident_programs(binary, call, target) >= call.programs / MULTIPROCESSORS[target]


LEFT_OUT = [
    {"weight"}, {"weight", "dbias"}, {"dtotal"}, {"dx"}, {"dweight"}, {"dbias"}, {"dweight", "dbias"},
    {"dtotal", "dweight"},
]  # fmt: skip


@pytest.mark.parametrize("without", LEFT_OUT, ids=lambda names: "-".join(sorted(names)))
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, id=f"{shape[0]}-{shape[1]}", marks=() if shape[0] in (1024, 65_536) else pytest.mark.slow)
        for shape in ALIGNED + UNALIGNED
    ],
)
def test_what_is_left_out_compiles_without_spills(shape, without):
    n, aligned = shape
    for types, centre in itertools.product([BRAIN, SINGLE_ADD, STREAM_ADD], (False, True)):
        left = {"aligned": aligned, "wanted": WANTED - without}
        backward = backward_call(types, centre, n, "sm_90", **left)
        binary = compiled(backward, "sm_90", aligned)
        assert resources(binary, "sm_90")[1] == 0
        assert resident_programs(binary, backward, "sm_90") >= backward.programs / MULTIPROCESSORS["sm_90"]
        if without & {"weight", "dbias"}:
            forward = forward_call(types, centre, n, "sm_90", **left)
            spilt = resources(compiled(forward, "sm_90", aligned), "sm_90")[1]
            assert n > 16_384 or spilt <= excused(forward, "sm_90", shape, 16_384)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [bfloat16, float32])
@pytest.mark.parametrize("n", [4096, pytest.param(41, marks=pytest.mark.slow)])
def test_reduction(target, dtype, n):
    call = reduction_call(dtype, n, target)
    binary = compiled(call, target)
    check_code(binary)
    check_row_offsets(binary, anywhere=False)
    assert resources(binary, target)[1] == 0


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_a_barrier_stands_between_the_passes_of_a_looped_row(target):
    """The second pass reads what other threads wrote: `total` in the first pass, a partial sum a tile ago."""
    for make, expected in (forward_call, "for barrier for"), (backward_call, "for for barrier for"):
        binary = compiled(make(BRAIN_ADD, True, 65_536, target), target)
        found = re.findall(r"scf\.(for) %|(?:ttg|gpu)\.(barrier) ", binary.asm["ttgir"])
        assert " ".join(loop or barrier for loop, barrier in found) == expected


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
            for centre, mixed, aligned in itertools.product((False, True), (False, True), {False, n % 16 == 0}):
                forward = launch.forward(m, n, aligned, 32)
                assert forward.programs * forward.rows >= m
                backward = launch.backward(m, n, centre, mixed, aligned, 132, 32)
                assert 1 <= backward.programs <= -(-m // backward.rows)
                for plan in forward, backward:
                    assert plan.looped or plan.block >= n
                    assert 1 <= plan.warps <= 32


def test_alignment_is_that_of_addresses_strides_and_width():
    matrix = torch.zeros(8, 64)
    assert calls.aligned(matrix, None, matrix[0])
    assert calls.aligned(matrix[:, 16:32])
    for unaligned in matrix[:, 1:17], matrix[:, :41], torch.zeros(8, 72)[:, :64], matrix[0, 1:]:
        assert not calls.aligned(matrix, unaligned)
