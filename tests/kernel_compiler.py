"""Compiles the launches of `normexp.kernels.calls` for a GPU that need not be there, and reads what came out."""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from normexp.kernels import calls, launch

NAMES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
TARGETS = {f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 90, 100)} | {
    "gfx942": GPUTarget("hip", "gfx942", 64)
}
MULTIPROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148, "gfx942": 304}
SHARED_MEMORY = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
ROWS = 1 << 20  # enough for every persistent grid to be full


@dataclass(frozen=True)
class Types:
    """One combination of types: of x and y, of the parameters, and of the residual (None: no residual)."""

    x: torch.dtype
    parameters: torch.dtype
    residual: torch.dtype | None = None

    def __str__(self) -> str:
        parts = [self.x, self.parameters, *([self.residual] if self.residual else [])]
        return "/".join(str(part).removeprefix("torch.").replace("float", "f") for part in parts)


def tensor(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def operands(types: Types, n: int, m: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """x, residual, a parameter and a statistic."""
    residual = None if types.residual is None else tensor(m, n, dtype=types.residual)
    parameter, statistics = tensor(n, dtype=types.parameters), tensor(m, dtype=torch.float32)
    return tensor(m, n, dtype=types.x), residual, parameter, statistics


WANTED = frozenset(("weight", "dtotal", "dx", "dweight", "dbias"))  # what a caller may leave out


def forward_call(
    types: Types,
    centre: bool,
    n: int,
    target: str,
    m: int = ROWS,
    aligned: bool = True,
    round_first: bool = True,
    wanted: frozenset = WANTED,
):
    x, residual, parameter, statistics = operands(types, n, m)
    weight = parameter if "weight" in wanted else None
    inputs = x, residual, weight, parameter if centre and "dbias" in wanted else None
    outputs = x, residual, statistics if centre else None, statistics
    plan = launch.forward(m, n, aligned and n % 16 == 0, TARGETS[target].warp_size)
    return calls.forward(inputs, outputs, (1e-6, 0.0), centre, round_first, plan)


def backward_call(
    types: Types, centre: bool, n: int, target: str, m: int = ROWS, aligned: bool = True, wanted: frozenset = WANTED
):
    x, residual, parameter, statistics = operands(types, n, m)
    apart = types.residual not in (None, types.x)
    mixed = apart or (types.residual is not None and types.parameters != types.x)
    plan = launch.backward(
        m, n, centre, mixed, aligned and n % 16 == 0, MULTIPROCESSORS[target], TARGETS[target].warp_size
    )
    weight = parameter if "weight" in wanted else None
    saved = x if residual is None else residual, weight, statistics if centre else None, statistics
    partial = tensor(plan.programs, n, dtype=torch.float32)
    dx, dresidual = (x, residual if apart else None) if "dx" in wanted else (None, None)
    dweight = partial if wanted >= {"weight", "dweight"} else None
    dbias = partial if centre and "dbias" in wanted else None
    gradients = x, residual if "dtotal" in wanted else None
    return calls.backward(plan, gradients, saved, (dx, dresidual, dweight, dbias), 0.0)


def reduction_call(parameters: torch.dtype, n: int, target: str):
    partial, gradient = tensor(MULTIPROCESSORS[target], n, dtype=torch.float32), tensor(n, dtype=parameters)
    return calls.reduction((partial, partial), (gradient, gradient), TARGETS[target].warp_size)


def source(call: calls.Call, aligned: bool = True) -> ASTSource:
    """What Triton's launcher would compile for these arguments; `aligned` is what the pointers are."""
    kernel, signature, attributes = call.kernel, {}, {}
    constants = dict(call.constants)
    specialised = {parameter.name: not parameter.do_not_specialize for parameter in kernel.params}
    for index, (name, value) in enumerate(zip(kernel.arg_names, call.arguments, strict=False)):
        if value is None or (isinstance(value, int) and value == 1 and specialised[name]):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name], divisible = NAMES[value.dtype], aligned
        elif isinstance(value, float):
            signature[name], divisible = "fp32", False
        else:
            signature[name] = "i32" if value < 2**31 else "i64"
            divisible = specialised[name] and value % 16 == 0
        if signature[name] != "constexpr" and divisible:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature | dict.fromkeys(call.constants, "constexpr"), constants, attributes)


def compiled(call: calls.Call, target: str, aligned: bool = True):
    known = {name: value for name, value in call.options.items() if name != "maxnreg" or target != "gfx942"}
    return triton.compile(source(call, aligned), target=TARGETS[target], options=known)


def threads(call: calls.Call, target: str) -> int:
    return call.options["num_warps"] * TARGETS[target].warp_size


def resources(binary, target: str) -> tuple[int, int]:
    """(registers per thread, bytes of local memory per thread); any local memory is a spill."""
    if target == "gfx942":
        text = binary.asm["amdgcn"]
        spills = re.findall(r"\.(?:private_segment_fixed_size|vgpr_spill_count):\s*(\d+)", text)
        return int(re.search(r"\.vgpr_count:\s*(\d+)", text)[1]), sum(map(int, spills))
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(binary.asm["cubin"])
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def activation_bytes(binary, call: calls.Call) -> tuple[float, float]:
    """(loaded, stored) bytes per element of an (M, N) tensor, from the shapes in Triton's own representation."""
    tile = f"{call.constants['ROWS']}x{call.constants['BLOCK']}"
    found = {}
    for kind in "load", "store":
        types = re.findall(rf"tt\.{kind} .* : tensor<{tile}x!tt\.ptr<[a-z]*(\d+)>>", binary.asm["ttir"])
        found[kind] = sum(int(bits) for bits in types) / 8
    return found["load"], found["store"]


AMD_BITS = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32, "short": 16, "ushort": 16, "byte": 8, "ubyte": 8}


def access_widths(binary, kind: str) -> Counter[int]:
    """How often one thread reaches global memory, by the bits of the access; asynchronous copies are loads."""
    if "ptx" not in binary.asm:
        names = re.findall(rf"(?:global|buffer|flat)_{kind}_(dwordx\d|[a-z]+)", binary.asm["amdgcn"])
        return Counter(AMD_BITS[name] for name in names)
    found = re.findall(rf"{'ld' if kind == 'load' else 'st'}\.global(?:\.v(\d))?\.b(\d+)", binary.asm["ptx"])
    widths = [int(vector or 1) * int(bits) for vector, bits in found]
    if kind == "load":
        widths += [8 * int(size, 0) for size in re.findall(r"cp\.async\.c[ag]\..*?, (0x[0-9a-f]+),", binary.asm["ptx"])]
    return Counter(widths)


def resident_programs(binary, call: calls.Call, target: str) -> int:
    """Programs that one multiprocessor holds at once, by its registers and its shared memory."""
    registers, _ = resources(binary, target)
    rounded = -(-registers // 8) * 8
    if target == "gfx942":  # 4 SIMD units of 512 registers for each lane, at most 8 wavefronts each
        by_registers = 4 * min(512 // rounded, 8) // call.options["num_warps"]
    else:
        by_registers = 65_536 // (rounded * threads(call, target))
    shared = binary.metadata.shared
    return min(by_registers, SHARED_MEMORY[target] // shared) if shared else by_registers
