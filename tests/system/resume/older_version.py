"""Show that the working tree continues what an older commit wrote (data, runs, checkpoints), bit for bit.

    python tests/system/resume/older_version.py --rev 3f3016b

The older code is unpacked into a temporary folder. Both versions prepare the same data and train the same
tiny runs on the CPU: from the start, and from a copy of the older run that ends at its middle checkpoint.
Only commands and files are used; no module of the project is imported, so the modules may move.

The exit code is 0 if everything is the same, 1 if something differs, 2 if the older version is missing or
fails. The temporary folder is removed only if everything is the same.
"""

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[3]
STEPS, MIDDLE = 6, 3
# What older versions did not write
LATER = ("evaluations.jsonl", "events.jsonl", "report.html", "README.md", "model.safetensors.index.json")
# Metrics that differ between two equal runs.
CLOCKS = re.compile(r"time|tokens_per_second|.*_seconds|peak_memory_bytes|[mh]fu|power_.*|joules_.*|gpu_.*")

# The warm-up is longer than MIDDLE, so that continued runs depend on it too.
TINY = {"DIM": 32, "N_LAYERS": 2, "N_HEADS": 4, "N_KV_HEADS": 2, "MULTIPLE_OF": 16, "MAX_SEQ_LEN": 96,
        "MICRO_BATCH_SIZE": 2, "TOTAL_BATCH_SIZE": 768, "MAX_STEPS": STEPS, "LEARNING_RATE": 0.01,
        "WARMUP_STEPS": 4, "DEVICE": "cpu", "PRECISION": "fp32", "COMPILE": "false", "LOG_EVERY": 1,
        "VALIDATE_EVERY": 2, "VALIDATION_ROWS": 5, "HELLASWAG_EVERY": 3, "HELLASWAG_BATCH_TOKENS": 128,
        "SAMPLE_EVERY": 3, "SAMPLE_TOKENS": 4, "SAVE_EVERY": MIDDLE, "KEEP_LAST": 0, "RUN_NAME": "run"}
SFT = {"TRAINING_STAGE": "sft", "PRETRAIN_CHECKPOINT": "<base>"}
DPO = {"TRAINING_STAGE": "dpo", "PRETRAIN_CHECKPOINT": "<base>"}
DISTILLATION = {"DISTILLATION_ENABLED": "true", "TEACHER_MODEL": "<teacher>"}
# <base> and <teacher> are the last checkpoints of the cases BASE and TEACHER, which are trained first.
BASE, TEACHER = "pretrain, AdamW", "pretrain, Muon"
FIRST_CASES = {BASE: {}, TEACHER: {"OPTIMIZER": "muon", "SEED": 2}, "pretrain, 2 ranks": {}}
CASES = {"SFT": SFT,
         "SFT, LoRA": {**SFT, "LORA_ENABLED": "true", "LORA_RANK": 4, "LORA_DROPOUT": 0.1},
         "DPO, stored reference": {**DPO, "DPO_REFERENCE": "stored"},
         "ORPO": {**DPO, "PREFERENCE_OBJECTIVE": "orpo"},
         "distillation, live teacher": DISTILLATION,
         "distillation, stored teacher": {**DISTILLATION, "DISTILLATION_TOP_K": 8}}
# Each kind of prepared data: its script, and the setting that names the prepared folder.
KINDS = {"text": ("load_pretrain_dataset.py", "PRETRAIN_DATA_PATH"),
         "chats": ("load_instruct_dataset.py", "SFT_DATA_PATH"),
         "pairs": ("load_dpo_dataset.py", "DPO_DATA_PATH")}
COMMANDS = 2 + 3 * len(KINDS) + 4 * len(FIRST_CASES | CASES) + 6  # that are run in all


class OlderVersionError(Exception):
    """The older version is missing or fails, so there is nothing to compare with."""


class Row(NamedTuple):
    """One line of the table; each side has one value, or one from the start and one continued."""

    what: str
    old: tuple
    new: tuple


