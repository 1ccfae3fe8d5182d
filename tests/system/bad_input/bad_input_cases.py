"""The cases of test_bad_input.py (promises 21 to 28 of docs/promises.md): a folder in which every command works, and ways to spoil it.

Errors whose remedy is tried in test_remedies.py are not repeated here.
"""

import gzip
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from factories import TINY, prepare, save_adapter_folder
from safetensors.torch import load_file, save_file

import lora
from checkpoint import huggingface, peft
from config import LoraConfig, ModelConfig
from data_pipeline.shards import header_bytes
from data_preparation_utils import PreparationOptions, prepare_set
from model import Transformer
from plan.identity import weights_sha256
from tokenizer import load_tokenizer

Spoil = Callable[[], object]  # called in the folder that it spoils
PREPARE = "--output out --preparation-workers 1 --env-file .env"


def chat(*contents: object, **more) -> dict:
    return {"messages": [{"role": ("user", "assistant")[number % 2], "content": content}
                         for number, content in enumerate(contents)], **more}


def lines(*records: object) -> str:
    return "".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records)


PAIR = {"prompt": "Why?", "chosen": "So.", "rejected": "No."}
ITEM = {"activity_label": "Farm", "ctx": "The cat saw", "endings": ["a dog.", "the hen.", "one ox.", "a cow."], "label": 2}
SHAPE = ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, multiple_of=16)


def make_farm(folder: Path) -> None:
    """Make two training shards and one for validation, chats, pairs, items, two tokenizers, a model in the formats of
    Hugging Face and of Meta, and adapters."""
    prepared = prepare(folder / "made", vocab_size=260)
    tokenizer = load_tokenizer(str(prepared.tokenizer))
    shutil.copy(prepared.tokenizer, folder / "tokenizer.model")
    shutil.copy(prepared.items, folder / "items.jsonl")
    options = PreparationOptions(str(prepared.tokenizer), "auto", 3000, 0.2, workers=1)
    (folder / "x.jsonl").write_text(lines(*[chat(f"Is it {number}?", f"It is {number}.") for number in range(60)]))
    (folder / "y.jsonl").write_text(lines(*[{**PAIR, "prompt": f"Is it {number}?"} for number in range(60)]))
    sets = {"set": prepare_set("documents", str(folder / "made" / "text.jsonl"), folder / "made", options)}
    for name, kind, source in (("chats", "chats", "x.jsonl"), ("pairs", "pairs", "y.jsonl")):
        sets[name] = prepare_set(kind, str(folder / source), folder / "made", options)
    for name, place in sets.items():
        shutil.copytree(place, folder / name)
    model = Transformer(SHAPE, tokenizer.vocab_size)
    model.init_weights(torch.Generator().manual_seed(0))
    for name in ("model", "meta", "adapter"):
        (folder / name).mkdir()
    huggingface.save_model_folder(folder / "model", model.state_dict(), SHAPE, tokenizer, 64)
    state = {name: tensor[:tokenizer.vocab_size] if name in huggingface.VOCABULARY else tensor
             for name, tensor in model.state_dict().items()}
    torch.save({**state, "output.weight": state["tok_embeddings.weight"]}, folder / "meta" / "consolidated.00.pth")
    (folder / "meta" / "params.json").write_text(json.dumps({"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2,
                                                             "norm_eps": 1e-5, "rope_theta": 500_000.0}))
    shutil.copy(prepared.tokenizer, folder / "meta" / "tokenizer.model")
    adapters = LoraConfig(lora_enabled=True, lora_rank=4)
    base_sha256 = weights_sha256(folder / "model")
    lora.add_adapters(model, adapters, torch.Generator().manual_seed(0))
    adapter = peft.Adapter(lora.adapter_state_dict(model), adapters, "model", base_sha256, {})
    save_adapter_folder(folder / "adapter", adapter, SHAPE, tokenizer)
    (folder / ".env").write_text(lines(*[f"{name}={value}" for name, value in {
        **TINY, "OUTPUT_DIR": "runs", "PRETRAIN_DATA_PATH": "set", "SFT_DATA_PATH": "chats", "DPO_DATA_PATH": "pairs",
        "TOKENIZER_PATH": "tokenizer.model", "HELLASWAG_PATH": "items.jsonl", "MAX_STEPS": 1}.items()]))
    shutil.rmtree(folder / "made")


