"""Train every stage on the sample data, and measure on held-out data how much each stage improves.

    ./paddock pipeline
    NPROC=2 ./paddock pipeline    on two ranks

This takes 10 to 25 minutes on two CPU cores, on which two stages train at the same time. All flags are
passed to every training run. If interrupted, the same command resumes. The results are in
runs/pipeline/summary.json and, as a table, in runs/pipeline/pipeline.md.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev
from typing import Optional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.command_line import CommandParser  # noqa: E402
from common.errors import PaddockError, SettingsError, run_script  # noqa: E402
from common.text import command, counted  # noqa: E402
from plan.layers import read_flags  # noqa: E402


def parse_args() -> list[str]:
    """Return the settings for every training run."""
    parser = CommandParser(__doc__, usage="%(prog)s [settings as for train.py]", allow_abbrev=False)
    _, flags = parser.parse_known_args()
    if problems := read_flags(flags).problems:
        raise SettingsError(*problems)
    return flags


if __name__ == "__main__":
    run_script(parse_args)  # before torch, whose import takes seconds

import numpy as np  # noqa: E402
import torch  # noqa: E402

from checkpoint.huggingface import load_model_weights  # noqa: E402
from checkpoint.schema import read_entries  # noqa: E402
from checkpoint.tensors import open_tensors  # noqa: E402
from data_pipeline.shards import TokenizerInfo  # noqa: E402
from data_pipeline.templates import load_chat_format  # noqa: E402
from dataloaders import ExampleRows, open_example_set  # noqa: E402
from extensions.inference.engine import generate  # noqa: E402
from extensions.inference.weights import load_for_use  # noqa: E402
from learn.objectives import answer_lengths, is_pair, pair_logprobs  # noqa: E402

SAMPLE, RUNS = Path("data/sample"), Path("runs/pipeline")
SEEDS = (1, 2, 3)
ANSWER_TOKENS = 40


def run_python(label: str, script: str, *arguments: object, ranks: int = 1) -> None:
    """Run a script, or train.py by the launcher if there are several ranks; label its output."""
    if ranks > 1:
        script, arguments = "scripts/launch.py", ("--nproc-per-node", ranks, *arguments)
    process = subprocess.Popen([sys.executable, str(ROOT / script), *map(str, arguments)],
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               encoding="utf-8", errors="replace")
    for line in process.stdout:
        print(f"{label:11} {line}", end="", flush=True)
    if code := process.wait():
        raise PaddockError(f"{' '.join(map(str, (script, *arguments)))} failed with exit code {code}; see "
                           "its output above; the same command resumes from here")


class Pipeline:
    """The runs of a pipeline."""

    def __init__(self, ranks: int, flags: Sequence[str]):
        self.ranks, self.flags = ranks, flags
        self.lanes = 1 if ranks > 1 or torch.cuda.is_available() else min(2, os.cpu_count() or 1)
        self.error: Optional[PaddockError] = None  # of the first run that failed
        RUNS.mkdir(parents=True, exist_ok=True)
        self.began = time.perf_counter()

    def train(self, name: str, preset: str, *flags: object) -> Path:
        """Train a run to its end and return its last checkpoint; wait for checkpoints among the flags."""
        flags = [flag.result() if isinstance(flag, Future) else flag for flag in flags]
        if self.error:
            raise self.error
        ranks = 1 if "student" in preset else self.ranks  # a student's steps have two rows
        try:
            run_python(name, "train.py", "--output-dir", RUNS, "--run-name", name, "--preset", preset, *flags,
                       *self.flags, ranks=ranks)
        except PaddockError as error:
            self.error = self.error or error
            raise
        return last_checkpoint(name)


def last_checkpoint(name: str) -> Path:
    return max((RUNS / name / "checkpoints").glob("step-*"))


def curve(name: str, metric: str) -> list[tuple[int, float]]:
    """Return (step, value) of a run's metric for each step that has one."""
    lines = read_entries(RUNS / name / "metrics.jsonl")
    return [(line["step"], line[metric]) for line in lines if line.get(metric) is not None]


