"""Run identity and the run folder: the contract between what produces runs and what reads them.

A run is its config: the folder's name is derived from a hash of it, so the same config finds the same folder.
"""

import copy
import fcntl
import hashlib
import json
import os
import platform
import re
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

import normexp
from normexp.fields import UserError

# Raised when a fix changes the numbers of a run: old runs then keep their names, and new ones get theirs.
NUMERICS = 1

# What cannot change a number, left out of the hash. The corpus is in it by content; the names of choices say nothing
# that their values do not say.
OUTSIDE = (
    "tracker",
    "results",
    "device",
    "cell",
    "data.path",
    "data.name",
    "data.config",
    "data.revision",
    "data.split",
    "data.documents",
    "data.streaming",
    "data.column",
    "norm._partial_",
    "placement._partial_",
    "data._partial_",
)

EXPERTS = {
    "model.experts": 8,
    "model.experts_per_token": 2,
    "model.expert_mlp": "relu",
    "model.load_balance": 0.01,
    "model.router_z_loss": 0.001,
    "model.moe_norm": "shared",
}

# Fields added after the first runs were made, and the value with which a run is what it was without the field. With
# that value they stay out of the hash, so that old runs keep their names.
NEUTRAL: dict[str, Any] = {
    "norm.kernel": "auto",
    "norm.gain_offset": 0.0,
    "train.compile": False,
    "data.vocab_size": 4096,
    "train.deterministic": False,
    "train.tf32": False,
    "optim.decay_fraction": 0.2,
    "model.qk_norm": "none",
    "model.embed_norm": False,
    "model.embed_scale": 1.0,
    "model.logit_softcap": 0.0,
    "model.quant": "none",
    "model.quant_granularity": "token",
    "model.quant_at": "norm_output",
    "model.kv_heads": 0,
    "model.head_width": 0,
    "model.rotary_base": 10_000.0,
    "model.attn_softcap": 0.0,
    "model.query_scale": 0.0,
    "model.window": 0,
    "model.local_layers": "all",
    "train.z_loss": 0.0,
    **EXPERTS,
}

# Fields that another field puts out of use: then they count as this value, whatever they are.
UNUSED: dict[tuple[str, Any], dict[str, Any]] = {
    ("optim.name", "adamw"): {"optim.momentum": 0.0},
    ("optim.name", "stableadamw"): {"optim.momentum": 0.0},
    ("optim.name", "sgd"): {"optim.betas": [0.9, 0.98], "optim.eps": 1e-8},
    **dict.fromkeys((("model.mlp", plain) for plain in ("relu", "gelu", "gelu_tanh", "swiglu", "geglu")), EXPERTS),
    ("optim.decay", "constant"): {"optim.final_lr_fraction": 0.1, "optim.decay_fraction": 0.2},
    ("optim.decay", "inverse_sqrt"): {"optim.final_lr_fraction": 0.1, "optim.decay_fraction": 0.2},
    ("optim.decay", "cosine"): {"optim.decay_fraction": 0.2},
    ("optim.decay", "linear"): {"optim.decay_fraction": 0.2},
    ("model.window", 0): {"model.local_layers": "all"},
    ("model.position", "learned"): {"model.rotary_base": 10_000.0},
    ("model.position", "sinusoidal"): {"model.rotary_base": 10_000.0},
    ("data.tokenizer", "characters"): {"data.vocab_size": 4096},
    ("data.tokenizer", "bytes"): {"data.vocab_size": 4096},
    ("model.quant", "none"): {"model.quant_granularity": "token", "model.quant_at": "norm_output"},
}

PACKAGES = ("normexp", "torch", "numpy", "triton", "wandb", "hydra-core", "tokenizers", "datasets")


def run_id(resolved: Mapping[str, Any], corpus_sha256: str) -> str:
    """<norm>-<placement>-L<depth>-w<warmup>-s<seed>-<10 hex digits of the hash>."""
    norm, placement = (re.sub(r"[^\w.+-]", "_", resolved["cell"][group]) for group in ("norm", "placement"))
    numbers = f"L{resolved['model']['depth']}-w{resolved['optim']['warmup_steps']}-s{resolved['seed']}"
    return f"{norm}-{placement}-{numbers}-{digest(resolved, corpus_sha256)[:10]}"