def put(name: str, content: str | bytes = b"") -> Spoil:
    return lambda: Path(name).write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))


def edit(name: str, change: Callable[[bytes], bytes]) -> Spoil:
    return lambda: Path(name).write_bytes(change(Path(name).read_bytes()))


def cut(name: str, size: int) -> Spoil:
    return edit(name, lambda content: content[:size])


def flip(name: str, position: int) -> Spoil:
    return edit(name, lambda content: content[:position] + bytes([content[position] ^ 8]) + content[position:][1:])


def json_of(name: str, change: Callable[[dict], object]) -> Spoil:
    """Change the object in a JSON file in place, or replace it by what `change` returns."""
    def spoil() -> None:
        content = json.loads(Path(name).read_text())
        changed = change(content)
        Path(name).write_text(json.dumps(content if changed is None else changed))
    return spoil


def gone(name: str) -> Spoil:
    return lambda: shutil.rmtree(name) if Path(name).is_dir() else Path(name).unlink()


def instead(name: str, make: Callable[[str], object]) -> Spoil:
    """Put a folder, a FIFO or a symbolic link in the place of a file."""
    return lambda: (gone(name)(), make(name))


def env(**changes: object) -> Spoil:
    def spoil() -> None:
        kept = [line for line in Path(".env").read_text().splitlines() if line.split("=")[0] not in changes]
        Path(".env").write_text(lines(*kept, *[f"{name}={value}" for name, value in changes.items()]))
    return spoil


def all_of(*spoils: Spoil) -> Spoil:
    return lambda: [spoil() for spoil in spoils]


def tensors_of(name: str, change: Callable[[dict], object]) -> Spoil:
    def spoil() -> None:
        tensors = load_file(name)
        change(tensors)
        save_file(tensors, name)
    return spoil


def meta_of(change: Callable[[dict], object]) -> Spoil:
    def spoil() -> None:
        tensors = torch.load("meta/consolidated.00.pth", weights_only=True)
        change(tensors)
        torch.save(tensors, "meta/consolidated.00.pth")
    return spoil


def nothing() -> None:
    pass


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def shards_of(manifest: dict) -> list[dict]:
    return manifest["splits"]["train"]["shards"]


def manifest(change: Callable[[dict], object]) -> Spoil:
    return json_of("set/manifest.json", lambda content: change(content) and None)


def first_shard(**changes: object) -> Spoil:
    return manifest(lambda m: shards_of(m)[0].update(changes))


def npy(header: bytes) -> Spoil:
    return lambda: (gone("set")(), os.mkdir("set"), Path("set/train.npy").write_bytes(b"\x93NUMPY" + header))


def segments(*flags: int) -> Spoil:
    def spoil() -> None:
        path = Path("chats/train-segments-00000.bin")
        path.write_bytes(header_bytes(len(flags), "uint32") + np.array(flags, "<u4").tobytes())
        json_of("chats/manifest.json", lambda m: m["splits"]["train"]["segments"].update(tokens=len(flags), shards=[
            {"file": path.name, "tokens": len(flags), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}]))()
    return spoil


def second_line(record: object, good: object) -> Spoil:
    return put("in.jsonl", lines(good, record))


class Case(NamedTuple):
    """A command in a spoilt folder, its exit code, and a pattern for its last line."""

    name: str
    command: str
    code: int
    spoil: Spoil
    words: str


def group(name: str, command: str, code: int, **cases: tuple[Spoil, str]) -> list[Case]:
    return [Case(f"{name}-{case}", command, code, spoil, words) for case, (spoil, words) in cases.items()]


def commands(name: str, code: int, **cases: tuple[str, str]) -> list[Case]:
    return [Case(f"{name}-{case}", command, code, nothing, words) for case, (command, words) in cases.items()]


TRAIN = "train.py"
TEXT = f"scripts/load_pretrain_dataset.py --source in.jsonl {PREPARE}"
CHATS = f"scripts/load_instruct_dataset.py --source in.jsonl {PREPARE}"
PAIRS = f"scripts/load_dpo_dataset.py --source in.jsonl {PREPARE}"
MIX = f"scripts/load_pretrain_dataset.py --mix mix.json {PREPARE}"
ITEMS = "scripts/load_hellaswag_dataset.py --source in.jsonl --output h.jsonl"
THEIRS = f"scripts/load_instruct_dataset.py --source x.jsonl --tokenizer-path model {PREPARE}"
LEARN = "scripts/train_tokenizer.py --output t.model"
ASK = "scripts/generate.py model --max-new-tokens 1"
IMPORT, META, MERGE = ("scripts/import_checkpoint.py model start", "scripts/import_checkpoint.py meta start",
                       "scripts/merge_lora.py adapter --output merged")
