"""Tokenizers: Llama 3's with a tiktoken file, or any Hugging Face tokenizer.

Text never becomes a control token: a literal `<|eot_id|>` in a document is encoded as ten characters.
"""

import base64
import hashlib
import json
import os
import re
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
import tokenizers

from common.errors import DataError, unreadable
from common.files import json_sha256, plain, read_json, read_plain, read_text
from common.remote import hub_folder, is_hub_name, why_not
from common.text import command
from config import SAMPLE

# Llama 3's pattern for splitting text before merging, in tiktoken and in Hugging Face's tokenizer.json.
PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")
# Without its lookahead, a third faster, the pattern splits a text alike unless two blanks (spaces other than
# line ends) follow each other. NUL, which no document contains, is a piece that separates documents.
PLAIN_PATTERN = r"\x00|" + PATTERN.replace(r"|\s+(?!\S)", "").replace(r"\p{N}]", r"\p{N}\x00]")
# A text with none of these has no two blanks in a row. Any blank but " " counts, to find them fast.
NOT_PLAIN = ("  ", *"\0\t\v\f\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000", *map(chr, range(0x2000, 0x200B)))
# In the order of Meta's code for Llama 3.1. Other releases name spare tokens differently (the hub folder has
# a reserved token at 5, later code has `<|image|>` at 11), but text models' tokens have the same numbers.
NAMED_SPECIALS = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>",
    "<|eot_id|>", "<|python_tag|>")
SPECIALS = NAMED_SPECIALS + tuple(f"<|reserved_special_token_{number}|>" for number in range(2, 247))

OTHER_CHARACTERS = "remove it, or use a tokenizer of all characters"  # after what lacks one
# tiktoken's regex engine overflows its stack on longer runs. Meta's code cuts at the same places.
MAX_PIECE_CHARS = 400_000
MAX_RUN_CHARS = 25_000
RUN, SPACE = re.compile(r"\s+|\S+"), re.compile(r"\s")

# Characters for bytes in Hugging Face's byte-level vocabularies (GPT-2's table).
PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
OTHER_BYTES = sorted({*range(256)} - {*PRINTABLE})
BYTE_TO_CHAR = {byte: chr(byte) for byte in PRINTABLE} | {
    byte: chr(256 + number) for number, byte in enumerate(OTHER_BYTES)}

# Control tokens of Hugging Face tokenizers without a configuration.
KNOWN_NAMES = {
    "bos_token": ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]"),
    "eos_token": ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "[EOS]"),
    "pad_token": ("<|finetune_right_pad_id|>", "<pad>", "<|pad|>", "[PAD]"),
    "eot_token": ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|eot|>", "<turn|>",
                  "<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>"),
}
ADDED = "added_tokens.json"
CONFIG_FILES = ["tokenizer_config.json", "special_tokens_map.json", ADDED]
GENERATION_FILES = ["config.json", "generation_config.json"]
SUPPRESSED = "suppress_tokens"  # ids that are never sampled
GENERATION_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
MORE_TEMPLATES = "additional_chat_templates/*.jinja"  # by name
HUGGINGFACE_FILES = ["tokenizer.json", *CONFIG_FILES, "chat_template.jinja", MORE_TEMPLATES,
                     *GENERATION_FILES]

# Llama 3's chat format.
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' ~ message['role'] ~ '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim }}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""


