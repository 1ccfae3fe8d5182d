"""Compare the data and the runs of a reference commit with those of this working tree, bit by bit.

    python tests/system/golden.py                    all cases
    python tests/system/golden.py --only sft data    the cases whose names contain one of these words

Both versions get the same sources and commands on the CPU, in folders with the same relative paths. The
reference's results are the expected ones. The working tree must reproduce them from the start, when it
continues the reference's runs from their middle, and when it is killed and restarted. Only commands and
files are used; no module of the project is imported, so the modules may move.

A difference is allowed only if it is in INTENDED, with its reason. The exit code is 0 if nothing else
differs, 1 if something does, 2 if the reference is missing or fails. The working tree's output is kept if
something differs. With --cache, the reference's output is kept too and used again.
"""

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = "f73f0bd8"
# (regular expression for "case: fact", reason): what is meant to differ from the reference.
INTENDED: list[tuple[str, str]] = [
    (r"^data: (chats|pairs|prompts|unpaired)\b", "EXAMPLES_VERSION is 6, which is part of the key"),
    (r"distill.*: .*trainer_state.json", "the teacher's weights belong to the identity of a run"),
    (r"^(dpo|kto).*: stored outputs", "the note on a stored reference has the identity of its configuration"),
    (r": console", "results for people have three decimals, and shares one"),
    (r": samples.jsonl", "before the first step, the base answers; three prompts are answered instead of two")]
# Names of settings and state that the reference does not record, or with another default.
NEW_SETTINGS: list[str] = ["VALIDATION_DATA_PATH", "memory_forecast_gib", "DROPOUT", "LEARNING_RATE_FACTORS", "val_items",
                           "first_val_loss", "EXTENSIONS"]
STEPS, MIDDLE = 6, 3
# Metrics that differ between two equal runs.
CLOCKS = re.compile(r"time|tokens_per_second|.*_seconds|(slow|fast)est_rank|peak_memory_bytes|[mh]fu|power_.*|"
                    r"joules_.*|gpu_.*")
# The warm-up is longer than MIDDLE, so that continued runs depend on it too.
TINY = {"DIM": 32, "N_LAYERS": 2, "N_HEADS": 4, "N_KV_HEADS": 2, "MULTIPLE_OF": 16, "MAX_SEQ_LEN": 96,
        "MICRO_BATCH_SIZE": 2, "TOTAL_BATCH_SIZE": 768, "MAX_STEPS": STEPS, "LEARNING_RATE": 0.01,
        "WARMUP_STEPS": 4, "DEVICE": "cpu", "PRECISION": "fp32", "COMPILE": "false", "LOG_EVERY": 1,
        "VALIDATE_EVERY": 2, "VALIDATION_ROWS": 5, "HELLASWAG_EVERY": 3,
        "SAMPLE_EVERY": 3, "SAMPLE_TOKENS": 4, "SAVE_EVERY": MIDDLE, "KEEP_LAST": 0, "RUN_NAME": "run",
        "REPORT": "false", "TOKENIZER_PATH": "tokenizer.model",
        "HELLASWAG_PATH": "items.jsonl"}
