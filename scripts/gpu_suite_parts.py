"""One part of scripts/gpu_suite.py, which starts this in a process of its own: what it finds goes into PART.notes.jsonl at
once, so that a part which is ended at its limit has told what it knew.
"""

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.errors import run_script  # noqa: E402


class Skipped(Exception):
    """This part cannot run here; the text says why."""


@dataclass
class Task:
    """What a part is given, and where it notes what it finds."""

    device: str
    tiny: bool
    folder: Path
    seconds: float
    notes: Path

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def note(self, **entry: Any) -> None:
        """Keep an entry, whatever happens next."""
        with open(self.notes, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry, default=str) + "\n")

    def figure(self, name: str, value: Any) -> None:
        """A result."""
        print(f"{name}: {value}", flush=True)
        self.note(figure={name: value})

    def check(self, name: str, holds: bool, value: Any) -> None:
        """A result that must hold."""
        self.figure(name, value)
        if not holds:
            self.note(fault=f"{name} is {value}")

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """A `with` block whose failure is noted, and stops nothing that follows it."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.note(fault=f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[0][:300] if str(error) else ''}")

    def run(self, name: str, *arguments: Any, env: Optional[dict[str, str]] = None) -> subprocess.CompletedProcess:
        """Run one of our programs to its end, with its output shown and returned."""
        command = [sys.executable, *map(str, arguments)]
        print(f"$ {name}: {' '.join(command)}", flush=True)
        done = subprocess.run(command, cwd=ROOT, env=os.environ | (env or {}), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, errors="replace")
        print(done.stdout, flush=True)
        return done


def last_line(text: str) -> str:
    """What a program said last that is not empty."""
    return ([line for line in text.splitlines() if line.strip()] or ["it said nothing"])[-1][:300]


# ------------------------------------------------------------------------------------------------------- the machine


def header(task: Task) -> None:
    """On what machine, with which versions, of which commit the parts are."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    changed = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], cwd=ROOT, capture_output=True, text=True)
    task.figure("commit", (commit.stdout.strip() + (", changed" if changed.stdout.strip() else "")) or "unknown")
    task.figure("date", datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"))
    if task.tiny:
        task.figure("sizes", "toy")
    task.figure("python", platform.python_version())
    task.figure("cores", os.cpu_count())
    import torch

    task.figure("torch", torch.__version__)
    for name in ("triton", "transformers", "liger_kernel", "litgpt", "flash_attn", "flash_attn_interface"):
        task.figure(name, version_of(name))
    if not task.cuda:
        task.figure("device", f"CPU ({torch.get_num_threads()} threads)")
        return
    if not torch.cuda.is_available():
        task.note(fault="torch sees no GPU here; take --device cpu, or the CUDA build of torch")
        return
    properties = torch.cuda.get_device_properties(0)
    task.figure("device", properties.name)
    task.figure("capability", "{}.{}".format(*torch.cuda.get_device_capability()))
    task.figure("memory GiB", round(properties.total_memory / 2**30, 1))
    task.figure("CUDA", torch.version.cuda)
    task.figure("cuDNN", torch.backends.cudnn.version())
    task.figure("nccl", ".".join(map(str, torch.cuda.nccl.version())))
    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True)
    task.figure("driver", driver.stdout.strip().splitlines()[0] if driver.stdout.strip() else "unknown")


def version_of(package: str) -> str:
    """Its version, or that it is not there."""
    from importlib import metadata, util

    if util.find_spec(package) is None:
        return "not installed"
    try:
        return metadata.version({"flash_attn": "flash-attn", "liger_kernel": "liger-kernel"}.get(package, package))
    except metadata.PackageNotFoundError:
        return "unknown"


# ------------------------------------------------------------------------------------------------------- tests, grouped