class BaseTokenizer:
    """Base class of both tokenizers."""

    sha256: str
    other_sha256: frozenset[str]  # hashes of the same tokenizer in other file formats
    tokenizer_json: str  # the content of a tokenizer.json
    control_tokens: dict[str, str]  # by role, such as bos_token
    added_tokens: Sequence[dict] = ()  # of a tokenizer.json
    special_tokens: list[dict]  # the special ones among them
    special_ids: dict[str, int]
    chat_template: str | None  # the default one
    named_templates: Mapping[str, str] = {}  # others; with tools, `tool_use` is used
    generation: Mapping[str, Any] = {}  # of the model, by `read_generation`

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end a text: the tokenizer's, and those that the model's files name."""
        ends = self.generation.get("eos_token_id", ())
        return frozenset((self.eos_id, *(token for token in ends if token < self.vocab_size)))

    @cached_property
    def control_pattern(self) -> re.Pattern:
        """Matches the names of control tokens, with the spaces that they absorb."""
        longest_first = sorted(self.special_tokens, key=lambda token: -len(token["content"]))
        return re.compile("|".join(r"\s*" * token["lstrip"] + re.escape(token["content"])
                                   + r"\s*" * token["rstrip"] for token in longest_first) or "(?!)")

    def is_same(self, sha256: str) -> bool:
        """Return whether the tokenizer with this hash has the same vocabulary and merges, in any format."""
        return sha256 == self.sha256 or sha256 in self.other_sha256

    def differing_id(self, other: "BaseTokenizer") -> tuple[int, str, str] | None:
        """Return an id that both have, but with different texts, and the texts; None if there is none.

        Control tokens may have other names, but those with the same name must have the same id.
        """
        control = {*self.special_ids.values(), *other.special_ids.values()}
        for name, number in self.special_ids.items():
            if other.special_ids.get(name, number) != number:
                return number, name, other.decode([number])
        for number in range(min(self.vocab_size, other.vocab_size)):
            texts = self.decode([number]), other.decode([number])
            if texts[0] != texts[1] and number not in control and "\ufffd" not in "".join(texts):
                return number, *texts
        return None

    def encode_document(self, text: str) -> list[int]:
        """Return the ids of a document: `[bos] + ids + [eos]`, or `[eos] + ids` without a bos."""
        ids = self.encode(text)
        return [self.eos_id, *ids] if self.bos_id is None else [self.bos_id, *ids, self.eos_id]

    def pieces_of_added(self) -> dict[int, list[int]]:
        """Return the ids of the text of each added token, as if it had not been added."""
        return {token["id"]: self.encode(token["content"]) for token in self.special_tokens}

    def document_ids(self, texts: Iterable[str]) -> array:
        return array("I", chain.from_iterable(map(self.encode_document, texts)))

    def _document_sha256(self, document: Mapping[str, Any]) -> str:
        """Return a hash of the fields of a tokenizer.json that affect ids, and of bos and eos."""
        fields = [document.get(key) for key in ("normalizer", "pre_tokenizer", "model", "added_tokens")]
        return json_sha256([fields, self.bos_id, self.eos_id])

    def save_huggingface(self, folder: str | Path) -> None:
        """Write a folder for `transformers`; its tokenizer.json decides whether a plain call adds bos."""
        names = {role: token for role, token in self.control_tokens.items()
                 if role != "eot_token" or token not in KNOWN_NAMES[role]}
        chat_template = self.chat_template
        is_llama_3 = "bos_token" in names and self.special_ids.keys() >= {*NAMED_SPECIALS[6:10]}
        if chat_template is None and is_llama_3:
            chat_template = CHAT_TEMPLATE
        # The generic class: a model's specific class may ignore parts of tokenizer.json.
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **names,
                  "clean_up_tokenization_spaces": False}
        files = {"tokenizer.json": self.tokenizer_json, "tokenizer_config.json": json.dumps(config, indent=2),
                 "special_tokens_map.json": json.dumps(names, indent=2)}
        files |= {MORE_TEMPLATES.replace("*", name): text for name, text in self.named_templates.items()}
        if chat_template is not None:
            files["chat_template.jinja"] = chat_template
        for name, content in files.items():
            (Path(folder) / name).parent.mkdir(exist_ok=True)
            (Path(folder) / name).write_text(content, encoding="utf-8")


class Tokenizer(BaseTokenizer):
    """Llama 3's tokenizer with any BPE ranks: ids are the ranks, followed by 256 special tokens.

    `byte_lengths` has the number of UTF-8 bytes that each id stands for; 0 for special tokens.
    """

    adds_start = True
    chat_template = CHAT_TEMPLATE
    control_tokens = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>",
                      "pad_token": "<|finetune_right_pad_id|>"}

    def __init__(self, ranks: dict[bytes, int]):
        self.ranks = ranks
        self.special_ids = {name: len(ranks) + i for i, name in enumerate(SPECIALS)}
        self.vocab_size = len(ranks) + len(SPECIALS)
        self.bos_id = self.special_ids["<|begin_of_text|>"]
        self.eos_id = self.special_ids["<|end_of_text|>"]
        self.eot_id = self.special_ids["<|eot_id|>"]
        self.pad_id = self.special_ids["<|finetune_right_pad_id|>"]
        self.document_start_id = self.bos_id
        self.special_tokens = [{"id": token, "content": content, "single_word": False, "lstrip": False,
                                "rstrip": False, "normalized": False, "special": True}
                               for content, token in self.special_ids.items()]
        self._ordered = sorted(ranks, key=ranks.__getitem__)
        self.byte_lengths = [*map(len, self._ordered), *[0] * len(SPECIALS)]
        self._encoding = tiktoken.Encoding("llama3", pat_str=PATTERN, mergeable_ranks=ranks,
                                           special_tokens=self.special_ids)

    @cached_property
    def _plain_encoding(self) -> tiktoken.Encoding:
        return tiktoken.Encoding("plain", pat_str=PLAIN_PATTERN, mergeable_ranks=self.ranks,
                                 special_tokens={})

    @cached_property
    def sha256(self) -> str:
        """Hex digest of everything that affects ids: pattern, special tokens, ranks."""
        digest = hashlib.sha256(json.dumps([PATTERN, SPECIALS]).encode())
        for token in self._ordered:
            digest.update(len(token).to_bytes(4, "little") + token)
        return digest.hexdigest()

    @cached_property
    def other_sha256(self) -> frozenset[str]:
        """The hash of the tokenizer.json that `save_huggingface` writes."""
        return frozenset([self._document_sha256(json.loads(self.tokenizer_json))])

    @property
    def tokenizer_json(self) -> str:
        """The content of a tokenizer.json with the same ids.

        tiktoken merges any two tokens whose concatenation is a token, in order of its rank, so every such
        pair is a merge here. Only one pair with the same result can occur, so their order is irrelevant.
        """
        ranks, bos = self.ranks, "<|begin_of_text|>"
        name = {token: "".join(map(BYTE_TO_CHAR.__getitem__, token)) for token in self._ordered}
        merges = [f"{name[token[:i]]} {name[token[i:]]}" for token in self._ordered
                  for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        # Steps before and after the merges.
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                      "use_regex": False}
        split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
        first, second = ([{"SpecialToken": {"id": bos, "type_id": number}},
                          {"Sequence": {"id": sequence, "type_id": number}}]
                         for number, sequence in enumerate("AB"))
        add_bos = {"type": "TemplateProcessing", "single": first, "pair": first + second,
                   "special_tokens": {bos: {"id": bos, "ids": [self.bos_id], "tokens": [bos]}}}
        # ignore_merges: text that equals a token becomes this token, even if no merges lead to it.
        return json.dumps({
            "version": "1.0", "truncation": None, "padding": None,
            "added_tokens": self.special_tokens,
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
            "post_processor": {"type": "Sequence", "processors": [byte_level, add_bos]},
            "decoder": byte_level,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                      "ignore_merges": True, "vocab": {name[token]: ranks[token] for token in self._ordered},
                      "merges": merges},
        }, ensure_ascii=False)

    def encode(self, text: str, is_first: bool = True) -> list[int]:
        """Return the ids of text of any length, like Meta's code. Lone surrogates become U+FFFD."""
        ids = [self._encoding.encode_ordinary(piece) for piece in split_long(text)]
        return ids[0] if len(ids) == 1 else [token for piece in ids for token in piece]

    def document_ids(self, texts: Iterable[str]) -> array:
        """As in the base class, with one call for many documents: between calls, threads wait for others."""
        def is_plain(text: str) -> bool:
            return len(text) <= MAX_RUN_CHARS and not any(sign in text for sign in NOT_PLAIN)

        ids = array("I")
        for fits, group in groupby(texts, is_plain):
            if not fits:
                ids.extend(super().document_ids(group))
                continue
            joined = array("I", self._plain_encoding.encode_ordinary("\0" + "\0\0".join(group) + "\0"))
            ids_M = np.frombuffer(joined, np.uint32)
            borders = np.flatnonzero(ids_M == self.ranks[b"\0"])
            ids_M[borders[::2]], ids_M[borders[1::2]] = self.bos_id, self.eos_id
            ids.extend(joined)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return self._encoding.decode([int(token) for token in ids])