BASE, TEACHER = (f"runs/{name}/run/checkpoints/step-{STEPS:08d}" for name in ("pretrain", "muon"))
SFT = {"TRAINING_STAGE": "sft", "PRETRAIN_CHECKPOINT": BASE}
DPO = {"TRAINING_STAGE": "dpo", "PRETRAIN_CHECKPOINT": BASE}
LORA = {"LORA_ENABLED": "true", "LORA_RANK": 4}  # the masks of LORA_DROPOUT are hashes now, not draws
DISTILLATION = {"DISTILLATION_ENABLED": "true", "TEACHER_MODEL": TEACHER}
GRPO = {"TRAINING_STAGE": "grpo", "PRETRAIN_CHECKPOINT": BASE, "GRPO_GROUP": 2, "GRPO_MAX_TOKENS": 8, "REWARD": "length*0.1,contains"}
# The other runs start from these two.
FIRST_RUNS = {"pretrain": {}, "muon": {"OPTIMIZER": "muon", "SEED": 2}}
RUNS = {"pretrain-2-ranks": {}, "pretrain-2-ranks-full": {"SHARDING": "full"},
        "muon-2-ranks-full": {"OPTIMIZER": "muon", "SHARDING": "full"}, "pretrain-mixture": {},
        "sft": SFT, "sft-lora": SFT | LORA, "sft-lora-2-ranks-full": SFT | LORA | {"SHARDING": "full"},
        "dpo-stored": DPO | {"DPO_REFERENCE": "stored"},
        "dpo-live": DPO | {"DPO_REFERENCE": "live"}, "dpo-lora-live": DPO | LORA | {"DPO_REFERENCE": "live"},
        "orpo": DPO | {"PREFERENCE_OBJECTIVE": "orpo"}, "simpo": DPO | {"PREFERENCE_OBJECTIVE": "simpo"},
        "distill-live": DISTILLATION,
        "distill-sft-live": SFT | DISTILLATION,
        "grpo-2-updates": GRPO | {"GRPO_UPDATES": 2, "GRPO_BETA": 0.1},
        "kto-unpaired": DPO | {"PREFERENCE_OBJECTIVE": "kto", "KTO_UNDESIRABLE_WEIGHT": 2.0},
        "distill-on-policy": GRPO | DISTILLATION | {"DISTILLATION_LAMBDA": 0.5, "GRPO_GROUP": 1},
        "sft-lora-2-ranks-reproducible": SFT | LORA | {"REPRODUCIBLE": "true"}, "pretrain-bf16": {"PRECISION": "bf16"},
        "pretrain-2-ranks-full-offload": {"SHARDING": "full", "CPU_OFFLOAD": "true"}, "pretrain-2-ranks-async": {"ASYNC_SAVE": "true"}}
KILLED = ("pretrain", "muon-2-ranks-full", "pretrain-mixture", "sft-lora", "dpo-stored", "grpo-2-updates")
# Each kind of prepared data: its script, its source, and the setting that names the prepared folder.
KINDS = {"text": ("load_pretrain_dataset.py", "--source=text.jsonl", "PRETRAIN_DATA_PATH"),
         "chats": ("load_instruct_dataset.py", "--source=chats.jsonl", "SFT_DATA_PATH"),
         "pairs": ("load_dpo_dataset.py", "--source=pairs.jsonl", "DPO_DATA_PATH"),
         "prompts": ("load_prompts_dataset.py", "--source=prompts.jsonl", "GRPO_DATA_PATH"),
         "mixture": ("load_pretrain_dataset.py", "--mix=mix.json", "PRETRAIN_DATA_PATH"),
         "unpaired": ("load_dpo_dataset.py", "--source=unpaired.jsonl", "DPO_DATA_PATH")}
ONLY_BY_NAME = ("mixture", "unpaired")  # for cases whose names contain this; the others use the other kinds
# Python runs this file first. With it, a thread that saves is slower than the steps that are taken meanwhile.
SLOW_DISK = """import builtins, threading, time
original = open

def slow(path, mode="r", *arguments, **named):
    if mode in ("wb", "r+b") and threading.current_thread() is not threading.main_thread():
        time.sleep(0.02)
    return original(path, mode, *arguments, **named)

builtins.open = slow
"""
Facts = dict[str, Any]


class ReferenceFailed(Exception):
    """The reference is missing or fails, so there is nothing to compare with."""


class Side(NamedTuple):
    """A version of the code, and the folder in which its commands run, without .env."""

    tree: Path
    folder: Path
    folders: str  # regular expression for the folders of all versions

    def start(self, script: str, *arguments: Any, slow_disk: bool = False, **options: Any) -> subprocess.Popen:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        env |= {"PYTHONPATH": str(self.folder / "slow-disk")} if slow_disk else {}
        command = [str(part) for part in (sys.executable, self.tree / script, *arguments)]
        return subprocess.Popen(command, cwd=self.folder, env=env, text=True, errors="replace",
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                **options)

    def run(self, script: str, *arguments: Any, **options: Any) -> tuple[int, str]:
        process = self.start(script, *arguments, **options)
        output = process.communicate()[0]
        return process.returncode, self.without_paths(output)

    def train(self, case: str, **changes: Any) -> tuple[int, str]:
        return self.run(*training_command(self.folder, case, **changes), slow_disk="async" in case)

    def without_paths(self, text: str) -> str:
        return re.sub(self.folders, "<folder>", text.replace(str(self.tree), "<tree>"))

    def read(self, path: Path) -> Optional[str]:
        """Return the text of a file, without paths that differ; None if there is no such file."""
        if not path.exists():
            return None
        text = path.read_text()
        for name in NEW_SETTINGS:
            text = re.sub(rf'\s*"{name}": ("[\w,]*"|null|[\d.]+|true|false),', "", text)
        if path.name != "ledger.jsonl":  # evaluations differ in the last bits
            text = re.sub(r"\d+\.\d{7,}", lambda number: f"{float(number[0]):.6g}", text)
        return self.without_paths(text)


