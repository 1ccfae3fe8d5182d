"""Tiny data, batches, models and runs; and ranks as real processes that tests can signal, kill and give faults."""

import base64
import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional

import torch

import train
from checkpoint import huggingface, model_json, peft, store
from checkpoint.schema import Progress
from checkpoint.tensors import TensorFile, read_all, write_files
from config import Config, ModelConfig
from data_pipeline.vocabulary import train_bpe, write_tiktoken
from data_preparation_utils import PreparationOptions, prepare_set
from dataloaders import Batch
from extensions import cpu_kernels, reproducible, rounding  # noqa: F401, which they register
from learn.objectives import NextToken
from learn.optim import Optimizer, make_reducer
from model import Transformer
from model_kernels.head import IGNORE_INDEX
from parallel.fsdp import local_rows
from parallel.ranks import Ranks
from plan.command_line import plan_on_rank0
from plan.make import make_plan
from run import folder as run_folder
from run.log import CLOCKS
from tokenizer import Tokenizer

FILES_PAGE = Path(__file__).resolve().parents[1] / "docs" / "files.md"
PATIENCE = 120  # seconds until a process counts as hanging; the machine may be busy
# Of a page in a browser: what is smaller than 24 by 24 px; links within sentences may be.
SMALL_TARGETS = """[...document.querySelectorAll("button, select, input:not([type=checkbox]), summary, a, textarea, label")].filter((each) => {
  const {width, height} = each.getBoundingClientRect();
  return each.checkVisibility() && width > 1 && (width < 24 || height < 24) && !each.closest("p:not(:has(label))");
}).map((each) => each.outerHTML.slice(0, 99))"""
NOUNS, VERBS = "cat dog bird fox hen cow".split(), "saw met fed lost found drew".split()

# Eight rows a step, so that micro-batches of 1, 2 and 4 rows and 1, 2 and 4 ranks fit. fp32 and eager: runs are reproducible.
TINY = {"DIM": 32, "N_LAYERS": 2, "N_HEADS": 4, "N_KV_HEADS": 2, "MULTIPLE_OF": 16, "MAX_SEQ_LEN": 32, "MICRO_BATCH_SIZE": 2,
        "TOTAL_BATCH_SIZE": 256, "MAX_STEPS": 6, "LEARNING_RATE": 0.01, "WARMUP_STEPS": 2, "DEVICE": "cpu", "PRECISION": "fp32",
        "COMPILE": "false", "LOG_EVERY": 1, "VALIDATE_EVERY": 2, "VALIDATION_ROWS": 5, "HELLASWAG_EVERY": 3,
        "SAMPLE_EVERY": 6, "SAMPLE_TOKENS": 4, "SAVE_EVERY": 2, "KEEP_LAST": 0, "KEEP_BEST": 1,
        "DISTRIBUTED_TIMEOUT": 600, "REPORT": "false", "RUN_NAME": "run"}


class Prepared(NamedTuple):
    """The paths of the tiny data set."""

    shards: Path
    tokenizer: Path
    items: Path

    def settings(self) -> dict[str, Any]:
        return {**TINY, "PRETRAIN_DATA_PATH": self.shards, "TOKENIZER_PATH": self.tokenizer, "HELLASWAG_PATH": self.items}


def sentence(rng: Random) -> str:
    noun, verb, other = (words[int(rng.random() * len(words))] for words in (NOUNS, VERBS, NOUNS))
    return f"The {noun} {verb} the {other}."


def write_jsonl(path: Path, records: Iterable) -> str:
    """Write one record a line; returns the path as text."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def prepare(folder: Path, seed: int = 0, documents: int = 120, vocab_size: int = 256) -> Prepared:
    """Write documents of a few sentences, a tokenizer of single bytes, and ten HellaSwag items.

    A run of six steps reads about half of the documents.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = Random(seed)
    texts = [" ".join(sentence(rng) for _ in range(1 + int(rng.random() * 4))) for _ in range(documents)]
    write_jsonl(folder / "text.jsonl", ({"text": text} for text in texts))
    write_tiktoken(train_bpe(texts, vocab_size), folder / "tokenizer.model")
    items = [{"ind": number, "activity_label": "Farm", "ctx": sentence(rng), "endings": [sentence(rng)[4:] for _ in range(4)],
              "label": int(rng.random() * 4)} for number in range(10)]
    write_jsonl(folder / "items.jsonl", items)
    shards = prepared_set("documents", folder / "text.jsonl", folder / "tokenizer.model", folder / "shards")
    return Prepared(shards, folder / "tokenizer.model", folder / "items.jsonl")