class Commands:
    """Runs the scripts of both versions, in a folder without .env, and prints the progress."""

    def __init__(self, folder: Path, trees: Mapping[str, Path]):
        self.folder, self.trees = folder, trees
        self.done, self.begun, self.lock = 0, time.monotonic(), threading.Lock()
        self.env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}

    def run(self, version: str, what: str, script: str, *arguments: Any) -> tuple[int, str]:
        """Run a script of the version "old" or "new"; returns the exit code and the output.

        Raises:
            OlderVersionError: the older version's exit code is not 0.
        """
        begun = time.monotonic()
        command = [str(part) for part in (sys.executable, self.trees[version] / script, *arguments)]
        ended = subprocess.run(command, cwd=self.folder, env=self.env, text=True, errors="replace",
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        with self.lock:
            self.done += 1
            left = (time.monotonic() - self.begun) / self.done * (COMMANDS - self.done)
            failed = f", exit code {ended.returncode}" if ended.returncode else ""
            print(f"[{self.done:2}/{COMMANDS}] {version}: {what}: {time.monotonic() - begun:.1f} s{failed}"
                  f" | ETA {left // 60:.0f}:{left % 60:02.0f}", flush=True)
        if ended.returncode and version == "old":
            raise OlderVersionError(f"the older version fails ({what}):\n{ended.stdout[-3000:]}")
        return ended.returncode, ended.stdout


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def modified(path: Path) -> int:
    """Return the time when a file was last written, in nanoseconds."""
    return path.stat().st_mtime_ns


def files_of(folder: Path, fact: Callable[[Path], Any] = sha256) -> dict[str, Any]:
    """Return a fact about each file below a folder, except locks and notes, whose names begin with a dot."""
    return {str(path.relative_to(folder)): fact(path) for path in sorted(folder.rglob("*"))
            if path.is_file() and not path.name.startswith(".")}


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

    records = {"text": [{"text": f"The {words(12)}. A {words(12)}."} for _ in range(200)],
               "chats": [{"messages": chat()} for _ in range(150)],
               "pairs": [{"prompt": words(2), "chosen": words(1), "rejected": "ox" * rng.randint(1, 15)}
                         for _ in range(150)],
               "items": [{"ind": number, "activity_label": "Farm", "ctx": words(4), "label": rng.randrange(4),
                          "endings": [words(3) for _ in range(4)]} for number in range(8)]}
    for name, lines in records.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def compare_data(commands: Commands) -> tuple[dict[str, Any], list[Row]]:
    """Prepare all data with both versions; returns the settings that name the older data, and the rows."""
    folder, rows = commands.folder, []
    tokenizers = {version: folder / f"tokenizer-{version}.model" for version in commands.trees}
    for version, path in tokenizers.items():
        commands.run(version, "train the tokenizer", "scripts/train_tokenizer.py", "--vocab-size=280",
                     f"--output={path}", folder / "text.jsonl")
    rows.append(Row("tokenizer", *((path.exists() and sha256(path),) for path in tokenizers.values())))
    settings = {"TOKENIZER_PATH": tokenizers["old"], "HELLASWAG_PATH": folder / "items.jsonl"}

    def prepare(version: str, kind: str, output: Path, what: str) -> Path:
        """Prepare below `output`; returns the folder that the last line of the script names."""
        script, setting = KINDS[kind]
        flags = [f"--source={folder / kind}.jsonl", f"--output={output}", "--preparation-workers=1",
                 f"--tokenizer-path={tokenizers['old']}", "--validation-fraction=0.1", "--shard-tokens=2000"]
        code, text = commands.run(version, f"{what} {kind}", f"scripts/{script}", *flags)
        named = re.search(rf"^{setting}=(.+)$", text, re.MULTILINE)
        return Path(named[1]) if named and code == 0 else output / f"exit-code-{code}"

    for kind, (_, setting) in KINDS.items():
        old = prepare("old", kind, folder / "data-old", "prepare")
        new = prepare("new", kind, folder / "data-new", "prepare")
        rows.append(Row(f"prepared {kind}: files", *(([path.name, files_of(path)],) for path in (old, new))))
        before = files_of(old, modified)
        again = prepare("new", kind, folder / "data-old", "recognise the older")
        rows.append(Row(f"prepared {kind}: recognised as complete", ([str(old), before],),
                        ([str(again), files_of(old, modified)],)))
        settings[setting] = old
    return settings, rows


# --------------------------------------------------------------------------------------- the runs


def last_checkpoint(commands: Commands, case: str) -> Path:
    """Return the last checkpoint of the run that the older version trained from the start."""
    return commands.folder / "runs" / case / "old" / "run" / "checkpoints" / f"step-{STEPS:08d}"


def facts_of(run: Path, code: int, text: str) -> dict[str, Any]:
    """Return everything of a finished run that must be the same; missing files give empty values."""
    def lines(name: str) -> list[dict]:
        content = (run / name).read_text().splitlines() if (run / name).exists() else []
        return [{key: value for key, value in json.loads(line).items() if not CLOCKS.fullmatch(key)}
                for line in content]

    checkpoint = run / "checkpoints" / f"step-{STEPS:08d}"
    tensors = {path.name: sha256(path) for path in sorted(checkpoint.glob("*.safetensors"))}
    state = checkpoint / "trainer_state.json"
    state = json.loads(state.read_text()) if state.exists() else {}
    # A Weights & Biases run gets a random name.
    progress = {**state.get("progress", {}), "wandb_run_id": None}
    return {"exit code": code, "optimizer": tensors.pop("optimizer.safetensors", None), "weights": tensors,
            "ledger": lines("ledger.jsonl"), "metrics": lines("metrics.jsonl"),
            "samples": lines("samples.jsonl"), "state": [progress, state.get("identity")],
            "names of files": [name for name in files_of(run) if Path(name).name not in LATER],
            "console": re.findall(r"Step \[\d+/\d+\].*?(?= \| Tok/s)", text)}


def compare_runs(commands: Commands, data: Mapping[str, Any], case: str) -> list[Row]:
    """Train with both versions from the start, and continue the older run from its middle with both."""
    folder, facts = commands.folder / "runs" / case, {}
    names = {"<base>": last_checkpoint(commands, BASE), "<teacher>": last_checkpoint(commands, TEACHER)}
    own = {name: names.get(value, value) for name, value in (FIRST_CASES | CASES)[case].items()}
    script = ["scripts/launch.py", "--nproc-per-node=2"] if "2 ranks" in case else ["train.py"]

    def train(version: str, where: str, cache: str) -> None:
        # As flags, which no environment variable can change.
        settings = {**TINY, **data, **own, "OUTPUT_DIR": folder / where, "CACHE_DIR": folder / cache}
        flags = [f"--{name.lower().replace('_', '-')}={value}" for name, value in settings.items()]
        how = f"continued from step {MIDDLE}" if "continued" in where else "from the start"
        code, text = commands.run(version, f"{case}, {how}", *script, *flags)
        (folder / f"{where}.txt").write_text(text)
        facts[where] = facts_of(folder / where / "run", code, text)

    train("old", "old", "cache-old")
    # The copies are as after a kill: the logs have lines of steps after the last checkpoint.
    for version in commands.trees:
        copy = folder / f"{version}-continued" / "run"
        shutil.copytree(folder / "old" / "run", copy)
        for checkpoint in (copy / "checkpoints").iterdir():
            if int(checkpoint.name.removeprefix("step-")) > MIDDLE:
                shutil.rmtree(checkpoint)
    train("old", "old-continued", "cache-old")
    stored = files_of(folder / "cache-old", modified)
    train("new", "new-continued", "cache-old")
    used = files_of(folder / "cache-old", modified)
    train("new", "new", "cache-new")
    known = {key for line in facts["old"]["metrics"] for key in line}  # a newer version may add metrics
    for found in facts.values():
        found["metrics"] = [{key: value for key, value in line.items() if key in known}
                            for line in found["metrics"]]
    rows = [Row(f"{case}: {what}", *((facts[version][what], facts[f"{version}-continued"][what])
                                     for version in commands.trees)) for what in facts["old"]]
    # The outputs of a reference or teacher model, which are computed once.
    if "stored" in case:
        assert stored, f"nothing is stored in {folder / 'cache-old'}"
        rows += [Row(f"{case}: stored outputs", *((files_of(folder / f"cache-{version}"),)
                                                  for version in commands.trees)),
                 Row(f"{case}: stored outputs used again", (stored,), (used,))]
    return rows


def compare_checkpoints(commands: Commands) -> list[Row]:
    """Generate text with older checkpoints, and merge older adapters."""
    rows = []
    for case, options in ((BASE, []), ("SFT", ["--chat"])):
        arguments = [last_checkpoint(commands, case), *options, "--seed=7", "--prompt", "cat"]
        texts = [commands.run(version, f"{case}, generate", "scripts/generate.py", *arguments)
                 for version in commands.trees]
        rows.append(Row(f"{case}: generated text", *((text,) for text in texts)))
    merged = [commands.folder / f"merged-{version}" for version in commands.trees]
    for version, output in zip(commands.trees, merged):
        commands.run(version, "merge the adapters", "scripts/merge_lora.py",
                     last_checkpoint(commands, "SFT, LoRA"), f"--output={output}")
    return [*rows, Row("SFT, LoRA: merged model", *((files_of(output),) for output in merged))]


# -------------------------------------------------------------------------------------- the table


def first_difference(old: Any, new: Any, where: str = "") -> str:
    """Return where two values differ first, and both values there."""
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            one, other = old.get(key, "(missing)"), new.get(key, "(missing)")
            if one != other:
                return first_difference(one, other, f"{where}[{key}]")
    return f"{where} old: {old!r:.200}, new: {new!r:.200}"


def print_table(rows: list[Row]) -> int:
    """Print the table, and below it where rows differ first; returns the number of rows that differ."""
    def shown(value: Any) -> str:
        text = json.dumps(value)
        return text if isinstance(value, int) else hashlib.sha256(text.encode()).hexdigest()[:8]

    width = max(len(row.what) for row in rows)
    print(f"\nRuns: from the start / continued from step {MIDDLE}. 8 digits are of a SHA-256"
          f"\n\n{'what':{width}} | {'old':19} | {'new':19} | same?")
    different = []
    for row in rows:
        old, new = (" / ".join(map(shown, side)) for side in (row.old, row.new))
        same = json.dumps(row.old) == json.dumps(row.new)  # as JSON, so that the order of keys counts
        print(f"{row.what:{width}} | {old:19} | {new:19} | {'yes' if same else 'NO'}")
        if not same:
            different.append(f"{row.what}: {first_difference(row.old, row.new)}")
    print("", *different, sep="\n")
    return len(different)


def main() -> int:
    """Compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rev", default="3f3016b", help="the older commit (default: %(default)s)")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the newer code (default: this working tree)")
    parser.add_argument("--jobs", type=int, default=2, help="commands at a time (default: %(default)s)")
    args = parser.parse_args()
    begun, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="older-version-"))
    try:
        archive = ["git", "-C", str(ROOT), "archive", f"--output={folder}/older.tar", args.rev]
        git = subprocess.run(archive, capture_output=True, text=True)
        if git.returncode:
            raise OlderVersionError(f"{git.stderr.strip()}; a shallow clone lacks it: git fetch --unshallow")
        shutil.unpack_archive(folder / "older.tar", folder / "older")
        write_sources(folder)
        commands = Commands(folder, {"old": folder / "older", "new": args.tree.resolve()})
        data, rows = compare_data(commands)
        with ThreadPoolExecutor(args.jobs) as pool:
            for cases in (FIRST_CASES, CASES):
                for found in pool.map(partial(compare_runs, commands, data), cases):
                    rows += found
        rows += compare_checkpoints(commands)
    except OlderVersionError as error:
        print(f"error: {error}\n(what was written is in {folder})", file=sys.stderr)
        return 2
    different = print_table(rows)
    print(f"{len(rows) - different} of {len(rows)} are the same with {args.rev} and with {args.tree}, in "
          f"{time.monotonic() - begun:.0f} s" + (f"; what was written is in {folder}" if different else ""))
    if different:
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
