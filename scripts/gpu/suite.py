"""Test Paddock's correctness and speed on a device, without a network.

    bash scripts/gpu_suite.sh --device cuda --parts correctness   ten minutes
    bash scripts/gpu_suite.sh --device cuda --parts speed         ten minutes
    bash scripts/gpu_suite.sh --device cpu --tiny                 at toy size

Each part is a separate process with a time limit (scripts/gpu/parts.py). It appends a line to results.jsonl
in --output, and its console output goes to PART.txt there. The suite continues if a part fails. To turn the
results into docs/gpu.md, run `python scripts/dev/write_docs.py --gpu-results gpu_suite/results.jsonl`. The
exit code is 1 if a part failed.

This file imports only the standard library, so that it can report missing packages.
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

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.command_line import CommandParser  # noqa: E402
from common.errors import run_script  # noqa: E402
from common.text import last_line  # noqa: E402
from parallel.process import configure_allocator  # noqa: E402

PROGRAM = ROOT / "scripts" / "gpu" / "parts.py"  # runs one part
RESULTS = "results.jsonl"
HEADER = "header"  # the part that records the machine and the commit
MINUTES = {"correctness": 9.5, "speed": 9.5}  # for each group, since some machines limit a command to 10 min
STOP_SECONDS = 5  # time for a part to stop the processes that it started


class Part(NamedTuple):
    """One process of the suite."""

    name: str
    group: str
    seconds: float  # time limit
    content: str
    alone: bool = False  # it measures time, so no other part may run at the same time
    needs: tuple[str, ...] = ()  # parts whose files it reads


SAMPLE, BASE = ("sample",), ("stage-pretrain",)
PARTS = (
    Part(HEADER, "both", 60, "device and versions", alone=True),
    Part("probe", "correctness", 60, "compiler, matmul, copy", alone=True),
    Part("attention", "correctness", 120, "each attention kernel: values, gradients, rate", alone=True),
    Part("sample", "correctness", 120, "a smaller version of the sample data"),
    Part("use", "correctness", 150, "a deterministic run with samples; generate.py, chat.py, evaluate.py",
         needs=SAMPLE),
    Part("parity-values", "correctness", 120, "loss and gradients in fp32, bf16, fp16; the head; documents"),
    Part("parity-compiled", "correctness", 240, "compiled against eager; recompilations and waits per step"),
    Part("stage-pretrain", "correctness", 120, "pretraining with AdamW", needs=SAMPLE),
    Part("parity-attention", "correctness", 240, "every attention kernel, with recomputation and compiled"),
    Part("parity-faults", "correctness", 180, "overflow, NaN, out of memory, bit-identical resume"),
    Part("resume", "correctness", 200, "verify_resume.py with default settings", needs=SAMPLE),
    Part("resume-deterministic", "correctness", 200, "the same with DETERMINISTIC=true", needs=SAMPLE),
    Part("ranks", "correctness", 180, "two ranks on one device: gradients, drift, a hang; nccl alone"),
    Part("fsdp", "correctness", 120, "SHARDING and CPU_OFFLOAD with one rank, compared with a plain run"),
    Part("memory", "correctness", 240, "the memory forecast compared with the memory of a step, by layout",
         alone=True),
    *(Part(f"stage-{name}", "correctness", 120, content, needs=BASE) for name, content in {
        "sft": "SFT", "dpo": "DPO with a stored reference",
        "lora-dpo": "DPO of adapters with a live reference", "distil": "distillation",
        "grpo": "GRPO: generation, rewards and updates in one process"}.items()),
    Part("stage-muon", "correctness", 120, "pretraining with Muon", needs=SAMPLE),
    Part("stage-windows", "correctness", 120, "pretraining of SmolLM 3 with sliding windows", needs=SAMPLE),
    Part("stage-stops", "correctness", 150, "resuming after SIGTERM and after kill -9", needs=SAMPLE),
    Part("power", "correctness", 120, "power, a profile, a memory snapshot, counted FLOPs", alone=True,
         needs=SAMPLE),
    Part("checkpoint", "speed", 120, "copy, hash, write, verify and load a checkpoint", alone=True),
    Part("hellaswag", "speed", 90, "500 items, cold and warm", alone=True),
    Part("speed-1b", "speed", 230, "Llama 3.2 1B, compared with its peers", alone=True),
    Part("speed-174m", "speed", 230, "174M parameters, compared with their peers", alone=True),
    Part("decode", "speed", 60, "decoding: weights rounded for each token, or once; CUDA graphs", alone=True),
    Part("generate", "speed", 120, "generation, compared with transformers; batched requests", alone=True),
)


@dataclass
class Suite:
    """One call of the suite: its options, its parts, and its deadline."""

    options: argparse.Namespace
    parts: Sequence[Part]

    def __post_init__(self) -> None:
        self.folder: Path = self.options.output
        self.environment = os.environ | {"PADDOCK_COMMIT": self.options.commit}
        self.environment |= {"OMP_NUM_THREADS": "1"} if self.options.tiny else {}
        self.started = time.monotonic()
        groups = {part.group for part in self.parts} & MINUTES.keys()
        minutes = self.options.minutes or sum(MINUTES[group] for group in groups or MINUTES)
        self.deadline = self.started + 60 * minutes
        self.lock = threading.Lock()
        self.done = 0

    def run(self) -> list[dict[str, Any]]:
        """Run the parts that measure time one by one and the others in parallel; return ordered results."""
        futures: dict[str, Future] = {}
        alone = [part for part in self.parts if part.alone and not self.options.tiny]
        together = [part for part in self.parts if part not in alone]
        first, last = ([part for part in alone if bool(part.needs) is needs] for needs in (False, True))
        # A part comes after those that it needs, so no thread waits for a part that has not started.
        for threads, parts in ((1, first), (self.options.jobs, together), (1, last)):
            with ThreadPoolExecutor(threads) as pool:
                for part in parts:
                    needed = [futures[name] for name in (HEADER, *part.needs) if name in futures]
                    futures[part.name] = pool.submit(self.run_part, part, needed)
        return [futures[part.name].result() for part in self.parts]

    def run_part(self, part: Part, needed: Sequence[Future]) -> dict[str, Any]:
        """Run one part, or skip it if a part that it needs failed or no time is left; return the result."""
        failed = next((future.result()["part"] for future in needed if not future.result()["ok"]), None)
        left = self.deadline - time.monotonic()
        if failed:
            result = result_of(part, None, error=f"skipped: it needs {failed}, which did not succeed")
        elif left < min(10, part.seconds):
            result = result_of(part, None, error="skipped: no time left")
        else:
            self.info(f"{part.name:<22} starts: {part.content}")
            # At toy size, the limit only ends a part that hangs, however slow the machine is.
            result = self.in_process(part, min(part.seconds * (10 if self.options.tiny else 1), left))
        with self.lock:
            self.done += 1
            with open(self.folder / RESULTS, "a", encoding="utf-8") as results:
                results.write(json.dumps(result) + "\n")
        self.info(f"{part.name:<22} {verdict(result)} after {result['seconds']:.0f} s"
                  + (f": {result['error']}" if result["error"] else ""))
        return result

    def in_process(self, part: Part, limit: float) -> dict[str, Any]:
        """Run one part in a separate process, and read its notes even if it was killed."""
        notes, output = self.folder / f"{part.name}.notes.jsonl", self.folder / f"{part.name}.txt"
        notes.unlink(missing_ok=True)
        command = [sys.executable, str(PROGRAM), part.name, "--device", self.options.device, "--output",
                   str(self.folder), "--seconds", f"{limit:.0f}", *(["--tiny"] if self.options.tiny else [])]
        started = time.monotonic()
        with open(output, "w") as file:
            process = subprocess.Popen(command, cwd=ROOT, env=self.environment, stdin=subprocess.DEVNULL,
                                       stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                code: Optional[int] = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                # End the whole process group; SIGTERM comes first, so that runs can stop their processes.
                for number in (signal.SIGTERM, signal.SIGKILL):
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, number)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(STOP_SECONDS)
        seconds = time.monotonic() - started
        figures, faults, skipped = read_notes(notes)
        if code is None:
            faults.insert(0, f"it exceeded its limit of {limit:.0f} s")
        elif code:
            faults.append(f"exit code {code}: {last_line(output.read_text(errors='replace'))}")
        if faults:
            return result_of(part, False, seconds, figures, "; ".join(faults))
        return result_of(part, None if skipped else True, seconds, figures, skipped and f"skipped: {skipped}")

    def info(self, text: str) -> None:
        with self.lock:
            print(f"[{time.monotonic() - self.started:4.0f} s, {f'{self.done}/{len(self.parts)}':>5}] {text}",
                  flush=True)


def result_of(part: Part, ok: Optional[bool], seconds: float = 0.0, figures: Optional[dict] = None,
              error: Optional[str] = None) -> dict[str, Any]:
    return {"part": part.name, "ok": ok, "seconds": round(seconds, 1), "figures": figures or {},
            "error": error}


def read_notes(path: Path) -> tuple[dict[str, Any], list[str], Optional[str]]:
    figures: dict[str, Any] = {}
    faults: list[str] = []
    skipped = None
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError):  # the last line of a killed part may be incomplete
            note = json.loads(line)
            figures |= note.get("figure", {})
            faults += [note["fault"]] if "fault" in note else []
            skipped = note.get("skipped", skipped)
    return figures, faults, skipped


def verdict(result: dict[str, Any]) -> str:
    return {True: "ok", False: "FAILED", None: "skipped"}[result["ok"]]


def summary(figures: dict[str, Any], width: int = 110) -> str:
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


def table(results: Sequence[dict[str, Any]]) -> str:
    lines = ["| part | | s | figures or errors |", "|---|---|---|---|"]
    for result in results:
        text = (result["error"] or summary(result["figures"])).replace("|", "/")
        lines.append(f"| {result['part']} | {verdict(result)} | {result['seconds']:.0f} | {text} |")
    verdicts = [verdict(result) for result in results]
    counts = (f"{verdicts.count(word)} {word}" for word in ("ok", "FAILED", "skipped"))
    return "\n".join([*lines, "", ", ".join(counts)])


def select_parts(text: str) -> list[Part]:
    """Return the parts of these groups and names, and the parts they need. Raise ValueError if unknown."""
    names = {name.strip() for name in text.split(",") if name.strip()}
    known = ["all", *MINUTES, *(part.name for part in PARTS)]
    if unknown := names.difference(known):
        raise ValueError(f"--parts {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    selected = {HEADER} | {part.name for part in PARTS if names & {part.name, part.group, "all"}}
    for part in reversed(PARTS):
        if part.name in selected:
            selected |= set(part.needs)
    return [part for part in PARTS if part.name in selected]


def parse_args(argv: Optional[Sequence[str]] = None) -> tuple[argparse.Namespace, list[Part]]:
    parser = CommandParser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda",
                        help="device to test (default: %(default)s)")
    parser.add_argument("--parts", default="all", metavar="NAME,...",
                        help="all, correctness, speed, or names of parts, separated by commas (default: all)")
    parser.add_argument("--tiny", action="store_true", help="use toy sizes, and compile in one part only")
    parser.add_argument("--output", type=Path, default=ROOT / "gpu_suite", metavar="FOLDER",
                        help="folder of results.jsonl (default: gpu_suite)")
    parser.add_argument("--commit", default="", help="commit to record (default: from git)")
    parser.add_argument("--jobs", type=int, metavar="N",
                        help="number of parts to run at the same time, except those that measure time "
                             "(default: 4, tiny: 2)")
    parser.add_argument("--minutes", type=float, metavar="N",
                        help="start no part after this time (default: 9.5 for each group)")
    options = parser.parse_args(argv)
    options.jobs = options.jobs or (2 if options.tiny else 4)
    options.output = options.output.resolve()
    try:
        return options, select_parts(options.parts)
    except ValueError as error:
        parser.error(str(error))


def main() -> int:
    options, parts = parse_args()
    configure_allocator()  # as a run does
    options.output.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(options.output / "runs", ignore_errors=True)  # from an earlier call
    results = Suite(options, parts).run()
    print(f"\nThe results are in {options.output / RESULTS}. To update docs/gpu.md, run "
          f"scripts/dev/write_docs.py --gpu-results.\n\n{table(results)}", flush=True)
    return int(any(result["ok"] is False for result in results))


if __name__ == "__main__":
    run_script(lambda: sys.exit(main()))
