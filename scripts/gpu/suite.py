"""Test Paddock's correctness and speed on a device, without a network.

    bash scripts/gpu_suite.sh --parts first        the most important, 9 minutes
    bash scripts/gpu_suite.sh --parts second       3 minutes
    bash scripts/gpu_suite.sh --parts more         the rest, 15 minutes
    bash scripts/gpu_suite.sh --device cpu --tiny  all of it at toy size

Each part is a separate process with a time limit (scripts/gpu/parts.py). The suite continues if a part fails,
hangs or is killed, and skips what is not installed. --output gets figures.jsonl (each figure at once),
results.jsonl (each part at its end), a table and an archive of the console output.
`python scripts/dev/write_docs.py --gpu-results gpu_suite/results.jsonl` writes the results into
scripts/gpu/README.md. The exit code is 1 if a part failed.

This file imports only the standard library, so that it can report missing packages.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.command_line import CommandParser  # noqa: E402
from common.errors import run_script  # noqa: E402
from common.text import last_line  # noqa: E402
from parallel.process import configure_allocator  # noqa: E402

PROGRAM = ROOT / "scripts" / "gpu" / "parts.py"  # runs one part
RESULTS, FIGURES = "results.jsonl", "figures.jsonl"
HEADER, NO_DEVICE = "header", "none"  # the part that records the machine, and its device if torch finds none
MINUTES = {"first": 9, "second": 3, "more": 15}  # for each group
JOBS = 6  # parts that run at the same time, unless they measure time
LAST_SECONDS = 10  # of these, for the table and the archive
STOP_SECONDS = 5  # time for a part to stop the processes that it started
LARGEST = 2**21  # bytes of a file that goes into the archive


class Part(NamedTuple):
    """One process of the suite."""

    name: str
    group: str
    seconds: float  # time limit
    content: str
    alone: bool = False  # it measures time or memory, so no other part may run at the same time
    needs: tuple[str, ...] = ()  # parts whose files it reads


SAMPLE, BASE = ("sample",), ("stage-pretrain",)
# In the order in which they start, what only a real device shows first: a machine may be taken away early.
PARTS = (
    Part(HEADER, "first", 60, "device, versions, the kernels chosen and why"),
    Part("sample", "first", 60, "a smaller version of the sample data; unpaired answers"),
    # Parts that measure time or memory, which run one by one
    Part("parity", "first", 60, "loss and gradients against a CPU and transformers", alone=True),
    Part("speed-1b", "first", 60, "Llama 3.2 1B with documents: speed, memory, kernels", alone=True),
    Part("speed-174m", "first", 45, "the same with 174M parameters", alone=True),
    Part("probe", "first", 40, "compiler, matmul, copy, attention at one shape", alone=True),
    Part("decode", "first", 40, "weights rounded for each token, or once; CUDA graphs", alone=True),
    Part("memory", "first", 40, "the memory forecast against a step, compiled and eager", alone=True),
    Part("saving", "first", 30, "pinned memory; the time that saves stop a run", alone=True, needs=SAMPLE),
    # Parts that run in parallel
    Part("stage-pretrain", "first", 90, "pretraining with AdamW, profiled; waits a step", needs=SAMPLE),
    Part("resume", "first", 100, "kill -9; it must resume bit-identically", needs=SAMPLE),
    Part("use", "first", 100, "a deterministic run; generate.py, chat.py, evaluate.py", needs=SAMPLE),
    Part("faults", "first", 80, "fp16, a loss that is not finite, out of memory", needs=SAMPLE),
    Part("fsdp", "first", 100, "SHARDING and CPU_OFFLOAD on one rank, against a plain run", needs=SAMPLE),
    Part("ranks", "first", 80, "two ranks on one device over gloo, against one rank", needs=SAMPLE),
    Part("stage-dpo", "first", 50, "DPO with a stored reference", needs=BASE),
    Part("stage-lora-dpo", "first", 50, "DPO of adapters with a live reference", needs=BASE),
    Part("stage-grpo", "first", 50, "GRPO: generation, rewards and updates in one process", needs=BASE),
    Part("stage-kto", "first", 50, "KTO", needs=BASE),
    # The first step of litgpt alone takes over a minute.
    Part("litgpt-1b", "second", 90, "litgpt on Llama 3.2 1B", alone=True),
    Part("attention", "second", 25, "each attention kernel: its rate by shape and documents", alone=True),
    Part("generate", "second", 20, "generation against transformers; batched requests", alone=True),
    Part("more-memory", "second", 25, "the memory forecast in other layouts", alone=True),
    *(Part(f"stage-{name}", "more", 120, content, needs=needs) for name, content, needs in (
        ("sft", "SFT", BASE), ("distil", "distillation", BASE), ("muon", "pretraining with Muon", SAMPLE),
        ("windows", "pretraining of SmolLM 3 with sliding windows", SAMPLE))),
    Part("peers-1b", "more", 75, "transformers with Liger on Llama 3.2 1B", alone=True),
    Part("more-speed-1b", "more", 200, "Llama 3.2 1B, other settings and peers", alone=True),
    Part("more-speed-174m", "more", 200, "174M parameters, compared with peers", alone=True),
)


@dataclass
class Suite:
    """One call of the suite: its options, its parts, and its deadline."""

    options: argparse.Namespace
    parts: Sequence[Part]

    def __post_init__(self) -> None:
        self.output: Path = self.options.output
        self.folder = Path(tempfile.mkdtemp(prefix="gpu_suite-"))  # for runs and console output
        caches = Path(tempfile.gettempdir()) / f"gpu_suite-cache-{os.getuid()}"  # one for all parts and calls
        self.environment = {
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "TRITON_CACHE_DIR": str(caches / "triton"),
            "TORCH_LOGS": "recompiles,graph_breaks", "TORCHINDUCTOR_COMPILE_THREADS": "4"} | os.environ | {
            "PADDOCK_COMMIT": self.options.commit, "PYTHONUNBUFFERED": "1"}
        self.environment |= {"OMP_NUM_THREADS": "1"} if self.options.tiny else {}
        self.started = time.monotonic()
        groups = {part.group for part in self.parts if part.name != HEADER}
        minutes = self.options.minutes or sum(MINUTES[group] for group in groups)
        self.deadline = self.started + 60 * minutes - LAST_SECONDS
        self.figures = self.output / FIGURES
        self.begin = self.figures.stat().st_size if self.figures.exists() else 0  # those of earlier calls
        self.lock = threading.Lock()
        self.running: set[int] = set()
        self.done, self.no_device = 0, ""

    def run(self) -> list[dict[str, Any]]:
        """Run the parts in order: those that measure one by one, and in parallel those between them."""
        futures: dict[str, Future] = {}
        # A part comes after those that it needs, so no thread waits for a part that has not started.
        for (is_alone, _), parts in groupby(self.parts, self.stage_of):
            with ThreadPoolExecutor(1 if is_alone else self.options.jobs) as pool:
                for part in parts:
                    needed = [futures[name] for name in part.needs if name in futures]
                    futures[part.name] = pool.submit(self.run_part, part, needed)
            if futures[HEADER].result()["figures"].get("device") == NO_DEVICE:
                self.no_device = f"skipped: torch finds no {self.options.device} device"
        return [futures[part.name].result() for part in self.parts]

    def stage_of(self, part: Part) -> tuple[bool, bool]:
        """Return whether a part runs alone, and whether it is the header or what runs beside it."""
        return part.alone and not self.options.tiny, part.name in (HEADER, *SAMPLE)

    def run_part(self, part: Part, needed: Sequence[Future]) -> dict[str, Any]:
        """Run one part, or skip it if a part that it needs failed or no time is left; return the result."""
        failed = next((future.result()["part"] for future in needed if not future.result()["ok"]), None)
        left = self.deadline - time.monotonic()
        if self.no_device:
            result = result_of(part, None, error=self.no_device)
        elif failed:
            result = result_of(part, None, error=f"skipped: it needs {failed}, which did not succeed")
        elif left < min(10, part.seconds):
            result = result_of(part, None, error="skipped: no time left")
        else:
            self.info(f"{part.name:<22} starts: {part.content}")
            # At toy size, the limit only ends a part that hangs, however slow the machine is.
            try:
                result = self.in_process(part, min(part.seconds * (10 if self.options.tiny else 1), left))
            except (OSError, RuntimeError) as error:  # no process or no file could be created
                result = result_of(part, False, error=f"{type(error).__name__}: {error}")
        with self.lock, suppress(OSError):  # the disk may be full
            self.done += 1
            with open(self.output / RESULTS, "a", encoding="utf-8") as results:
                results.write(json.dumps(result) + "\n")
        self.info(f"{part.name:<22} {verdict(result)} after {result['seconds']:.0f} s"
                  + (f": {result['error']}" if result["error"] else ""))
        return result

    def in_process(self, part: Part, limit: float) -> dict[str, Any]:
        """Run one part in a separate process, and read its figures even if it was killed."""
        output = self.folder / f"{part.name}.txt"
        command = [sys.executable, str(PROGRAM), part.name, "--device", self.options.device, "--output",
                   str(self.folder), "--figures", str(self.figures), "--seconds", f"{limit:.0f}",
                   *(["--tiny"] if self.options.tiny else [])]
        started = time.monotonic()
        with open(output, "w") as file:
            process = subprocess.Popen(command, cwd=ROOT, env=self.environment, stdin=subprocess.DEVNULL,
                                       stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
            self.running.add(process.pid)
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
                self.running.discard(process.pid)
        seconds = time.monotonic() - started
        figures, faults, skipped = read_figures(self.figures, part.name, self.begin)
        if code is None:
            faults.insert(0, f"it exceeded its limit of {limit:.0f} s")
        elif code == -signal.SIGKILL:
            faults.append("it was killed (SIGKILL), as is done when memory runs out")
        elif code:
            faults.append(f"exit code {code}: {last_line(output.read_text(errors='replace'))}")
        if faults:
            return result_of(part, False, seconds, figures, "; ".join(faults))
        return result_of(part, None if skipped else True, seconds, figures, skipped and f"skipped: {skipped}")

    def stop(self, *_: Any) -> None:
        """Stop all parts; those that have not started are skipped."""
        self.deadline = 0.0
        for group in [*self.running]:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGTERM)

    def finish(self, results: Sequence[dict[str, Any]]) -> None:
        """Print and write the table, and archive the text files of all parts; delete the rest."""
        name = self.options.parts if self.options.parts in MINUTES else "suite"
        text = table(results)
        print(f"\nThe results are in {self.output}. To update scripts/gpu/README.md, run "
              f"scripts/dev/write_docs.py --gpu-results {self.output / RESULTS}.\n\n{text}", flush=True)
        with suppress(OSError):
            (self.output / f"{name}.md").write_text(text + "\n", encoding="utf-8")
            with tarfile.open(self.output / f"{name}.tar.gz", "w:gz") as archive:
                for path in sorted(self.folder.rglob("*")):
                    if path.suffix in (".txt", ".jsonl", ".csv") and path.stat().st_size < LARGEST:
                        archive.add(path, path.relative_to(self.folder))
        shutil.rmtree(self.folder, ignore_errors=True)

    def info(self, text: str) -> None:
        with self.lock:
            print(f"[{time.monotonic() - self.started:4.0f} s, {f'{self.done}/{len(self.parts)}':>5}] {text}",
                  flush=True)


def result_of(part: Part, ok: Optional[bool], seconds: float = 0.0, figures: Optional[dict] = None,
              error: Optional[str] = None) -> dict[str, Any]:
    return {"part": part.name, "ok": ok, "seconds": round(seconds, 1), "figures": figures or {},
            "error": error}


def read_figures(path: Path, part: str, begin: int = 0) -> tuple[dict[str, Any], list[str], Optional[str]]:
    """Return the figures and faults of a part, and why it was skipped, from `begin` (bytes) on."""
    figures: dict[str, Any] = {}
    faults: list[str] = []
    skipped = None
    for line in path.read_bytes()[begin:].splitlines() if path.exists() else ():
        with suppress(ValueError):  # the last line of a killed part may be incomplete
            entry = json.loads(line)
            if entry["part"] == part:
                figures |= entry.get("figure", {})
                faults += [entry["fault"]] if "fault" in entry else []
                skipped = entry.get("skipped", skipped)
    return figures, faults, skipped


def verdict(result: dict[str, Any]) -> str:
    return {True: "ok", False: "FAILED", None: "skipped"}[result["ok"]]


def summary(figures: dict[str, Any], width: int = 110) -> str:
    """Return the first figures as text, and of a figure with several values only the speed."""
    values = {name: value.get("tokens_per_second", "...") if isinstance(value, dict) else value
              for name, value in figures.items()}
    text = ", ".join(f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
                     for name, value in values.items())
    return text if len(text) <= width else f"{text[:width]}..."


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
                        help="all, first, second, more, or names of parts, separated by commas "
                             "(default: all)")
    parser.add_argument("--tiny", action="store_true", help="use toy sizes, and compile in one part only")
    parser.add_argument("--output", type=Path, default=ROOT / "gpu_suite", metavar="FOLDER",
                        help="folder for the results, of at most eight files (default: gpu_suite)")
    parser.add_argument("--commit", default="", help="commit to record (default: from git)")
    parser.add_argument("--jobs", type=int, metavar="N",
                        help="number of parts to run at the same time, except those that measure time "
                             "(default: 6, tiny: 2)")
    parser.add_argument("--minutes", type=float, metavar="N",
                        help="end after this time (default: 9 for first, 3 for second, 15 for more)")
    options = parser.parse_args(argv)
    options.jobs = options.jobs or (2 if options.tiny else JOBS)
    options.output = options.output.resolve()
    try:
        return options, select_parts(options.parts)
    except ValueError as error:
        parser.error(str(error))


def main() -> int:
    options, parts = parse_args()
    configure_allocator()  # as a run does
    options.output.mkdir(parents=True, exist_ok=True)
    suite = Suite(options, parts)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, suite.stop)
    results = suite.run()
    suite.finish(results)
    return int(any(result["ok"] is False for result in results))


if __name__ == "__main__":
    run_script(lambda: sys.exit(main()))
