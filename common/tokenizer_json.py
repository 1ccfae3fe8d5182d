"""The files of a tokenizer in a Hugging Face folder, and byte-level BPE in the form of a tokenizer.json."""

import json
from collections.abc import Mapping
from pathlib import Path


def byte_alphabet() -> dict[int, str]:
    """Return the character for each byte in Hugging Face's byte-level vocabularies (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


BYTE_TO_CHAR = byte_alphabet()


def byte_level_json(ranks: Mapping[bytes, int], pattern: str, special_ids: Mapping[str, int],
                    bos: str) -> str:
    """Return tiktoken's ranks as a tokenizer.json that gives the same ids.

    tiktoken merges any two tokens whose concatenation is a token, in the order of its rank: so each such pair
    is a merge here. Of the pairs that give one token only one can occur, so their order is irrelevant.

    Args:
        pattern: the regular expression that splits text before merging.
        bos: the special token that a plain call puts in front.
    """
    ordered = sorted(ranks, key=ranks.__getitem__)
    name = {token: "".join(map(BYTE_TO_CHAR.__getitem__, token)) for token in ordered}
    merges = [f"{name[token[:i]]} {name[token[i:]]}" for token in ordered for i in range(1, len(token))
              if token[:i] in ranks and token[i:] in ranks]
    # The steps before and after the merges.
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    first, second = ([{"SpecialToken": {"id": bos, "type_id": number}},
                      {"Sequence": {"id": sequence, "type_id": number}}]
                     for number, sequence in enumerate("AB"))
    add_bos = {"type": "TemplateProcessing", "single": first, "pair": first + second,
               "special_tokens": {bos: {"id": bos, "ids": [special_ids[bos]], "tokens": [bos]}}}
    # ignore_merges: a piece of text that is a token is this token, even if no merges lead to it.
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": token, "content": content, "single_word": False, "lstrip": False,
                          "rstrip": False, "normalized": False, "special": True}
                         for content, token in special_ids.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": {"type": "Sequence", "processors": [byte_level, add_bos]},
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                  "ignore_merges": True, "vocab": {name[token]: ranks[token] for token in ordered},
                  "merges": merges},
    }, ensure_ascii=False)


def write_tokenizer_files(folder: str | Path, tokenizer_json: str, names: Mapping[str, str],
                          chat_template: str | None) -> None:
    """Write the tokenizer's files of a Hugging Face folder; `names` are its control tokens by role.

    The class is the generic one: a model's own class may not follow tokenizer.json.
    """
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "clean_up_tokenization_spaces": False}
    files = {"tokenizer.json": tokenizer_json, "tokenizer_config.json": json.dumps(config, indent=2),
             "special_tokens_map.json": json.dumps(names, indent=2)}
    if chat_template is not None:
        files["chat_template.jinja"] = chat_template
    for name, content in files.items():
        (Path(folder) / name).write_text(content, encoding="utf-8")