class HuggingFaceTokenizer(BaseTokenizer):
    """Any tokenizer.json, with control tokens from the files beside it, and those named in `control`."""

    def __init__(self, file: Path, name: str, control: Collection[str] = ()):
        setting = f"TOKENIZER_PATH={name}"
        self._file, self._name, self._document, config = file, name, read_object(file, setting), {}
        for other in CONFIG_FILES:
            if os.path.lexists(file.parent / other):
                more = read_object(file.parent / other, setting)  # in transformers' order
                more = {ADDED: more} if other == ADDED else more
                config = {**more, **config} if "added_tokens_decoder" in config else {**config, **more}
        self.generation, model = read_generation(file.parent), self._document.get("model")
        self.dropout = isinstance(model, dict) and model.get("dropout")
        if self.dropout:  # ids would be random
            model["dropout"] = None
        needed, special = named_tokens(config)
        self.added_tokens = added_tokens(self._document, special.union(control), self.generation)
        if self.added_tokens:
            self._document["added_tokens"] = self.added_tokens
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(self._document))
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"{setting}: {file} is not a tokenizer: {error}; name another") from error
        if lost := [name for name in sorted(needed) if self._tokenizer.token_to_id(name) is None]:
            raise DataError(f"{setting}: {file} lacks {lost[0]!r}, which a file beside it adds; save "
                            "it with transformers' AutoTokenizer.from_pretrained(OLD).save_pretrained(NEW)")
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # a literal <|eot_id|> in text stays text
        # Whether text may be encoded in pieces: byte-level, without a leading space.
        self._can_split = (self._document.get("decoder") or {}).get("type") == "ByteLevel" and (
            '"add_prefix_space": true' not in json.dumps(self._document.get("pre_tokenizer")))

        # The control token of each role, from the configuration or by a known name.
        self.control_tokens = {}
        for role, known in KNOWN_NAMES.items():
            token = config.get(role)
            names = known if token is None else (token.get("content") if isinstance(token, dict) else token,)
            if not all(isinstance(text, str) for text in names):
                raise DataError(f"{setting}: {role} is {token!r:.60} in its configuration; set it to text")
            if token is None and role == "bos_token" and "eos_token" in config:
                continue  # a configuration without bos means that there is none
            if here := [text for text in names if self._tokenizer.token_to_id(text) is not None]:
                self.control_tokens[role] = here[0]

        # The chat templates, from their files or the configuration, as in transformers.
        templates, paths = config.get("chat_template") or {}, {"default": file.parent / "chat_template.jinja"}
        paths |= {path.stem: path for path in sorted(file.parent.glob(MORE_TEMPLATES))}
        try:
            stored = {name: read_text(path) for name, path in paths.items() if os.path.lexists(path)}
        except UnicodeDecodeError as error:
            raise DataError(f"{setting}: a chat template beside {file} is not text: {error}; get a new copy"
                            ) from error
        if isinstance(templates, list) and all(isinstance(entry, dict) for entry in templates):
            templates = {entry.get("name"): entry.get("template") for entry in templates}
        templates = stored or (templates if isinstance(templates, dict) else {"default": templates})
        if not all(isinstance(text, str) for text in (*templates, *templates.values())) or any(
                "/" in name for name in templates):
            raise DataError(f"{setting}: the chat_template in its tokenizer_config.json is not text; correct "
                            "it")
        self.chat_template = templates.pop("default", None)
        self.named_templates = templates

        # The ids.
        ids = {role: self._tokenizer.token_to_id(token) for role, token in self.control_tokens.items()}
        if "eos_token" not in ids:
            raise DataError(f"{setting}: {file} has no end-of-sequence token with a known name; add it as "
                            "eos_token to a tokenizer_config.json beside it")
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.special_tokens = [token for token in self.added_tokens if token["special"]]
        self.special_ids = {token["content"]: token["id"] for token in self.special_tokens}
        self.eos_id = ids["eos_token"]
        self.bos_id = ids.get("bos_token") if ids.get("bos_token") != self.eos_id else None
        self.eot_id = ids.get("eot_token", self.eos_id)
        self.pad_id = ids.get("pad_token")
        self.document_start_id = self.eos_id if self.bos_id is None else self.bos_id

    @cached_property
    def adds_start(self) -> bool:
        """Whether tokenizer.json begins texts with the start token; harnesses and llama.cpp then do so."""
        return self._tokenizer.encode("a").ids[:1] == [self.document_start_id]

    def with_control_tokens(self, names: Collection[str]) -> "HuggingFaceTokenizer":
        """Return a copy in which the added tokens with these names are control tokens."""
        copy = HuggingFaceTokenizer(self._file, self._name, names)
        copy.generation = self.generation
        return copy

    @cached_property
    def byte_lengths(self) -> list[int] | None:
        """Number of UTF-8 bytes for each id, 0 for special tokens; None without a byte-level BPE."""
        if not self._can_split:
            return None
        lengths, alphabet = [0] * self.vocab_size, set(BYTE_TO_CHAR.values())
        for token, number in self._tokenizer.get_vocab(with_added_tokens=False).items():
            lengths[number] = len(token) if alphabet.issuperset(token) else len(token.encode())
        for added in self.added_tokens:
            lengths[added["id"]] = 0 if added["special"] else len(added["content"].encode())
        return lengths

    @cached_property
    def sha256(self) -> str:
        """Hex digest of everything that affects ids: fields of tokenizer.json, bos and eos."""
        return self._document_sha256(self._document)

    @cached_property
    def other_sha256(self) -> frozenset[str]:
        """Hashes of an equivalent tiktoken file and of its tokenizer.json; empty if there is none."""
        def behaviour(tokenizer_json: str) -> list[Any]:
            """Return a canonical form of what affects the ids of byte-level BPE."""
            document = json.loads(tokenizers.Tokenizer.from_str(tokenizer_json).to_str())
            model = document["model"]
            merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.pop("merges")]
            # Only one of the merges with the same result can occur, so their order is irrelevant.
            rank_of_merge = [model["vocab"]["".join(merge)] for merge in merges]
            return [sorted(merges), rank_of_merge == sorted(rank_of_merge), model,
                    *(document[key] for key in ("normalizer", "pre_tokenizer", "added_tokens"))]

        vocab = self._document["model"].get("vocab")
        alphabet = {char: byte for byte, char in BYTE_TO_CHAR.items()}
        is_byte_level = isinstance(vocab, dict) and alphabet.keys() == {*"".join(vocab)} and (
            alphabet.keys() <= vocab.keys() and sorted(vocab.values()) == [*range(len(vocab))])
        if not is_byte_level:
            return frozenset()
        same = Tokenizer({bytes(alphabet[char] for char in token): rank for token, rank in vocab.items()})
        is_same = (same.bos_id, same.eos_id) == (self.bos_id, self.eos_id) and (
            behaviour(same.tokenizer_json) == behaviour(self.tokenizer_json))
        return frozenset([same.sha256, *same.other_sha256] if is_same else [])

    def encode(self, text: str, is_first: bool = True) -> list[int]:
        """Return the ids of text of any length, without bos or eos. Lone surrogates become U+FFFD.

        Some tokenizers prepend a space to text, unless a control token precedes it (`is_first=False`).
        """
        tokenizer = self._tokenizer if is_first else self._later_tokenizer
        pieces = split_long(text) if self._can_split else [without_surrogates(text)]
        try:
            ids = [tokenizer.encode(piece, add_special_tokens=False).ids for piece in pieces]
        except BaseException as error:  # a panic in the Rust library is not an Exception
            if "Missing [UNK]" in str(error):
                raise DataError(f"TOKENIZER_PATH={self._name}: its vocabulary lacks a character of the text "
                                f"that starts with {text[:40]!r}; {OTHER_CHARACTERS}") from None
            if type(error).__name__ != "PanicException":
                raise
            raise DataError(f"TOKENIZER_PATH={self._name}: its tokenizer.json fails on the text that starts "
                            f"with {text[:40]!r} ({error}); remove the text, or use another tokenizer"
                            ) from None
        return ids[0] if len(ids) == 1 else [token for piece in ids for token in piece]

    @cached_property
    def _later_tokenizer(self):
        first, never = ('"prepend_scheme": ' + when for when in ('"first"', '"never"'))
        if first not in self.tokenizer_json:
            return self._tokenizer
        later = tokenizers.Tokenizer.from_str(self.tokenizer_json.replace(first, never))
        later.encode_special_tokens = True
        return later

    def pieces_of_added(self) -> dict[int, list[int]]:
        document = {**json.loads(self.tokenizer_json), "added_tokens": [], "post_processor": None}
        before = tokenizers.Tokenizer.from_str(json.dumps(document))
        return {token["id"]: before.encode(token["content"]).ids for token in self.added_tokens}

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)

    @cached_property
    def tokenizer_json(self) -> str:
        return json.dumps({**self._document, "truncation": None, "padding": None}, ensure_ascii=False)