def pytest_part(*chosen: str) -> Callable[[Task], None]:
    """A part that is tests of tests/system/gpu/test_gpu.py, with each of them a figure."""

    def part(task: Task) -> None:
        command = [sys.executable, "-m", "pytest", "tests/system/gpu/test_gpu.py", "-m", "gpu", "-k", " or ".join(chosen), "-vv", "-raP",
                   "--tb=short", "-p", "no:cacheprovider", "--basetemp", str(task.folder / "runs" / f"tests-{chosen[0]}")]
        environment = os.environ | {"PADDOCK_TEST_DEVICE": task.device, "COLUMNS": "400", "PYTHONUNBUFFERED": "1"}
        (task.folder / "runs").mkdir(exist_ok=True)
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   text=True)
        counts = {"passed": 0, "skipped": 0, "failed": 0}
        for line in process.stdout:
            print(line, end="", flush=True)
            if found := re.match(r"tests/system/gpu/test_gpu\.py::(\S+(?: \S+)*?) (PASSED|FAILED|ERROR|SKIPPED)", line):
                kind = "failed" if found[2] == "ERROR" else found[2].lower()
                counts[kind] += 1
                task.figure(kind, counts[kind])
            elif found := re.match(r"(FAILED|ERROR) tests/system/gpu/test_gpu\.py::(.*)", line):
                task.note(fault=found[2].strip()[:300])
            elif found := re.match(r"SKIPPED \[(\d+)\] \S+: (.*)", line):
                task.figure(f"skipped: {found[2].strip()}", int(found[1]))
            elif found := re.match(r"measured: (.+) = (.+)", line.strip()):
                task.figure(found[1], int(found[2]))
        code = process.wait()
        task.check("pytest's exit code", code == 0, code)
        if not counts["passed"] and counts["skipped"]:
            task.note(skipped="every test of it needs CUDA")

    return part


# ------------------------------------------------------------------------------------------------------------- stages


def sample(task: Task) -> None:
    """The embedded sample, smaller, for the stages."""
    stories = 2400 if task.tiny else 12_000
    done = task.run("sample", "scripts/make_sample.py", "--stories", stories, "--folder", task.folder / "sample")
    task.check("exit code", done.returncode == 0, done.returncode)
    task.figure("stories", stories)


def flags_of(task: Task, name: str, preset: str = "sample") -> list[str]:
    """Flags of a short run on the sample; a later flag wins."""
    data, runs = task.folder / "sample", task.folder / "runs"
    paths = {"output-dir": runs, "run-name": name, "pretrain-data-path": data / "pretrain", "sft-data-path": data / "sft",
             "dpo-data-path": data / "dpo", "hellaswag-path": data / "items.jsonl", "tokenizer-path": data / "tokenizer.model"}
    learning = {"optimizer": "adamw", "learning-rate": 0.003, "lr-schedule": "cosine", "warmup-steps": 2}
    how_often = {"hellaswag-every": 0, "sample-every": 0, "save-every": 0, "log-every": 1, "drift-check-every": 0}
    sizes = ({"max-steps": 4, "total-batch-size": 2048, "validation-rows": 2, "validate-every": 2, "dim": 64, "n-layers": 2,
              "ffn-dim": 128} if task.tiny else
             {"max-steps": 60, "total-batch-size": 16_384, "validation-rows": 16, "validate-every": 20})
    settings = {"preset": preset, "device": task.device, "compile": "true" if task.cuda else "false", **paths, **learning,
                **how_often, **sizes}
    return [f"--{name}={value}" for name, value in settings.items()]


def base_of(task: Task, name: str = "stage-pretrain") -> Path:
    """The last checkpoint of an earlier part's run."""
    return max((task.folder / "runs" / name / "checkpoints").glob("step-*"))


def stage(name: str, preset: str, base: Optional[str] = None, **settings: Any) -> Callable[[Task], None]:
    """A part that trains one stage, and sees that it ends well and its validation loss falls.

    Args:
        base: the setting that takes the checkpoint of stage-pretrain.
    """

    def part(task: Task) -> None:
        from checkpoint.schema import read_entries

        flags = [*flags_of(task, name, preset), *([f"--{base}={base_of(task)}"] if base else []),
                 *(f"--{key.replace('_', '-')}={value}" for key, value in settings.items())]
        started = time.perf_counter()
        done = task.run(name, "train.py", *flags, env={"TORCH_LOGS": "recompiles"})
        task.figure("seconds", round(time.perf_counter() - started, 1))
        task.check("exit code", done.returncode == 0, done.returncode)
        if done.returncode:
            task.note(fault=last_line(done.stdout))
            return
        lines = list(read_entries(task.folder / "runs" / name / "metrics.jsonl"))
        losses = [line["val_loss"] for line in lines if "val_loss" in line]
        trained = [line for line in lines if "tokens_per_second" in line]
        task.check("validation loss, first", len(losses) > 1, losses[0] if losses else None)
        task.check("validation loss, last", len(losses) > 1 and losses[-1] < losses[0] + 1e-4, losses[-1] if losses else None)
        task.figure("tokens a second, last", trained[-1]["tokens_per_second"])
        task.figure("recompilations", done.stdout.count("Recompiling function"))
        task.figure("warnings", sum("warning" in line.lower() for line in done.stdout.splitlines()))

    return part


