"""Corpora, tokenisers and batches. `batch(seed, step, rows)` is a pure function: a resume needs no loader state, and
all cells of a seed see the same text.

`corpora`: a corpus is bytes with their SHA-256. `tokens`: a tokeniser turns them into ids, once; a memory-mapped cache
keeps them under that hash. `batches`: a shape cuts ids into rows.
"""

from normexp.data.batches import IGNORED, Batch, Source
from normexp.data.corpora import kjv, text

__all__ = ["IGNORED", "Batch", "Source", "kjv", "text"]
