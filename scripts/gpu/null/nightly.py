"""Train every stage, layout and precision on a GPU that is not there (build.sh), and print a table.

    bash scripts/gpu/null/build.sh ENVIRONMENT FOLDER
    FOLDER/run python scripts/gpu/null/nightly.py --output RESULTS

torch's host code for CUDA runs for real: allocator, autograd, compiler, streams. Kernels compute nothing. So
it shows crashes, waits, recompilations, launches and memory, but neither values nor speed. The exit code is 1
if a run fails, waits too often, compiles again after its second step, reserves ever more memory, or if the
forecast is off by more than 2 %; also if a step launches more kernels and matrix products, or if its compiled
kernels read and write more bytes, than counts.json says for this torch. RESULTS/counts.json has the numbers
of this run. The host's time is printed only, since it differs between machines. cards.py tries the models
that docs/gpu.md names.
"""

import importlib.metadata
import json
import re
import shutil
import sys
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from common.command_line import CommandParser  # noqa: E402
from common.errors import run_script  # noqa: E402
from scripts.dev.benchmark import MODELS  # noqa: E402
from scripts.gpu import parts  # noqa: E402
from scripts.gpu.null import cards  # noqa: E402
from scripts.gpu.parts import DISTILLATION, DPO, STAGES, WARN_OF_WAITS, Task, flags_of  # noqa: E402

STEPS, PER_CENT, MIB = 6, 2, 2**20
LEVEL = 16 * MIB  # of reserved memory: rows with other documents need other blocks
HALF = {"weight_dtype": "bf16", "optimizer_dtype": "bf16"}
BACKWARD = {"update_in_backward": "true", "max_grad_norm": 0}
LORA = {"lora_enabled": "true", "lora_rank": 4}
GRPO = {"base": "instruct_checkpoint", "training_stage": "grpo", "reward": "length*-0.01", "grpo_group": 4,
        "micro_batch_size": 4, "grpo_max_tokens": 16}
FULL = {"sharding": "full"}
TWO = {"ranks": 2, "log_every": 2}  # in a step that is logged, ranks also exchange their times
# SFT of the benchmark's models: nearly all tokens are targets.
FULL_SIZE = {name: {"vocab": each.vocab, "training_stage": "sft", "random_init": "true",
                    "max_seq_len": each.seq_len, "micro_batch_size": each.rows,
                    "total_batch_size": each.rows * each.seq_len, **each.shape}
             for name, each in MODELS.items() if name in ("174m", "1b")}
CASES: dict[str, dict[str, Any]] = {
    "stage-pretrain": {"save_every": STEPS, "micro_batch_size": 32},
    "eager": {"compile": "false"}, "fp32": {"precision": "fp32"}, "fp16": {"precision": "fp16"},
    "deterministic": {"deterministic": "true"}, "recomputed": {"activation_checkpointing": "block"},
    "selective": {"activation_checkpointing": "selective", "activation_memory_budget": 0.9},
    "muon": STAGES["stage-muon"], "windows": STAGES["stage-windows"],
    "bf16 weights": HALF, "bf16 weights, in backward": HALF | BACKWARD, "bf16 weights, sharded": HALF | FULL,
    "bf16 weights, Muon": HALF | STAGES["stage-muon"],
    "reproducible": {"reproducible": "true"}, "reproducible, sharded": FULL | {"reproducible": "true"},
    "sharded": FULL, "sharded, recomputed": FULL | {"activation_checkpointing": "block"},
    "sharded, on the host": FULL | {"cpu_offload": "true"},
    **FULL_SIZE,
    "SFT": STAGES["stage-sft"], "SFT, adapters": STAGES["stage-sft"] | LORA | {"lora_dropout": 0.1},
    "SFT, nf4 base": STAGES["stage-sft"] | LORA | {"lora_base_quantization": "nf4"},
    "SFT, int8 base": STAGES["stage-sft"] | LORA | {"lora_base_quantization": "int8"},
    "distillation": DISTILLATION,
    "DPO, stored": DPO | {"dpo_reference": "stored"}, "DPO, live": DPO | {"dpo_reference": "live"},
    "DPO of adapters": DPO | LORA, "ORPO": DPO | {"preference_objective": "orpo"},
    "SimPO": DPO | {"preference_objective": "simpo"}, "KTO": DPO | {"preference_objective": "kto"},
    "GRPO": GRPO, "GRPO, two updates": GRPO | {"grpo_beta": 0.1, "grpo_updates": 2},
    "two ranks": TWO, "two ranks, sharded": FULL | TWO,
    "two ranks, sharded, Muon": FULL | STAGES["stage-muon"] | TWO,
    "two ranks, sharded, bf16 weights": HALF | FULL | TWO,
    "two ranks, reproducible": TWO | {"reproducible": "true"},
    "two ranks, reproducible, sharded": FULL | TWO | {"reproducible": "true"},
    "two ranks, adapters": STAGES["stage-sft"] | LORA | TWO,
    "two ranks, adapters, sharded": STAGES["stage-sft"] | LORA | FULL | TWO,
    "four ranks, hybrid": TWO | {"sharding": "hybrid", "shard_degree": 2, "ranks": 4},
    **{f"capability {each / 10}": {"capability": each} for each in (75, 80, 86, 89, 100, 120)}}