def training_command(folder: Path, case: str, **changes: Any) -> list[str]:
    """Return a script and its flags, which no environment variable can change."""
    settings = {**TINY, **(FIRST_RUNS | RUNS).get(case, {}), "OUTPUT_DIR": f"runs/{case}", "CACHE_DIR": f"cache/{case}"}
    for kind, (_, _, setting) in KINDS.items():
        if kind not in ONLY_BY_NAME or kind in case:
            settings[setting] = (folder / f"{kind}.prepared").read_text()
    flags = [f"--{name.lower().replace('_', '-')}={value}" for name, value in (settings | changes).items()]
    return [*(["scripts/launch.py", "--nproc-per-node=2"] if "2-ranks" in case else ["train.py"]), *flags]


def files_of(folder: Path, fact: Callable[[Path], Any]) -> Facts:
    """Return a fact about each file below a folder, except locks and notes, whose names begin with a dot."""
    return {str(path.relative_to(folder)): fact(path) for path in sorted(folder.rglob("*"))
            if path.is_file() and not path.name.startswith(".")}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --------------------------------------------------------------------------------------- the data


def write_sources(folder: Path) -> None:
    """Write small jsonl files: texts, chats of one to three turns, preference pairs, and HellaSwag items."""
    rng = random.Random(0)

    def words(at_most: int) -> str:
        return " ".join(rng.choices("cat dog bird fox hen cow saw met fed lost found drew".split(),
                                    k=rng.randint(1, at_most)))

    def chat() -> list[dict]:
        return [{"role": role, "content": words(3)} for _ in range(rng.randint(1, 3))
                for role in ("user", "assistant")]

    records = {"text": [{"text": f"the {words(12)}. a {words(12)}."} for _ in range(200)],
               "chats": [{"messages": chat()} for _ in range(150)],
               "pairs": [{"prompt": words(2), "chosen": words(1), "rejected": "ox" * rng.randint(1, 15)}
                         for _ in range(150)],
               "prompts": [{"prompt": words(2), "answer": rng.choice("ado")} for _ in range(80)],
               "unpaired": [{"prompt": words(2), "completion": words(3), "label": rng.random() < 0.6} for _ in range(150)],
               "items": [{"ind": number, "activity_label": "Farm", "ctx": words(4), "label": rng.randrange(4),
                          "endings": [words(3) for _ in range(4)]} for number in range(8)],
               "long": [{"text": f"the {words(40)}. {number}."} for number in range(15_000)]}
    for name, lines in records.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "slow-disk").mkdir()
    (folder / "slow-disk" / "sitecustomize.py").write_text(SLOW_DISK)
    (folder / "mix.json").write_text(json.dumps({
        "sources": [{"path": "text.jsonl", "label": "a"}, {"path": "long.jsonl", "label": "b"}],
        "phases": [{"until": 0.5, "weights": {"a": 3, "b": 1}}, {"until": 1, "weights": {"a": 1, "b": 1}}]}))


def prepare_flags(kind: str, workers: int = 1, shard_tokens: int = 2000) -> list[str]:
    script, source, _ = KINDS[kind]
    return [f"scripts/{script}", source, f"--output=data/{kind}", f"--preparation-workers={workers}",
            "--tokenizer-path=tokenizer.model", "--validation-fraction=0.15",
            f"--shard-tokens={20_000 if kind == 'mixture' else shard_tokens}"]


