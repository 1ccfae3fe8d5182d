"""Text to token ids and back: a BPE file in tiktoken's format, read as Llama 3 reads it, or any Hugging Face tokenizer.

Text never becomes a control token: a literal `<|eot_id|>` in a document is encoded as the ten characters that it is.
"""

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import tiktoken

from common.errors import DataError, SettingsError
from common.files import read_text
from common.remote import HUB_NAME, hub_folder, why_not
from config import SAMPLE

# How Llama 3 cuts text before merging; the same in tiktoken and in Hugging Face's tokenizer.json.
PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
           r"|\s+(?!\S)|\s+")
# In the order of Meta's code for Llama 3.1. Other releases name the spare ones differently (the folder on the hub has a
# reserved token at 5, later code `<|image|>` at 11); those that a text model uses have the same number in all of them.
NAMED_SPECIALS = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
    "<|python_tag|>")
SPECIALS = NAMED_SPECIALS + tuple(f"<|reserved_special_token_{2 + i}|>" for i in range(256 - len(NAMED_SPECIALS)))

# tiktoken's regex engine overflows its stack on longer runs; Meta cuts at the same places, so the ids agree.
MAX_PIECE_CHARS = 400_000
MAX_RUN_CHARS = 25_000
RUN, SPACE = re.compile(r"\s+|\S+"), re.compile(r"\s")

# Where a Hugging Face tokenizer comes without a configuration, its control tokens are known by name.
KNOWN_NAMES = {
    "bos_token": ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]"),
    "eos_token": ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "[EOS]"),
    "pad_token": ("<|finetune_right_pad_id|>", "<pad>", "<|pad|>", "[PAD]"),
    "eot_token": ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|eot|>", "<turn|>", "<|end_of_turn|>",
                  "<|END_OF_TURN_TOKEN|>"),
}
HUGGINGFACE_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
LOCAL_SUFFIXES = (".model", ".tiktoken", ".json", ".bpe", ".txt")

# Renders what chat_formats.ChatFormat encodes.
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


