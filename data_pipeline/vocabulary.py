"""Training a tokenizer's vocabulary, and its file: BPE in tiktoken's format, or single characters."""

import base64
from collections.abc import Iterable, Mapping
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from common.errors import DataError, SettingsError
from common.files import atomic_write, disk_errors
from tokenizer import BYTE_TO_CHAR, PATTERN, split_long

DOCUMENT_END = "<|endoftext|>"


def write_tiktoken(ranks: Mapping[bytes, int], path: str | Path) -> None:
    """Write ranks in tiktoken's format, atomically."""
    lines = [base64.b64encode(token) + b" %d\n" % rank
             for token, rank in sorted(ranks.items(), key=lambda item: item[1])]
    write(Path(path), b"".join(lines))


def write(path: Path, content: bytes) -> None:
    """Write a file, and the folder that holds it, atomically."""
    with disk_errors(path, DataError, "choose another path"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            temporary.write_bytes(content)


def write_characters(texts: Iterable[str], path: str | Path) -> int:
    """Write a tokenizer.json with an id for each character of the texts, by code point; return their number.

    The library refuses to encode any other character, because the vocabulary has no unknown token.
    """
    characters = sorted(set().union(*texts))
    if not characters:
        raise DataError("the text has no character; provide some text")
    ids = {character: number for number, character in enumerate(characters)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(ids))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([DOCUMENT_END])
    write(Path(path), tokenizer.to_str(pretty=True).encode())
    return len(characters)


def train_bpe(texts: Iterable[str], vocab_size: int) -> dict[bytes, int]:
    """Train a byte-level BPE deterministically; return its ranks: 256 bytes, then the merges in order."""
    if not 256 <= vocab_size <= 10_000_000:
        raise SettingsError(f"--vocab-size {vocab_size} must be from 256 (one for each byte) to 10,000,000")
    # Split text like Llama 3; the library represents each byte by a printable character.
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=list(BYTE_TO_CHAR.values()),
                                  show_progress=False)
    bpe.train_from_iterator((piece for text in texts for piece in split_long(text)), trainer)
    # Convert the result back to bytes.
    char_to_byte = {char: byte for byte, char in BYTE_TO_CHAR.items()}
    vocabulary = sorted(bpe.get_vocab().items(), key=lambda item: item[1])
    if len(vocabulary) < vocab_size:
        raise DataError(f"the text yields only {len(vocabulary):,} tokens, fewer than --vocab-size "
                        f"{vocab_size}; lower it, or provide more text")
    return {bytes(map(char_to_byte.__getitem__, token)): rank for token, rank in vocabulary}