def prepare(side: Side, kind: str, **options: Any) -> Facts:
    """Prepare a kind of data; returns the files of the prepared set, and of the sets that it is mixed from."""
    setting = KINDS[kind][2]
    code, output = side.run(*prepare_flags(kind, **options))
    named = re.search(rf"^{setting}=(.+)$", output, re.MULTILINE)
    if code or not named:
        return {"failed": f"exit code {code}: {output}"}
    # A link with the name of its source may name it.
    folder = str((side.folder / named[1]).resolve().relative_to(side.folder.resolve()))
    for link in (side.folder / "data" / kind).iterdir():
        if link.is_symlink():
            link.unlink()
    (side.folder / f"{kind}.prepared").write_text(folder)
    files = files_of(side.folder / "data" / kind, lambda path: path.name == "manifest.json" or sha256(path))
    manifest = json.loads(side.read(side.folder / folder / "manifest.json") or "{}")
    manifest.pop("source", None)  # in words; what decides the tokens names the folder
    manifest.pop("rules", None)  # of splits: with texts in lower case and this fraction, both versions agree
    return {"folder": folder, "files": files, "manifest": json.dumps(manifest)}


def new_folder(side: Side, name: str) -> Side:
    """Return the same version with another folder, which has the same sources."""
    folder = side.folder.parent / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_sources(folder)
    if (side.folder / "tokenizer.model").exists():
        shutil.copy(side.folder / "tokenizer.model", folder)
    return side._replace(folder=folder)


def data_facts(side: Side) -> Facts:
    code, output = side.run("scripts/train_tokenizer.py", "--vocab-size=280", "--output=tokenizer.model", "text.jsonl")
    facts = {"tokenizer": sha256(side.folder / "tokenizer.model") if code == 0 else {"failed": output}}
    return facts | {kind: prepare(side, kind) for kind in KINDS}


def prepare_in_other_ways(new: Side, old: Side) -> Iterator[tuple[str, Facts]]:
    """Prepare with two workers, after a kill, and on top of the reference's sets, which are left untouched."""
    workers = new_folder(new, "workers")
    for kind in KINDS:
        yield f"{kind}, 2 workers", prepare(workers, kind, workers=2)
    killed = new_folder(new, "interrupted")
    for kind in ("mixture", "text"):  # the mixture's second source is long enough to be killed in it
        process = killed.start(*prepare_flags(kind), start_new_session=True)
        while process.poll() is None and len([*killed.folder.glob("data/*/train-*")]) < (20 if kind == "mixture" else 1):
            time.sleep(0.001)
        with suppress(ProcessLookupError):  # it was faster
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        yield f"{kind}, killed", prepare(killed, kind)
    recognised = new_folder(new, "recognised")
    shutil.rmtree(recognised.folder)
    shutil.copytree(old.folder, recognised.folder, ignore=shutil.ignore_patterns("runs", "cache"))
    for kind in KINDS:
        shards = {path: path.stat().st_mtime_ns for path in recognised.folder.glob(f"data/{kind}/*/*.bin")}
        facts = prepare(recognised, kind)
        if {path: path.stat().st_mtime_ns for path in recognised.folder.glob(f"data/{kind}/*/*.bin")} != shards:
            facts["files"] = "shards were written again"
        yield f"{kind}, prepared by the reference", facts


# --------------------------------------------------------------------------------------- the runs


def checkpoint_facts(side: Side, checkpoint: Path) -> Facts:
    """Return the contents of a checkpoint: text where it is text, else SHA-256."""
    facts: Facts = files_of(checkpoint, lambda path: sha256(path) if path.suffix == ".safetensors" else side.read(path))
    state = json.loads(facts.pop("trainer_state.json", None) or "{}")
    if state:
        state["progress"]["wandb_run_id"] = None  # is random
    manifest = json.loads(facts.pop("MANIFEST.json", None) or "{}")
    for entry in ("sha256", "paddock"):
        manifest.pop(entry, None)
    # Paths in the files differ, and so do their hashes. Those of tensors have a test of their own.
    for name, entry in manifest.get("files", {}).items():
        hashed = "tree" in entry or entry["sha256"] == sha256(checkpoint / name)
        manifest["files"][name] = hashed and entry["size"] == (checkpoint / name).stat().st_size
    card = re.sub(r"version: .*|[0-9a-f]{40}", "", (facts.pop("README.md", None) or "").partition("\n---\n")[0])
    return {**facts, "trainer_state.json": json.dumps(state), "MANIFEST.json": json.dumps(manifest), "card": card}