def read_object(path: Path, setting: str) -> dict[str, Any]:
    """Return the object in a tokenizer's or a model's JSON file."""
    try:
        return read_json(path)
    except OSError as error:
        raise DataError(f"{setting}: {path} {unreadable(error, 'get a new copy')}") from error
    except ValueError as error:
        raise DataError(f"{setting}: {path} is not a JSON object: {error}; get a new copy") from error


def read_generation(folder: Path) -> dict[str, Any]:
    """Return the content of a model folder's generation_config.json; config.json supplies ids that it lacks.

    `eos_token_id` and `suppress_tokens` are lists. The result is empty if the folder has neither file.
    """
    settings: dict[str, Any] = {}
    for name in GENERATION_FILES:
        if os.path.lexists(folder / name):
            content = read_object(folder / name, str(folder))
            names = GENERATION_IDS if name == "config.json" else content
            settings |= {key: content[key] for key in names if content.get(key) is not None}
    for name in settings.keys() & {"eos_token_id", SUPPRESSED}:
        ids = settings[name]
        settings[name] = ids = ids if isinstance(ids, list) else [ids]
        if not all(type(token) is int for token in ids):
            raise DataError(f"{folder}: {name} is {ids!r:.60} in its {' or '.join(GENERATION_FILES)}; "
                            "set it to a token id, or to a list of them")
    return {key: value for key, value in settings.items() if key not in GENERATION_IDS or value != -1}


