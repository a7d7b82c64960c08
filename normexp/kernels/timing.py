"""Timing for the benchmarks: several providers in turn in one run, and the bandwidth of a plain copy beside them.

A CUDA figure is device time between two events, over inputs that rotate through more memory than the L2 cache holds,
with the host far enough ahead that launches leave no gaps. A CPU figure is wall time on one thread. Providers take
turns, so that a ratio is one of each round's pair; medians stand with their quartiles.
"""

import datetime
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

Step = Callable[[int], object]  # is given the number of the call, to choose among rotating inputs
COPY_BYTES = 1 << 28
AHEAD = 4_000_000  # clock cycles, about two milliseconds, that the device waits while the host queues its work


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    known = Path("/proc/cpuinfo")
    models = [line for line in known.read_text().splitlines() if "model name" in line] if known.exists() else []
    return (models[0].split(":")[1].strip() if models else platform.machine()) + " CPU, one thread"


def cache_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0


def rotations(bytes_per_call: int, device: torch.device) -> int:
    """How many sets of inputs together are twice the L2 cache; one on a CPU, where rows are reused while warm."""
    return max(1, math.ceil(2 * cache_bytes(device) / bytes_per_call)) if device.type == "cuda" else 1


Name = TypeVar("Name")


def measure(steps: dict[Name, Step], device: torch.device, rounds: int, calls: int) -> dict[Name, list[float]]:
    """Seconds per call of each step, one value a round; a round times each of them once, in a block of `calls`."""
    block = _device_block if device.type == "cuda" else _wall_block
    for step in steps.values():
        for number in range(2):
            step(number)
    times = [{name: block(step, calls) for name, step in steps.items()} for _ in range(rounds)]
    return {name: [each[name] for each in times] for name in steps}


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def ratios(times: Sequence[float], others: Sequence[float]) -> list[float]:
    return [time / other for time, other in zip(times, others, strict=True)]


def saving(shares: Sequence[float]) -> str:
    """A share that is saved, as its median and quartiles in percent; `within noise` where these have both signs."""
    low, middle, high = quartiles(shares)
    return "within noise" if low <= 0 <= high else f"{middle:+.0%} ({low:+.0%} … {high:+.0%})"


def _wall_block(step: Step, calls: int) -> float:
    step(0)  # the first call after another provider pays for the memory that the allocator gave back
    start = time.perf_counter()
    for number in range(calls):
        step(number)
    return (time.perf_counter() - start) / calls


def _device_block(step: Step, calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(AHEAD)  # type: ignore[no-untyped-call]
    start.record()
    for number in range(calls):
        step(number)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000 / calls


def host_seconds(step: Step, device: torch.device, calls: int = 50) -> float | None:
    """Time until a call returns to Python, with work still queued; None on a CPU, where the call is the work."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    start = time.perf_counter()
    for number in range(calls):
        step(number)
    seconds = (time.perf_counter() - start) / calls
    torch.cuda.synchronize()
    return seconds


def copy_bandwidth(device: torch.device, rounds: int) -> float:
    """Bytes per second, read and written, of `Tensor.copy_` between buffers larger than any cache."""
    source = torch.ones(COPY_BYTES // 4, device=device)
    targets = [torch.empty_like(source) for _ in range(2)]
    times = measure({"copy": lambda number: targets[number % 2].copy_(source)}, device, rounds, 4)["copy"]
    return 2 * COPY_BYTES / statistics.median(times)


def versions() -> dict[str, str]:
    found = {"torch": torch.__version__, "python": platform.python_version()}
    if torch.version.cuda or torch.version.hip:
        found["runtime"] = str(torch.version.cuda or torch.version.hip)
    return found


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in [header, ["---"] * len(header), *rows]]
    return "\n".join(lines) + "\n"


def facts(device: torch.device, commit: str | None) -> dict[str, Any]:
    """What a benchmark's record says of itself: GPUs are measured in bfloat16, CPUs in float32."""
    return {
        "device": device_name(device),
        "dtype": "bfloat16" if device.type == "cuda" else "float32",
        "versions": versions(),
        "git_commit": commit,
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
    }


def head(record: dict[str, Any]) -> str:
    return (
        f"{record['dtype']}, torch {record['versions']['torch']}. {record['date']}, `{record['command']}`, "
        f"commit {record['git_commit'] or 'unknown'}. Medians, with quartiles in brackets."
    )


def write(folder: Path, name: str, device: torch.device, record: dict[str, Any], text: str) -> Path:
    """`name`_cpu.json and .md, or with the name of the GPU; returns the page."""
    where = "cpu" if device.type == "cpu" else device_name(device).lower().replace(" ", "_").replace("/", "_")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}_{where}.json").write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    page = folder / f"{name}_{where}.md"
    page.write_text(text)
    return page