START = "train.py --pretrain-checkpoint model"
SFT = "train.py --training-stage sft --pretrain-checkpoint model"
DPO = "train.py --training-stage dpo --pretrain-checkpoint model"
SHARD, MANIFEST, TOKENIZER, JSON, CONFIG = ("set/train-00001.bin", "set/manifest.json", "tokenizer.model", "model/tokenizer.json",
                                            "model/config.json")
WEIGHTS, ADAPTER, FACTORS = "model/model.safetensors", "adapter/adapter_config.json", "adapter/adapter_model.safetensors"
SAYS = {"role": "assistant", "content": "So."}
DEEP = "[" * 100_000
LONG = "a" * 300  # longer than any file name may be

SHARDS = group(
    "shard", TRAIN, 3,
    missing=(gone(SHARD), "00001.bin: is missing, though"), bit=(flip(SHARD, 2000), "00001.bin is damaged: its SHA-256"),
    pipe=(instead(SHARD, os.mkfifo), "00001.bin: cannot be read: is not a plain file"),
    another_tokenizer=(edit(TOKENIZER, lambda c: b"".join(c.splitlines(True)[:-1])), "made with another tokenizer"),
    set_missing=(gone("set"), "set: (no such file or folder|holds neither)"), set_empty=(instead("set", os.mkdir), "holds neither manifest"),
    set_records=(env(PRETRAIN_DATA_PATH="x.jsonl"), "prepare it with .*scripts/load_pretrain_dataset.py'? --source x.jsonl"),
    chats=(env(PRETRAIN_DATA_PATH="chats"), "holds chats, but PRETRAIN_DATA_PATH needs documents"),
    npy_code=(npy(b"\x01\x00\x50\0{'descr': __import__('os').mkdir('executed'), 'shape': (3,)}"), "cannot be read"),
    npy_huge=(npy(b"\x01\x00\x76\0" + b"{'descr': '<u2', 'fortran_order': False, 'shape': (9999999999,), }".ljust(117) + b"\n"), "cannot be read")) + group(
    "manifest", TRAIN, 3,
    gone=(gone(MANIFEST), "looks like part of a prepared set, but there is no manifest.json"), torn=(cut(MANIFEST, 200), "invalid JSON"),
    format=(manifest(lambda m: m.update(format=2)), "format: "),
    wide=(manifest(lambda m: m.update(dtype="uint32")), "lists 3000 of uint32"),
    start_other=(manifest(lambda m: m.update(document_start_id=3)), "document_start_id is 3, but its tokenizer"),
    shards=(manifest(lambda m: m["splits"]["train"].update(shards="ab")), "splits.train.shards: "),
    no_shards=(manifest(lambda m: m["splits"]["train"].update(shards=[], tokens=0)), "lists no train shards"),
    outside=(first_shard(file="../set/train-00000.bin"), "shards.0.file: "),
    one_more=(manifest(lambda m: (shards_of(m).append({"file": "x.bin", "tokens": 5, "sha256": ""}), m["splits"]["train"].update(tokens=m["splits"]["train"]["tokens"] + 5))), "x.bin: is missing"),
    twice=(manifest(lambda m: shards_of(m).append(shards_of(m)[0])), "a shard is listed twice"),
    sum=(manifest(lambda m: m["splits"]["train"].update(tokens=5)), "expected 5")) + group(
    "segments", SFT, 3,
    sum=(segments(8, 15), "tokens long in total, but the shards have"), no_target=(segments(8, 14), "does not have the segments of chats"),
    none=(lambda: json_of("chats/manifest.json", lambda m: m["splits"]["train"].pop("segments") and None)(), "lists no segments of train"))

