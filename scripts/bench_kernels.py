"""How fast the norms are: every op, pass and provider, in GB/s and as a share of a plain copy on the same device.

    python scripts/bench_kernels.py [--seconds 240] [--out results/bench] [--quick]

Prints a Markdown table and writes it with the numbers as kernels_<device>.{md,json}. Providers: the formula in plain
torch (`eager`), torch's own operations (`torch`), `torch.compile` of the formula, Liger and quack where they are
installed and the device can run them, and ours. Without a GPU the CPU providers run and the missing rows are named.
GB/s are the bytes that an op must move, not those that a provider happens to move. Run it on an idle machine.
"""

import argparse
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch import config as functorch_config

from normexp import kernels
from normexp.kernels import timing

EPS = 1e-6
OPS = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")
PASSES = ("forward", "backward", "both")
GPU_SHAPES = [
    (32_768, 256), (32_768, 512), (32_768, 1024), (16_384, 2048), (8192, 4096), (8192, 8192), (4096, 16_384),
    (2048, 32_768), (32_768, 768), (16_384, 1600), (8192, 5120),
]  # fmt: skip
CPU_SHAPES = [(2048, width) for width in (64, 128, 512, 768, 1024, 1600)]
COMPILED_WIDTHS = (64, 1024, 4096, 16_384)  # of the ops but rms_norm: each compilation takes seconds
Outputs = tuple[Tensor, ...]
Provider = Callable[..., Any]  # (x, residual or None, weight, bias or None) -> y, or (y, sum)


def ours(op: str, kernel: str) -> Provider:
    function = getattr(kernels, op)

    def run(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None) -> Any:
        positional = [tensor for tensor in (residual, weight, bias) if tensor is not None]
        return function(x, *positional, EPS, cast="float32", kernel=kernel)

    return run


def torch_own(op: str) -> Provider:
    def run(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None) -> Any:
        total = x if residual is None else x + residual
        width = total.shape[-1:]
        norm = F.rms_norm(total, width, weight, EPS) if bias is None else F.layer_norm(total, width, weight, bias, EPS)
        return norm if residual is None else (norm, total)

    return run


def liger(op: str) -> Provider | None:
    if importlib.util.find_spec("liger_kernel") is None or op == "add_layer_norm":
        return None
    from liger_kernel.transformers import functional

    return {
        "rms_norm": lambda x, residual, weight, bias: functional.liger_rms_norm(x, weight, EPS, 0.0, "gemma", False),
        "layer_norm": lambda x, residual, weight, bias: functional.liger_layer_norm(x, weight, bias, EPS),
        "add_rms_norm": lambda x, residual, weight, bias: functional.liger_fused_add_rms_norm(
            x, residual, weight, EPS, 0.0, "gemma", False
        ),
    }[op]


def quack(op: str) -> Provider | None:
    if importlib.util.find_spec("quack") is None or op.endswith("layer_norm"):
        return None
    from quack.rmsnorm import rmsnorm

    return lambda x, residual, weight, bias: rmsnorm(x, weight, residual=residual, eps=EPS)


def providers(op: str, n: int, device: torch.device) -> dict[str, Provider]:
    found = {"eager": ours(op, "torch"), "torch": torch_own(op), "ours": ours(op, "auto")}
    if op == "rms_norm" or n in COMPILED_WIDTHS:
        found["compile"] = torch.compile(ours(op, "torch"), dynamic=False)
    if device.type == "cuda":
        found |= {name: made for name, made in (("liger", liger(op)), ("quack", quack(op))) if made is not None}
    return found


def required_bytes(op: str, which: str, m: int, n: int, size: int) -> int:
    """x and y; dy, x and dx; with a residual also the sum and its gradient. Weights and statistics are negligible."""
    forward, backward = (4, 4) if op.startswith("add") else (2, 3)
    return m * n * size * {"forward": forward, "backward": backward, "both": forward + backward}[which]