@torch.no_grad()
def exact_answers(folder: Path) -> tuple[float, float]:
    """Return the share of held-out questions answered exactly, and of answers that end (greedy decoding)."""
    model, tokenizer = load_for_use(folder)
    chat_format = load_chat_format(tokenizer)
    lines = (SAMPLE / "questions-held-out.jsonl").read_text().splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    right = stopped = 0
    for start in range(0, len(chats), 100):
        batch = chats[start:start + 100]
        prompts = [chat_format.encode_prompt(chat[:-1]) for chat in batch]
        answers = generate(model, prompts, ANSWER_TOKENS, stop_ids={chat_format.end_of_turn_id})
        right += sum(tokenizer.decode(ids) == chat[-1]["content"] for chat, ids in zip(batch, answers))
        stopped += sum(len(ids) < ANSWER_TOKENS for ids in answers)
    return right / len(chats), stopped / len(chats)


@torch.no_grad()
def preference_accuracy(folder: Path) -> float:
    """Return the share of held-out pairs whose chosen answer is more probable than the rejected one."""
    model, tokenizer = load_for_use(folder)
    pairs = open_example_set(SAMPLE / "dpo-held-out", "train", "pairs", TokenizerInfo(tokenizer.vocab_size))
    rows, right, count = ExampleRows(pairs, 512), 0, 0
    for start in range(0, len(rows), 16):
        batch = rows(np.arange(start, min(start + 16, len(rows)))).to(model.norm.weight.device)
        logprob_BP2, is_pair_BP = pair_logprobs(model, batch), is_pair(answer_lengths(batch))
        right += int(((logprob_BP2[..., 0] > logprob_BP2[..., 1]) & is_pair_BP).sum())
        count += int(is_pair_BP.sum())
    return right / count


def run_stages(pipeline: Pipeline) -> dict:
    """Train and evaluate everything; return the content of summary.json."""
    # More steps than the presets: questions about the second person of a story need them.
    base = pipeline.train("pretrain", "sample", "--sample-every", 0, "--max-steps", 1000,
                          "--muon-momentum", 0.95)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // pipeline.lanes)))
    with ThreadPoolExecutor(pipeline.lanes) as pool:
        def train(*arguments: object) -> Future[Path]:
            return pool.submit(pipeline.train, *arguments)

        instruct = train("sft", "sample,sample-sft", "--pretrain-checkpoint", base, "--max-steps", 700)
        # Rewards and a teacher's scores improve a model that answers only some questions.
        start = train("short-sft", "sample,sample-sft", "--pretrain-checkpoint", base, "--max-steps", 200)
        rewarded = train("grpo", "sample,sample-grpo", "--instruct-checkpoint", start)
        on_policy = train("on-policy", "sample,sample-on-policy", "--instruct-checkpoint", start,
                       "--distillation-enabled", "true", "--grpo-group", 1, "--teacher-model", instruct)
        preferred = train("dpo", "sample,sample-dpo", "--instruct-checkpoint", instruct)
        adapter = train("lora", "sample,sample-sft,sample-lora", "--pretrain-checkpoint", base)
        students = []
        for seed in SEEDS:
            # More and smaller steps than the preset's: less spread over seeds.
            student = ("sample,sample-student", "--seed", seed, "--total-batch-size", 1024,
                       "--max-steps", 300, "--muon-momentum", 0.9, "--validate-every", 150)
            students += [train(f"student-{seed}", *student), train(
                f"distilled-{seed}", *student, "--distillation-enabled", "true", "--teacher-model", base)]
        models = {"pretrain": base, "sft": instruct.result(), "dpo": preferred.result(),
                  "lora": adapter.result(), "start": start.result(), "grpo": rewarded.result(),
                  "on-policy": on_policy.result()}
        for student in students:
            student.result()
    losses = {kind: [curve(f"{kind}-{seed}", metric)[-1][1] for seed in SEEDS]
              for kind, metric in (("student", "val_loss"), ("distilled", "val_cross_entropy"))}

    # Evaluate all of them on held-out data.
    print("evaluation  on held-out data", flush=True)
    adapter, merged = models["lora"], RUNS / "lora-merged"
    shutil.rmtree(merged, ignore_errors=True)
    run_python("evaluation", "scripts/merge_lora.py", adapter, "--output", merged)
    models["lora"] = merged
    right, stops = zip(*map(exact_answers, models.values()))
    right, stops = dict(zip(models, right)), dict(zip(models, stops))
    items = [value for _, value in curve("pretrain", "hellaswag_acc")]
    trained, total = (sum(math.prod(tensor.shape) for tensor in tensors.values()) for tensors in
                      (open_tensors(adapter / "adapter_model.safetensors"), load_model_weights(base)))
    preferences = [preference_accuracy(models[name]) for name in ("sft", "dpo")]
    return {
        "pretrain": {"item_accuracy": [items[0], items[-1]]},
        "sft": {"exact_answers": [right["pretrain"], right["sft"]],
                "stops": [stops["pretrain"], stops["sft"]]},
        "dpo": {"preference_accuracy": preferences, "exact_answers": [right["sft"], right["dpo"]]},
        **{name: {"exact_answers": [right["start"], right[name]]} for name in ("grpo", "on-policy")},
        "distill": {"val_loss": [losses["student"], losses["distilled"]]},
        "lora": {"exact_answers": [right["pretrain"], right["lora"]], "trainable_fraction": trained / total},
        "seconds": time.perf_counter() - pipeline.began}


