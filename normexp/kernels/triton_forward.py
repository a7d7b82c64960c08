# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# (Triton's language has no types that mypy could check)
"""Forward kernels: y = (x [- mean]) * rstd * gain [+ bias], optionally of x + residual, which is stored as well.

Legend: a tile is (ROWS, BLOCK); row and column are its indices, inside marks the part of it that exists.
Arithmetic is in WIDE (float32; float64 for float64 inputs, which only the tests use) right after each load.
Row offsets are 64 bits wide: 2^31 values are 4 GiB of bfloat16.
"""

import triton
import triton.language as tl


@triton.jit
def tile_rows(start, column, M, N, ROWS: tl.constexpr):
    """Row indices in 64 bits, and the mask of the tile."""
    row = start + tl.arange(0, ROWS).to(tl.int64)
    return row, (row < M)[:, None] & (column < N)[None, :]


@triton.jit
def load_wide(pointer, row, column, inside, stride, WIDE: tl.constexpr):
    return tl.load(pointer + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(WIDE)


@triton.jit
def load_gain(weight, column, N, offset, WIDE: tl.constexpr):
    """(1, BLOCK) gain, or 1 without a weight."""
    if weight is None:
        gain = tl.full([1, 1], 1.0, WIDE)
    else:  # the compiler goes on after a `return` above
        gain = (tl.load(weight + column, mask=column < N, other=0.0).to(WIDE) + offset)[None, :]
    return gain


@triton.jit
def load_input(x, residual, total, row, column, inside, N, x_stride, residual_stride, WIDE: tl.constexpr):
    """x, or x + residual as it was rounded when it was stored in `total`."""
    value = load_wide(x, row, column, inside, x_stride, WIDE)
    if residual is not None:
        value += load_wide(residual, row, column, inside, residual_stride, WIDE)
        stored = value.to(total.dtype.element_ty)
        tl.store(total + row[:, None] * N + column[None, :], stored, mask=inside)
        value = stored.to(WIDE)
    return value


@triton.jit
def store_affine(
    y, normalised, weight, bias, row, column, inside, N, offset, ROUND_FIRST: tl.constexpr, WIDE: tl.constexpr
):
    """y = normalised * gain + bias; ROUND_FIRST rounds to the type of y before the gain (LLaMA)."""
    if ROUND_FIRST:
        normalised = normalised.to(y.dtype.element_ty).to(WIDE)
    normalised = normalised * load_gain(weight, column, N, offset, WIDE)
    if bias is not None:
        normalised += tl.load(bias + column, mask=column < N, other=0.0).to(WIDE)[None, :]
    tl.store(y + row[:, None] * N + column[None, :], normalised.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def forward(
    x, residual, weight, bias, y, total, mean, rstd, M, N, x_stride, residual_stride, eps, offset,
    CENTRE: tl.constexpr, ROUND_FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Whole rows in registers: each operand is read once; the variance is taken in two passes over the registers."""
    column = tl.arange(0, BLOCK)
    row, inside = tile_rows(tl.program_id(0).to(tl.int64) * ROWS, column, M, N, ROWS)
    value = load_input(x, residual, total, row, column, inside, N, x_stride, residual_stride, WIDE)
    if CENTRE:
        average = tl.sum(value, 1) / N
        tl.store(mean + row, average, mask=row < M)
        value = tl.where(inside, value - average[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(value * value, 1) / N + eps)
    tl.store(rstd + row, scale, mask=row < M)
    store_affine(y, value * scale[:, None], weight, bias, row, column, inside, N, offset, ROUND_FIRST, WIDE)


@triton.jit
def merge_moments(average, low, square, count, value, inside, CENTRE: tl.constexpr):
    """Adds a block to the running mean and sum of squared deviations of `count` values: Chan et al. 1979.

    The mean is average + low: rounded after every block, a large mean would be wrong by several units.
    """
    if CENTRE:
        size = tl.sum(inside.to(value.dtype), 1)
        value = tl.where(inside, value - average[:, None], 0.0)
        difference = tl.sum(value, 1) / size
        centred = tl.where(inside, value - difference[:, None], 0.0)
        apart = difference - low
        square += tl.sum(centred * centred, 1) + apart * apart * (count * size / (count + size))
        step = low + apart * (size / (count + size))
        low = step - (average + step - average)
        average += step
    else:
        square += tl.sum(value * value, 1)
    return average, low, square


@triton.jit(do_not_specialize=["M"])
def forward_looped(
    x, residual, weight, bias, y, total, mean, rstd, M, N, x_stride, residual_stride, eps, offset,
    CENTRE: tl.constexpr, ROUND_FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One row per program (ROWS = 1) in column blocks; the second reading of the row comes from the L2 cache."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    average = tl.zeros([ROWS], WIDE)
    low = tl.zeros([ROWS], WIDE)
    square = tl.zeros([ROWS], WIDE)
    for start in range(0, N, BLOCK):
        column = start + tl.arange(0, BLOCK)
        row, inside = tile_rows(first, column, M, N, ROWS)
        value = load_input(x, residual, total, row, column, inside, N, x_stride, residual_stride, WIDE)
        average, low, square = merge_moments(average, low, square, start, value, inside, CENTRE)
    scale = tl.rsqrt(square / N + eps)
    row = first + tl.arange(0, ROWS)
    tl.store(rstd + row, scale, mask=row < M)
    if CENTRE:
        tl.store(mean + row, average, mask=row < M)
    tl.debug_barrier()  # `total` is read below by other threads than those that wrote it
    for start in range(0, N, BLOCK):
        column = start + tl.arange(0, BLOCK)
        row, inside = tile_rows(first, column, M, N, ROWS)
        if residual is not None:
            value = load_wide(total, row, column, inside, N, WIDE)
        else:
            value = load_wide(x, row, column, inside, x_stride, WIDE)
        normalised = (value - average[:, None]) * scale[:, None]
        store_affine(y, normalised, weight, bias, row, column, inside, N, offset, ROUND_FIRST, WIDE)