def prepared_set(kind: str, source: Any, tokenizer: Any, output: Path, **options) -> Path:
    """Prepare a set in this process; returns its folder."""
    given = {"tokenizer_backend": "auto", "shard_tokens": 100_000, "validation_fraction": 0.1, "workers": 1} | options
    return prepare_set(kind, str(source) if isinstance(source, Path) else source, output, PreparationOptions(str(tokenizer), **given))


PREPARED_UNDER_FIRE = """
import json, sys
from data_pipeline import prepare as preparation
from data_preparation_utils import PreparationOptions, prepare_set
kind, source, tokenizer, output, chunk, options = sys.argv[1:]
preparation.CHUNK_CHARACTERS = int(chunk)
prepare_set(kind, source, output, PreparationOptions(tokenizer, validation_fraction=0.1, journal_seconds=0.0, **json.loads(options)))
"""


def start_preparation(kind: str, source: str, tokenizer: str, output: Path, chunk: int, **options) -> subprocess.Popen:
    arguments = (kind, source, tokenizer, output, chunk, json.dumps(options))
    return subprocess.Popen([sys.executable, "-c", PREPARED_UNDER_FIRE, *map(str, arguments)], cwd=Path(train.__file__).parent,
                            text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def prepare_under_fire(kills: int, seconds: float, *arguments, **options) -> None:
    """Prepare in a process that is killed as often, at random moments after its first new journal, and then let it end."""
    output, rng = arguments[3], Random()
    for _ in range(kills):
        before = [path.read_text() for path in output.glob("tmp-*/journal.json")]
        process = start_preparation(*arguments, **options)
        while process.poll() is None and [path.read_text() for path in output.glob("tmp-*/journal.json")] == before:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, seconds))
        process.kill()
        _, error = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), error
    _, error = (process := start_preparation(*arguments, **options)).communicate()
    assert process.returncode == 0, error


# A row has room for one pair, or for several chats.
STAGE = {**TINY, "MAX_SEQ_LEN": 96, "TOTAL_BATCH_SIZE": 768, "MAX_STEPS": 4, "VALIDATION_ROWS": 3, "HELLASWAG_EVERY": 4,
         "SAMPLE_EVERY": 2, "WARMUP_STEPS": 1}
UNMEASURED = {"VALIDATE_EVERY": 0, "HELLASWAG_EVERY": 0, "SAMPLE_EVERY": 0}
DPO = {"TRAINING_STAGE": "dpo", "PRETRAIN_CHECKPOINT": "base"}
KTO = {"PREFERENCE_OBJECTIVE": "kto", "DPO_DATA_PATH": "unpaired"}
LORA = {"LORA_ENABLED": "true", "LORA_RANK": 4}
GRPO = {"TRAINING_STAGE": "grpo", "PRETRAIN_CHECKPOINT": "base", "GRPO_GROUP": 2, "GRPO_MAX_TOKENS": 12, "MICRO_BATCH_SIZE": 4,
        "REWARD": "length*0.1,contains"}
DISTILLATION = {"DISTILLATION_ENABLED": "true", "TEACHER_MODEL": "teacher"}
MODES = {"sft": {"PRETRAIN_CHECKPOINT": "base"},
         "dpo-stored": {**DPO, "DPO_REFERENCE": "stored"},
         "dpo-live": {**DPO, "DPO_REFERENCE": "live"},
         "orpo": {**DPO, "PREFERENCE_OBJECTIVE": "orpo"},
         "simpo": {**DPO, "PREFERENCE_OBJECTIVE": "simpo"},
         "kto": {**DPO, **KTO},
         "distilled": {**DISTILLATION, "TRAINING_STAGE": "pretrain"},
         "distilled-sft": {**DISTILLATION, "PRETRAIN_CHECKPOINT": "base"},
         "lora-sft": {**LORA, "PRETRAIN_CHECKPOINT": "base", "LORA_DROPOUT": 0.1},
         "lora-dpo": {**LORA, **DPO}}
