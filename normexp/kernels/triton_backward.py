# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# (Triton's language has no types that mypy could check)
"""Backward kernels. With g = dy * gain and n = (x [- mean]) * rstd, means over the columns:

    dx = rstd * (g - n * mean(g * n) [- mean(g)]) [+ dtotal]     dweight = sum over rows of dy * n     dbias = sum of dy

Two stages make the sums deterministic without atomics: each program of a persistent grid adds up its own rows in
float32 and writes one partial row; `reduce_partials` adds those in a fixed order. Legend: see the forward kernels.
"""

import triton
import triton.language as tl

from normexp.kernels.triton_forward import load_gain, load_wide, tile_rows


@triton.jit
def load_normalised(x, mean, scale, row, column, inside, M, x_stride, CENTRE: tl.constexpr, WIDE: tl.constexpr):
    value = load_wide(x, row, column, inside, x_stride, WIDE)
    if CENTRE:
        value -= tl.load(mean + row, mask=row < M, other=0.0)[:, None]
    return value * scale[:, None]


@triton.jit
def row_means(upstream, normalised, N, CENTRE: tl.constexpr):
    projection = tl.sum(upstream * normalised, 1) / N
    average = projection
    if CENTRE:
        average = tl.sum(upstream, 1) / N
    return projection, average