def named_tokens(config: Mapping[str, Any]) -> tuple[set[str], set[str]]:
    """Return the tokens that transformers adds to a tokenizer.json, and those that it makes special."""
    more = [config.get(name) or [] for name in ("additional_special_tokens", "extra_special_tokens")]
    more = [token for each in more for token in (each.values() if isinstance(each, dict) else each)]
    added = [*(config.get("added_tokens_decoder") or {}).values()]
    roles = [value for key, value in config.items() if key.endswith("_token")]
    special = [*roles, *more, *(each for each in added if isinstance(each, dict) and each.get("special"))]
    needed, special = (
        {text for each in tokens if (text := each.get("content") if isinstance(each, dict) else each)
         and isinstance(text, str)} for tokens in ([config.get("eos_token"), *more, *added], special))
    return needed.union(config.get(ADDED, ())), special


def added_tokens(document: Mapping[str, Any], names: Collection[str], generation: Mapping[str, Any]
                 ) -> list[dict]:
    """Return a tokenizer.json's added tokens, of which those with these names are special, too."""
    ends, stored = generation.get("eos_token_id", ()), document.get("added_tokens") or []
    if not all(isinstance(token, dict) and {"id", "content", "special"} <= token.keys() for token in stored):
        return []  # the library names what is wrong
    tokens = [{**token, "special": token["special"] or token["content"] in names or token["id"] in ends}
              for token in stored]
    # Some names are only in the vocabulary.
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    vocab = (document.get("model") or {}).get("vocab")
    vocab = vocab if isinstance(vocab, dict) else {}
    known = {token["content"] for token in tokens}
    return tokens + [{"id": vocab[name], "content": name, **dict.fromkeys(flags, False), "special": True}
                     for name in sorted(vocab.keys() & names - known)]