def run_facts(side: Side, case: str, code: int, output: str) -> Facts:
    """Return everything of a finished run that must be the same; missing files give empty values."""
    run = side.folder / "runs" / case / "run"

    def lines(name: str) -> list[dict]:
        return [json.loads(line) for line in (side.read(run / name) or "").splitlines()]

    facts: Facts = {"exit code": code, "error": output[-300:] if code else "", "ledger.jsonl": side.read(run / "ledger.jsonl")}
    for checkpoint in sorted(run.glob("checkpoints/step-*")):
        facts |= {f"{checkpoint.name}/{name}": fact for name, fact in checkpoint_facts(side, checkpoint).items()}
    facts["metrics"] = [{key: value for key, value in line.items() if not CLOCKS.fullmatch(key)}
                        for line in lines("metrics.jsonl")]
    for name in ("samples.jsonl", "evaluations.jsonl", "rollouts.jsonl", "config.json", "data.json"):
        facts[name] = side.read(run / name)
    facts["stored outputs"] = files_of(side.folder / "cache" / case, sha256)
    # What a continued run writes differently (ONLY_FROM_THE_START).
    # When a thread has written a checkpoint depends on the disk.
    facts["keys of metrics"] = [[key for key in line if key != "save_seconds"] for line in lines("metrics.jsonl")]
    facts["console"] = re.findall(r"(?:Step|Validation|HellaSwag) \[\d+/\d+\].*?(?= \| Tok/s|\n)", output)
    facts["names of files"] = [name for name in files_of(run, sha256) if not name.startswith("profile")]
    return facts


ONLY_FROM_THE_START = ("keys of metrics", "console", "names of files", "config.json")


def train_case(side: Side, case: str) -> Facts:
    shutil.rmtree(side.folder / "runs" / case, ignore_errors=True)
    return run_facts(side, case, *side.train(case))


