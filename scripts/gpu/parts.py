"""Run one part of scripts/gpu/suite.py, which starts this file as a separate process.

Figures are appended to --figures immediately, so that none is lost if the part is killed at its limit.
"""

import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
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
from scripts.gpu.suite import NO_DEVICE, read_figures  # noqa: E402

# What changes torch or Paddock before training
WARN_OF_WAITS = "import torch\ntorch.cuda.set_sync_debug_mode('warn')"
LITTLE_MEMORY = "import torch\ntorch.cuda.set_per_process_memory_fraction(0.005)"
OVER_GLOO = """import dataclasses, torch
from parallel import ranks
join = ranks._init_process_group
cpu = torch.device("cpu")  # two ranks on one GPU need gloo, because nccl refuses them
ranks._init_process_group = lambda each, *others: join(dataclasses.replace(each, device=cpu), *others)"""
TRAIN = "import runpy, sys\nsys.argv[0] = 'train.py'\nrunpy.run_path('train.py', run_name='__main__')"


@dataclass
class Task:
    """The options of a part, and the file for its figures."""

    part: str
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
            file.write(json.dumps({"part": self.part, **entry}, default=str) + "\n")

    def figure(self, name: str, value: Any) -> None:
        print(f"{name}: {value}", flush=True)
        self.note(figure={name: value})

    def figures(self) -> dict[str, Any]:
        return read_figures(self.notes, self.part)[0]

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

    def train(self, *flags: str, prelude: str = "", env: Mapping[str, str] = {}) -> tuple[int, str]:
        start = ("-W", "always", "-c", f"{prelude}\n{TRAIN}") if prelude else ("train.py",)
        return self.run(*start, *flags, env=env)

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
    """Record the machine; only a missing device is fatal."""
    def output_of(*command: str) -> str:
        with suppress(OSError):  # the program is missing
            return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
        return ""

    # torch is imported last, so that the other figures are recorded if it is missing.
    commit = os.environ.get("PADDOCK_COMMIT") or output_of("git", "rev-parse", "HEAD")
    changed = ", changed" if output_of("git", "status", "--porcelain", "--untracked-files=no") else ""
    task.figure("commit", commit + changed if commit else "unknown")
    task.figure("date", datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"))
    task.figure("sizes", "toy" if task.tiny else "full")
    task.figure("python", platform.python_version())
    task.figure("cores", os.cpu_count())
    import torch

    task.figure("torch", torch.__version__)
    if not task.cuda:
        task.figure("device", f"CPU ({torch.get_num_threads()} threads)")
    elif not torch.cuda.is_available():
        task.figure("device", NO_DEVICE)
        task.note(fault="torch finds no GPU; use --device cpu, or install a CUDA build of torch")
        return
    else:
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
        with suppress(Exception):  # NVML or its package is missing
            from scripts.gpus import read_gpus

            task.figure("NVML", "; ".join(map(str, read_gpus())))
    for name in ("triton", "transformers", "liger_kernel", "litgpt", "flash_attn", "flash_attn_interface"):
        version = "unknown" if importlib.util.find_spec(name) else "not installed"
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name.replace("_", "-"))
        task.figure(name, version)
    from_probe(task, "kernels")