@triton.jit
def read_means(
    dy, x, weight, mean, scale, row, column, inside, M, N, dy_stride, x_stride, offset,
    CENTRE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The means of a tile that is not kept: it will be read again."""
    upstream = load_wide(dy, row, column, inside, dy_stride, WIDE) * load_gain(weight, column, N, offset, WIDE)
    normalised = load_normalised(x, mean, scale, row, column, inside, M, x_stride, CENTRE, WIDE)
    return row_means(upstream, normalised, N, CENTRE)


@triton.jit
def store_dx(
    dx, dresidual, dtotal, upstream, normalised, projection, average, scale, row, column, inside, N, dtotal_stride,
    CENTRE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The gradient of x + residual goes to both; dresidual is written only where its type differs from that of dx."""
    gradient = upstream - normalised * projection[:, None]
    if CENTRE:
        gradient -= average[:, None]
    gradient *= scale[:, None]
    if dtotal is not None:
        gradient += load_wide(dtotal, row, column, inside, dtotal_stride, WIDE)
    offsets = row[:, None] * N + column[None, :]
    tl.store(dx + offsets, gradient.to(dx.dtype.element_ty), mask=inside)
    if dresidual is not None:
        tl.store(dresidual + offsets, gradient.to(dresidual.dtype.element_ty), mask=inside)


@triton.jit
def store_partial(partial, sums, program, column, N):
    if partial is not None:
        tl.store(partial + program * N + column, tl.sum(sums, 0), mask=column < N)


@triton.jit(do_not_specialize=["M"])
def backward(
    dy, dtotal, x, weight, mean, rstd, dx, dresidual, dweight, dbias, M, N, dy_stride, dtotal_stride, x_stride, offset,
    CENTRE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, REREAD: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Whole rows per tile; dweight and dbias are (programs, N), or None when not wanted.

    REREAD is for rows too wide to hold through the reductions: x and dy are read a second time, from the cache.
    """
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    dweight_sum = tl.zeros([ROWS, BLOCK], WIDE)
    dbias_sum = tl.zeros([ROWS, BLOCK], WIDE)
    if not REREAD:
        gain = load_gain(weight, column, N, offset, WIDE)
    for start in tl.range(program * ROWS, M, tl.num_programs(0).to(tl.int64) * ROWS, num_stages=STAGES):
        row, inside = tile_rows(start, column, M, N, ROWS)
        scale = tl.load(rstd + row, mask=row < M, other=0.0)
        if REREAD:
            projection, average = read_means(
                dy, x, weight, mean, scale, row, column, inside, M, N, dy_stride, x_stride, offset, CENTRE, WIDE
            )
            tl.debug_barrier()  # or the compiler merges the two readings and holds the first
            gain = load_gain(weight, column, N, offset, WIDE)
        upstream = load_wide(dy, row, column, inside, dy_stride, WIDE)
        normalised = load_normalised(x, mean, scale, row, column, inside, M, x_stride, CENTRE, WIDE)
        if dweight is not None:
            dweight_sum += upstream * normalised
        if dbias is not None:
            dbias_sum += upstream
        if dx is not None:
            upstream *= gain
            if not REREAD:
                projection, average = row_means(upstream, normalised, N, CENTRE)
            store_dx(
                dx, dresidual, dtotal, upstream, normalised, projection, average, scale, row, column, inside, N,
                dtotal_stride, CENTRE, WIDE,
            )  # fmt: skip
    store_partial(dweight, dweight_sum, program, column, N)
    store_partial(dbias, dbias_sum, program, column, N)


@triton.jit
def add_to_partial(partial, value, program, column, N, is_first):
    """partial[program] += value; the first rows of a program overwrite, so the buffer is not cleared beforehand."""
    pointer = partial + program * N + column
    before = tl.load(pointer, mask=(column < N) & (is_first == 0), other=0.0)
    tl.store(pointer, before + tl.sum(value, 0), mask=column < N)


@triton.jit(do_not_specialize=["M"])
def backward_looped(
    dy, dtotal, x, weight, mean, rstd, dx, dresidual, dweight, dbias, M, N, dy_stride, dtotal_stride, x_stride, offset,
    CENTRE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rows in column blocks: their second reading and the partial sums of dweight and dbias are in the cache."""
    program = tl.program_id(0).to(tl.int64)
    for start in range(program * ROWS, M, tl.num_programs(0).to(tl.int64) * ROWS):
        row = start + tl.arange(0, ROWS)
        scale = tl.load(rstd + row, mask=row < M, other=0.0)
        projection = tl.zeros([ROWS], WIDE)
        average = tl.zeros([ROWS], WIDE)
        for block in range(0, N, BLOCK):
            column = block + tl.arange(0, BLOCK)
            row, inside = tile_rows(start, column, M, N, ROWS)
            block_projection, block_average = read_means(
                dy, x, weight, mean, scale, row, column, inside, M, N, dy_stride, x_stride, offset, CENTRE, WIDE
            )
            projection += block_projection
            average += block_average
        tl.debug_barrier()  # the partial sums are read below by other threads than those that wrote them, a tile ago
        for block in range(0, N, BLOCK):
            column = block + tl.arange(0, BLOCK)
            row, inside = tile_rows(start, column, M, N, ROWS)
            upstream = load_wide(dy, row, column, inside, dy_stride, WIDE)
            normalised = load_normalised(x, mean, scale, row, column, inside, M, x_stride, CENTRE, WIDE)
            if dweight is not None:
                add_to_partial(dweight, upstream * normalised, program, column, N, start == program * ROWS)
            if dbias is not None:
                add_to_partial(dbias, upstream, program, column, N, start == program * ROWS)
            if dx is not None:
                upstream *= load_gain(weight, column, N, offset, WIDE)
                store_dx(
                    dx, dresidual, dtotal, upstream, normalised, projection, average, scale, row, column, inside, N,
                    dtotal_stride, CENTRE, WIDE,
                )  # fmt: skip


@triton.jit
def reduce_one(partial, out, column, programs, N, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    sums = tl.zeros([ROWS, BLOCK], WIDE)
    for start in range(0, programs, ROWS):
        row, inside = tile_rows(start, column, programs, N, ROWS)
        sums += load_wide(partial, row, column, inside, N, WIDE)
    tl.store(out + column, tl.sum(sums, 0).to(out.dtype.element_ty), mask=column < N)


@triton.jit(do_not_specialize=["programs"])
def reduce_partials(
    dweight_partial, dbias_partial, dweight, dbias, programs, N,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Column sums of the (programs, N) partial gradients, in the type of the parameter."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if dweight_partial is not None:
        reduce_one(dweight_partial, dweight, column, programs, N, ROWS, BLOCK, WIDE)
    if dbias_partial is not None:
        reduce_one(dbias_partial, dbias, column, programs, N, ROWS, BLOCK, WIDE)