# The most waits of a step without evaluation. KTO waits for the answers of all ranks, each update once, and
# an optimizer on the host for the gradients.
MOST_WAITS = {"KTO": 2, "GRPO": 70, "GRPO, two updates": 71, "sharded, on the host": 4}
TORCH = ".".join(importlib.metadata.version("torch").split(".")[:2])
KNOWN = json.loads(Path(__file__).with_name("counts.json").read_text("utf-8")).get(TORCH, {})


class Outcome(NamedTuple):
    """What a run printed."""

    code: int
    waits: float  # the fewest of a step after the second
    recompilations: int  # after the second step
    growth: int  # bytes of reserved memory, from the third step to the last
    peak: int  # allocated bytes
    launches: int  # these are the fewest of a step after the second
    megabytes: int
    host_ms: float

    def faults(self, name: str) -> list[str]:
        launches, megabytes = [*KNOWN.get(name, ()), float("inf"), float("inf")][:2]
        reasons = {f"exit code {self.code}": self.code != 0,
                   f"{self.waits} waits": self.waits > MOST_WAITS.get(name, 1),
                   f"{self.recompilations} recompilations": self.recompilations > 0,
                   f"{self.growth / MIB:.0f} MiB more reserved": self.growth > LEVEL,
                   f"{launches} launches before": self.launches > launches,
                   f"{megabytes} MB before": self.megabytes > 1.01 * megabytes}  # rows differ in documents
        return [reason for reason, holds in reasons.items() if holds]


def outcome_of(code: int, output: str) -> Outcome:
    texts = output.split("NULL peak ")[1:]  # each begins at the end of a train_step
    sizes = [tuple(map(int, re.findall(r"\d+", text.split("\n")[0]))) for text in texts]
    waits = [text.count("called a synchronizing") for text in texts[2:-1]]
    later = sum(text.count("Recompiling function") for text in texts[2:])
    growth = sizes[-1][1] - sizes[2][1] if len(sizes) > 2 else 0
    peak = max((peak for peak, *_ in sizes), default=0)
    steps = [[new - old for old, new in zip(*both)] for both in pairwise(sizes[1:])]
    _, _, launches, taken, us = map(min, zip(*steps)) if steps else [0] * 5
    return Outcome(code, min(waits, default=float("inf")), later, growth, peak, launches,
                   round(taken / 1e6), us / 1000)