def sample(task: Task) -> None:
    """Make the sample data, and unpaired answers, for KTO, from its pairs."""
    from data_preparation_utils import PreparationOptions, prepare_set

    stories, folder = 2400 if task.tiny else 12_000, task.folder / "sample"
    code, _ = task.run("scripts/make_sample.py", "--stories", stories, "--folder", folder)
    task.check("exit code", code == 0, code)
    task.figure("stories", stories)
    with open(folder / "preferences.jsonl") as pairs, open(folder / "unpaired.jsonl", "w") as unpaired:
        for number, pair in enumerate(map(json.loads, pairs)):
            completion = pair["rejected" if number % 2 else "chosen"]
            record = {"prompt": pair["prompt"], "completion": completion, "label": number % 2 == 0}
            unpaired.write(json.dumps(record) + "\n")
    options = PreparationOptions(str(folder / "tokenizer.model"), "tiktoken", 100_000_000, 0.1)
    prepare_set("pairs", str(folder / "unpaired.jsonl"), folder / "unpaired", options)


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

    if changes.get("preference_objective") == "kto":
        changes["dpo_data_path"] = task.folder / "sample" / "unpaired"
    if base:
        changes[base] = max((task.runs / "stage-pretrain" / "checkpoints").glob("step-*"))
    started, flags = time.perf_counter(), flags_of(task, name, preset, **changes)
    code, output = task.train(*flags, prelude=WARN_OF_WAITS if task.cuda else "")
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
    task.figure("watts", [*(line["power_watts"] for line in lines if "power_watts" in line), "no counter"][0])
    task.figure("recompilations", output.count("Recompiling function"))
    task.figure("graph breaks", output.count("Graph break"))
    if task.cuda:  # each step's line comes after its waits; the first steps compile, and some evaluate
        waits = sorted(step.count("called a synchronizing") for step in output.split("Step [")[5:-1])
        median = waits[len(waits) // 2] if waits else math.inf
        # KTO waits once more, for the answers of all ranks, and GRPO for each token that it generates.
        most = {"stage-kto": 2, "stage-grpo": math.inf}.get(name, 1)
        task.check("waits a step, median", median <= most, median)
    task.figure("warnings", sum("warning: " in line.lower() and "synchronizing" not in line
                                for line in output.splitlines()))


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


def verify_resume(task: Task) -> None:
    flags = flags_of(task, "resume", deterministic="true")
    code, output = task.run("scripts/verify_resume.py", "--steps", 8, *flags)
    # The first column of its table is 18 characters wide.
    for name, text in re.findall(r"^  (\S.{16}) ?(ok: .*|DIFFERS: .*|kill -9 .*)$", output, re.MULTILINE):
        task.figure(name.strip(), text)
    task.check("exit code", code == 0, last_line(output) if code else 0)


def faults(task: Task) -> None:
    """Train in fp16, to a loss that is not finite, and with too little memory; compare the exit codes."""
    cases = {"not finite": (4, "not finite", "", {"init_std": 1e15})}
    if task.cuda:
        cases |= {"fp16": (0, "", "", {"precision": "fp16"}),
                  "out of memory": (1, "out of memory", LITTLE_MEMORY,
                                    {"dim": 2048, "n_heads": 16, "n_kv_heads": 16, "n_layers": 8})}
    for name, (expected, text, prelude, changes) in cases.items():
        flags = flags_of(task, f"faults-{name.replace(' ', '-')}", max_steps=8, validate_every=0, **changes)
        code, output = task.train(*flags, prelude=prelude)
        task.check(f"{name}: exit code", code == expected and text in output, code)
        task.check(f"{name}: traceback", "Traceback" not in output, "Traceback" in output)


def train_on(task: Task, ranks: int, *flags: str, prelude: str = OVER_GLOO, devices: int = 1,
             env: Mapping[str, str] = {}) -> tuple[int, str]:
    """Train on ranks that share devices; return the worst exit code, and the output of rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # With a run's id, as from a launcher, ranks wait for slow ones.
    env = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(devices), "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "parts", **env}

    def train(rank: int) -> tuple[int, str]:
        return task.train(*flags, prelude=prelude,
                          env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank % devices)})

    with ThreadPoolExecutor(ranks) as pool:
        ended = [*pool.map(train, range(ranks))]
    return max((code for code, _ in ended), key=abs), ended[0][1]


def compare_layouts(task: Task, layouts: Mapping[str, Mapping[str, str]]) -> None:
    """Compare the losses of runs in these layouts with those of a plain run."""
    compiled = "true" if task.cuda else "false"
    changes = {"precision": "fp32", "tf32": "false", "compile": compiled, "max_steps": 5, "log_every": 1}
    losses = {}
    for name, layout in ({"plain": {}} | layouts).items():
        train = partial(train_on, task, 2) if name == "two ranks" else task.train
        code, output = train(*flags_of(task, f"{task.part}-{name.replace(' ', '-')}", **changes, **layout))
        losses[name] = [float(loss) for loss in re.findall(r"Step \[.*? Loss: (\S+)", output)]
        task.check(f"{name}: exit code", code == 0, last_line(output) if code else 0)
        task.figure(f"{name}: recompilations", output.count("Recompiling function"))
    for name in layouts:
        gaps = [abs(one - other) for one, other in zip(losses[name], losses["plain"])]
        task.check(f"{name}: loss difference", len(gaps) == 5 and max(gaps) < 1e-3, max(gaps, default="none"))


def saving(task: Task) -> None:
    """Measure pinned allocation, and how long a run stops for each asynchronous save."""
    from checkpoint.schema import read_entries

    if task.cuda:
        import torch

        for name in ("first", "second"):  # pinned memory that was freed is kept
            started = time.perf_counter()
            torch.empty(2**32, dtype=torch.uint8, pin_memory=True)
            task.figure(f"4 GiB of pinned memory, {name}, s", round(time.perf_counter() - started, 2))
    shape = {} if task.tiny else {"dim": 2048, "n_layers": 8, "n_heads": 16, "n_kv_heads": 8, "ffn_dim": 8192}
    flags = flags_of(task, "saving", max_steps=7, save_every=2, keep_last=1, **shape)
    code, output = task.train(*flags)
    task.check("exit code", code == 0, last_line(output) if code else 0)
    for entry in read_entries(task.runs / "saving" / "events.jsonl"):
        if entry["event"] in ("save", "saved"):  # training stopped; the checkpoint is complete
            task.figure(f"{entry['event']}, step {entry['step']}, s", entry["seconds"])


def speed(task: Task, model: str, contenders: str) -> None:
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
    size = ("tiny", "--eager", "--threads", 1) if task.tiny else (model,)
    code, _ = task.run("scripts/dev/benchmark.py", "--contenders", contenders, "--blocks", 1, "--fast",
                       "--device", task.device, "--seconds", f"{task.seconds - 10:.0f}", "--profile", 25,
                       "--model", *size, "--json", task.folder / f"{task.part}.json", on_line=on_line)
    ours = read_figures(task.notes, f"speed-{model}")[0].get("paddock", {})
    for name, figures in task.figures().items():
        if "tokens_per_second" in ours and not name.startswith("paddock") and "tokens_per_second" in figures:
            ratio = ours["tokens_per_second"] / figures["tokens_per_second"]
            task.figure(f"Paddock / {name}", round(ratio, 3))
    task.check("exit code", code == 0, code)


def generate(task: Task) -> None:
    if importlib.util.find_spec("transformers") is None:
        return task.note(skipped="transformers, with which it compares, is not installed")
    size = ("--shape", "1b", "--weights", "bf16", "--pairs", 1, "--caches", "static")
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
    from config import extension_module
    from scripts.gpu import probe  # imports torch at the top

    extension_module("cpu_kernels")
    getattr(probe, name)(task)


BENCHMARKED = ("tokens_per_second", "rows", "accumulation", "mfu", "mfu_causal", "peak_memory_gib",
               "memory_forecast_gib", "reserved_gib", "device_gib", "first_step_seconds", "first_loss",
               "compiled", "profile")
DPO = dict(preset="sample,sample-dpo", base="pretrain_checkpoint")
DISTILLATION = dict(base="teacher_model", distillation_enabled="true")
STAGES: dict[str, dict[str, Any]] = {
    "stage-pretrain": dict(profile_steps="2:3", power_hz=50),
    "stage-muon": dict(optimizer="muon", learning_rate=0.01),
    "stage-sft": dict(preset="sample,sample-sft", base="pretrain_checkpoint"),
    "stage-dpo": dict(DPO, dpo_reference="stored"),
    "stage-kto": dict(DPO, dpo_reference="stored", preference_objective="kto", metric="val_reward_accuracy"),
    "stage-lora-dpo": dict(DPO, dpo_reference="live", lora_enabled="true", lora_rank=4),
    "stage-windows": dict(model_type="smollm3", sliding_window=64, sliding_every=2, no_rope_every=2),
    "stage-distil": DISTILLATION}
SHARDED = {"sharding": "full"}
PARTS: dict[str, Callable[[Task], None]] = {
    "header": header, "sample": sample, "use": use, "faults": faults, "resume": verify_resume,
    "fsdp": partial(compare_layouts, layouts={"full": SHARDED, "offload": SHARDED | {"cpu_offload": "true"}}),
    "ranks": partial(compare_layouts, layouts={"two ranks": {}}), "saving": saving,
    **{name: partial(from_probe, name=name) for name in ("probe", "parity", "attention", "memory", "decode")},
    "more-memory": partial(from_probe, name="memory"),
    **{name: partial(train_stage, name=name, **stage) for name, stage in STAGES.items()},
    "stage-grpo": grpo,
    "speed-1b": partial(speed, model="1b", contenders="paddock"),
    "speed-174m": partial(speed, model="174m", contenders="paddock"),
    "litgpt-1b": partial(speed, model="1b", contenders="litgpt"),
    "peers-1b": partial(speed, model="1b", contenders="hf-liger"),
    "more-speed-1b": partial(speed, model="1b", contenders="paddock-causal,paddock-budget,hf-compile"),
    "more-speed-174m": partial(speed, model="174m",
                               contenders="paddock-causal,hf-liger,paddock-budget,litgpt,hf-compile"),
    "generate": generate}


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("part", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--figures", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--layout", default="", help="measure only this layout, in this process (for memory)")
    options = parser.parse_args()
    PARTS[options.part](Task(options.part, options.device, options.tiny, options.output, options.seconds,
                             options.figures, options.layout))


if __name__ == "__main__":
    run_script(main)