class Tokenizer:
    """Llama 3's tokenizer over any ranks: the ids are the ranks, then 256 special tokens."""

    def __init__(self, ranks: dict[bytes, int]):
        self.ranks = ranks
        self.special_ids = {name: len(ranks) + i for i, name in enumerate(SPECIALS)}
        self.vocab_size = len(ranks) + len(SPECIALS)
        self.bos_id = self.special_ids["<|begin_of_text|>"]
        self.eos_id = self.special_ids["<|end_of_text|>"]
        self.eot_id = self.special_ids["<|eot_id|>"]
        self.pad_id = self.special_ids["<|finetune_right_pad_id|>"]
        self.document_start_id = self.bos_id
        self._encoding = tiktoken.Encoding("llama3", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=self.special_ids)

    @cached_property
    def sha256(self) -> str:
        """Hex digest of all that decides an id: pattern, special tokens, ranks."""
        digest = hashlib.sha256(json.dumps([PATTERN, SPECIALS]).encode())
        for token in sorted(self.ranks, key=self.ranks.__getitem__):
            digest.update(len(token).to_bytes(4, "little") + token)
        return digest.hexdigest()

    def encode(self, text: str) -> list[int]:
        """The ids of ordinary text of any length, as Meta's reference gives them. A lone surrogate counts as U+FFFD."""
        ids = [self._encoding.encode_ordinary(piece) for piece in split_long(text)]
        return ids[0] if len(ids) == 1 else [token for piece in ids for token in piece]

    def encode_document(self, text: str) -> list[int]:
        """`[bos] + ids + [eos]`."""
        return as_document(self, text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of any ids, control tokens by their names, bytes that are no UTF-8 as U+FFFD."""
        return self._encoding.decode([int(token) for token in ids])

    def save_huggingface(self, folder: str | Path) -> None:
        """Write what `transformers.AutoTokenizer.from_pretrained(folder)` needs to give our ids.

        As with Meta's own folders a plain call there puts the bos in front, `add_special_tokens=False` does not.
        """
        names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "pad_token": "<|finetune_right_pad_id|>"}
        write_huggingface(folder, self._tokenizer_json, names, CHAT_TEMPLATE)

    @cached_property
    def _tokenizer_json(self) -> str:
        """These ranks as Hugging Face's byte-level BPE.

        Every cut of a token into two tokens is a merge, in the order of the whole's rank: so merges tiktoken.
        Of the cuts of one token only that to which its own bytes lead can ever meet, so their order is of no matter.
        """
        ordered = sorted(self.ranks, key=self.ranks.__getitem__)
        name = {token: "".join(map(BYTE_TO_CHAR.__getitem__, token)) for token in ordered}
        merges = [f"{name[token[:i]]} {name[token[i:]]}" for token in ordered for i in range(1, len(token))
                  if token[:i] in self.ranks and token[i:] in self.ranks]
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
        bos = SPECIALS[0]
        first, second = ([{"SpecialToken": {"id": bos, "type_id": i}}, {"Sequence": {"id": "AB"[i], "type_id": i}}]
                         for i in (0, 1))
        add_bos = {"type": "TemplateProcessing", "single": first, "pair": first + second,
                   "special_tokens": {bos: {"id": bos, "ids": [self.bos_id], "tokens": [bos]}}}
        return json.dumps({
            "version": "1.0", "truncation": None, "padding": None,
            "added_tokens": [{"id": token, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
                              "normalized": False, "special": True} for content, token in self.special_ids.items()],
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
            "post_processor": {"type": "Sequence", "processors": [byte_level, add_bos]},
            "decoder": byte_level,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
                      "vocab": {name[token]: self.ranks[token] for token in ordered}, "merges": merges},
        }, ensure_ascii=False)


class HuggingFaceTokenizer:
    """Any tokenizer.json, with the control tokens that the files beside it name."""

    def __init__(self, file: Path, name: str):
        import tokenizers

        self._name, self._document = name, _read_json(file, name)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(self._document))
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"TOKENIZER_PATH={name}: the tokenizers library cannot read {file}: {error}; get it anew") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # else a literal <|eot_id|> in text becomes the control token
        self._pieces_join = _pieces_join(self._document)

        beside = {}
        for other in ("tokenizer_config.json", "special_tokens_map.json"):
            if os.path.lexists(file.parent / other):
                beside = {**_read_json(file.parent / other, name), **beside}
        self.control_tokens = self._control_tokens(beside, name)
        self.chat_template = _chat_template(file.parent / "chat_template.jinja", beside.get("chat_template"), name)

        ids = {role: self._tokenizer.token_to_id(token) for role, token in self.control_tokens.items()}
        if "eos_token" not in ids:
            raise DataError(f"TOKENIZER_PATH={name}: {file} has no end-of-sequence token of a known name; name it as "
                            "eos_token in a tokenizer_config.json beside it")
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.special_tokens = [token for token in self._document.get("added_tokens") or () if token["special"]]
        self.special_ids = {token["content"]: token["id"] for token in self.special_tokens}
        self.eos_id = ids["eos_token"]
        self.bos_id = ids.get("bos_token") if ids.get("bos_token") != self.eos_id else None
        self.eot_id = ids.get("eot_token", self.eos_id)
        self.pad_id = ids.get("pad_token")
        self.document_start_id = self.eos_id if self.bos_id is None else self.bos_id

    def _control_tokens(self, beside: dict, name: str) -> dict[str, str]:
        """The token of each role that has one, as the configuration says or, where it is silent, by a known name."""
        found = {}
        for role, known in KNOWN_NAMES.items():
            token = beside.get(role)
            names = known if token is None else (token.get("content") if isinstance(token, dict) else token,)
            if not all(isinstance(text, str) for text in names):
                raise DataError(f"TOKENIZER_PATH={name}: {role} is {token!r:.60} in its configuration, expected a text; mend it")
            if token is None and role == "bos_token" and "eos_token" in beside:
                continue  # a configuration without a bos means that there is none
            if here := [text for text in names if self._tokenizer.token_to_id(text) is not None]:
                found[role] = here[0]
        return found

    @cached_property
    def sha256(self) -> str:
        """Hex digest of all that decides an id: what in tokenizer.json encodes, and a document's bos and eos."""
        parts = [self._document.get(part) for part in ("normalizer", "pre_tokenizer", "model", "added_tokens")]
        return hashlib.sha256(json.dumps([parts, self.bos_id, self.eos_id], sort_keys=True).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The ids of ordinary text, of any length, without bos or eos. A lone surrogate counts as U+FFFD."""
        return self._encode(self._tokenizer, text)

    def encode_further(self, text: str) -> list[int]:
        """The ids of ordinary text behind a control token, without the space that some tokenizers put before a beginning."""
        return self._encode(self._later_tokenizer, text)

    def _encode(self, tokenizer, text: str) -> list[int]:
        pieces = split_long(text) if self._pieces_join else [without_surrogates(text)]
        try:
            ids = [tokenizer.encode(piece, add_special_tokens=False).ids for piece in pieces]
        except BaseException as error:  # a panic of the Rust library is no Exception
            if type(error).__name__ != "PanicException":
                raise
            raise DataError(f"TOKENIZER_PATH={self._name}: its tokenizer.json gives up on the text that begins {text[:40]!r} "
                            f"({error}); leave that text away, or take another tokenizer") from None
        return ids[0] if len(ids) == 1 else [token for piece in ids for token in piece]

    @cached_property
    def _later_tokenizer(self):
        import tokenizers

        first, never = ('"prepend_scheme": ' + when for when in ('"first"', '"never"'))
        if first not in self._tokenizer_json:
            return self._tokenizer
        later = tokenizers.Tokenizer.from_str(self._tokenizer_json.replace(first, never))
        later.encode_special_tokens = True
        return later

    def encode_document(self, text: str) -> list[int]:
        """`[bos] + ids + [eos]`, or `[eos] + ids` where there is no bos of its own."""
        return as_document(self, text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of any ids, control tokens by their names, bytes that are no UTF-8 as U+FFFD."""
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)

    def save_huggingface(self, folder: str | Path) -> None:
        """Write what `transformers.AutoTokenizer.from_pretrained(folder)` needs to give our ids.

        Whether a plain call there adds a bos follows from the tokenizer.json; `add_special_tokens=False` never does.
        """
        names = {role: token for role, token in self.control_tokens.items()
                 if role != "eot_token" or token not in KNOWN_NAMES[role]}
        template = self.chat_template
        if template is None and "bos_token" in names and set(NAMED_SPECIALS[6:10]) <= set(self.special_ids):
            template = CHAT_TEMPLATE
        write_huggingface(folder, self._tokenizer_json, names, template)

    @cached_property
    def _tokenizer_json(self) -> str:
        return json.dumps({**self._document, "truncation": None, "padding": None}, ensure_ascii=False)


def load_tokenizer(path: str, backend: str = "auto") -> Tokenizer | HuggingFaceTokenizer:
    """The tokenizer that TOKENIZER_PATH means: a file in tiktoken's format, a tokenizer.json or its folder, a hub name.

    Args:
        backend: "tiktoken", "huggingface", or "auto", which goes by the look of the path.
    Raises:
        DataError: there is no such tokenizer, or it cannot be used.
    """
    file = Path(path).expanduser()
    on_hub = not os.path.exists(file) and file.suffix not in LOCAL_SUFFIXES and bool(HUB_NAME.fullmatch(path))
    if backend == "auto":
        backend = "huggingface" if on_hub or file.suffix == ".json" or os.path.isfile(file / "tokenizer.json") else "tiktoken"
    if backend == "huggingface" and on_hub:
        file = _hub_folder(path)
    if backend == "huggingface" and os.path.isdir(file):
        file = file / "tokenizer.json"
    if not os.path.isfile(file):
        what = "is a folder without a tokenizer.json" if os.path.isdir(file) else f"there is no file {file}"
        raise DataError(f"TOKENIZER_PATH={path}: {what}; " + (
            f"make the embedded sample with scripts/make_sample.py --folder {SAMPLE}" if file.is_relative_to(SAMPLE) else
            "give a BPE file in tiktoken's format (such as Llama 3's tokenizer.model), a tokenizer.json, or train one with "
            "scripts/train_tokenizer.py"))
    try:
        return HuggingFaceTokenizer(file, path) if backend == "huggingface" else Tokenizer(read_tiktoken(file))
    except OSError as error:
        raise DataError(f"TOKENIZER_PATH={path}: {error.filename} cannot be read: {error.strerror}; see who may") from error


def read_tiktoken(path: str | Path) -> dict[bytes, int]:
    """The ranks in a file of tiktoken's format: a line a token, its bytes in base64 and its rank.

    tiktoken's own reader caches by the name of the file: a new file under an old name would give the old ranks.

    Raises:
        DataError: with file and line.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            encoded, rank = line.split()
            token, rank = base64.b64decode(encoded, validate=True), int(rank)
        except ValueError as error:
            raise DataError(f"{path}:{number}: expected a token in base64 and its rank, as in tiktoken's files; "
                            "a tokenizer.json goes with TOKENIZER_BACKEND=huggingface") from error
        if token in ranks:
            raise DataError(f"{path}:{number}: the token {token!r} was there before; TOKENIZER_PATH needs a sound file")
        ranks[token] = rank
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise DataError(f"TOKENIZER_PATH={path}: the ranks of its {len(ranks)} tokens should be 0 to {len(ranks) - 1}, "
                        "each once; a line is missing or changed")
    absent = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if absent:
        raise DataError(f"TOKENIZER_PATH={path}: has no token for {len(absent)} of the 256 bytes (the first is "
                        f"{absent[0]}), so some text could not be encoded; a line is missing or changed")
    return ranks


def write_tiktoken(ranks: Mapping[bytes, int], path: str | Path) -> None:
    """Write ranks in tiktoken's format, whole or not at all.

    Raises:
        DataError: the file cannot be written.
    """
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    content = b"".join(base64.b64encode(token) + b" %d\n" % ranks[token] for token in sorted(ranks, key=ranks.__getitem__))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            unfinished.write_bytes(content)
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}; choose another place") from error


def train_bpe(texts: Iterable[str], vocab_size: int) -> dict[bytes, int]:
    """The ranks of a byte-level BPE trained on these texts: 256 bytes, then the merges in their order. Deterministic.

    Args:
        vocab_size: number of ranks; the 256 special tokens come on top.
    Raises:
        SettingsError: fewer ranks than bytes are asked for.
        DataError: the texts do not hold so many tokens.
    """
    from tokenizers import Regex, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Trainable

    if not 256 <= vocab_size <= 10_000_000:
        raise SettingsError(f"--vocab-size {vocab_size} must be at least 256, one rank for each byte, and at most 10,000,000")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe = Trainable(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PATTERN), "isolated"), byte_level])
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=list(BYTE_TO_CHAR.values()),
                                  show_progress=False)
    bpe.train_from_iterator((piece for text in texts for piece in split_long(text)), trainer)
    char_to_byte = {char: byte for byte, char in BYTE_TO_CHAR.items()}
    vocabulary = sorted(bpe.get_vocab().items(), key=lambda item: item[1])
    if len(vocabulary) < vocab_size:
        raise DataError(f"the text gives {len(vocabulary)} ranks and no more, --vocab-size {vocab_size} was asked for; "
                        "ask for fewer or give more text")
    return {bytes(map(char_to_byte.__getitem__, token)): rank for token, rank in vocabulary}


def as_document(tokenizer: Tokenizer | HuggingFaceTokenizer, text: str) -> list[int]:
    """A prepared document: `[bos] + ids + [eos]`, or `[eos] + ids` where there is no bos of its own."""
    ids = tokenizer.encode(text)
    return [tokenizer.eos_id, *ids] if tokenizer.bos_id is None else [tokenizer.bos_id, *ids, tokenizer.eos_id]


def without_surrogates(text: str) -> str:
    """The text with pairs of surrogates joined and lone ones, which UTF-8 cannot hold, replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def split_long(text: str) -> Iterator[str]:
    """Pieces of a text that a tokenizer takes without overflow; nearly every document is one piece.

    Cut after MAX_PIECE_CHARS, and within these after MAX_RUN_CHARS without a change between space and non-space.
    """
    text = without_surrogates(text)
    for start in range(0, max(len(text), 1), MAX_PIECE_CHARS):
        part, cut = text[start:start + MAX_PIECE_CHARS], 0
        if has_long_run(part):
            for run in RUN.finditer(part):
                for end in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                    yield part[cut:end]
                    cut = end
        yield part[cut:]


def has_long_run(text: str) -> bool:
    """Whether a run of MAX_RUN_CHARS spaces or of as many others is possible, without walking through every word.

    Such a run covers one of the blocks of half its length.
    """
    block = MAX_RUN_CHARS // 2
    parts = (text[start:start + block] for start in range(0, len(text) - block + 1, block))
    return any(part.isspace() or SPACE.search(part) is None for part in parts)


def write_huggingface(folder: str | Path, tokenizer_json: str, names: dict[str, str],
                      chat_template: str | None) -> None:
    """Write the tokenizer's files of a Hugging Face folder.

    The class is the generic one: a model's own class may build parts of the tokenizer anew, not as tokenizer.json says.
    """
    files = {"tokenizer.json": tokenizer_json,
             "tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names,
                                                  "clean_up_tokenization_spaces": False}, indent=2),
             "special_tokens_map.json": json.dumps(names, indent=2)}
    if chat_template is not None:
        files["chat_template.jinja"] = chat_template
    for name, content in files.items():
        (Path(folder) / name).write_text(content, encoding="utf-8")