# Their steps cannot be replayed or sharded.
ONLINE = {"grpo": GRPO, "lora-grpo": {**LORA, **GRPO, "GRPO_BETA": 0.1, "GRPO_UPDATES": 2, "GRPO_LOSS": "grpo"},
          "gkd": {**GRPO, **DISTILLATION, "DISTILLATION_LOSS": "jsd", "DISTILLATION_LAMBDA": 0.5, "GRPO_GROUP": 1}}


class Stages(NamedTuple):
    """The paths that the later stages need: data of each kind, and a base and a teacher of two steps each."""

    prepared: Prepared
    chats: Path
    pairs: Path
    prompts: Path
    unpaired: Path
    base: Path
    teacher: Path

    def settings(self, mode: str, modes: Mapping[str, dict] = {**MODES, **ONLINE}) -> dict[str, Any]:
        named = {"base": self.base, "teacher": self.teacher, "unpaired": self.unpaired}
        return {**self.prepared.settings(), **STAGE, "TRAINING_STAGE": "sft", "SFT_DATA_PATH": self.chats,
                "DPO_DATA_PATH": self.pairs, "GRPO_DATA_PATH": self.prompts, **{name: named.get(value, value) for name, value in modes[mode].items()}}

    def run(self, mode: str, output_dir: Path, **changes) -> "TinyRun":
        return TinyRun(self.prepared, output_dir, **self.settings(mode) | changes)


def prepare_stages(prepared: Prepared, folder: Path) -> Stages:
    """Prepare chats of one to three turns and pairs with answers of 2 to 37 tokens, and train a base and a teacher."""
    rng = Random(1)

    def up_to(limit: int) -> int:
        return 1 + int(rng.random() * limit)

    def nouns(count: int) -> str:
        return " ".join(NOUNS[up_to(len(NOUNS)) - 1] for _ in range(count))

    def letter() -> str:
        return chr(ord("a") + up_to(26) - 1)

    def chat() -> dict:
        turns = [(f"{letter()}at?", nouns(up_to(3))) for _ in range(up_to(3))]
        return {"messages": [{"role": role, "content": text} for turn in turns
                             for role, text in zip(("user", "assistant"), turn)]}

    def pair() -> dict:
        return {"prompt": f"{letter()}?", "chosen": nouns(1)[:up_to(3)], "rejected": "ox" * up_to(18)}

    paths = []
    def prompt() -> dict:
        return {"question": f"{letter()}at?", "answer": letter()}

    def unpaired() -> dict:
        return {"prompt": f"{letter()}?", "completion": nouns(up_to(3)), "label": rng.random() < 0.8}

    for name, record, count in (("chats", chat, 120), ("pairs", pair, 120), ("prompts", prompt, 60), ("unpaired", unpaired, 120)):
        file = write_jsonl(folder / f"{name}.jsonl", (record() for _ in range(count)))
        paths.append(prepared_set(name if name != "unpaired" else "pairs", file, prepared.tokenizer, folder / name))
    starts = []
    for name, seed in (("base", 1), ("teacher", 2)):
        run = TinyRun(prepared, folder, RUN_NAME=name, MAX_STEPS=2, SEED=seed, **UNMEASURED).trained()
        starts.append(run.checkpoint(2))
    return Stages(prepared, *paths, *starts)


def argv_of(settings: Mapping[str, Any]) -> list[str]:
    """Settings as flags, which neither .env nor the environment overrides."""
    return [f"--{name.lower().replace('_', '-')}={value}" for name, value in settings.items()]


