"""Trains a byte-level BPE tokenizer, and writes it in tiktoken's format."""

import base64
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from common.errors import DataError, SettingsError
from tokenizer import BYTE_TO_CHAR, PATTERN, split_long


def train_bpe(texts: Iterable[str], vocab_size: int) -> dict[bytes, int]:
    """Train a byte-level BPE and return its ranks: 256 bytes, then the merges in order. Deterministic.

    Args:
        vocab_size: number of ranks; the 256 special tokens are added to them.
    """
    from tokenizers import Regex, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Trainable

    if not 256 <= vocab_size <= 10_000_000:
        raise SettingsError(f"--vocab-size {vocab_size} must be at least 256, one rank for each byte, and at "
                            "most 10,000,000")
    # Text is split as Llama 3 does; the library works with a printable character for each byte.
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe = Trainable(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=list(BYTE_TO_CHAR.values()),
                                  show_progress=False)
    bpe.train_from_iterator((piece for text in texts for piece in split_long(text)), trainer)
    # Back to bytes.
    char_to_byte = {char: byte for byte, char in BYTE_TO_CHAR.items()}
    vocabulary = sorted(bpe.get_vocab().items(), key=lambda item: item[1])
    if len(vocabulary) < vocab_size:
        raise DataError(f"the text gives only {len(vocabulary)} ranks, --vocab-size {vocab_size} was asked "
                        "for; ask for fewer or give more text")
    return {bytes(map(char_to_byte.__getitem__, token)): rank for token, rank in vocabulary}


def write_tiktoken(ranks: Mapping[bytes, int], path: str | Path) -> None:
    """Write ranks in tiktoken's format; after a crash the file is complete or not there."""
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    lines = [base64.b64encode(token) + b" %d\n" % rank
             for token, rank in sorted(ranks.items(), key=lambda item: item[1])]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            unfinished.write_bytes(b"".join(lines))
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}; choose another place") from error
