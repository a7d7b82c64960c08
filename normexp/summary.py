"""The rows of a run -> the numbers and the verdict of its summary. From the history alone: it can be taken again."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from normexp.verdict import History, Row, column, judge, spike_score


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; a torn last line, which a killed run leaves, is left out."""
    if not path.exists():
        return []
    *lines, _ = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines]


def summarise(
    rows: Sequence[Row],
    *,
    unigram_entropy: float,
    vocab_size: int,
    bytes_per_token: float,
    warmup_steps: int,
    entropy_rate: float | None,
) -> dict[str, Any]:
    """Losses in nats per token. `val_loss` is by running statistics where the norm has them, `val_loss_batch_stats` by
    those of the batch; `initial_loss`, before the first step, is by the latter if they exist."""
    history = History.of(rows)
    verdict = judge(rows, unigram_entropy=unigram_entropy, vocab_size=vocab_size, warmup_steps=warmup_steps)
    validated = [row for row in rows if "val/loss" in row]
    losses = column(validated, "val/loss")
    trained = losses[[row["step"] > 0 for row in validated]]
    last = rows[-1] if rows else {}
    return {
        **vars(verdict),
        "val_loss": float(losses[-1]) if len(losses) else None,
        "val_step": validated[-1]["step"] if validated else None,
        "best_val_loss": float(np.nanmin(trained)) if np.isfinite(trained).any() else None,
        "val_loss_batch_stats": _last(validated, "val/loss_batch_stats"),
        "bits_per_byte": float(losses[-1]) / math.log(2) / bytes_per_token if len(losses) else None,
        "initial_loss": history.initial_loss if len(losses) else None,
        "unigram_entropy": unigram_entropy,
        "entropy_rate": entropy_rate,  # of a source for which it is known
        "excess_loss": float(losses[-1]) - entropy_rate if len(losses) and entropy_rate is not None else None,
        "vocab_size": vocab_size,
        "loss_spike_score": spike_score(history.loss),
        "grad_spike_score": spike_score(history.grad_norm[history.judged()]),
        "skipped_steps": int((~(np.isfinite(history.loss) & np.isfinite(history.grad_norm))).sum()),
        "steps": int(last.get("step", 0)),
        "tokens": int(last.get("tokens", 0)),
        "tokens_per_second": last["tokens"] / last["time"] if last.get("time") else None,
        "seconds": float(last.get("time", 0.0)),
    }


def _last(rows: Sequence[Row], path: str) -> float | None:
    values = column([row for row in rows if path in row], path)
    return float(values[-1]) if len(values) else None
