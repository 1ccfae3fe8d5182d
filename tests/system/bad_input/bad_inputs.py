"""A folder in which every command works, ways to spoil it, and the form of a case of test_bad_input.py.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from factories import TINY, prepare
from safetensors.torch import load_file, save_file

import lora
from checkpoint import huggingface, peft
from config import LoraConfig, ModelConfig
from data_pipeline.shards import header_bytes
from data_preparation_utils import PreparationOptions, prepare_set
from model import Transformer
from tokenizer import load_tokenizer

Spoil = Callable[[], object]  # called in the folder that it spoils


PREPARE = "--output out --preparation-workers 1 --env-file .env"


# ---------------------------------------------------------------- the folder in which all is well


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
    base_sha256 = huggingface.weights_sha256(huggingface.load_model_weights(folder / "model"))
    lora.add_adapters(model, adapters, torch.Generator().manual_seed(0))
    adapter = peft.Adapter(lora.adapter_state_dict(model), adapters, "model", base_sha256, {})
    peft.save_adapter_folder(folder / "adapter", adapter, SHAPE, tokenizer)
    (folder / ".env").write_text(lines(*[f"{name}={value}" for name, value in {
        **TINY, "OUTPUT_DIR": "runs", "PRETRAIN_DATA_PATH": "set", "SFT_DATA_PATH": "chats", "DPO_DATA_PATH": "pairs",
        "TOKENIZER_PATH": "tokenizer.model", "HELLASWAG_PATH": "items.jsonl", "MAX_STEPS": 1}.items()]))
    shutil.rmtree(folder / "made")


# ---------------------------------------------------------------------------------- ways to spoil


def put(name: str, content: str | bytes = b"") -> Spoil:
    """Replace the content of a file."""
    return lambda: Path(name).write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))


def edit(name: str, change: Callable[[bytes], bytes]) -> Spoil:
    return lambda: Path(name).write_bytes(change(Path(name).read_bytes()))


def cut(name: str, size: int) -> Spoil:
    return edit(name, lambda content: content[:size])


def flip(name: str, position: int) -> Spoil:
    return edit(name, lambda content: content[:position] + bytes([content[position] ^ 8]) + content[position:][1:])


def add(name: str, text: str) -> Spoil:
    return edit(name, lambda content: content + text.encode())


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


def loop(name: str) -> None:
    os.symlink(Path(name).name, name)


def env(**changes: object) -> Spoil:
    """Change settings in `.env`."""
    def spoil() -> None:
        kept = [line for line in Path(".env").read_text().splitlines() if line.split("=")[0] not in changes]
        Path(".env").write_text(lines(*kept, *[f"{name}={value}" for name, value in changes.items()]))
    return spoil


def all_of(*spoils: Spoil) -> Spoil:
    return lambda: [spoil() for spoil in spoils]


def tensors_of(name: str, change: Callable[[dict], object]) -> Spoil:
    """Change the tensors of a safetensors file."""
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
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


def token_beyond_the_vocabulary() -> None:
    """Put an id beyond the vocabulary into a shard, and the right hash into the manifest."""
    shard = Path("set/train-00001.bin")
    shard.write_bytes(shard.read_bytes()[:1100] + b"\xff\xff" + shard.read_bytes()[1102:])
    json_of("set/manifest.json", lambda m: shards_of(m)[1].update(sha256=hashlib.sha256(shard.read_bytes()).hexdigest()))()


def shards_of(manifest: dict) -> list[dict]:
    return manifest["splits"]["train"]["shards"]


def manifest(change: Callable[[dict], object]) -> Spoil:
    return json_of("set/manifest.json", lambda content: change(content) and None)


def first_shard(**changes: object) -> Spoil:
    return manifest(lambda m: shards_of(m)[0].update(changes))


def npy(header: bytes) -> Spoil:
    return lambda: (gone("set")(), os.mkdir("set"), Path("set/train.npy").write_bytes(b"\x93NUMPY" + header))


def segments(*flags: int) -> Spoil:
    """Replace the segments of the prepared chats."""
    def spoil() -> None:
        path = Path("chats/train-segments-00000.bin")
        path.write_bytes(header_bytes(len(flags), "uint32") + np.array(flags, "<u4").tobytes())
        json_of("chats/manifest.json", lambda m: m["splits"]["train"]["segments"].update(tokens=len(flags), shards=[
            {"file": path.name, "tokens": len(flags), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}]))()
    return spoil


def second_line(record: object, good: object) -> Spoil:
    return put("in.jsonl", lines(good, record))


def text_line(line: str | bytes) -> Spoil:
    line = line if isinstance(line, bytes) else line.encode()
    return put("in.jsonl", b'{"text": "first"}\n' + line + b'\n{"text": "last"}\n')


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