def continued(new: Side, old: Side, case: str) -> Facts:
    """Continue a copy of the reference's run from its middle, as after a kill: the logs go beyond it."""
    side = copied_folder(new, f"continued_{case}", case)
    run, cache = side.folder / "runs" / case / "run", side.folder / "cache" / case
    shutil.copytree(old.folder / "runs" / case / "run", run)
    if (old.folder / "cache" / case).exists():
        shutil.copytree(old.folder / "cache" / case, cache)
    stored = files_of(cache, lambda path: path.stat().st_mtime_ns)
    for checkpoint in (run / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step-")) > MIDDLE:
            shutil.rmtree(checkpoint)
    facts = run_facts(side, case, *side.train(case))
    if files_of(cache, lambda path: path.stat().st_mtime_ns) != stored:
        facts["stored outputs"] = "were computed again"
    return facts


def killed(new: Side, case: str) -> Facts:
    """Kill rank 0 with SIGKILL after the checkpoint in the middle, and start the run again."""
    side = copied_folder(new, f"killed_{case}", case)
    run = side.folder / "runs" / case / "run"
    for _ in range(5):
        process = side.start(*training_command(side.folder, case))
        threading.Thread(target=process.communicate, daemon=True).start()
        while process.poll() is None and not (run / "checkpoints" / f"step-{MIDDLE:08d}").exists():
            time.sleep(0.001)
        holder = re.match(r"process (\d+) ", (run / "run.lock").read_text()) if process.poll() is None else None
        if holder:
            os.kill(int(holder[1]), signal.SIGKILL)
        if process.wait() and not (run / "checkpoints" / f"step-{STEPS:08d}").exists():
            return run_facts(side, case, *side.train(case))
        shutil.rmtree(run.parent, ignore_errors=True)  # it ended before it was killed
    return {"exit code": "the run always ended before it could be killed"}


def copied_folder(new: Side, name: str, case: str) -> Side:
    """Return the new version with a folder that has its data, and the runs that others start from."""
    folder = new.folder.parent / name
    (folder / "runs").mkdir(parents=True)
    for name in ("data", "slow-disk"):
        shutil.copytree(new.folder / name, folder / name)
    for name in ("tokenizer.model", "items.jsonl", *(f"{kind}.prepared" for kind in KINDS)):
        shutil.copy(new.folder / name, folder)
    for name in FIRST_RUNS if case in RUNS else ():
        shutil.copytree(new.folder / "runs" / name, folder / "runs" / name)
    return new._replace(folder=folder)


# ---------------------------------------------------------------------------------------- comparison


class Comparison:
    """The two versions, and what was compared so far."""

    def __init__(self, old: Side, new: Side):
        self.old, self.new = old, new
        self.same, self.differences, self.lock = 0, [], threading.Lock()

    def expected(self, case: str, find: Callable[[Side], Facts]) -> Facts:
        """Return the reference's facts, from its folder if they were found before."""
        path = self.old.folder / "facts" / f"{case}.json"
        if not path.exists():
            facts = find(self.old)
            if facts.get("exit code", 0) != 0 or '"failed"' in json.dumps(facts):
                raise ReferenceFailed(f"{case}: {facts} (in {self.old.folder})")
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(facts))
        return json.loads(path.read_text())

    def compare(self, case: str, old: Facts, new: Facts, begun: float) -> None:
        new = json.loads(json.dumps(new))
        found = []
        failed = [fact for fact in ("failed", "exit code") if old.get(fact) != new.get(fact)]
        for fact in [*failed, "error"] if failed else {**old, **new}:
            one, other = (in_one_order(fact, side.get(fact, "(missing)")) for side in (old, new))
            if json.dumps(one) != json.dumps(other):  # as JSON, so that the order of keys counts
                name = f"{case}: {fact}"
                reason = next((reason for pattern, reason in INTENDED if re.search(pattern, name)), None)
                found.append((name, first_difference(one, other), reason))
        with self.lock:
            self.same += len({**old, **new}) - len(found)
            self.differences += found
            print(f"{time.monotonic() - begun:6.1f} s  {case}: "
                  + (f"{len(found)} of {len({**old, **new})} DIFFER" if found else f"{len(old)} the same"), flush=True)
            for name, where, reason in found[:6]:
                print(f"          {f'intended ({reason})' if reason else 'DIFFERS'}: {name} {where}", flush=True)

    def check(self, case: str, find: Callable[[Side], Facts]) -> Facts:
        begun = time.monotonic()
        old = self.expected(case, find)
        self.compare(case, old, facts_or_failure(lambda: find(self.new)), begun)
        return old

    def check_run(self, case: str) -> None:
        """Compare a run from the start, continued from the reference's middle checkpoint, and killed."""
        old = self.check(case, lambda side: train_case(side, case))
        ways = {"continued": lambda: continued(self.new, self.old, case)}
        if case in KILLED:
            ways["killed"] = lambda: killed(self.new, case)
        for way, find in ways.items():
            begun = time.monotonic()
            facts = [{name: value for name, value in side.items() if name not in ONLY_FROM_THE_START}
                     for side in (old, facts_or_failure(find))]
            self.compare(f"{case}, {way}", *facts, begun)

    def check_data(self, all_ways: bool) -> None:
        old = self.check("data", data_facts)
        if all_ways:
            begun = time.monotonic()
            for what, facts in prepare_in_other_ways(self.new, self.old):
                self.compare(f"data: {what}", old[what.partition(",")[0]], facts, begun)


def facts_or_failure(find: Callable[[], Facts]) -> Facts:
    try:
        return find()
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def in_one_order(fact: str, value: Any) -> Any:
    """Return the settings that a run recorded in one order, which has no meaning, without those of one version only."""
    if not str(value).startswith("{") or fact != "config.json" and not fact.endswith("/trainer_state.json"):
        return value
    content = json.loads(value)
    settings = content.get("settings", content)
    known = {name: settings[name] for name in sorted(settings) if name not in NEW_SETTINGS}
    return json.dumps(content | {"settings": known} if "settings" in content else known)