def _byte_alphabet() -> dict[int, str]:
    """The printable character that stands for each byte in Hugging Face's byte-level vocabularies (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}


BYTE_TO_CHAR = _byte_alphabet()


def _read_json(file: Path, name: str) -> dict:
    try:
        content = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise DataError(f"TOKENIZER_PATH={name}: {file} is not JSON: {error}; get it anew") from error
    if not isinstance(content, dict):
        raise DataError(f"TOKENIZER_PATH={name}: {file} holds a {type(content).__name__}, expected a JSON object; get it anew")
    return content


def _chat_template(file: Path, beside: Any, name: str) -> str | None:
    try:
        template = read_text(file) if os.path.lexists(file) else beside
    except UnicodeDecodeError as error:
        raise DataError(f"TOKENIZER_PATH={name}: {file} is no text: {error}; get it anew") from error
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    if not isinstance(template, str | None):
        raise DataError(f"TOKENIZER_PATH={name}: the chat_template in its tokenizer_config.json is no text; mend it there")
    return template


def _pieces_join(document: dict) -> bool:
    """Whether pieces encoded apart decode to the whole text: a byte-level tokenizer that puts no space in front."""
    byte_level = (document.get("decoder") or {}).get("type") == "ByteLevel"
    return byte_level and '"add_prefix_space": true' not in json.dumps(document.get("pre_tokenizer"))


def _hub_folder(name: str) -> Path:
    """The local folder of a tokenizer on the hub: what lies in the cache, else what is downloaded now."""
    try:
        return hub_folder(name, "tokenizer.json", lambda folder: (folder / "tokenizer.json").is_file(),
                          allow_patterns=list(HUGGINGFACE_FILES))
    except Exception as error:  # the hub's HTTP library, and with it the errors' class, differs from version to version
        raise DataError(f"TOKENIZER_PATH={name} is no local file, and the hub gives no tokenizer.json: {why_not(error)}; "
                        "check the name, the network, HF_TOKEN and HF_HUB_OFFLINE, or give a local path") from error