def steps_of(run: Path) -> int:
    """The steps that a run's ledger tells of."""
    ledger = run / "ledger.jsonl"
    return ledger.read_text().count("\n") if ledger.exists() else 0


def stops(task: Task) -> None:
    """A run that is stopped by TERM, then by kill -9, goes on from where it was, to its end."""
    steps, often = (12, 2) if task.tiny else (90, 10)
    run = task.folder / "runs" / "stops"
    flags = [*flags_of(task, run.name), f"--max-steps={steps}", f"--save-every={often}", "--validate-every=0"]
    for number, code_then in ((signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)):
        name, before = signal.Signals(number).name, steps_of(run)
        process = subprocess.Popen([sys.executable, "train.py", *flags], cwd=ROOT, stdin=subprocess.DEVNULL)
        while process.poll() is None and steps_of(run) <= before + often:
            time.sleep(0.01)
        process.send_signal(number)
        code, reached = process.wait(), steps_of(run)
        task.check(f"{name}: exit code", code == code_then, code)
        task.check(f"{name}: steps before", before < reached < steps, reached)
    done = task.run("stops", "train.py", *flags)
    task.check("exit code at the end", done.returncode == 0, done.returncode)
    begun = [int(step) for step in re.findall(r"resuming after step (\d+)", done.stdout)]
    task.check("went on after step", bool(begun) and begun[-1] >= often, begun[-1] if begun else None)
    task.check("steps in the ledger", steps_of(run) == steps, steps_of(run))


def verified_resume(deterministic: bool) -> Callable[[Task], None]:
    """A part that is scripts/verify_resume.py; without DETERMINISTIC a difference on CUDA is a figure, not a fault."""

    def part(task: Task) -> None:
        from config import Config

        if deterministic and "deterministic" not in Config.model_fields:
            raise Skipped("this commit has no DETERMINISTIC")
        flags = [*flags_of(task, "resume"), *(["--deterministic=true"] * deterministic)]
        done = task.run("verify_resume", "scripts/verify_resume.py", "--steps", 8, *flags)
        for name, text in re.findall(r"^  (\S.{16}) ?(ok: .*|DIFFERS: .*|kill -9 .*)$", done.stdout, re.MULTILINE):
            task.figure(name.strip(), text)
        must = deterministic or not task.cuda
        task.check("exit code", done.returncode == 0 or (done.returncode == 1 and not must), done.returncode)
        if done.returncode and (must or done.returncode != 1):
            task.note(fault=last_line(done.stdout))

    return part


# -------------------------------------------------------------------------------------------------------------- FSDP