class TinyRun:
    """The settings of a tiny run, and its folder; it can be started several times."""

    def __init__(self, prepared: Prepared, output_dir: Path, **settings):
        self.output_dir = output_dir
        self.settings = prepared.settings() | {"OUTPUT_DIR": output_dir} | settings

    @property
    def folder(self) -> Path:
        return self.output_dir / str(self.settings["RUN_NAME"])

    def argv(self, **changes) -> list[str]:
        return argv_of(self.settings | changes)

    def train(self, **changes) -> int:
        """Train in this process; returns the exit code."""
        try:
            return train.main(self.argv(**changes))
        except SystemExit as exit:
            return exit.code

    def trained(self) -> "TinyRun":
        """The run, which trains to its end."""
        assert (code := self.train()) == 0, f"exit code {code}"
        return self

    def start(self, world_size: int = 1, plant: Optional[Callable[[], Any]] = None, env: Optional[Mapping[str, str]] = None,
              **changes) -> "Job":
        """Train in new processes, each of which calls `plant` first."""
        return start(main_with, self.argv(**changes), plant, world_size=world_size, folder=self.output_dir / "outputs", env=env)

    def ends(self, codes: list[int], plant: Optional[Callable[[], Any]] = None, timeout: float = PATIENCE,
             env: Optional[Mapping[str, str]] = None, **changes) -> str:
        """Train in a new process for each of these exit codes, which must be those that they end with; returns their output."""
        job = self.start(len(codes), plant, env, **changes)
        found = job.wait(timeout)
        assert found == codes, f"exit codes {found}\n{job.text()}"
        return job.text()

    def copy(self, folder: Path, **changes) -> "TinyRun":
        """Copy all files into a new output folder; returns the run there."""
        copy = TinyRun.__new__(TinyRun)
        copy.output_dir = Path(shutil.copytree(self.output_dir, folder))
        copy.settings = self.settings | {"OUTPUT_DIR": folder} | changes
        return copy

    def lines(self, log: str) -> list[dict]:
        """The lines of one of the logs of JSON lines: metrics, ledger or samples."""
        path = self.folder / f"{log}.jsonl"
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []

    def metrics(self) -> list[dict]:
        """The lines of metrics.jsonl; docs/files.md describes each of their names."""
        rows = re.findall(r"^\| (`.*?`) \|", FILES_PAGE.read_text(encoding="utf-8").partition("\n## Metrics\n")[2], re.MULTILINE)
        lines, known = self.lines("metrics"), re.findall(r"`([\w*]+)`", " ".join(rows).replace("NAME", "*"))
        for name in {name.removeprefix("val_") for line in lines for name in line}:
            assert any(fnmatch(name, pattern.removeprefix("val_")) for pattern in known), f"docs/files.md lacks {name}"
        return lines

    def column(self, name: str) -> dict[int, Any]:
        return {line["step"]: line[name] for line in self.metrics() if name in line}

    def steps_saved(self) -> list[int]:
        return sorted(int(path.name.removeprefix("step-")) for path in (self.folder / "checkpoints").glob("step-*"))

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step-{step:08d}"

    def hashes(self, step: int) -> dict[str, str]:
        """The SHA-256 of the weights or adapters, and of the optimizer state."""
        found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in self.checkpoint(step).glob("*.safetensors")}
        assert "optimizer.safetensors" in found and len(found) == 2, found
        return found


def without_clocks(metrics: list[dict]) -> list[dict]:
    """The lines without the values that differ between two equal runs."""
    return [{name: value for name, value in line.items() if not CLOCKS.fullmatch(name)} for line in metrics]


def assert_same_run(run: TinyRun, other: TinyRun, step: int, logs: Sequence[str] = ("metrics", "ledger", "samples", "evaluations", "rollouts")) -> None:
    """Assert that two runs are the same: the checkpoint after `step` bit for bit, and their logs apart from clocks.

    Args:
        logs: the logs to compare; fewer if one of the runs began later, or in another folder.
    """
    for log in logs:
        assert without_clocks(run.lines(log)) == without_clocks(other.lines(log)), log
    assert run.hashes(step) == other.hashes(step)


def contents(folder: Path) -> dict[str, tuple[int, Optional[bytes]]]:
    """Every path in a folder with the time of its last change and, of a file, its content; the run's lock left out."""
    return {str(path.relative_to(folder)): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
            for path in sorted(folder.rglob("*")) if path.name != run_folder.LOCK}


def rules_of_policy(policy: str, page: str) -> dict[str, str]:
    """The rules of a Content-Security-Policy, without those of scripts and styles, which must allow the page's own and nothing else."""
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    for rule, tag in (("script-src", "script"), ("style-src", "style")):
        inline = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in inline]
        assert rules.pop(rule).split() == hashes
    return rules


