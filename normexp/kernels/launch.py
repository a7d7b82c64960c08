"""How the fused kernels are launched: a fixed function of the problem, never timed, so that a run repeats bitwise.

m rows, n columns, lanes threads in a warp (32 on CUDA, 64 on CDNA); aligned: every row begins at a multiple of 16, of
bytes and of elements, so that accesses are 128 bits wide. The limits are where the compiled kernels begin to spill
registers to memory, and registers x threads x programs keep a persistent grid resident; the tests check both.
"""

from dataclasses import dataclass

FORWARD_BLOCK = 32_768  # columns that one program holds in registers; wider rows are looped
BACKWARD_BLOCK = 8_192  # fewer, because x, dy and a float32 sum for the weight are held
REREAD_BLOCK = 16_384  # so far, one such sum fits when x and dy are read a second time, from the cache
LOOP_BLOCK = 4_096  # columns of one step of a looped row


@dataclass(frozen=True)
class Launch:
    rows: int  # of one tile
    block: int  # columns of one tile, a power of two
    warps: int  # per program
    programs: int  # of the grid, on axis x
    stages: int = 1  # 2: the next tile is on its way while this one is worked on
    looped: bool = False  # the row is wider than a tile
    reread: bool = False  # the tile is read again after the reductions, not held
    registers: int | None = None  # per thread at most, on CUDA; left to itself the compiler trades them for spills


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def forward(m: int, n: int, aligned: bool, lanes: int) -> Launch:
    """One row per program from 1,024 columns up, several below; 32 values per thread are 4 to 8 loads in flight.

    Unaligned values have an address and a mask each, which take registers: 16 of them, as far as 512 threads go.
    """
    if n > FORWARD_BLOCK:
        return Launch(1, LOOP_BLOCK, 512 // lanes, m, looped=True)
    block = max(next_power_of_two(n), 16)
    values = 32 if aligned or block > 8192 else 16
    rows = 1 if block >= 32 * values else 64 * values // block
    threads = max(rows * block // values, lanes)
    limit = None if aligned else min(65_536 // threads, 248)
    return Launch(rows, block, threads // lanes, ceil_div(m, rows), registers=limit)


def backward(m: int, n: int, centre: bool, mixed: bool, aligned: bool, multiprocessors: int, lanes: int) -> Launch:
    """A persistent grid: each program sums the weight's gradient of many rows in registers and writes it once.

    Few programs per multiprocessor, because each writes a float32 row that is read again, and 8 values of a row per
    thread as far as 512 threads go, so that the registers of the grid fit and it is resident as a whole. LayerNorm
    (centre) sums two gradients; with a residual and several types (mixed) there are more values to hold.
    """
    block = max(next_power_of_two(n), 16)
    if not aligned:
        return unaligned_backward(m, block, centre and mixed, multiprocessors, lanes)
    if block > (BACKWARD_BLOCK if centre or mixed else REREAD_BLOCK):
        return Launch(2, LOOP_BLOCK, 512 // lanes, min(multiprocessors, ceil_div(m, 2)), looped=True)
    rows = max(1024 // block, 1)
    programs = min(max(6144 // (rows * block), 1) * multiprocessors, ceil_div(m, rows))
    if block > BACKWARD_BLOCK:
        return Launch(rows, block, 1024 // lanes, programs, reread=True)
    threads = max(min(rows * block // 8, 512), lanes)
    stages = 2 if rows == 1 else 1
    return Launch(rows, block, threads // lanes, programs, stages, registers=128 if threads == 512 else 80)


def unaligned_backward(m: int, block: int, crowded: bool, multiprocessors: int, lanes: int) -> Launch:
    """Each value has an address and a mask of its own, so a thread holds fewer of them in more registers."""
    if block > BACKWARD_BLOCK:
        return Launch(1, LOOP_BLOCK, 512 // lanes, min(multiprocessors, m), looped=True)
    if block > 2048:
        return Launch(1, block, 1024 // lanes, min(multiprocessors, m), registers=64)
    rows = max((256 if crowded else 512) // block, 1)
    threads = max(block // 8, 128)
    return Launch(
        rows, block, threads // lanes, min(512 // threads * multiprocessors, ceil_div(m, rows)), registers=128
    )


def reduction(partial_rows: int, n: int, lanes: int) -> Launch:
    """The sum of the partial rows: 16 columns (64 bytes) each for a full grid, so a narrow weight has several."""
    rows = min(next_power_of_two(partial_rows), 256)
    block = 4096 // rows
    return Launch(rows, block, 128 // lanes, ceil_div(n, block), looped=partial_rows > rows)