def load_tokenizer(path: str, backend: str = "auto") -> Tokenizer | HuggingFaceTokenizer:
    """Return a tokenizer from a tiktoken file, a tokenizer.json or its folder, a run, or a hub name."""
    file = Path(path).expanduser()
    if os.path.isdir(file):  # of a run: its newest checkpoint
        file = max(file.glob("checkpoints/step-*"), default=file)
    on_hub = not os.path.exists(file) and is_hub_name(path)
    if backend == "auto":
        is_huggingface = on_hub or file.suffix == ".json" or os.path.isfile(file / "tokenizer.json")
        backend = "huggingface" if is_huggingface else "tiktoken"
    if backend == "huggingface" and on_hub:
        try:
            file = hub_folder(path, "tokenizer.json", lambda folder: (folder / "tokenizer.json").is_file(),
                              allow_patterns=HUGGINGFACE_FILES)
        except Exception as error:  # its class differs between versions of the hub's HTTP client
            raise DataError(f"TOKENIZER_PATH={path} is not a local file, and the request to the hub failed: "
                            f"{why_not(error)} a local path") from error
    if os.path.isdir(file) and (backend == "huggingface" or os.path.isfile(file / "tokenizer.model")):
        names = "tokenizer.json", "tokenizer.model"
        file = next((file / name for name in names if os.path.isfile(file / name)), file / names[0])
    # Open the file, or explain why that is impossible.
    if not os.path.isfile(file):
        problem = f"there is no file {file};"
        if os.path.isdir(file):
            problem = "is a folder without a tokenizer.json; copy the model's own into it, or"
        advice = ("set it to the folder of the model or its tokenizer.json, or to a BPE file in tiktoken's "
                  f"format (Llama 3's), or train one with {command('scripts/train_tokenizer.py')}")
        if file.is_relative_to(SAMPLE):
            advice = f"make the embedded sample with {command('scripts/make_sample.py', '--folder', SAMPLE)}"
        raise DataError(f"TOKENIZER_PATH={path}: {problem} {advice}")
    try:
        refuse_sentencepiece(file, path)
        if backend == "huggingface":
            return HuggingFaceTokenizer(file, path)
        return Tokenizer(read_tiktoken(file))
    except OSError as error:
        reason = unreadable(error, "check its permissions")
        raise DataError(f"TOKENIZER_PATH={path}: {error.filename} {reason}") from error