RECORDS = group(
    "text", TEXT, 3,
    ten_megabytes=(put("in.jsonl", '{"text": "first"}\n{"text": "' + "x" * 10_000_000), "in.jsonl:2: not valid JSON"),
    all_empty=(put("in.jsonl", lines({"text": ""}, {"text": " "})), "no document is left to train on: 2 empty;"),
    missing=(nothing, "in.jsonl: no such file"), pipe=(lambda: os.mkfifo("in.jsonl"), "in.jsonl: is not a plain file")) + [
    Case(f"files-{name}", f"scripts/load_pretrain_dataset.py --source {name} {PREPARE}", 3, put(name.split()[0], content), words)
    for name, content, words in (
        ("cut.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 999)[:-9], "cut.jsonl.gz: .*; check that it exists"),
        ("crc.jsonl.gz", gzip.compress(b'{"text": "a"}\n')[:-8] + b"12345678", "CRC"),
        ("x.docx", b"PK", "no file of a supported format"),
        ("e.txt", b"", "e.txt: no document is left.* the source is empty; add more"))] + commands(
    "source", 3, none=(f"scripts/load_pretrain_dataset.py --source 'q*.jsonl' {PREPARE}", "nothing matches"),
    protocol=(f"scripts/load_pretrain_dataset.py --source nosuch://x/y.jsonl {PREPARE}", "Protocol not known"),
    hub_name=(f"scripts/load_pretrain_dataset.py --source mytext {PREPARE}", "mytext is not a local file or folder, and the"),
    output_file=("scripts/load_pretrain_dataset.py --source y.jsonl --output x.jsonl", "x.jsonl cannot be written: File exists")) + commands(
    "flags", 2, empty=(f"scripts/load_pretrain_dataset.py --source= {PREPARE}", "--source: needs a value"),
    nothing=(f"scripts/load_dpo_dataset.py {PREPARE}", "--source is not set"),
    unknown=(f"scripts/load_pretrain_dataset.py --colum x {PREPARE}", "did you mean --column"),
    text_flag=(f"scripts/load_instruct_dataset.py --source x.jsonl --column a {PREPARE}", "unknown flag --column"),
    limit=(f"{TEXT} --max-documents 1.5", "--max-documents: expected a number"),
    both=(f"{MIX} --source y.jsonl", "--mix contains its sources")) + group(
    "mix", MIX, 2, missing=(nothing, "mix.json: cannot be read"),
    empty=(put("mix.json", '{"sources": [{"path": ""}]}'), "source 1: give either a path"))

EXAMPLES = [
    Case(f"chat-{name}", CHATS, 3, second_line(record, chat("a?", "b")), f"in.jsonl:2: .*{words}") for name, record, words in (
    ("last", chat(*["x"] * 999), "ends in a user's message"),
    ("columns", {f"k{number}": 1 for number in range(3000)}, r"is not a chat: it has 'k0'.* and 2,980 more, expected"),
    ("newline", {"a\nb": 1}, r"it has 'a\\nb'"))] + [
    Case(f"pair-{name}", PAIRS, 3, second_line(record, PAIR), f"in.jsonl:2: .*{words}") for name, record, words in (
        ("missing", {"prompt": "a"}, "has no chosen and no rejected"), ("mixed", {**PAIR, "chosen": [SAYS]}, "one of chosen and rejected is text"),
        ("three", {"prompt": "a", "completions": ["a", "b", "c"]}, "has no chosen"))]

ITEM_CASES = [Case(f"item-{by}", command, 3, put(file, lines(ITEM, DEEP)), f"{file}:2: .*JSON")
              for by, command, file in (("script", ITEMS, "in.jsonl"), ("train", TRAIN, "items.jsonl"))] + group(
    "items", TRAIN, 3, empty=(put("items.jsonl"), "HELLASWAG_PATH=items.jsonl contains no items"),
    missing=(gone("items.jsonl"), "cannot be read"),
    gzip_cut=(all_of(put("i.jsonl.gz", gzip.compress(b"x" * 999)[:-5]), env(HELLASWAG_PATH="i.jsonl.gz")), "ended before"),
    long_ending=(put("items.jsonl", lines({**ITEM, "endings": ["x" * 500, "b", "c", "d"]})), "ending of 501 tokens")) + commands(
    "items", 3, nowhere=("scripts/load_hellaswag_dataset.py --source none.jsonl --output h.jsonl", "none.jsonl: no such"),
    into_folder=("scripts/load_hellaswag_dataset.py --source items.jsonl --output set", "set cannot be written"))

# What a setting may be, and what fits another, is tested in test_load.
SETTINGS = [Case(f"env-{name}", TRAIN, 2, env(**changes), words) for name, changes, words in (
    ("ranks", dict(WORLD_SIZE=4), "no launcher started this process"), ("device", dict(DEVICE="cuda:7"), "DEVICE=cuda:7"),
    ("kernel", dict(ATTENTION_BACKEND="flash"), "ATTENTION_BACKEND=flash"))] + commands(
    "flag", 2, endless=("train.py --" + LONG, r"unknown flag --a+\.\.\.")) + [
    Case(f"json-{name}", "train.py --config c.json", 2, put("c.json", content), words) for name, content, words in (
        ("nested", '{"a":{"b":{"seed":"x"}}}', "a.b.seed: SEED=x"),
        ("half", '{"output_dir":"\\ud800"}', "OUTPUT_DIR=.*an invalid character"),
        ("nul", '{"hellaswag_path":"a\\u0000"}', "HELLASWAG_PATH=.*NUL"))] + [
    Case("env-output-file", TRAIN, 5, env(OUTPUT_DIR="x.jsonl"), "x.jsonl/run cannot be written"),
    Case("env-output-long", TRAIN, 5, env(OUTPUT_DIR="a" * 300), "File name too long")]

TOKENIZERS = group(
    "tiktoken", TRAIN, 3, empty=(put(TOKENIZER), "no token for 256 of the 256 bytes"),
    cut=(cut(TOKENIZER, -900), "a line is missing|tokenizer.model:"),
    junk=(put(TOKENIZER, b"\xfe\xed" * 999), "tokenizer.model:1: expected"),
    twice=(edit(TOKENIZER, lambda c: c + c.split()[0] + b" 260\n"), "occurs twice"),
    json=(put(TOKENIZER, "{}"), "TOKENIZER_BACKEND=huggingface"), folder=(instead(TOKENIZER, os.mkdir), "folder without a tokenizer.json"),
    missing=(gone(TOKENIZER), "there is no file"), hub=(env(TOKENIZER_PATH="no/such"), "no/such is not a local file")) + group(
    "tokenizer", THEIRS, 3, empty=(put(JSON), "tokenizer.json is not a JSON object"),
    no_model=(json_of(JSON, lambda d: d.pop("model") and None), "Model missing"),
    no_special=(json_of(JSON, lambda d: d.update(added_tokens=[])), "lacks '<|end_of_text|>', which a file beside it adds"),
    regex=(json_of(JSON, lambda d: d["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex="(")), "is not a tokenizer: "),
    config_cut=(cut("model/tokenizer_config.json", 20), "is not a JSON object"),
    eos=(json_of("model/special_tokens_map.json", lambda d: d.update(eos_token=5)), "eos_token is 5"),
    eos_unknown=(json_of("model/special_tokens_map.json", lambda d: d.update(eos_token="<x>")), "lacks '<x>', which a file beside it adds"),
    template_bytes=(put("model/chat_template.jinja", b"\xff"), "chat_template.jinja cannot be read: it is not UTF-8 text"),
    template_number=(all_of(gone("model/chat_template.jinja"), json_of("model/tokenizer_config.json", lambda d: d.update(chat_template=5))), "chat_template .*is not text"),
    gone=(gone(JSON), "without a tokenizer.json")) + [
    Case(f"template-{name}", THEIRS, 3, put("model/chat_template.jinja", template), f"chat template cannot be .*{words}")
    for name, template, words in (
        ("syntax", "{% if %}", "correct it"), ("endless", "{% for i in range(99999999999) %}x{% endfor %}", "Range too big"),
    ("include", "{% include '/etc/passwd' %}", "no loader"), ("empty", "", "no control token"),
    ("escape", "{{ cycler.__init__.__globals__.os.mkdir('executed') }}", "unsafe"), ("undefined", "{{ nope.nope }}", "'nope' is undefined"))] + commands(
    "learn", 3, missing=(f"{LEARN} --vocab-size 300 none.txt", "none.txt: no such"),
    column=(f"{LEARN} --vocab-size 257 y.jsonl", "y.jsonl:1: has no column .* and 58 more"),
    into_folder=("scripts/train_tokenizer.py --vocab-size 257 --column prompt --output set y.jsonl", "set cannot be written")) + commands(
    "learn", 2, small=(f"{LEARN} --vocab-size 255 y.jsonl", "from 256"), empty=(f"{LEARN} --vocab-size 257 ''", "source is empty"),
    none=(LEARN, "required"))

OF_A_MODEL = (
    ("config_empty", put(CONFIG), "config.json cannot be read"),
    ("config_gpt2", json_of(CONFIG, lambda d: d.update(model_type="gpt2")), "'gpt2' model"),
    ("heads_null", json_of(CONFIG, lambda d: d.update(num_attention_heads=None)), "lacks num_attention_heads"),
    ("layers_1", json_of(CONFIG, lambda d: d.update(num_hidden_layers=1)), "contain|N_LAYERS is 1"),
    ("kv_4", json_of(CONFIG, lambda d: d.update(num_key_value_heads=4)), "k_proj.weight is|N_KV_HEADS is 4"),
    ("head", json_of(CONFIG, lambda d: d.update(tie_word_embeddings=False)), "no lm_head.weight"),
    ("weights_missing", gone(WEIGHTS), "model.safetensors cannot be read"),
    ("weights_cut", cut(WEIGHTS, -10), "model.safetensors cannot be read"),
    ("weights_pickle", lambda: torch.save({"a": Bomb()}, WEIGHTS), "cannot be read"),
    ("no_norm", tensors_of(WEIGHTS, lambda t: t.pop("model.norm.weight")), "lack model.norm.weight"),
    ("extra", tensors_of(WEIGHTS, lambda t: t.update({"x.y": torch.ones(2)})), "contain x.y"),
    ("shape", tensors_of(WEIGHTS, lambda t: t.update({"model.norm.weight": torch.ones(7)})), r"model.norm.weight is \(7,\)"),
    ("nan", tensors_of(WEIGHTS, lambda t: t["model.norm.weight"].fill_(torch.nan)), "non-finite"),
    ("index", all_of(gone(WEIGHTS), put(f"{WEIGHTS}.index.json", '{"weight_map": {"a": "b.safetensors"}}')), "b.safetensors cannot be read"),
    ("index_outside", all_of(gone(WEIGHTS), put(f"{WEIGHTS}.index.json", '{"weight_map": {"a": "../x"}}')), "outside its folder"),
    ("manifest", put("model/MANIFEST.json", "{}"), "MANIFEST.json is damaged"))
# All read models by the same functions; a start also compares the shape with the settings.
SOME = {"config_empty", "layers_1", "kv_4", "head", "weights_pickle", "nan", "index_outside", "manifest"}
MODELS = [Case(f"{by}-{name}", command, 5, spoil, words) for by, command in (("ask", ASK), ("import", IMPORT), ("start", START))
          for name, spoil, words in OF_A_MODEL if by == "ask" or name in SOME] + group(
    "meta", META, 5, params=(put("meta/params.json", "{"), "params.json cannot be read"),
    dim=(json_of("meta/params.json", lambda d: d.update(dim="x")), "params.json gives DIM='x'"),
    cut=(cut("meta/consolidated.00.pth", -500), "is damaged"),
    bomb=(lambda: torch.save({"tok_embeddings.weight": Bomb()}, "meta/consolidated.00.pth"), "more than plain weights"),
    list=(lambda: torch.save([1], "meta/consolidated.00.pth"), "not a dictionary of tensors"),
    keys=(lambda: torch.save({1: torch.ones(1)}, "meta/consolidated.00.pth"), "not Meta's Llama 3"),
    nan=(meta_of(lambda t: t["norm.weight"].fill_(torch.nan)), "norm.weight contains non-finite numbers"),
    parts=(lambda: shutil.copy("meta/consolidated.00.pth", "meta/consolidated.01.pth"), "split into 2"),
    there=(lambda: os.mkdir("start"), "start already exists")) + group(
    "merge", MERGE, 5, no_config=(gone(ADAPTER), "adapter is neither a Paddock checkpoint"),
    another_base=(tensors_of(WEIGHTS, lambda t: t["model.norm.weight"].mul_(2)), "belong to another base"),
    cut=(cut(FACTORS, -10), "cannot be read"), none=(lambda: save_file({}, FACTORS), "contains no adapters"),
    nan=(tensors_of(FACTORS, lambda t: next(iter(t.values())).fill_(torch.nan)), "non-finite"),
    unknown=(tensors_of(FACTORS, lambda t: t.update(x=torch.ones(3))), "contain x"),
    half=(tensors_of(FACTORS, lambda t: t.pop(next(iter(t)))), "has adapters without layers.0.feed_forward.w2.lora_A"),
    there=(lambda: os.mkdir("merged"), "merged already exists")) + commands(
    "ask", 5, nowhere=("scripts/generate.py nowhere", "no checkpoint 'nowhere'"),
    data=("scripts/generate.py set", "set is neither a Paddock checkpoint")) + commands(
    "ask", 2, temperature=(f"{ASK} --temperature nan", "--temperature: expected a number from 0"),
    tokens=("scripts/generate.py model --max-new-tokens 99999999999", "at most")) + commands(
    "checkpoint", 5, resume=("train.py --resume nope", "there is no checkpoint 'nope'"),
    step=("train.py --resume step-00000009", "no checkpoint 'step"),
    data=("train.py --pretrain-checkpoint set", "set is neither a Paddock checkpoint"),
    run=("train.py --pretrain-checkpoint .", r"\. is neither a Paddock checkpoint"),
    heads=(f"{START} --n-heads 2 --n-kv-heads 1", "N_HEADS is 4 there and 2 here"),
    teacher=("train.py --distillation-enabled --teacher-model set", "set is neither a Paddock checkpoint"))

KINDS = commands(
    "kind", 3, chats_of_pairs=(f"{SFT} --sft-data-path pairs", "pairs.* prepare them with .*scripts/load_instruct"),
    chats_of_text=(f"{SFT} --sft-data-path set", "set.* prepare them with .*scripts/load_instruct"),
    pairs_of_chats=(f"{DPO} --dpo-data-path chats", "chats.* prepare them with .*scripts/load_dpo"),
    pairs_of_text=(f"{DPO} --preference-objective orpo --dpo-data-path set", "set.* prepare them with .*scripts/load_dpo")) + commands(
    "request", 2, examples=(f"{PAIRS} --max-examples -1", "--max-examples"))

# Each of these is the only mistake in a command that would otherwise work.
FLAGS = [Case(f"flags-of-{Path(command.split()[0]).stem}-{number}", f"scripts/{command}", code, nothing, words)
         for number, (command, code, words) in enumerate((
    ("generate.py model --top-k -1", 2, "argument --top-k: "), ("generate.py model --stop ''", 2, "--stop must not be empty"),
    ("generate.py model --output o", 2, "--output requires --prompts"),
    ("generate.py model --batch-size 0", 2, "--batch-size must be at least 1"), ("generate.py model --chat", 2, "--chat requires a --prompt"),
    ("generate.py model --system 'Be kind.'", 2, "--system requires --chat"),
    ("chat.py nowhere", 5, "no checkpoint 'nowhere'"), ("chat.py model other", 2, "requires --serve"),
    ("chat.py model --port 1", 2, "--port requires --serve"), ("chat.py model model --serve", 2, "must be different"),
    ("chat.py model --serve --seed 1", 2, "--seed applies only in the terminal"),
    ("chat.py model --serve --api-key", 2, "PADDOCK_API_KEY"), ("chat.py model --top-p 0", 2, "--top-p: expected a number above 0"),
    ("report.py nosuch", 5, "nosuch is not a run; "),
    ("report.py --serve --output x", 2, "writes no file"),
    ("inspect_data.py nothing-there", 3, "nothing-there: no such folder"), ("inspect_data.py", 2, "either a FOLDER or --list"),
    ("inspect_data.py --list model", 3, "contains no prepared data"), ("inspect_data.py x --bacth 3", 2, "did you mean --batch"),
    ("inspect_data.py model", 3, "holds neither manifest.json"),
    ("sweep.py --vary learning_rate=x,0.1", 2, "LEARNING_RATE=x"), ("sweep.py --vary lerning_rate=1", 2, "--learning-rate"),
    ("sweep.py --vary learning_rate", 2, "--vary LEARNING_RATE"), ("sweep.py", 2, "nothing varies"),
    ("verify_resume.py --steps 3", 2, "of at least 4"), ("verify_resume.py --nproc-per-node 3", 2, "WORLD_SIZE = "),
    ("verify_resume.py --max-step 3", 2, "did you mean --max-steps")))]

CASES = [*FLAGS, *SHARDS, *RECORDS, *EXAMPLES, *ITEM_CASES, *SETTINGS, *TOKENIZERS, *MODELS, *KINDS]