def digest(resolved: Mapping[str, Any], corpus_sha256: str) -> str:
    """SHA-256 of the canonical JSON of all that can change a number."""
    kept = copy.deepcopy(dict(resolved))
    for path, neutral in out_of_use(kept).items():
        _field(kept, path, neutral)
    for path in OUTSIDE:
        _remove(kept, path)
    for path, value in NEUTRAL.items():
        _remove(kept, path, value)
    kept |= {"corpus": corpus_sha256, "numerics": NUMERICS}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()).hexdigest()


_ANY = object()


def _field(node: dict[str, Any], path: str, new: Any = _ANY) -> Any:
    """The field at group.name, None without one; with `new`, set if it is there."""
    group, name = path.split(".")
    if new is not _ANY and name in node.get(group, {}):
        node[group][name] = new
    return node.get(group, {}).get(name)


def _remove(node: dict[str, Any], path: str, value: Any = _ANY) -> None:
    """Drops the field at a dotted path, if it is there (and has that value)."""
    *parents, name = path.split(".")
    for parent in parents:
        node = node.get(parent, {})
    if name in node and (value is _ANY or node[name] == value):
        del node[name]


def out_of_use(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that another one puts out of use, and what they count as."""
    idle = [others for (path, value), others in UNUSED.items() if _field(dict(resolved), path) == value]
    return {path: neutral for others in idle for path, neutral in others.items()}


class RunFolder:
    """`config.yaml`, `summary.json`, `metrics.jsonl`, `checkpoint.pt` and, after a fault, `traceback.txt`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.checkpoint = path / "checkpoint.pt"

    def summary(self) -> dict[str, Any]:
        """What is known about the run; empty where nothing is."""
        try:
            found = json.loads((self.path / "summary.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def status(self) -> str | None:
        """`running`, `interrupted`, `finished` or `failed`; None before the run. `running` without a holder of the
        lock is a run that was killed."""
        status = self.summary().get("status")
        return status if isinstance(status, str) else None

    @contextmanager
    def lock(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Makes the folder and holds it as the only writer. Waits for another one to end, after a word to `tell`."""
        with _opened(self.path) as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                stream.seek(0)
                holder = stream.read().strip() or "another process"
                tell(f"run {self.path.name} is taken by {holder}; waiting for it to end")
                fcntl.flock(stream, fcntl.LOCK_EX)
            stream.seek(0)
            stream.truncate()
            stream.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            stream.flush()
            yield

    def holder(self) -> int | None:
        """The process on this machine that holds the lock, None where none does."""
        with suppress(OSError, ValueError, IndexError), (self.path / "lock").open(encoding="utf-8") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(stream.read().split()[1])
        return None

    def write_config(self, resolved: Mapping[str, Any]) -> None:
        text = yaml.safe_dump(dict(resolved), sort_keys=False, allow_unicode=True, width=float("inf"))
        write_atomically(self.path / "config.yaml", text)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_atomically(self.path / "summary.json", strict_json(summary) + "\n")

    def refuse_other_device(self, device: str) -> None:
        """A run goes on only on the type of device that it began on: another one gives other numbers."""
        begun = self.summary().get("device", device)
        if begun != device and self.checkpoint.exists():
            raise UserError(
                f"device={device}: the run {self.path.name} was begun on {begun}; give device={begun}, or delete "
                f"{self.path} to begin it again"
            )


def _opened(folder: Path) -> Any:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / "lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(f"results: cannot write {folder} ({error.strerror}); give another folder") from None


def write_atomically(path: Path, text: str) -> None:
    """All of the text or what was there before, whenever the process dies."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def strict_json(summary: Mapping[str, Any]) -> str:
    """One JSON object; a number that is not finite becomes null and its path is added to `nonfinite`."""
    nonfinite: list[str] = list(summary.get("nonfinite", []))
    plain = {name: _finite(value, name, nonfinite) for name, value in summary.items()}
    return json.dumps(plain | {"nonfinite": sorted(set(nonfinite))}, indent=2, allow_nan=False)


def _finite(value: Any, path: str, nonfinite: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(item, f"{path}.{name}", nonfinite) for name, item in value.items()}
    if isinstance(value, float) and value - value != 0:
        nonfinite.append(path)
        return None
    return value


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found | {"normexp": normexp.__version__}


def machine() -> str:
    """Processor and number of cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_processor()}, {cores} cores"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def git_commit() -> str | None:
    """Of the checkout that the package runs from, `-dirty` after it if files differ; None for an installed package."""
    root = Path(normexp.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
