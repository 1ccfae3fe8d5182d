"""Try Paddock on a device part by part: what is right on it, and how fast it is. Needs no network.

    bash scripts/gpu_suite.sh --device cuda --parts correctness       less than ten minutes on one H200
    bash scripts/gpu_suite.sh --device cuda --parts speed             likewise
    bash scripts/gpu_suite.sh --device cpu --tiny                     the code of every part, at toy size

Each part is a process of its own under a time limit (scripts/gpu_suite_parts.py) and adds one line to results.jsonl in --output;
one that fails stops no other. What it printed lies beside, in PART.txt. `python scripts/write_docs.py --gpu-results
gpu_suite/results.jsonl` makes docs/gpu.md of it. The exit code is 1 where a part failed.

This file needs the standard library only, so that it can tell what is missing.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Optional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.errors import run_script  # noqa: E402

PROGRAM = ROOT / "scripts" / "gpu_suite_parts.py"  # of every part
RESULTS = "results.jsonl"
HEADER = "header"  # the part that says on what machine and of which commit the following ones are
MINUTES = {"correctness": 9.5, "speed": 9.5}  # a command may take ten
LEAVING_SECONDS = 5  # that a part has to end what it started


class Part(NamedTuple):
    """One process of the suite."""

    name: str
    group: str
    seconds: float  # its time limit
    what: str
    alone: bool = False  # measures time, so nothing else may run beside it
    needs: tuple[str, ...] = ()  # parts whose files it goes on from


PARTS = (
    Part(HEADER, "both", 60, "device and versions", alone=True),
    Part("probe", "correctness", 60, "compiler, matmul, copy", alone=True),
    Part("attention", "correctness", 120, "each kernel of attention: values, gradients, rate", alone=True),
    Part("sample", "correctness", 120, "the embedded sample, smaller"),
    Part("parity-values", "correctness", 120, "loss and gradients in fp32, bf16 and fp16; the head; documents"),
    Part("parity-compiled", "correctness", 240, "compiled against eager; compilations and waits a step"),
    Part("stage-pretrain", "correctness", 120, "pretraining with AdamW", needs=("sample",)),
    Part("parity-attention", "correctness", 240, "every kernel by every use of it, recomputed and compiled"),
    Part("parity-faults", "correctness", 180, "overflow, NaN, no memory, resuming bit by bit"),
    Part("resume", "correctness", 200, "verify_resume.py with the settings as they are", needs=("sample",)),
    Part("resume-deterministic", "correctness", 200, "verify_resume.py with DETERMINISTIC=true", needs=("sample",)),
    Part("ranks", "correctness", 180, "two ranks on one device: gradients, drift, a hang; nccl alone"),
    Part("fsdp", "correctness", 60, "FSDP2 at world size 1, a probe"),
    Part("stage-sft", "correctness", 120, "SFT", needs=("stage-pretrain",)),
    Part("stage-dpo", "correctness", 120, "DPO with a stored reference", needs=("stage-pretrain",)),
    Part("stage-lora-dpo", "correctness", 120, "DPO of adapters with a live reference", needs=("stage-pretrain",)),
    Part("stage-distil", "correctness", 120, "distillation from a live teacher", needs=("stage-pretrain",)),
    Part("stage-distil-stored", "correctness", 120, "distillation from a stored teacher", needs=("stage-pretrain",)),
    Part("stage-muon", "correctness", 120, "pretraining with Muon", needs=("sample",)),
    Part("stage-stops", "correctness", 150, "TERM and kill -9, and on from there", needs=("sample",)),
    Part("checkpoint", "speed", 120, "a checkpoint: copy, hash, write, verify, load", alone=True),
    Part("hellaswag", "speed", 90, "500 items, cold and warm", alone=True),
    Part("speed-1b", "speed", 230, "Llama 3.2 1B beside its peers", alone=True),
    Part("speed-174m", "speed", 230, "174M parameters beside their peers", alone=True),
)
GROUPS = ("correctness", "speed")


@dataclass
class Suite:
    """One call: its options, the parts that are asked for, and the time that is left."""

    options: argparse.Namespace
    parts: Sequence[Part]

    def __post_init__(self) -> None:
        self.folder: Path = self.options.output
        self.environment = os.environ | ({"OMP_NUM_THREADS": "1"} if self.options.tiny else {})
        self.began = time.monotonic()
        groups = {part.group for part in self.parts} & set(GROUPS)
        self.ends = self.began + 60 * (self.options.minutes or sum(MINUTES[group] for group in groups or GROUPS))
        self.lock = threading.Lock()
        self.records: dict[str, dict[str, Any]] = {}

    def install(self, wheels: Path) -> None:
        """Put what the machine lacks into a folder of the suite, from where every part imports it."""
        files, site = sorted(map(str, wheels.glob("*.whl"))), self.folder / "site-packages"
        done = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index",
                               "--no-deps", "--upgrade", "--target", str(site), *files], capture_output=True, text=True)
        if not files or done.returncode:
            why = (done.stderr.strip().splitlines() or ["no reason given"])[-1] if files else "there is no *.whl in it"
            print(f"warning: the wheels of {wheels} are not installed: {why}; parts that need them will fail", flush=True)
            return
        self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
        print(f"{len(files)} wheels of {wheels} are installed in {site}", flush=True)

    def run(self) -> list[dict[str, Any]]:
        """Run all parts: those that measure time one by one, then the others side by side. Their records, in order."""
        futures: dict[str, Future] = {}
        tiny = self.options.tiny

        def needed(part: Part) -> list[Future]:
            return [futures[name] for name in (HEADER, *part.needs) if name in futures]  # without a device nothing goes

        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(self.options.jobs) as several:
            for part in self.parts:
                if part.alone and not tiny:
                    futures[part.name] = one.submit(self.take, part, needed(part))
            for future in list(futures.values()):
                future.result()
            for part in self.parts:
                if part.name not in futures:
                    # What it needs stands before it, and so is begun before it: no thread waits for one that waits behind it.
                    futures[part.name] = several.submit(self.take, part, needed(part))
        return [futures[part.name].result() for part in self.parts]

    def take(self, part: Part, needed: Sequence[Future]) -> dict[str, Any]:
        """Run one part, unless something stands against it, and write its record."""
        lacking = next((future.result()["part"] for future in needed if not future.result()["ok"]), None)
        left = self.ends - time.monotonic()
        if lacking:
            record = record_of(part, None, error=f"skipped: it goes on from {lacking}, which did not end well")
        elif left < min(10, part.seconds):
            record = record_of(part, None, error="skipped: no time was left")
        else:
            self.info(f"{part.name:<22} begins: {part.what}")
            record = self.in_process(part, min(part.seconds, left))
        with self.lock:
            self.records[part.name] = record
            with open(self.folder / RESULTS, "a", encoding="utf-8") as results:
                results.write(json.dumps(record) + "\n")
        self.info(f"{part.name:<22} {verdict(record)} after {record['seconds']:.0f} s"
                 + (f": {record['error']}" if record["error"] else ""))
        return record

    def in_process(self, part: Part, limit: float) -> dict[str, Any]:
        """Run one part in a process of its own, and read what it has noted, even where it was ended."""
        notes, output = self.folder / f"{part.name}.notes.jsonl", self.folder / f"{part.name}.txt"
        notes.unlink(missing_ok=True)
        command = [sys.executable, str(PROGRAM), part.name, "--device", self.options.device,
                   "--output", str(self.folder), "--seconds", f"{limit:.0f}", *(["--tiny"] if self.options.tiny else [])]
        started = time.monotonic()
        with open(output, "w") as file:
            process = subprocess.Popen(command, cwd=ROOT, env=self.environment, stdin=subprocess.DEVNULL, stdout=file,
                                       stderr=subprocess.STDOUT, start_new_session=True)
            try:
                code: Optional[int] = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end_group(process)
        seconds = time.monotonic() - started
        figures, faults, skipped = read_notes(notes)
        if code is None:
            faults.insert(0, f"its {limit:.0f} s were over")
        elif code:
            said = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
            faults.append(f"exit code {code}: {(said or ['it said nothing'])[-1][:300]}")
        if faults:
            return record_of(part, False, seconds, figures, "; ".join(faults))
        return record_of(part, None if skipped else True, seconds, figures, f"skipped: {skipped}" if skipped else None)

    def info(self, text: str) -> None:
        """A line of progress."""
        with self.lock:
            done = f"{len(self.records)}/{len(self.parts)}"
            print(f"[{time.monotonic() - self.began:4.0f} s, {done:>5}] {text}", flush=True)


def end_group(process: subprocess.Popen) -> None:
    """End a process and all that it started: first with a word, so that trainings can end theirs."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(LEAVING_SECONDS)


