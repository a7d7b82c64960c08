"""What is said about the cost of norms, measured: RMSNorm against LayerNorm, and a norm folded into the next linear.

    python scripts/bench_norms.py [--out results/bench] [--quick]

Prints the tables and writes them as norms_<device>.{md,json}. All sides of a comparison are timed in turn in this run.

Training is forward + backward, inference forward alone. `torch` are torch's own operations, `ours` kernel=auto,
`compiled` torch.compile of the formula. The folded linear is FlashNorm's (2407.09577): x W* / rms(x), W* = W
diag(gain), exact for RMSNorm. What is saved is `within noise` where its quartiles over the rounds have both signs, and
`norm unseen` where the norm beside its linear layer is. Run it on an idle machine.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normexp import kernels, runs
from normexp.kernels import timing

EPS = 1e-6
GPU_SHAPES = [(8192, 1024), (8192, 2048), (8192, 4096), (4096, 8192)]
CPU_SHAPES = [(2048, 128), (2048, 512), (2048, 1024)]
IMPLEMENTATIONS = ("torch", "compiled", "ours")
CLAIMS = (
    "RMSNorm needs 7 to 64 % less time than LayerNorm (1910.07467, by model)",
    "RMSNorm is 10 to 30 % faster at inference under torch.compile",
    "norm + matmul fusion saves 20 to 40 % of the norm's latency (A100)",
)


def pair(implementation: str) -> dict[str, Callable[..., Tensor]]:
    """Both norms of (x, weight, bias) by one implementation."""
    if implementation == "torch":
        return {
            "rms": lambda x, weight, bias: F.rms_norm(x, x.shape[-1:], weight, EPS),
            "ln": lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias, EPS),
        }
    kernel = "auto" if implementation == "ours" else "torch"
    made: dict[str, Callable[..., Tensor]] = {
        "rms": lambda x, weight, bias: kernels.rms_norm(x, weight, EPS, cast="float32", kernel=kernel),
        "ln": lambda x, weight, bias: kernels.layer_norm(x, weight, bias, EPS, cast="float32", kernel=kernel),
    }
    if implementation == "ours":
        return made
    return {name: torch.compile(norm, dynamic=False) for name, norm in made.items()}


Arguments = list[list[Tensor]]  # one list for each rotation, so that a GPU's L2 cache is cold


def training(function: Callable[..., Tensor], wanted: int, arguments: Arguments) -> timing.Step:
    """Forward and backward to the first `wanted` arguments; the upstream gradient is the argument x of the next set."""

    def step(number: int) -> object:
        here, other = arguments[number % len(arguments)], arguments[(number + 1) % len(arguments)]
        return torch.autograd.grad(function(*here), here[:wanted], other[0].detach())

    return step


def inference(function: Callable[..., Tensor], arguments: Arguments) -> timing.Step:
    @torch.no_grad()
    def step(number: int) -> object:
        return function(*arguments[number % len(arguments)])

    return step


def microseconds(times: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return [1e6 * value for value in timing.quartiles(times)]


def compare_norms(m: int, n: int, device: torch.device, options: argparse.Namespace) -> list[dict[str, Any]]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    count = timing.rotations(2 * m * n * dtype.itemsize, device)
    shared = [torch.randn(n, device=device, dtype=dtype, requires_grad=True) for _ in range(2)]
    rotating = [torch.randn(m, n, device=device, dtype=dtype, requires_grad=True) for _ in range(count)]
    arguments, rows = [[x, *shared] for x in rotating], []
    for mode in "training", "inference":
        steps = {
            (implementation, name): training(function, 2 if name == "rms" else 3, arguments)
            if mode == "training"
            else inference(function, arguments)
            for implementation in IMPLEMENTATIONS
            for name, function in pair(implementation).items()
        }
        times = timing.measure(steps, device, options.rounds, options.calls)
        for implementation in IMPLEMENTATIONS:
            rms, ln = (times[implementation, name] for name in ("rms", "ln"))
            row = {"m": m, "n": n, "mode": mode, "implementation": implementation}
            rows.append(row | {"rms": microseconds(rms), "ln": microseconds(ln), "ratios": timing.ratios(rms, ln)})
    return rows


def folded(x: Tensor, weight: Tensor) -> Tensor:
    """x W* * rstd: the product does not wait for the reduction, and the gain is in W*."""
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return F.linear(x, weight) * rstd.to(x.dtype)


def compare_linear(m: int, n: int, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    count = timing.rotations(2 * m * n * dtype.itemsize, device)
    rotating = [torch.randn(m, n, device=device, dtype=dtype) for _ in range(count)]
    linear = torch.randn(n, n, device=device, dtype=dtype) / n**0.5
    gain = torch.rand(n, device=device, dtype=dtype) + 0.5
    star = linear * gain

    def norm_linear(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(kernels.rms_norm(x, gain, EPS, cast="float32", kernel="auto"), weight)

    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(
        folded(rotating[0], star), norm_linear(rotating[0], linear), rtol=tolerance, atol=tolerance
    )
    sides = {
        "linear": (F.linear, linear),
        "norm + linear": (norm_linear, linear),
        "norm + linear, compiled": (torch.compile(norm_linear, dynamic=False), linear),
        "folded": (folded, star),
        "folded, compiled": (torch.compile(folded, dynamic=False), star),
    }
    steps = {name: inference(function, [[x, weight] for x in rotating]) for name, (function, weight) in sides.items()}
    times = timing.measure(steps, device, options.rounds, options.calls)
    sides_of = {name: microseconds(values) for name, values in times.items()}
    saved = {how or ", eager": saved_of_the_norm(times, how) for how in ("", ", compiled")}
    return {"m": m, "n": n, "sides": sides_of, "saved": saved}


def saved_of_the_norm(times: dict[str, list[float]], how: str) -> list[float] | None:
    """Round by round, the share of the norm's own time that folding saves; None where that time can't be seen."""
    both, folded_away = times[f"norm + linear{how}"], times[f"folded{how}"]
    norm = [b - a for b, a in zip(both, times["linear"], strict=True)]
    if timing.quartiles(norm)[0] <= 0:
        return None
    return [(b - f) / max(n, 1e-9) for b, f, n in zip(both, folded_away, norm, strict=True)]


def spread(values: list[float], form: str) -> str:
    low, middle, high = values
    return f"{middle:{form}} ({low:{form}}–{high:{form}})"


def page(record: dict[str, Any]) -> str:
    norms = [
        [f"{r['m']} × {r['n']}", r["mode"], r["implementation"], spread(r["rms"], ".0f"), spread(r["ln"], ".0f"),
         spread(timing.quartiles(r["ratios"]), ".2f"), timing.saving([1 - ratio for ratio in r["ratios"]])]
        for r in record["norms"]
    ]  # fmt: skip
    header = ["M × N", "mode", "implementation", "RMSNorm µs", "LayerNorm µs", "ratio", "RMSNorm saves"]
    sides = list(record["linears"][0]["sides"])
    linears = [
        [f"{r['m']} × {r['n']}", *(spread(r["sides"][side], ".0f") for side in sides),
         *("norm unseen" if shares is None else timing.saving(shares) for shares in r["saved"].values())]
        for r in record["linears"]
    ]  # fmt: skip
    wide = ["M × N", *(f"{side} µs" for side in sides), "folding saves of the norm", "the same, compiled"]
    claims = "\n".join(f"- {claim}" for claim in CLAIMS)
    missing = "\n".join(f"- {line}" for line in record["missing"]) or "- nothing"
    return (
        f"# Norms on {record['device']}\n\n{timing.head(record)} The claims:\n\n"
        f"{claims}\n\n{timing.table(header, norms)}\nInference of a norm and the N × N linear after it:\n\n"
        f"{timing.table(wide, linears)}\nMissing:\n\n{missing}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    parser.add_argument("--quick", action="store_true", help="one small shape, few repeats: a smoke test")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    options.rounds, options.calls = (2, 2) if options.quick else (15, 10) if device.type == "cuda" else (9, 5)
    shapes = GPU_SHAPES if device.type == "cuda" else CPU_SHAPES
    missing = [] if device.type == "cuda" else [f"GPU, {m} × {n}: no GPU here" for m, n in GPU_SHAPES]
    norms, linears = [], []
    for m, n in [(64, 64)] if options.quick else shapes:
        torch._dynamo.reset()
        norms += compare_norms(m, n, device, options)
        linears.append(compare_linear(m, n, device, options))
    record = timing.facts(device, runs.git_commit()) | {"norms": norms, "linears": linears, "missing": missing}
    text = page(record)
    print(text)
    print(timing.write(options.out, "norms", device, record, text))


if __name__ == "__main__":
    main()
