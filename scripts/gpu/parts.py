"""Run one part of scripts/gpu/suite.py, which starts this file as a separate process.

Results are written to PART.notes.jsonl immediately, so that none is lost if the part is killed at its limit.
"""

import csv
import gzip
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.command_line import CommandParser  # noqa: E402
from common.errors import run_script  # noqa: E402
from common.text import last_line  # noqa: E402

GPU_TESTS = "tests/system/gpu/test_gpu.py"


@dataclass
class Task:
    """The options of a part, and the file for its results."""

    device: str
    tiny: bool
    folder: Path
    seconds: float
    notes: Path
    layout: str = ""  # for the part `memory`

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def note(self, **entry: Any) -> None:
        with open(self.notes, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry, default=str) + "\n")

    def figure(self, name: str, value: Any) -> None:
        print(f"{name}: {value}", flush=True)
        self.note(figure={name: value})

    def figures(self) -> dict[str, Any]:
        lines = self.notes.read_text(encoding="utf-8").splitlines() if self.notes.exists() else []
        return {name: value for line in lines for name, value in json.loads(line).get("figure", {}).items()}

    def check(self, name: str, holds: bool, value: Any) -> None:
        """Record a result, and a fault unless it holds."""
        self.figure(name, value)
        if not holds:
            self.note(fault=f"{name} is {value}")

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Record an exception in the `with` block as a fault, and continue."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            reason = str(error).strip().splitlines()[0][:300] if str(error) else ""
            self.note(fault=f"{name}: {type(error).__name__}: {reason}")

    def run_part(self, part: str, *flags: str) -> tuple[int, str]:
        return self.run(__file__, part, "--device", self.device, "--output", self.folder, "--seconds",
                        f"{self.seconds:.0f}", *(["--tiny"] if self.tiny else []), *flags)

    def run(self, *arguments: Any, env: Mapping[str, str] = {}, stdin: str = "",
            on_line: Callable[[str], None] = lambda line: None) -> tuple[int, str]:
        """Run a Python program and print its output; return its exit code and output."""
        command = [sys.executable, *map(str, arguments)]
        print(f"$ {' '.join(command)}", flush=True)
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **env}, stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace")
        output = ""
        with process:
            process.stdin.write(stdin)
            process.stdin.close()
            for line in process.stdout:
                print(line, end="", flush=True)
                output += line
                on_line(line)
        return process.returncode, output


def header(task: Task) -> None:
    """Record the machine; other parts need only its device."""
    def output_of(*command: str) -> str:
        with suppress(OSError):  # the program is missing
            return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
        return ""

    # torch is imported last, so that the other figures are recorded if it is missing.
    commit = os.environ.get("PADDOCK_COMMIT") or output_of("git", "rev-parse", "HEAD")
    changed = ", changed" if output_of("git", "status", "--porcelain", "--untracked-files=no") else ""
    task.figure("commit", commit + changed if commit else "unknown")
    task.figure("date", datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"))
    if task.tiny:
        task.figure("sizes", "toy")
    task.figure("python", platform.python_version())
    task.figure("cores", os.cpu_count())
    import torch

    task.figure("torch", torch.__version__)
    for name in ("triton", "transformers", "liger_kernel", "litgpt", "flash_attn", "flash_attn_interface"):
        version = "unknown" if importlib.util.find_spec(name) else "not installed"
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name.replace("_", "-"))
        task.figure(name, version)
    if not task.cuda:
        task.figure("device", f"CPU ({torch.get_num_threads()} threads)")
        return
    if not torch.cuda.is_available():
        task.note(fault="torch finds no GPU; use --device cpu, or install a CUDA build of torch")
        return

    properties = torch.cuda.get_device_properties(0)
    task.figure("device", properties.name)
    task.figure("capability", "{}.{}".format(*torch.cuda.get_device_capability()))
    task.figure("memory GiB", round(properties.total_memory / 2**30, 1))
    task.figure("CUDA", torch.version.cuda)
    task.figure("cuDNN", torch.backends.cudnn.version())
    with suppress(Exception):  # a torch without NCCL
        task.figure("nccl", ".".join(map(str, torch.cuda.nccl.version())))
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    task.figure("driver", driver.splitlines()[0] if driver else "unknown")