def record_of(part: Part, ok: Optional[bool], seconds: float = 0.0, figures: Optional[dict] = None,
              error: Optional[str] = None) -> dict[str, Any]:
    """The line of a part: `ok` is null where it was skipped, and `error` then says why."""
    return {"part": part.name, "ok": ok, "seconds": round(seconds, 1), "figures": figures or {}, "error": error}


def read_notes(path: Path) -> tuple[dict[str, Any], list[str], Optional[str]]:
    """The figures, the faults, and why it was skipped if it was, of what a part has noted so far."""
    figures: dict[str, Any] = {}
    faults: list[str] = []
    skipped = None
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError):  # the last line of a part that was killed may be half
            note = json.loads(line)
            figures |= note.get("figure", {})
            faults += [note["fault"]] if "fault" in note else []
            skipped = note.get("skipped", skipped)
    return figures, faults, skipped


def verdict(record: dict[str, Any]) -> str:
    """How a part ended, in a word."""
    return {True: "ok", False: "FAILED", None: "skipped"}[record["ok"]]


def told(figures: dict[str, Any], width: int = 110) -> str:
    """The first figures, as many as go into a line."""
    text = ""
    for name, value in figures.items():
        if isinstance(value, dict) and "tokens_per_second" in value:
            value = f"{value['tokens_per_second']:,.0f} tok/s"
        if isinstance(value, (dict, list)):
            continue
        entry = f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        if len(text) + len(entry) > width:
            return f"{text}, ..." if text else entry[:width]
        text += (", " if text else "") + entry
    return text