def refuse_sentencepiece(file: Path, name: str) -> None:
    """Raise DataError if a file contains a SentencePiece model, with a way to a tokenizer.json."""
    with open(file, "rb", opener=plain) as opened:
        start = opened.read(4)
    # In a protocol buffer, its first piece: a text, perhaps with a score (5 bytes) and a type (2).
    if len(start) == 4 and start[::2] == b"\n\n" and start[1] - start[3] in (2, 4, 7, 9):
        raise DataError(
            f"TOKENIZER_PATH={name}: {file} is a SentencePiece model, which is not supported; use the "
            "tokenizer.json of the same model, or make one in Python with the packages transformers, "
            f'sentencepiece and protobuf: AutoTokenizer.from_pretrained("{file.parent}").save_pretrained('
            '"converted"), then set TOKENIZER_PATH=converted')


def read_tiktoken(path: str | Path) -> dict[bytes, int]:
    """Return the ranks in a file in tiktoken's format: each line is a token in base64 and its rank.

    tiktoken's reader caches by file name, and would return the old ranks for a new file with the same name.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_plain(Path(path)).splitlines(), 1):
        if not line.strip():
            continue
        try:
            encoded, rank = line.split()
            token, rank = base64.b64decode(encoded, validate=True), int(rank)
        except ValueError as error:
            raise DataError(f"{path}:{number}: expected a token in base64 and its rank, as in tiktoken's "
                            "files; a tokenizer.json needs TOKENIZER_BACKEND=huggingface") from error
        if token in ranks:
            raise DataError(f"{path}:{number}: the token {token!r} occurs twice; get a new copy")
        ranks[token] = rank
    # Check that the file is complete: consecutive ranks, and a token for each byte.
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise DataError(f"TOKENIZER_PATH={path}: the ranks of its {len(ranks)} tokens should be 0 to "
                        f"{len(ranks) - 1}, each once; a line is missing or changed")
    if absent := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise DataError(f"TOKENIZER_PATH={path}: has no token for {len(absent)} of the 256 bytes (the first "
                        f"is {absent[0]}), so it cannot encode some texts; a line is missing or changed")
    return ranks


def without_surrogates(text: str) -> str:
    """Join surrogate pairs, and replace lone surrogates, which UTF-8 cannot encode, by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def split_long(text: str) -> Iterator[str]:
    """Yield pieces of a text that a tokenizer can process; nearly every document is one piece.

    A piece has at most MAX_PIECE_CHARS characters, and runs of spaces or non-spaces of at most MAX_RUN_CHARS.
    """
    text = without_surrogates(text)
    for start in range(0, max(len(text), 1), MAX_PIECE_CHARS):
        piece, cut = text[start:start + MAX_PIECE_CHARS], 0
        # A run of MAX_RUN_CHARS fills a block of half this length; without such a block, skip the search.
        block = MAX_RUN_CHARS // 2
        blocks = (piece[first:first + block] for first in range(0, len(piece) - block + 1, block))
        if any(text.isspace() or SPACE.search(text) is None for text in blocks):
            for run in RUN.finditer(piece):
                for end in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                    yield piece[cut:end]
                    cut = end
        yield piece[cut:]