def run_tests(task: Task, prefix: str) -> None:
    """Run the tests of GPU_TESTS whose names start with `prefix`, and record each result."""
    counts = {"passed": 0, "skipped": 0, "failed": 0}

    def on_line(line: str) -> None:
        if match := re.match(rf"{GPU_TESTS}::(\S+(?: \S+)*?) (PASSED|FAILED|ERROR|SKIPPED)", line):
            kind = "failed" if match[2] == "ERROR" else match[2].lower()
            counts[kind] += 1
            task.figure(kind, counts[kind])
        elif match := re.match(rf"(FAILED|ERROR) {GPU_TESTS}::(.*)", line):
            task.note(fault=match[2].strip()[:300])
        elif match := re.match(r"SKIPPED \[(\d+)\] \S+: (.*)", line):
            task.figure(f"skipped: {match[2].strip()}", int(match[1]))
        elif match := re.match(r"measured: (.+) = (.+)", line.strip()):
            task.figure(match[1], int(match[2]))

    task.runs.mkdir(exist_ok=True)
    # COLUMNS lets pytest print each name and reason on one line.
    environment = {"PADDOCK_TEST_DEVICE": task.device, "COLUMNS": "400", "PYTHONUNBUFFERED": "1"}
    code, _ = task.run("-m", "pytest", GPU_TESTS, "-m", "gpu", "-k", prefix, "-vv", "-raP", "--tb=short",
                       "-p", "no:cacheprovider", "--basetemp", task.runs / f"tests-{prefix}",
                       env=environment, on_line=on_line)
    task.check("pytest's exit code", code == 0, code)
    if not counts["passed"] and counts["skipped"]:
        task.note(skipped="all tests need CUDA")


def sample(task: Task) -> None:
    stories = 2400 if task.tiny else 12_000
    code, _ = task.run("scripts/make_sample.py", "--stories", stories, "--folder", task.folder / "sample")
    task.check("exit code", code == 0, code)
    task.figure("stories", stories)


def flags_of(task: Task, name: str, preset: str = "sample", **changes: Any) -> list[str]:
    """Return the flags of a short run on the sample data."""
    data = task.folder / "sample"
    settings = {
        "preset": preset, "device": task.device, "compile": "true" if task.cuda else "false",
        "output-dir": task.runs, "run-name": name, "pretrain-data-path": data / "pretrain",
        "sft-data-path": data / "sft", "dpo-data-path": data / "dpo", "hellaswag-path": data / "items.jsonl",
        "tokenizer-path": data / "tokenizer.model", "optimizer": "adamw", "learning-rate": 0.003,
        "lr-schedule": "cosine", "warmup-steps": 2, "hellaswag-every": 0, "sample-every": 0, "save-every": 0,
        "log-every": 1, "drift-check-every": 0, "max-steps": 60, "total-batch-size": 16_384,
        "validation-rows": 16, "validate-every": 20, "report": "false"}
    if task.tiny:
        settings |= {"max-steps": 4, "total-batch-size": 2048, "validation-rows": 2, "validate-every": 2,
                     "dim": 64, "n-layers": 2, "ffn-dim": 128}
    settings |= {key.replace("_", "-"): value for key, value in changes.items()}
    return [f"--{key}={value}" for key, value in settings.items()]


def train_stage(task: Task, name: str, preset: str = "sample", base: str = "", metric: str = "val_loss",
                **changes: Any) -> None:
    """Train one stage, whose setting `base` is the pretrained checkpoint; its validation loss must fall."""
    from checkpoint.schema import read_entries

    if base:
        changes[base] = max((task.runs / "stage-pretrain" / "checkpoints").glob("step-*"))
    started, flags = time.perf_counter(), flags_of(task, name, preset, **changes)
    code, output = task.run("train.py", *flags, env={"TORCH_LOGS": "recompiles"})
    task.figure("seconds", round(time.perf_counter() - started, 1))
    task.check("exit code", code == 0, code)
    if code:
        task.note(fault=last_line(output))
        return

    lines = list(read_entries(task.runs / name / "metrics.jsonl"))
    losses = [line[metric] for line in lines if metric in line]
    rates = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    first, last = (losses[0], losses[-1]) if losses else (None, None)
    task.check(f"{metric}, first", len(losses) > 1, first)
    falls = len(losses) > 1 and (metric != "val_loss" or last < first + 1e-4)
    task.check(f"{metric}, last", falls, last)
    task.figure("tokens a second, last", rates[-1])
    task.figure("recompilations", output.count("Recompiling function"))
    task.figure("warnings", sum("warning" in line.lower() for line in output.splitlines()))