def table(summary: dict) -> str:
    """Return the results as a Markdown table."""
    def percent(values: Sequence[float]) -> str:
        return " | ".join(f"{100 * value:.1f} %" for value in values)

    stages = "pretrain", "sft", "dpo", "lora", "distill"
    pretrain, sft, dpo, lora, distill = (summary[stage] for stage in stages)
    gain, whole_gain = (after - before for before, after in (lora["exact_answers"], sft["exact_answers"]))
    losses = " | ".join(f"{mean(values):.4f} ± {stdev(values):.4f}" for values in distill["val_loss"])
    rows = {
        "pretraining | correct ending chosen out of four (n = 500)": percent(pretrain["item_accuracy"]),
        "SFT | questions answered exactly (n = 500)": percent(sft["exact_answers"]),
        "SFT | answers that end with the end-of-turn token": percent(sft["stops"]),
        "DPO | chosen answer more probable than rejected (n = 500)": percent(dpo["preference_accuracy"]),
        "DPO | questions answered exactly": percent(dpo["exact_answers"]),
        f"LoRA SFT, {100 * lora['trainable_fraction']:.1f} % of the parameters | questions answered exactly "
        f"({100 * gain / (whole_gain or 1):.0f} % of full SFT's gain)": percent(lora["exact_answers"]),
        "GRPO after a short SFT | questions answered exactly": percent(summary["grpo"]["exact_answers"]),
        "on-policy distillation after a short SFT | questions answered exactly":
            percent(summary["on-policy"]["exact_answers"]),
        f"distillation into a smaller student | validation loss without / with teacher ({len(SEEDS)} seeds)":
            losses}
    return "\n".join(["| stage | measured on held-out data | before | after |", "|---|---|---|---|",
                      *(f"| {name} | {values} |" for name, values in rows.items())])


def report(summary: dict, count: int) -> None:
    """Print the table, and write it into RUNS."""
    (RUNS / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    on_gpu, ranks = torch.cuda.is_available(), counted(count, 'rank')
    machine = torch.cuda.get_device_name() if on_gpu else f"a CPU with {counted(os.cpu_count() or 1, 'core')}"
    minutes = f"{summary['seconds'] / 60:.1f} minutes"
    (RUNS / "pipeline.md").write_text(f"""# Every stage on the sample data

`./paddock pipeline` took {minutes} with {ranks} on {machine}. The held-out data is about facts \
that no training text contains.

{table(summary)}
""", encoding="utf-8")
    print(f"\n{table(summary)}\n\nFinished in {minutes}.\nResults: {RUNS / 'summary.json'}\n"
          f"Table: {RUNS / 'pipeline.md'}\n"
          f"Chat with the model: {command('scripts/chat.py', last_checkpoint('dpo'))}\n"
          "Try a question such as: A story ... What colour is the kite?")


def main() -> None:
    flags = parse_args()
    ranks = int(os.environ.get("NPROC") or max(1, torch.cuda.device_count()))
    if ranks > 1:  # which share the cores
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    pipeline = Pipeline(ranks, flags)
    run_python("sample", "scripts/make_sample.py")
    report(run_stages(pipeline), ranks)


if __name__ == "__main__":
    run_script(main, "Stopped. Run the same command again to resume.")