def flip_bit(path: Path, position: int = -1) -> None:
    """Damage a file: change one bit of the byte at a position; by default of the one in the middle."""
    content = bytearray(path.read_bytes())
    content[position if position >= 0 else len(content) // 2] ^= 1
    path.write_bytes(content)


def rehash(checkpoint: Path, state: Optional[dict] = None, manifest: Optional[dict] = None) -> None:
    """Write another trainer state or manifest into a checkpoint, with matching hashes."""
    manifest = store.read_manifest(checkpoint) if manifest is None else manifest
    if state is not None:
        content = json.dumps(state).encode()
        (checkpoint / store.STATE).write_bytes(content)
        if isinstance(files := manifest.get("files"), dict) and isinstance(files.get(store.STATE), dict):
            files[store.STATE] |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / store.MANIFEST).write_bytes(store.manifest_bytes({name: manifest[name] for name in manifest if name != "sha256"}))


def ways_out(error: str) -> list[str]:
    """The remedies that the last line of an error offers, one by one."""
    return error.strip().splitlines()[-1].rpartition(". ")[2].split("; or ")


def settings_of(way: str) -> dict[str, str]:
    """The settings that a remedy says to set."""
    found = {name: value for name, value in re.findall(r"\b([A-Z_]+)=([^\s,;]+)", way)}
    flags = re.findall(r"--([a-z-]+)(?: (?!--)([^\s,;]+))?", way)
    found |= {flag.replace("-", "_").upper(): value or "true" for flag, value in flags}
    return found | ({"RUN_NAME": "another"} if "RUN_NAME" in way or "run-name" in way else {})