def train(task: Task, name: str, settings: Mapping[str, Any]) -> Outcome:
    settings = {"max_steps": STEPS, "validate_every": 0, "total_batch_size": 16_384, **settings}
    preset, base = settings.pop("preset", "sample"), settings.pop("base", "")
    ranks, data, env = settings.pop("ranks", 1), task.folder / "sample", {}
    if vocab := settings.pop("vocab", 0):
        settings |= {"sft_data_path": cards.prepared(task.folder, vocab),
                     "tokenizer_path": task.folder / f"tokenizer-{vocab}"}
        preset, env = "", {"NULL_STEPS": str(STEPS), "NULL_HOLDS": "0"}
    if settings.get("preference_objective") == "kto":
        settings["dpo_data_path"] = data / "unpaired"
    if settings.get("training_stage") == "grpo":
        settings["grpo_data_path"] = data / "prompts"
    if base:
        settings[base] = max((task.runs / "stage-pretrain" / "checkpoints").glob("step-*"))
    env |= {"TORCH_LOGS": "recompiles", "NULL_CC": str(settings.pop("capability", 90))}
    flags = flags_of(task, re.sub(r"\W+", "-", name), preset, **settings)
    run = partial(parts.train_on, task, ranks, devices=ranks) if ranks > 1 else task.train
    return outcome_of(*run(*flags, prelude=WARN_OF_WAITS, env=env | {"NULL_DEVICES": str(ranks)}))


def forecasts(task: Task) -> dict[str, tuple[float, float]]:
    """Return GiB by layout: the forecast, and the allocator's peak."""
    for name in ("memory", "more-memory"):
        task.run("scripts/gpu/parts.py", name, "--device", "cuda", "--output", task.folder,
                 "--figures", task.notes, "--seconds", 3600)
    figures = (item for name in ("memory", "more-memory")
               for item in parts.read_figures(task.notes, name)[0].items())
    return {layout: (values["forecast GiB"], values["allocated GiB"]) for layout, values in figures
            if isinstance(values, dict) and "allocated GiB" in values}


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER",
                        help="for the sample, runs and table")
    parser.add_argument("--only", default="", metavar="TEXT",
                        help="cases whose name has it; the first always runs")
    options = parser.parse_args()
    folder = options.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    task = Task("null", "cuda", False, folder, 3600, folder / "figures.jsonl")
    shutil.rmtree(task.runs, ignore_errors=True)  # or they would go on
    if not (folder / "sample" / "unpaired").exists():
        parts.sample(task)
    lines, faults = ["| run | waits a step | launches | kernels' MB | host ms | peak GiB | |",
                     "|---|---|---|---|---|---|---|"], []
    counts: dict[str, tuple[int, int]] = {}
    for number, (name, settings) in enumerate(CASES.items()):
        if number == 0 or options.only in name:
            outcome = train(task, name, settings)
            found = outcome.faults(name)
            faults += [f"{name}: {reason}" for reason in found]
            counts[name] = outcome.launches, outcome.megabytes
            lines.append(f"| {name} | {outcome.waits} | {outcome.launches} | {outcome.megabytes:,} | "
                         f"{outcome.host_ms:.0f} | {outcome.peak / 2**30:.2f} | {', '.join(found) or 'ok'} |")
            (folder / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
            (folder / "counts.json").write_text(json.dumps({TORCH: counts}, indent=1), encoding="utf-8")
    if options.only in "forecasts":
        lines += ["", "| layout | forecast GiB | peak GiB | off by |", "|---|---|---|---|"]
        for layout, (forecast, peak) in forecasts(task).items():
            off = 100 * (forecast / peak - 1)
            faults += [f"{layout}: the forecast is off by {off:.1f} %"] if abs(off) > PER_CENT else []
            lines.append(f"| {layout} | {forecast:.2f} | {peak:.2f} | {off:+.1f} % |")
    (folder / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join([*lines, "", *(faults or ["no fault"])]), flush=True)
    sys.exit(bool(faults))


if __name__ == "__main__":
    run_script(main)
