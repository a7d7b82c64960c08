"""How fast the norms are: every op, pass and provider, in GB/s and as a share of a plain copy on the same device.

    python scripts/bench_kernels.py [--seconds 240] [--out results/bench] [--quick]

Prints a Markdown table and writes it with the numbers as kernels_<device>.{md,json}. Providers: the formula in plain
torch (`eager`), torch's own operations (`torch`), `torch.compile` of the formula, Liger and quack on a GPU, and ours.
Whatever is not installed, fails, or differs from `eager` in an output or a gradient is named with its reason, and so
are all GPU rows where there is none. GB/s are the bytes that an op must move, not those that a provider happens to
move. Run it on an idle machine.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch import config as functorch_config

from normexp import kernels, runs
from normexp.kernels import timing

EPS = 1e-6
OPS = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")
PASSES = ("forward", "backward", "both")
ORDER = ("eager", "torch", "compile", "liger", "quack", "ours")
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


def liger(op: str) -> Provider:
    from liger_kernel.transformers import functional

    return {
        "rms_norm": lambda x, residual, weight, bias: functional.liger_rms_norm(x, weight, EPS, 0.0, "gemma", False),
        "layer_norm": lambda x, residual, weight, bias: functional.liger_layer_norm(x, weight, bias, EPS),
        "add_rms_norm": lambda x, residual, weight, bias: functional.liger_fused_add_rms_norm(
            x, residual, weight, EPS, 0.0, "gemma", False
        ),
    }[op]


def quack(op: str) -> Provider:
    from quack.rmsnorm import rmsnorm

    def run(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None) -> Any:
        return rmsnorm(x, weight, residual=residual, eps=EPS, prenorm=residual is not None)  # prenorm: and the sum

    return {"rms_norm": run, "add_rms_norm": run}[op]


def compiled(op: str) -> Provider:
    run: Provider = torch.compile(ours(op, "torch"), dynamic=False)
    return run


def providers(op: str, n: int, device: torch.device) -> tuple[dict[str, Provider], dict[str, str]]:
    """Those that there are, and why the others are not."""
    found = {"eager": ours(op, "torch"), "torch": torch_own(op), "ours": ours(op, "auto")}
    if op == "rms_norm" or n in COMPILED_WIDTHS:
        found["compile"] = compiled(op)
    missing = {}
    for name, make in (("liger", liger), ("quack", quack)) if device.type == "cuda" else ():
        try:
            found[name] = make(op)
        except KeyError:
            missing[name] = "has no such op"
        except Exception as error:
            missing[name] = reason(error)
    return found, missing


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


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

    def results(self, provider: Provider) -> dict[str, Tensor]:
        """Outputs and gradients by name."""
        outputs, leaves = self.outputs(provider, 0), self.leaves(0)
        gradients = torch.autograd.grad(outputs, leaves, self.gradients[0])
        names = ["x", *(["residual"] if len(outputs) > 1 else []), "weight", "bias"]
        found = dict(zip(("y", "sum"), outputs, strict=False))
        return found | {f"d{name}": gradient for name, gradient in zip(names, gradients, strict=False)}

    def fault(self, provider: Provider, expected: dict[str, Tensor]) -> str | None:
        """Why the provider is not timed: an exception, or a result that is off by 2 % of its largest value."""
        try:
            found = self.results(provider)
        except Exception as error:
            return reason(error)
        if found.keys() != expected.keys():
            return f"returns {sorted(found)}, not {sorted(expected)}"
        off = [name for name, value in expected.items() if (found[name] - value).abs().max() > 0.02 * value.abs().max()]
        return f"wrong {', '.join(off)}" if off else None


Missing = dict[str, list[str]]  # provider, op and reason -> shapes


def measure_problem(
    op: str, m: int, n: int, device: torch.device, options: argparse.Namespace, missing: Missing
) -> list[dict[str, Any]]:
    problem = Problem(op, m, n, device)
    found, absent = providers(op, n, device)
    expected = problem.results(found["eager"])
    faults = absent | {name: fault for name, provider in found.items() if (fault := problem.fault(provider, expected))}
    rows = []
    for which in PASSES:
        steps = {}
        for name in found.keys() - faults.keys():
            try:
                steps[name] = problem.step(found[name], which)
                steps[name](0)
            except Exception as error:
                steps.pop(name, None)
                missing.setdefault(f"{name} {op} {which}: {reason(error)}", []).append(f"{m} × {n}")
        rows += measure_pass({"op": op, "m": m, "n": n, "pass": which}, steps, problem.bytes[which], device, options)
    for name, fault in faults.items():
        missing.setdefault(f"{name} {op}: {fault}", []).append(f"{m} × {n}")
    return rows


def measure_pass(
    head: dict[str, Any], steps: dict[str, timing.Step], size: int, device: torch.device, options: argparse.Namespace
) -> list[dict[str, Any]]:
    times, rows = timing.measure(steps, device, options.rounds, options.calls), []
    for name in sorted(times, key=ORDER.index):
        seconds = statistics.median(times[name])
        host = timing.host_seconds(steps[name], device)
        row = {"provider": name, "microseconds": seconds * 1e6, "gb_per_second": size / seconds / 1e9}
        row |= {"host_microseconds": host and host * 1e6}
        row |= {"quartiles": [1e6 * value for value in timing.quartiles(times[name])[::2]]}
        if "ours" in times:
            row["time_over_ours"] = timing.quartiles(timing.ratios(times[name], times["ours"]))
        rows.append(head | row)
    return rows


def page(record: dict[str, Any]) -> str:
    header = ["op", "M × N", "pass", "provider", "µs", "GB/s", "of a copy", "host µs", "time / ours"]
    lines = []
    for row in record["rows"]:
        host = "" if row["host_microseconds"] is None else f"{row['host_microseconds']:.0f}"
        (first, third), share = row["quartiles"], row["gb_per_second"] / record["copy_gb_per_second"]
        low, middle, high = row.get("time_over_ours", (float("nan"),) * 3)
        ratio = "" if row["provider"] == "ours" else f"{middle:.2f} ({low:.2f}–{high:.2f})"
        lines.append(
            [row["op"], f"{row['m']} × {row['n']}", row["pass"], row["provider"],
             f"{row['microseconds']:.1f} ({first:.1f}–{third:.1f})", f"{row['gb_per_second']:.1f}", f"{share:.0%}",
             host, ratio]
        )  # fmt: skip
    notes = "\n".join(f"- {line}" for line in record["missing"])
    return (
        f"# Kernels on {record['device']}\n\n{timing.head(record)} A plain copy: "
        f"{record['copy_gb_per_second']:.1f} GB/s.\n\n{timing.table(header, lines)}\nMissing:\n\n"
        f"{notes or '- nothing'}\n"
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
    shapes = [(64, 64), (64, 128)] if options.quick else GPU_SHAPES if device.type == "cuda" else CPU_SHAPES
    missing: Missing = {"out of time": []}
    start, rows = time.monotonic(), []
    copy = timing.copy_bandwidth(device, options.rounds)
    for op in OPS:
        for m, n in shapes:
            if time.monotonic() - start > options.seconds:
                missing["out of time"].append(f"{op} {m} × {n}")
                continue
            torch._dynamo.reset()
            rows += measure_problem(op, m, n, device, options, missing)
    named = [] if device.type == "cuda" else [f"every GPU shape: {len(GPU_SHAPES)} of each op, no GPU here"]
    named += [] if device.type == "cuda" else ["liger, quack: they need a GPU"]
    named += [f"compile of the other ops at widths but {COMPILED_WIDTHS}: to fit four minutes"]
    named += [
        why if len(where) == len(shapes) else f"{why} ({', '.join(where)})" for why, where in missing.items() if where
    ]
    record = timing.facts(device, runs.git_commit()) | {"copy_gb_per_second": copy / 1e9, "rows": rows}
    record["missing"] = named
    text = page(record)
    print(text)
    print(timing.write(options.out, "kernels", device, record, text))


if __name__ == "__main__":
    main()
