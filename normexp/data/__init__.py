"""Corpora, tokenisers and batches. `batch(seed, step, rows)` is a pure function: a resume needs no loader state, and
all cells of a seed see the same text.

`corpora`: a corpus is bytes with their SHA-256; `files` finds them on the disk, `hub` among public datasets. `tokens`:
a tokeniser turns them into ids, once; a memory-mapped cache keeps them under that hash; `bpe` learns one. `markov`: ids
drawn from a chain whose entropy rate is known. `batches`: a shape cuts ids into rows.
"""

from normexp.data.batches import IGNORED, Batch, Source
from normexp.data.corpora import hf, kjv, text
from normexp.data.markov import synthetic

__all__ = ["IGNORED", "Batch", "Source", "hf", "kjv", "synthetic", "text"]