def grpo(task: Task) -> None:
    steps = 2 if task.tiny else 20
    train_stage(task, "stage-grpo", base="instruct_checkpoint", metric="val_reward", training_stage="grpo",
                grpo_data_path=task.folder / "sample" / "prompts", reward="length*-0.01", grpo_group=4,
                micro_batch_size=4, grpo_max_tokens=16, max_steps=steps, validate_every=steps // 2)


def use(task: Task) -> None:
    """Train with DETERMINISTIC=true and samples, then use the run: generate, chat, evaluate."""
    flags = flags_of(task, "use", deterministic="true", max_steps=6, sample_every=2, validate_every=6,
                     sample_prompts="The")
    run, short = task.runs / "use", ("--max-new-tokens", 8)
    for name, arguments, stdin in (
            ("train", ("train.py", *flags), ""),
            ("generate", ("scripts/generate.py", run, "--prompt", "The", *short), ""),
            ("chat", ("scripts/chat.py", run, *short), "The\n"),
            ("evaluate", ("scripts/evaluate.py", run, "--validation-rows", 2), "")):
        started = time.perf_counter()
        code, output = task.run(*arguments, stdin=stdin)
        task.check(f"{name}: exit code", code == 0, last_line(output) if code else 0)
        task.figure(f"{name}: seconds", round(time.perf_counter() - started, 1))
    samples = (run / "samples.jsonl").read_text(encoding="utf-8").count("\n")
    task.check("samples", samples >= 3, samples)


def stops(task: Task) -> None:
    """Stop a run by SIGTERM, then by kill -9; it must resume each time and finish."""
    steps, interval = (12, 2) if task.tiny else (90, 10)
    flags = flags_of(task, "stops", max_steps=steps, save_every=interval, validate_every=0)

    def steps_done() -> int:
        ledger = task.runs / "stops" / "ledger.jsonl"
        return ledger.read_text().count("\n") if ledger.exists() else 0

    for number, expected in ((signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)):
        name, before = signal.Signals(number).name, steps_done()
        process = subprocess.Popen([sys.executable, "train.py", *flags], cwd=ROOT, stdin=subprocess.DEVNULL)
        while process.poll() is None and steps_done() <= before + interval:  # past its next checkpoint
            time.sleep(0.01)
        process.send_signal(number)
        code = process.wait()
        task.check(f"{name}: exit code", code == expected, code)
        task.check(f"{name}: steps before", before < steps_done() < steps, steps_done())
    code, output = task.run("train.py", *flags)
    task.check("exit code at the end", code == 0, code)
    resumed = [-1, *map(int, re.findall(r"resuming after step (\d+)", output))][-1]
    task.check("resumed after step", resumed >= interval, resumed)
    task.check("steps in the ledger", steps_done() == steps, steps_done())


def verify_resume(task: Task, deterministic: bool) -> None:
    """Run scripts/verify_resume.py. On CUDA without DETERMINISTIC, a difference is only recorded."""
    flags = flags_of(task, "resume", deterministic=str(deterministic).lower())
    code, output = task.run("scripts/verify_resume.py", "--steps", 8, *flags)
    # The first column of its table is 18 characters wide.
    for name, text in re.findall(r"^  (\S.{16}) ?(ok: .*|DIFFERS: .*|kill -9 .*)$", output, re.MULTILINE):
        task.figure(name.strip(), text)
    accepted = code == 0 or (code == 1 and task.cuda and not deterministic)
    task.check("exit code", accepted, code)
    if not accepted:
        task.note(fault=last_line(output))


def fsdp(task: Task) -> None:
    """Compare the losses of runs with SHARDING=full and with CPU_OFFLOAD, on one rank, with a plain run."""
    compiled = "true" if task.cuda else "false"
    changes = {"precision": "fp32", "tf32": "false", "compile": compiled, "max_steps": 5, "log_every": 1}
    layouts = {"plain": {}, "full": {"sharding": "full"},
               "offload": {"sharding": "full", "cpu_offload": "true"}}
    losses = {}
    for name, layout in layouts.items():
        code, output = task.run("train.py", *flags_of(task, f"fsdp-{name}", **changes, **layout))
        losses[name] = [float(loss) for loss in re.findall(r"Step \[.*? Loss: (\S+)", output)]
        task.check(f"{name}: exit code", code == 0, last_line(output) if code else 0)
    for name in ("full", "offload"):
        gaps = [abs(one - other) for one, other in zip(losses[name], losses["plain"])]
        task.check(f"{name}: loss difference", len(gaps) == 5 and max(gaps) < 1e-3, max(gaps, default="none"))


def power(task: Task) -> None:
    """Sample the power of a run and profile some steps; the results must be plausible."""
    from checkpoint.schema import read_entries

    changes = {"power_hz": 50, "profile_steps": "2:3"}
    if task.cuda:
        changes["memory_snapshot"] = 2
    else:
        changes["peak_tflops"] = 1
    code, output = task.run("train.py", *flags_of(task, "power", max_steps=4 if task.tiny else 60, **changes))
    task.check("exit code", code == 0, code)
    folder = task.runs / "power"
    lines = [line for line in read_entries(folder / "metrics.jsonl") if "train_loss" in line]
    for name in ("mfu", "hfu"):
        task.check(name, 0 < lines[-1].get(name, 0) < 1, lines[-1].get(name))
    [trace] = (folder / "profile").glob("*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    kernels = sum(event.get("cat") == "kernel" for event in events)
    task.check("CUDA kernels in the profile", kernels > 0 or not task.cuda, kernels)
    text = next((folder / "profile").glob("*.txt")).read_text()
    share = float(re.search(r"([\d.]+)% are counted", text)[1])
    task.check("counted FLOPs, percent of the formula's", 98 < share < 102, share)
    if task.cuda:
        size = sum(path.stat().st_size for path in (folder / "profile").glob("memory-step-2.pickle"))
        task.check("bytes of the memory snapshot", size > 0, size)
    if not (folder / "power.csv").exists():
        task.check("power", not task.cuda, "no readable counter")
        return
    with open(folder / "power.csv", newline="") as file:
        check_power(task, lines, [*csv.DictReader(file)])


def check_power(task: Task, lines: list[dict[str, Any]], samples: list[dict[str, str]]) -> None:
    """Check the lines of metrics.jsonl, and the samples of power.csv."""
    limit, line = math.inf, lines[-1]
    if task.cuda:
        import pynvml

        pynvml.nvmlInit()
        limit = pynvml.nvmlDeviceGetEnforcedPowerLimit(pynvml.nvmlDeviceGetHandleByIndex(0)) / 1000
        task.figure("power limit, W", limit)
    watts = [float(row["watts"]) for row in samples if row["watts"]]
    task.check("highest power, W", 0 < max(watts) <= 1.1 * limit, max(watts))  # short peaks exceed the limit
    for name in ("power_watts", "joules_per_token", "gpu_utilization", "gpu_memory_bytes", "gpu_clock_mhz",
                 "gpu_temperature_celsius", "gpu_throttled"):
        on_cpu = name in ("power_watts", "joules_per_token")
        task.check(name, name in line or not (task.cuda or on_cpu), line.get(name))
    # After the compilation: the sampling rate, the driver's update rate, and the energy counter.
    steps = range(*((2, 4) if task.tiny else (21, 60)))
    inside = [row for row in samples if int(row["step"]) in steps and row["watts"]]
    seconds = float(inside[-1]["time"]) - float(inside[0]["time"]) if len(inside) > 1 else math.inf
    rate = len(inside) / seconds
    task.check("samples a second", rate > 40 or task.tiny, rate)
    values = [row["watts"] for row in inside]
    task.figure("new values a second", sum(map(str.__ne__, values, values[1:])) / seconds)
    counted = [entry["power_watts"] for entry in lines if entry["step"] in steps and "power_watts" in entry]
    if counted and values:
        ratio = sum(counted) / len(counted) / (sum(map(float, values)) / len(values))
        task.check("energy counter / mean of the samples", 0.8 < ratio < 1.25 or task.tiny, ratio)


def speed(task: Task, model: str, tiny_contenders: str) -> None:
    """Run scripts/dev/benchmark.py on one model, and record each contender when it ends."""
    def on_line(line: str) -> None:
        if match := re.match(r"block 1/1: (\{.*\})", line):
            figures = json.loads(match[1])
            name = figures["contender"]
            if "error" in figures:
                task.figure(name, f"failed: {figures['error']}")
                if name.startswith("paddock"):
                    task.note(fault=f"{name}: {figures['error']}")
            elif "skipped" in figures:
                task.figure(name, f"skipped: {figures['skipped']}")
            else:
                task.figure(name, {key: figures[key] for key in BENCHMARKED if key in figures})
        elif "rejected: " in line:
            task.note(fault=line.strip(" |\n"))

    # The most important contenders come first, because the time may run out.
    contenders = "paddock,paddock-causal,hf-liger,paddock-budget,litgpt,hf-compile"
    size = ("--model", model, "--contenders", contenders)
    if task.tiny:
        size = ("--model", "tiny", "--contenders", tiny_contenders, "--eager", "--threads", 1)
    code, _ = task.run("scripts/dev/benchmark.py", *size, "--blocks", 1, "--fast", "--device", task.device,
                       "--profile", 25, "--seconds", f"{task.seconds - 10:.0f}",
                       "--json", task.folder / f"benchmark-{model}.json", on_line=on_line)
    task.check("exit code", code == 0, code)


def generate(task: Task) -> None:
    size = ("--shape", "1b", "--weights", "bf16", "--pairs", 2, "--caches", "dynamic", "static")
    if task.tiny:
        size = ("--shape", "tiny", "--pairs", 1, "--prompt-tokens", 16, "--new-tokens", 8, "--threads", 1)
    results = task.folder / "generate.jsonl"
    code, _ = task.run("scripts/dev/benchmark_generate.py", *size, "--device", task.device, "--json", results)
    task.check("exit code", code == 0, code)
    for line in map(json.loads, results.read_text().splitlines()):
        size = f"batch {line['batch']}" if "batch" in line else "8 requests"
        rates = {part: line[f"{part}_wall"] for part in ("prefill", "decode") if f"{part}_wall" in line}
        task.figure(f"{size}: {', '.join(line['names'])}", rates | {"same_tokens": line["same_tokens"]})


def from_probe(task: Task, name: str) -> None:
    from scripts.gpu import probe  # imports torch at the top

    getattr(probe, name)(task)


BENCHMARKED = ("tokens_per_second", "rows", "accumulation", "mfu", "mfu_causal", "peak_memory_gib",
               "memory_forecast_gib", "first_step_seconds", "first_loss", "profile")
DPO = dict(preset="sample,sample-dpo", base="pretrain_checkpoint")
DISTILLATION = dict(base="teacher_model", distillation_enabled="true")
STAGES: dict[str, dict[str, Any]] = {
    "stage-pretrain": {}, "stage-muon": dict(optimizer="muon", learning_rate=0.01),
    "stage-sft": dict(preset="sample,sample-sft", base="pretrain_checkpoint"),
    "stage-dpo": dict(DPO, dpo_reference="stored"),
    "stage-lora-dpo": dict(DPO, dpo_reference="live", lora_enabled="true", lora_rank=4),
    "stage-windows": dict(model_type="smollm3", sliding_window=64, sliding_every=2, no_rope_every=2),
    "stage-distil": DISTILLATION}
PARTS: dict[str, Callable[[Task], None]] = {
    "header": header, "sample": sample, "fsdp": fsdp, "stage-stops": stops, "power": power, "use": use,
    **{name: partial(from_probe, name=name)
       for name in ("probe", "attention", "memory", "checkpoint", "hellaswag", "decode")},
    **{f"parity-{name}": partial(run_tests, prefix=f"test_{name}")
       for name in ("values", "attention", "compiled", "faults")},
    "ranks": partial(run_tests, prefix="test_ranks"),
    **{name: partial(train_stage, name=name, **stage) for name, stage in STAGES.items()},
    "stage-grpo": grpo, "resume": partial(verify_resume, deterministic=False),
    "resume-deterministic": partial(verify_resume, deterministic=True),
    "speed-1b": partial(speed, model="1b", tiny_contenders="paddock,hf-liger,litgpt"),
    "speed-174m": partial(speed, model="174m", tiny_contenders="paddock-causal,paddock-budget,hf-compile"),
    "generate": generate}


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("part", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--layout", default="", help="measure only this layout, in this process (for memory)")
    options = parser.parse_args()
    notes = options.output / f"{options.part}.notes.jsonl"
    PARTS[options.part](Task(options.device, options.tiny, options.output, options.seconds, notes,
                             options.layout))


if __name__ == "__main__":
    run_script(main)