class Problem:
    """Rotating inputs of one op and shape, with upstream gradients."""

    def __init__(self, op: str, m: int, n: int, device: torch.device) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.bytes = {which: required_bytes(op, which, m, n, dtype.itemsize) for which in PASSES}
        add, count = op.startswith("add"), timing.rotations(self.bytes["forward"], device)

        def random(*shape: int, grad: bool) -> Tensor:
            return torch.randn(shape, device=device, dtype=dtype, requires_grad=grad)

        self.weight = random(n, grad=True)
        self.bias = random(n, grad=True) if op.endswith("layer_norm") else None
        self.sets = [(random(m, n, grad=True), random(m, n, grad=True) if add else None) for _ in range(count)]
        self.gradients = [[random(m, n, grad=False) for _ in range(1 + add)] for _ in range(count)]

    def leaves(self, number: int) -> list[Tensor]:
        return [tensor for tensor in (*self.sets[number], self.weight, self.bias) if tensor is not None]

    def outputs(self, provider: Provider, number: int) -> Outputs:
        result = provider(*self.sets[number % len(self.sets)], self.weight, self.bias)
        return result if isinstance(result, tuple) else (result,)

    def step(self, provider: Provider, which: str) -> timing.Step:
        count = len(self.sets)
        if which == "forward":
            return lambda number: self.outputs(provider, number)
        kept = [self.outputs(provider, number) for number in range(count)] if which == "backward" else None

        def backward(number: int) -> object:
            number %= count
            outputs = self.outputs(provider, number) if kept is None else kept[number]
            return torch.autograd.grad(
                outputs, self.leaves(number), self.gradients[number], retain_graph=kept is not None
            )

        return backward

    def agrees(self, provider: Provider, reference: Provider) -> bool:
        found, expected = self.outputs(provider, 0), self.outputs(reference, 0)
        return all(torch.allclose(a, b, rtol=2e-2, atol=2e-2) for a, b in zip(found, expected, strict=True))


def measure_problem(op: str, m: int, n: int, device: torch.device, options: argparse.Namespace) -> list[dict[str, Any]]:
    problem, found = Problem(op, m, n, device), providers(op, n, device)
    wrong = [name for name, provider in found.items() if not problem.agrees(provider, found["eager"])]
    working = {name: provider for name, provider in found.items() if name not in wrong}
    rows = []
    for which in PASSES:
        steps = {name: problem.step(provider, which) for name, provider in working.items()}
        times = timing.measure(steps, device, options.rounds, options.calls)
        for name, seconds in times.items():
            host = timing.host_seconds(steps[name], device)
            row = {"op": op, "m": m, "n": n, "pass": which, "provider": name, "microseconds": seconds * 1e6}
            rows.append(
                row | {"gb_per_second": problem.bytes[which] / seconds / 1e9, "host_microseconds": host and host * 1e6}
            )
    return rows + [{"op": op, "m": m, "n": n, "provider": name, "wrong": True} for name in wrong]


def page(record: dict[str, Any]) -> str:
    header = ["op", "M × N", "pass", "provider", "µs", "GB/s", "of a copy", "host µs", "time / ours"]
    measured = [row for row in record["rows"] if "microseconds" in row]
    mine = {(r["op"], r["m"], r["n"], r["pass"]): r["microseconds"] for r in measured if r["provider"] == "ours"}
    lines = []
    for row in measured:
        key = row["op"], row["m"], row["n"], row["pass"]
        host = "" if row["host_microseconds"] is None else f"{row['host_microseconds']:.0f}"
        share, ratio = row["gb_per_second"] / record["copy_gb_per_second"], row["microseconds"] / mine[key]
        lines.append(
            [row["op"], f"{row['m']} × {row['n']}", row["pass"], row["provider"], f"{row['microseconds']:.1f}",
             f"{row['gb_per_second']:.1f}", f"{share:.0%}", host, f"{ratio:.2f}"]
        )  # fmt: skip
    wrong = [
        f"{row['provider']} {row['op']} {row['m']} × {row['n']}: wrong result, not timed"
        for row in record["rows"]
        if "wrong" in row
    ]
    notes = "\n".join(f"- {line}" for line in [*record["missing"], *wrong])
    return (
        f"# Kernels on {record['device']}\n\nA plain copy: {record['copy_gb_per_second']:.1f} GB/s. {record['dtype']}, "
        f"torch {record['versions']['torch']}.\n\n{timing.table(header, lines)}\nMissing:\n\n{notes or '- nothing'}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240, help="rows that do not fit are named as missing")
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    parser.add_argument("--quick", action="store_true", help="two small shapes, few repeats: a smoke test")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    functorch_config.donated_buffer = False  # a backward pass alone is timed, again and again
    options.rounds, options.calls = (2, 2) if options.quick else (15, 10) if device.type == "cuda" else (7, 5)
    shapes = GPU_SHAPES if device.type == "cuda" else CPU_SHAPES
    missing = [] if device.type == "cuda" else [f"all GPU shapes, {m} × {n}: no GPU here" for m, n in GPU_SHAPES]
    missing += [f"compile of the other ops at widths but {COMPILED_WIDTHS}: to fit four minutes"]
    start, rows = time.monotonic(), []
    copy = timing.copy_bandwidth(device, options.rounds)
    for op in OPS:
        for m, n in [(64, 64), (64, 128)] if options.quick else shapes:
            if time.monotonic() - start > options.seconds:
                missing.append(f"{op} {m} × {n}: out of time")
                continue
            torch._dynamo.reset()
            rows += measure_problem(op, m, n, device, options)
    record = timing.facts(device) | {"copy_gb_per_second": copy / 1e9, "rows": rows, "missing": missing}
    text = page(record)
    print(text)
    print(timing.write(options.out, "kernels", device, record, text))


if __name__ == "__main__":
    main()