def fsdp(task: Task) -> None:
    """One forward and backward by FSDP2 at world size 1 beside the plain model: whether it would work, no promise."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from config import Config
    from model_utils import build_model
    from parallel.collectives import Ranks

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("nccl" if task.cuda else "gloo", store=store, rank=0, world_size=1)
    device = torch.device(task.device, 0) if task.cuda else torch.device("cpu")
    config = Config(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128)
    tokens = torch.randint(512, (2, 65), generator=torch.Generator().manual_seed(0)).to(device)

    def values(wrap: Callable) -> list[torch.Tensor]:
        model = build_model(config, 512, Ranks(device=device), torch.float32)
        wrap(model)
        loss = -model(tokens[:, :-1], tokens[:, 1:], reduction="sum") / tokens[:, 1:].numel()
        loss.backward()
        full = (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
                for gradient in (parameter.grad for parameter in model.parameters()))
        return [loss.detach(), *full]

    def sharded(model) -> None:
        mesh = init_device_mesh(task.device, (1,))
        for block in model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    plain = values(lambda model: None)
    try:
        apart = max(float((one - other).abs().max() / other.abs().max())
                    for one, other in zip(values(sharded), plain, strict=True))
        task.check("loss and gradients apart", apart < 1e-5, apart)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        task.figure("works", f"no: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------------- speed


CONTENDERS = ("paddock", "paddock-causal", "hf-liger", "paddock-budget", "litgpt", "hf-compile")  # first what matters most


def speed(model: str, some: Sequence[str]) -> Callable[[Task], None]:
    """A part that is scripts/benchmark.py on one model, at toy size with some contenders; each one's figures come at its end."""

    def part(task: Task) -> None:
        shown = ("tokens_per_second", "mfu", "mfu_causal", "peak_memory_gib", "memory_forecast_gib", "first_step_seconds",
                 "first_loss", "profile")
        results = task.folder / f"benchmark-{model}.json"
        contenders = some if task.tiny else CONTENDERS
        command = [sys.executable, "scripts/benchmark.py", "--model", "tiny" if task.tiny else model, "--contenders",
                   ",".join(contenders), "--blocks", "1", "--fast", "--device", task.device, "--profile", "25", "--seconds",
                   f"{task.seconds - 10:.0f}", "--json", str(results), *(["--eager", "--threads", "1"] if task.tiny else [])]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in process.stdout:
            print(line, end="", flush=True)
            if found := re.match(r"block 1/1: (\{.*\})", line):
                figures = json.loads(found[1])
                name = figures["contender"]
                if "error" in figures:
                    task.figure(name, f"failed: {figures['error']}")
                    if name.startswith("paddock"):
                        task.note(fault=f"{name}: {figures['error']}")
                elif "skipped" in figures:
                    task.figure(name, f"skipped: {figures['skipped']}")
                else:
                    task.figure(name, {key: figures[key] for key in shown if key in figures})
            elif "refused: " in line:
                task.note(fault=line.strip(" |\n"))
        task.check("exit code", process.wait() == 0, process.returncode)

    return part


def from_probe(name: str) -> Callable[[Task], None]:
    """A part of gpu_probe.py, which imports torch, as most parts do not."""

    def part(task: Task) -> None:
        import gpu_probe

        getattr(gpu_probe, name)(task)

    return part


def main() -> int:
    parts: dict[str, Callable[[Task], None]] = {
        "header": header, "probe": from_probe("probe"), "attention": from_probe("attention"), "sample": sample,
        "parity-values": pytest_part("test_values"), "parity-attention": pytest_part("test_attention"),
        "parity-compiled": pytest_part("test_compiled"), "parity-faults": pytest_part("test_faults"),
        "ranks": pytest_part("test_ranks"), "fsdp": fsdp,
        "stage-pretrain": stage("stage-pretrain", "sample"),
        "stage-muon": stage("stage-muon", "sample", optimizer="muon", learning_rate=0.01),
        "stage-sft": stage("stage-sft", "sample,sample-sft", "pretrain-checkpoint"),
        "stage-dpo": stage("stage-dpo", "sample,sample-dpo", "pretrain-checkpoint", dpo_reference="stored"),
        "stage-lora-dpo": stage("stage-lora-dpo", "sample,sample-dpo", "pretrain-checkpoint", lora_enabled="true", lora_rank=4,
                                dpo_reference="live"),
        "stage-distil": stage("stage-distil", "sample", "teacher-model", distillation_enabled="true"),
        "stage-distil-stored": stage("stage-distil-stored", "sample", "teacher-model", distillation_enabled="true",
                                     distillation_top_k=8),
        "stage-stops": stops, "resume": verified_resume(False), "resume-deterministic": verified_resume(True),
        "checkpoint": from_probe("checkpoint"), "hellaswag": from_probe("hellaswag"),
        "speed-1b": speed("1b", ("paddock", "hf-liger", "litgpt")),
        "speed-174m": speed("174m", ("paddock-causal", "paddock-budget", "hf-compile"))}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=parts)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    task = Task(options.device, options.tiny, options.output, options.seconds, options.output / f"{options.part}.notes.jsonl")
    try:
        parts[options.part](task)
    except Skipped as reason:
        task.note(skipped=str(reason))
    return 0


if __name__ == "__main__":
    run_script(lambda: sys.exit(main()))