def cached_on_the_hub(model: Path, name: str, cache: Path, monkeypatch) -> Path:
    """Put a model folder into a cache of the hub as huggingface_hub does; returns its place. The hub cannot be reached."""
    import huggingface_hub.constants as constants

    repository, commit = cache / f"models--{name.replace('/', '--')}", hashlib.sha1(name.encode()).hexdigest()
    for folder in ("refs", "blobs", f"snapshots/{commit}"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    for file in model.iterdir():
        if file.name not in ("MANIFEST.json", "trainer_state.json", "optimizer.safetensors"):
            shutil.copy(file, repository / "blobs")
            (repository / "snapshots" / commit / file.name).symlink_to(f"../../blobs/{file.name}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return repository / "snapshots" / commit


def tokenizer_of_pairs() -> Tokenizer:
    """The bytes and 44 pairs of frequent letters, with 256 control tokens: 556 ids."""
    pairs = [bytes([a, b]) for a in b"etaoinsh" for b in b"etaoinsh"][:44]
    return Tokenizer({token: rank for rank, token in enumerate([bytes([i]) for i in range(256)] + pairs)})


def new_model(config: ModelConfig, vocab_size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Transformer:
    model = Transformer(config, vocab_size, dtype)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def in_transformers(model: Transformer, **settings):
    """The same model in transformers."""
    import pytest

    transformers = pytest.importorskip("transformers", reason="the oracle of these tests: pip install -r requirements-dev.txt")
    described = model_json.huggingface_config(model.config, model.vocab_size, 256, 1, 2, torch.float32)
    described = transformers.CONFIG_MAPPING[described["model_type"]](**described, **settings)
    theirs = transformers.AutoModelForCausalLM.from_config(described).eval()
    tensors = read_all(huggingface.to_huggingface(model.state_dict(), model.config, model.vocab_size))
    theirs.load_state_dict(tensors, strict=not model.config.tie_embeddings)
    theirs.tie_weights()
    return theirs


def uneven_batches(rows_per_micro_batch: int) -> list[Batch]:
    """Eight rows with 0 to 28 targets each, split into micro-batches."""
    generator = torch.Generator().manual_seed(0)
    tokens_BT, targets_BT = torch.randint(0, 512, (2, 8, 32), generator=generator)
    for row in range(8):
        targets_BT[row, 4 * row:] = IGNORE_INDEX
    whole = Batch(tokens_BT, targets_BT)
    return [Batch(whole.tokens_BT[first:first + rows_per_micro_batch], whole.targets_BT[first:first + rows_per_micro_batch])
            for first in range(0, 8, rows_per_micro_batch)]


def a_step(batches: list[Batch], scaler=None, plant=lambda model: None, ranks: Ranks = Ranks(),
           choose=lambda config: NextToken(), recent_losses=(), exponent: int = 0, **settings):
    """Take one step with a new tiny model; returns the result, the gradients and the model.

    Args:
        plant: is called with the model before the step.
        choose: makes the objective from the settings.
        recent_losses: losses of earlier steps.
        exponent: of the gradients' scale, with REPRODUCIBLE.
    """
    config = Config(**{name.lower(): value for name, value in (TINY | settings).items()})
    model = new_model(config, 512, seed=1)
    plant(model)
    run = SimpleNamespace(config=config, ranks=ranks, model=model, optimizer=Optimizer(model, config, ranks), scaler=scaler,
                          objective=choose(config), progress=Progress(0, recent_losses=[*recent_losses], gradient_exponent=exponent), has_written=False,
                          extensions=(), measures=(), phase=lambda name: contextlib.nullcontext(),
                          run_folder=SimpleNamespace(is_lost=False), context=SimpleNamespace(signals=SimpleNamespace(received=None)))
    reducer = make_reducer(model, ranks, config, run.optimizer)
    count = sum(int(run.objective.count(batch)) for batch in batches)
    result = train.take_step(run, reducer, batches, count, 0.01)
    return result, {name: parameter.grad for name, parameter in model.named_parameters()}, model


def furthest(gradients: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """The largest difference between gradients, relative to the largest gradient."""
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    return max(float((gradients[name] - others[name]).abs().max()) for name in gradients) / largest


def tiny_model_folder(folder: Path, tokenizer, silenced: Sequence[int] = (), context: int = 256) -> Path:
    """Save a model with random weights at a scale that makes greedy choices clear; it never writes the silenced ids."""
    config = ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, multiple_of=16, init_std=0.3)
    model = Transformer(config, tokenizer.vocab_size)
    model.init_weights(torch.Generator().manual_seed(2))
    with torch.no_grad():
        model.tok_embeddings.weight[[*silenced]] = 0
    huggingface.save_model_folder(folder, model.state_dict(), config, tokenizer, context)
    return folder


def model_without_weights(folder: Path, context: int = 2048, **shape) -> Path:
    """Write a model folder as a plan reads it: config.json alone. Its width leaves the recipes' rates unchanged."""
    config = ModelConfig(**{"dim": 2048, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2} | shape)
    folder.mkdir(parents=True, exist_ok=True)
    model_json.write_json(folder / "config.json", model_json.huggingface_config(config, 256, context, 1, 2, "float32"))
    return folder


def checkpoint_without_weights(run_dir: Path, step: int, progress: Mapping[str, Any] = {}, **settings) -> Path:
    """Write a checkpoint with a manifest as a plan reads it: the state of a run with these settings, and config.json."""
    config = Config(**{name.lower(): value for name, value in settings.items()})

    def write(folder: Path) -> None:
        if config.lora_enabled:
            model_json.write_json(folder / model_json.ADAPTERS, {"r": config.lora_rank, "base_model_name_or_path": "base"})
        else:
            model_json.write_json(folder / "config.json", model_json.huggingface_config(config, 256, config.max_seq_len, 1, 2, "float32"))
        state = {"progress": {"step": step, **progress}, "identity": {}, "world_size": 1, "settings": config.public()}
        model_json.write_json(folder / store.STATE, state)

    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    store.publish(folder, write, {"step": step})
    return folder


def save_adapter_folder(folder: Path, adapter: peft.Adapter, model_config: ModelConfig, tokenizer) -> None:
    peft.save_settings(folder, adapter, model_config, tokenizer)
    tensors = peft.to_peft(adapter.state, model_config, tokenizer.vocab_size)
    write_files(folder, {peft.WEIGHTS_FILE: TensorFile(tensors, {"format": "pt"}, model_config.head_dim)})


def is_rank(rank: int) -> bool:
    return os.environ.get("RANK", "0") == str(rank)


def wait_until(reached: Callable[[], Any], describe: Callable[[], Any] = lambda: "it does not happen", timeout: float = PATIENCE) -> None:
    """Wait for something that must happen; `describe` says what there is instead."""
    deadline = time.monotonic() + timeout
    while not reached():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.01)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Job:
    """Ranks that run as separate processes, each with its output in a file."""

    def __init__(self, processes: list, outputs: list[Path]):
        self.processes, self.outputs = processes, outputs

    def wait(self, timeout: float = PATIENCE) -> list[int]:
        """Wait for all ranks; returns their exit codes. A rank that hangs is killed, and fails the test."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hanging = [process for process in self.processes if process.is_alive()]
        for process in hanging:
            process.kill()
            process.join()
        assert not hanging, f"{len(hanging)} of {len(self.processes)} ranks hang:\n{self.text()}"
        return [process.exitcode for process in self.processes]

    def wait_for(self, words: str, timeout: float = PATIENCE) -> None:
        """Wait until a rank has printed these words."""
        deadline = time.monotonic() + timeout
        while words not in self.text():
            assert time.monotonic() < deadline and any(process.is_alive() for process in self.processes), self.text()
            time.sleep(0.02)

    def text(self) -> str:
        return "".join(path.read_text(errors="replace") for path in self.outputs if path.exists())


def warm():
    """The context of processes that are forked from a server that has imported torch, so that a start takes milliseconds.

    On a machine with a GPU they are spawned: a process that is forked after CUDA was queried cannot use it.
    """
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(["pytest", "warm_up"])
    return context


def start(function: Callable, *arguments, world_size: int = 1, folder: Path, env: Optional[Mapping[str, str]] = None) -> Job:
    """Call a module-level function on each rank, in new processes with the environment variables that torchrun sets."""
    context = warm()
    folder.mkdir(parents=True, exist_ok=True)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size),
             "LOCAL_WORLD_SIZE": str(world_size)}
    processes, outputs = [], []
    for rank in range(world_size):
        own = {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)} if world_size > 1 else {}
        outputs.append(folder / f"output-{rank}-{time.monotonic_ns()}.txt")
        processes.append(context.Process(target=call_as_rank, args=(function, arguments, {**own, **(env or {})}, outputs[-1])))
    for process in processes:
        process.start()
    return Job(processes, outputs)


def call_as_rank(function: Callable, arguments: tuple, env: Mapping[str, str], output: Path) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
    # The server may have been started with the streams of another test.
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
    os.environ.update(env)
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))  # the server has read it at its own start
    sys.exit(function(*arguments))


def run_ranks(function: Callable, *arguments, world_size: int, folder: Path, env: Optional[Mapping[str, str]] = None) -> str:
    """Call a function on each rank; returns their output, or fails with it if a rank fails."""
    job = start(function, *arguments, world_size=world_size, folder=folder, env=env)
    codes = job.wait()
    assert codes == [0] * world_size, f"exit codes {codes}\n{job.text()}"
    return job.text()


def planned(argv: list[str]) -> tuple[Any, Callable]:
    """The arguments of run.build.open_run for a command line."""
    return plan_on_rank0(argv, ""), partial(make_plan, argv, None)


def main_with(argv: list[str], prepare_rank: Optional[Callable[[], Any]] = None) -> int:
    """Call train.main, after a function that may plant a fault."""
    if prepare_rank is not None:
        prepare_rank()
    return train.main(argv)


def do_in_step(step: int, action: Callable[[], Any], module=train) -> None:
    """Call `action` in the middle of a step, counted from 1, in this process from now on."""
    original = module.learning_rate

    def learning_rate(finished: int, config) -> float:
        if finished == step - 1:
            action()
        return original(finished, config)

    module.learning_rate = learning_rate


@contextlib.contextmanager
def at_step(step: int, action: Callable[[], Any]):
    """A `with` block in which `do_in_step` holds."""
    original = train.learning_rate
    do_in_step(step, action)
    try:
        yield
    finally:
        train.learning_rate = original


def stop_at(step: int, number: signal.Signals = signal.SIGTERM):
    """A `with` block in which this process gets a signal in the middle of a step, counted from 1."""
    return at_step(step, lambda: os.kill(os.getpid(), number))


def spike_in(*steps: int) -> None:
    """Add a constant to the loss of some steps in this process; the gradient stays the same."""
    original = NextToken.loss_sum

    def loss_sum(self, model, batch):
        summed = original(self, model, batch)
        return summed._replace(total=summed.total + 20.0 * self.count(batch) * (train.ACTIVITY.step in steps))

    NextToken.loss_sum = loss_sum


def drift(rank: int, name: str) -> None:
    """In that rank: change one number of a weight, or of the optimizer's state, to the next float, after step 3."""
    if os.environ["RANK"] != str(rank):
        return
    original = train.log_step

    def log_step(run, result):
        if run.progress.step == 2:
            rows = local_rows({**dict(run.model.named_parameters()), **run.optimizer.state_tensors()}[name]).detach()
            rows.view(-1)[5] = torch.nextafter(rows.view(-1)[5], torch.tensor(math.inf))
        original(run, result)

    train.log_step = log_step