def first_difference(old: Any, new: Any, where: str = "") -> str:
    if isinstance(old, str) and isinstance(new, str) and "\n" in old + new:
        old, new = old.splitlines(), new.splitlines()
    if isinstance(old, list) and isinstance(new, list):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            one, other = old.get(key, "(missing)"), new.get(key, "(missing)")
            if one != other:
                return first_difference(one, other, f"{where}[{key}]")
        return f"{where} the order differs"
    if isinstance(old, str) and isinstance(new, str):
        same = len(os.path.commonprefix([old, new]))
        old, new = old[max(0, same - 40):], new[max(0, same - 40):]
    return f"{where}\n            reference: {old!r:.300}\n            now:       {new!r:.300}"


# ---------------------------------------------------------------------------------------------- main


@contextmanager
def opened_sides(args: argparse.Namespace) -> Iterator[tuple[Side, Side]]:
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short=12", f"{args.rev}^{{commit}}"], text=True,
                            capture_output=True)
    if commit.returncode:
        raise ReferenceFailed(f"{commit.stderr.strip()}; a shallow clone lacks it: git fetch --unshallow")
    work = Path(tempfile.mkdtemp(prefix="golden-"))
    reference = args.cache.resolve() / commit.stdout.strip() if args.cache else work / "reference"
    folders = rf"(?:{re.escape(str(reference))}|{re.escape(str(work))})/[-\w]+"  # the longer one first
    old = Side(reference / "tree", reference / "old", folders)
    if not (reference / "unpacked").exists():
        shutil.rmtree(reference, ignore_errors=True)
        old.tree.mkdir(parents=True)
        archive = subprocess.run(["git", "-C", str(ROOT), "archive", args.rev], stdout=subprocess.PIPE, check=True)
        subprocess.run(["tar", "-x", "-C", str(old.tree)], input=archive.stdout, check=True)
        new_folder(old, "old")
        (reference / "unpacked").touch()
    # A copy, so that nobody changes the code while it is compared.
    left_out = shutil.ignore_patterns(".*", "__pycache__", "runs", "data")
    tree = shutil.copytree(ROOT, work / "tree", ignore=left_out)
    yield old, new_folder(Side(tree, work / "new", folders), "new")
    shutil.rmtree(work)


def compare_all(comparison: Comparison, only: list[str], jobs: int) -> None:
    """Compare the cases whose names contain one of the words, after what they need."""
    def wanted(name: str) -> bool:
        return not only or any(word in name for word in only)

    comparison.check_data(wanted("data"))
    # The runs of both versions read what the reference has prepared: other rows would hide a change of training.
    old, new = comparison.old.folder, comparison.new.folder
    shutil.rmtree(new / "data")
    shutil.copytree(old / "data", new / "data")
    for path in (old / "tokenizer.model", *old.glob("*.prepared")):
        shutil.copy(path, new)
    cases: dict[str, Callable] = {}
    for name in RUNS:
        if wanted(name):
            cases[name] = lambda name=name: comparison.check_run(name)
    first = [name for name in FIRST_RUNS if wanted(name) or cases]
    stages = [{name: lambda name=name: comparison.check_run(name) for name in first}, cases]
    with ThreadPoolExecutor(jobs) as pool:
        for stage in stages:
            for done in [pool.submit(find) for find in stage.values()]:
                done.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rev", default=REFERENCE, help="the reference commit (default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases whose names contain one of these")
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="keep the reference's output here and use it again")
    parser.add_argument("--jobs", type=int, default=2, help="commands at a time (default: %(default)s)")
    args = parser.parse_args()
    begun = time.monotonic()
    try:
        with opened_sides(args) as (old, new):
            comparison = Comparison(old, new)
            compare_all(comparison, args.only, args.jobs)
            unexpected = [name for name, _, reason in comparison.differences if reason is None]
            print(f"{comparison.same} facts are the same as with {args.rev}, {len(comparison.differences) - len(unexpected)} "
                  f"differ as intended, {len(unexpected)} differ, in {time.monotonic() - begun:.0f} s", *unexpected, sep="\n  ")
            if unexpected:
                print(f"what was written is in {new.folder.parent}")
                return 1
    except ReferenceFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