def table(records: Sequence[dict[str, Any]]) -> str:
    """All parts, one a line, and how many were good."""
    lines = ["| part | | s | figures, or what was wrong |", "|---|---|---|---|"]
    for record in records:
        text = record["error"] or told(record["figures"])
        lines.append(f"| {record['part']} | {verdict(record)} | {record['seconds']:.0f} | {text.replace('|', '/')} |")
    counts = {word: sum(verdict(record) == word for record in records) for word in ("ok", "FAILED", "skipped")}
    return "\n".join([*lines, "", ", ".join(f"{count} {word}" for word, count in counts.items())])


def chosen(text: str) -> list[Part]:
    """The parts of a group, or those that are named, with what they need, in their order.

    Raises:
        ValueError: there is no such part.
    """
    names = {name.strip() for name in text.split(",") if name.strip()}
    if unknown := names - {part.name for part in PARTS} - {*GROUPS, "all"}:
        raise ValueError(f"--parts {', '.join(sorted(unknown))}: choose from all, {', '.join(GROUPS)}, "
                         + ", ".join(part.name for part in PARTS))
    wanted = {part.name for part in PARTS if part.name in names or part.group in names or "all" in names} | {HEADER}
    for part in reversed(PARTS):
        if part.name in wanted:
            wanted |= set(part.needs)
    return [part for part in PARTS if part.name in wanted]


def parse(argv: Optional[Sequence[str]] = None) -> tuple[argparse.Namespace, list[Part]]:
    """The options, and the parts to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", default="all", help="all, correctness, speed, or parts' names, with commas (default: all)")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, compiling in one part only")
    parser.add_argument("--output", type=Path, default=ROOT / "gpu_suite", help="folder of results.jsonl (default: gpu_suite)")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install first, which this machine lacks")
    parser.add_argument("--jobs", type=int, help="parts side by side, where they measure no time (default: 4, tiny: 2)")
    parser.add_argument("--minutes", type=float, help="after which no part is begun (default: 9.5 for each group)")
    options = parser.parse_args(argv)
    options.jobs = options.jobs or (2 if options.tiny else 4)
    options.output = options.output.resolve()
    try:
        return options, chosen(options.parts)
    except ValueError as error:
        parser.error(str(error))


def main() -> int:
    options, parts = parse()
    options.output.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(options.output / "runs", ignore_errors=True)  # of an earlier call
    suite = Suite(options, parts)
    if options.wheels:
        suite.install(options.wheels)
    records = suite.run()
    print(f"\nThese lines are in {options.output / RESULTS}; scripts/write_docs.py --gpu-results makes docs/gpu.md of them.\n")
    print(table(records), flush=True)
    return int(any(record["ok"] is False for record in records))


if __name__ == "__main__":
    run_script(lambda: sys.exit(main()))
