"""Byte-level BPE, trained on the spot: the only module that knows `tokenizers`, which is imported when it is needed."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

BATCH = 1000  # documents encoded at once


def learn(documents: Sequence[str], vocab_size: int) -> Any:
    """A tokeniser of at most `vocab_size` tokens: the 256 bytes, and the likeliest pairs within words (by GPT-2's
    pattern) of these documents. Of any number of threads, since ties go by the pair."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer=trainer)
    return tokenizer


def widths(tokenizer: Any) -> NDArray[np.int64]:
    """(V,) bytes behind each id: the library spells a byte as one character."""
    tokens = (tokenizer.id_to_token(token) for token in range(tokenizer.get_vocab_size()))
    return np.array([len(token) for token in tokens], np.int64)


def byte(tokenizer: Any, octet: int) -> int:
    """The id of a byte of ASCII."""
    (token,) = tokenizer.encode(chr(octet), add_special_tokens=False).ids
    return int(token)


def encode(tokenizer: Any, documents: Sequence[str], end: int) -> NDArray[Any]:
    """(N,) ids of the documents, with `end` between them."""
    kind = np.min_scalar_type(tokenizer.get_vocab_size() - 1)
    batches = (documents[start : start + BATCH] for start in range(0, len(documents), BATCH))
    return np.concatenate([np.array(list(_ids(tokenizer, batch, end)), kind) for batch in batches])[:-1]


def _ids(tokenizer: Any, documents: Sequence[str], end: int) -> Iterator[int]:
    for encoding in tokenizer.encode_batch_fast(documents, add_special_tokens=False):
        yield from encoding.ids
        yield end
