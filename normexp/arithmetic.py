"""How torch computes in this process: threads, precision, determinism, compilation; and what of a machine's speed a
model uses."""

import ctypes
import functools
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normexp.fields import UserError
from normexp.layers import GATED
from normexp.model import ModelConfig

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
DISTINCT = ":4096:8"  # with which cuBLAS gives the same numbers again
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
BUDGET, REPEATS, LARGEST = 0.05, 3, 16_384  # seconds for one size of the products that are measured


def settle(device: torch.device, *, threads: int, deterministic: bool, tf32: bool) -> None:
    """For all that this process computes from now on. UserError where CUDA has begun with other settings."""
    torch.set_num_threads(threads)
    _keep_memory()
    if deterministic and device.type == "cuda" and os.environ.get(WORKSPACE) not in (DISTINCT, ":16:8"):
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise UserError(f"train.deterministic=true: CUDA has begun already; start with {WORKSPACE}={DISTINCT}")
        os.environ[WORKSPACE] = DISTINCT
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # to say so once more imports the compiler
        torch.use_deterministic_algorithms(deterministic)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32


@functools.cache
def _keep_memory() -> None:
    """Tells glibc not to give the memory of a large tensor back after each use: to get it anew costs a page fault for
    every 4 KiB, 2 to 3 % of a step at model=small and more for wider ones."""
    with suppress(AttributeError, OSError):  # of another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 1 << 30)
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


class Compiled:
    """A model by torch.compile, and how many graphs it took: a number that must not grow with the steps."""

    def __init__(self, model: nn.Module) -> None:
        self.forward: Callable[..., Tensor] = torch.compile(model)
        self._before = _counts()
        self._settled: int | None = None

    def settle(self) -> None:
        """To be called once training and evaluation have both run: graphs after this are recompilations."""
        if self._settled is None:
            self._settled = self.facts()["compiled_graphs"]

    def facts(self) -> dict[str, int]:
        graphs, breaks = (now - before for now, before in zip(_counts(), self._before, strict=True))
        late = 0 if self._settled is None else graphs - self._settled
        return {"compiled_graphs": graphs, "graph_breaks": breaks, "recompilations": late}


def keep_compiled(folder: Path) -> None:
    """Where compiled code is kept for the next run, unless the user has said where."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def _counts() -> tuple[int, int]:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"]), int(sum(counters["graph_break"].values()))


def flops_per_token(config: ModelConfig, vocab_size: int) -> float:
    """Of training, forward and backward: 6 for each weight of a matrix product, and 12 · heads · their channels for
    each layer and token of the context, or of a local layer's window; the mask is not counted (PaLM's convention,
    2204.02311, appendix B). Embeddings are look-ups; of experts, those that a token takes count."""
    sizes = config.sizes()
    query, key = (sizes[heads] * sizes["head_width"] for heads in ("heads", "kv_heads"))
    mlp = (3 if (config.expert_mlp if config.mlp == "moe" else config.mlp) in GATED else 2) * sizes["hidden"]
    if config.mlp == "moe":
        mlp = config.experts_per_token * mlp + config.experts  # the router
    weights = config.depth * config.width * (2 * query + 2 * key + mlp) + config.width * vocab_size
    seen = sum(min(config.window_of(layer) or config.context, config.context) for layer in range(config.depth))
    return 6.0 * weights + 12.0 * seen * query


def product_rate(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s of a square matrix product in this process, the best over sizes that take milliseconds: what the machine
    can do now. None where it cannot: a run is not lost for that."""
    try:
        return _product_rate(device, dtype)
    except RuntimeError:  # out of memory, beside a model
        return None


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    side, spent, best = 128, 0.0, 0.0
    while 8 * spent < BUDGET and side <= LARGEST:
        a, b = (torch.ones(side, side, device=device, dtype=dtype) for _ in range(2))
        times = [_seconds(lambda a=a, b=b: a @ b, device) for _ in range(REPEATS)]  # type: ignore[misc]
        side, spent, best = 2 * side, sum(times), max(best, 2.0 * side**3 / min(times))
    return best


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()
