"""Train every stage on the embedded sample, and measure what each was to improve, before and after, on held-out data.

    python scripts/pipeline.py            (or bash scripts/run_pipeline.sh, which sets up first)
    NPROC=2 python scripts/pipeline.py    on two ranks

Flags go to every training run. A second call goes on where the first was stopped. It leaves the figures in
runs/pipeline/summary.json, and the table with its plots in runs/pipeline/pipeline.md.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from checkpoint.schema import read_entries  # noqa: E402
from common.errors import PaddockError, SettingsError, requires_package, run_script  # noqa: E402
from data_pipeline.chat_templates import load_chat_format  # noqa: E402
from data_pipeline.packed_rows import ExampleRows, open_example_set  # noqa: E402
from data_pipeline.shard_reader import TokenizerFacts  # noqa: E402
from model_utils import load_model_folder  # noqa: E402
from objectives.preference import answer_lengths, is_pair, pair_logprobs  # noqa: E402
from training.generate import generate  # noqa: E402

SAMPLE, RUNS = Path("data/sample"), Path("runs/pipeline")
SEEDS = (1, 2, 3)
ANSWER_TOKENS = 40
CLOCK = RUNS / "seconds.json"


def run_python(*arguments: str | Path, ranks: int = 1) -> None:
    """Run one of our programs and show what it says.

    Args:
        ranks: of train.py, which more than one run through the launcher.
    Raises:
        PaddockError: it failed.
    """
    command = ["scripts/launch.py", "--nproc-per-node", ranks, *arguments[1:]] if ranks > 1 else arguments
    code = subprocess.run([sys.executable, *map(str, command)]).returncode
    if code:
        raise PaddockError(f"{' '.join(map(str, arguments))} ended with exit code {code}; what it says above is the cause, and "
                           "the same command goes on from here")


class Pipeline:
    """The runs of one pipeline, and how long they took, which outlives a call."""

    def __init__(self, ranks: int, flags: Sequence[str]):
        self.ranks, self.flags = ranks, list(flags)
        RUNS.mkdir(parents=True, exist_ok=True)
        self.seconds: dict[str, float] = json.loads(CLOCK.read_text()) if CLOCK.exists() else {}

    def train(self, name: str, *flags: str | Path) -> Path:
        """Train a run to its end; its last checkpoint."""
        print(f"\n=== {name} " + "=" * (90 - len(name)), flush=True)
        started = time.perf_counter()
        run_python("train.py", "--output-dir", RUNS, "--run-name", name, *flags, *self.flags, ranks=self.ranks)
        self.clock(name, started)
        return max((RUNS / name / "checkpoints").glob("step-*"))

    def clock(self, name: str, started: float) -> None:
        """Add the time since `started` to a name's."""
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
        CLOCK.write_text(json.dumps(self.seconds, indent=1))


def curve(name: str, metric: str) -> list[tuple[int, float]]:
    """(step, value) of a metric wherever a run logged it."""
    lines = read_entries(RUNS / name / "metrics.jsonl")
    return [(line["step"], line[metric]) for line in lines if line.get(metric) is not None]


@torch.no_grad()
def exact_answers(folder: Path) -> tuple[float, float]:
    """The share of held-out questions that are answered exactly, greedily, and of answers that stop at the end of turn."""
    model, tokenizer = load_model_folder(folder)
    chat_format = load_chat_format(tokenizer)
    chats = [json.loads(line)["messages"] for line in (SAMPLE / "questions-held-out.jsonl").read_text().splitlines()]
    right = stopped = 0
    for start in range(0, len(chats), 100):
        part = chats[start:start + 100]
        written = generate(model, [chat_format.encode_prompt(chat[:-1]) for chat in part], ANSWER_TOKENS,
                           stop_ids={chat_format.end_of_turn_id})
        right += sum(tokenizer.decode(ids) == chat[-1]["content"] for chat, ids in zip(part, written))
        stopped += sum(len(ids) < ANSWER_TOKENS for ids in written)
    return right / len(chats), stopped / len(chats)


@torch.no_grad()
def preference_accuracy(folder: Path) -> float:
    """The share of held-out pairs whose chosen answer the model finds likelier than the rejected one."""
    model, tokenizer = load_model_folder(folder)
    pairs = open_example_set(SAMPLE / "dpo-held-out", "train", "pairs", TokenizerFacts(tokenizer.vocab_size))
    rows, right, count = ExampleRows(pairs, 512), 0, 0
    for start in range(0, len(rows), 16):
        batch = rows(np.arange(start, min(start + 16, len(rows)))).to(model.norm.weight.device)
        logprob_BP2, there_BP = pair_logprobs(model, batch), is_pair(answer_lengths(batch))
        right += int(((logprob_BP2[..., 0] > logprob_BP2[..., 1]) & there_BP).sum())
        count += int(there_BP.sum())
    return right / count


def trained_fraction(adapter: Path, base: Path) -> float:
    """The adapters' parameters as a share of the base's."""
    from checkpoint.hf_format import load_model_weights
    from checkpoint.tensor_files import read_tensors

    trained = sum(tensor.numel() for tensor in read_tensors(adapter / "adapter_model.safetensors").values())
    return trained / sum(tensor.numel() for tensor in load_model_weights(base).values())


def run_stages(pipeline: Pipeline) -> dict:
    """Train everything; the figures of summary.json."""
    train, sft = pipeline.train, ("--preset", "sample,sample-sft")
    base = train("pretrain", "--preset", "sample", "--sample-every", 0)
    instruct = train("sft", *sft, "--pretrain-checkpoint", base)
    preferred = train("dpo", "--preset", "sample,sample-dpo", "--instruct-checkpoint", instruct)
    adapter = train("lora", "--preset", "sample,sample-sft,sample-lora", "--pretrain-checkpoint", base)
    losses: dict[str, list[float]] = {"alone": [], "distilled": []}
    for seed in SEEDS:
        student = ("--preset", "sample,sample-student", "--seed", seed)
        train(f"student-{seed}", *student)
        train(f"distilled-{seed}", *student, "--distillation-enabled", "true", "--teacher-model", base)
        losses["alone"].append(curve(f"student-{seed}", "val_loss")[-1][1])
        losses["distilled"].append(curve(f"distilled-{seed}", "val_cross_entropy")[-1][1])

    started = time.perf_counter()
    print("\n=== evaluation on held-out data " + "=" * 60, flush=True)
    merged = RUNS / "lora-merged"
    shutil.rmtree(merged, ignore_errors=True)
    run_python("scripts/merge_lora.py", adapter, "--output", merged)
    answers = {name: exact_answers(folder) for name, folder in
               {"pretrain": base, "sft": instruct, "dpo": preferred, "lora": merged}.items()}
    items = [value for _, value in curve("pretrain", "hellaswag_acc")]
    summary = {
        "pretrain": {"item_accuracy": [items[0], items[-1]]},
        "sft": {"exact_answers": [answers["pretrain"][0], answers["sft"][0]],
                "stops": [answers["pretrain"][1], answers["sft"][1]]},
        "dpo": {"preference_accuracy": [preference_accuracy(instruct), preference_accuracy(preferred)],
                "exact_answers": [answers["sft"][0], answers["dpo"][0]]},
        "distill": {"val_loss": [losses["alone"], losses["distilled"]]},
        "lora": {"exact_answers": [answers["pretrain"][0], answers["lora"][0]],
                 "trainable_fraction": trained_fraction(adapter, base)},
    }
    pipeline.clock("evaluation", started)
    return summary | {"seconds": sum(pipeline.seconds.values())}


def table(summary: dict) -> str:
    """The figures as a table in Markdown."""
    def percent(values: Sequence[float]) -> str:
        return " | ".join(f"{100 * value:.1f} %" for value in values)

    def losses(values: Sequence[float]) -> str:
        return f"{mean(values):.4f} ± {stdev(values):.4f}"

    lora, distill = summary["lora"], summary["distill"]["val_loss"]
    gain, whole_gain = (after - before for before, after in (lora["exact_answers"], summary["sft"]["exact_answers"]))
    lines = [
        "| stage | measured on held-out data | before | after |", "|---|---|---|---|",
        f"| pretraining | the right one of four endings (n = 500) | {percent(summary['pretrain']['item_accuracy'])} |",
        f"| SFT | questions answered exactly (n = 500) | {percent(summary['sft']['exact_answers'])} |",
        f"| SFT | answers that stop at the end of turn | {percent(summary['sft']['stops'])} |",
        f"| DPO | the chosen answer is the likelier (n = 500 pairs) | {percent(summary['dpo']['preference_accuracy'])} |",
        f"| DPO | questions answered exactly | {percent(summary['dpo']['exact_answers'])} |",
        f"| LoRA SFT, {100 * lora['trainable_fraction']:.1f} % of the parameters | questions answered exactly ("
        f"{100 * gain / (whole_gain or 1):.0f} % of full SFT's gain) | {percent(lora['exact_answers'])} |",
        f"| distillation of a smaller student | validation loss alone / distilled, {len(SEEDS)} seeds each | {losses(distill[0])} | "
        f"{losses(distill[1])} |"]
    return "\n".join(lines)


def draw(output: Path) -> None:
    """One panel a stage: how its validation went."""
    with requires_package("matplotlib", "a plot"):
        import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = [("Pretraining", "loss (nats a token)", {"pretrain": "val_loss"}),
              ("SFT, all weights and LoRA", "loss (nats a target)", {"sft": "val_loss", "lora": "val_loss"}),
              ("DPO", "margin of the reward", {"dpo": "val_reward_margin"}),
              ("Students", "loss (nats a token)", {**{f"student-{seed}": "val_loss" for seed in SEEDS},
                                                   **{f"distilled-{seed}": "val_cross_entropy" for seed in SEEDS}})]
    figure, axes = plt.subplots(2, 2, figsize=(9, 6))
    for axis, (title, unit, runs) in zip(axes.flat, panels):
        for name, metric in runs.items():
            points = curve(name, metric)
            if title == "Students":
                points = points[1:]  # from the same initial loss, which would flatten the picture
                kind, seed = name.rsplit("-", 1)
                axis.plot(*zip(*points), marker="o", color="tab:blue" if kind == "student" else "tab:orange",
                          label={"student": "alone", "distilled": "distilled"}[kind] if seed == "1" else None)
            else:
                axis.plot(*zip(*points), marker="o", label=name)
        axis.set(title=title, xlabel="step", ylabel=unit)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(output, dpi=100)


def report(summary: dict, pipeline: Pipeline) -> None:
    """The table on the screen and, with plots, beside the runs."""
    (RUNS / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    times = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in pipeline.seconds.items())
    picture = "\n![curves](pipeline.png)\n"
    try:
        draw(RUNS / "pipeline.png")
    except SettingsError as error:
        print(f"No plots: {error}", file=sys.stderr)
        picture = ""
    (RUNS / "pipeline.md").write_text(f"""# Every stage, seen to learn

`bash scripts/run_pipeline.sh` on the embedded sample, offline, {pipeline.ranks} rank{'s' if pipeline.ranks > 1 else ''} on \
{torch.cuda.get_device_name() if torch.cuda.is_available() else f'a CPU with {os.cpu_count()} cores'}, \
{summary['seconds'] / 60:.1f} minutes in all ({times}). What is held out is about facts that no training text tells.

{table(summary)}
{picture}""", encoding="utf-8")
    print(f"\n{table(summary)}\n\n{summary['seconds'] / 60:.1f} minutes of work. The figures: {RUNS / 'summary.json'}; "
          f"{'with plots' if picture else 'as a page'}: {RUNS / 'pipeline.md'}\nTalk with it: python scripts/generate.py "
          f"{max((RUNS / 'dpo' / 'checkpoints').glob('step-*'))} --chat --prompt \"A story ... What colour is the kite?\"")


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return
    os.chdir(ROOT)
    ranks = int(os.environ.get("NPROC") or max(1, torch.cuda.device_count()))
    if ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    pipeline = Pipeline(ranks, sys.argv[1:])
    started = time.perf_counter()
    run_python("scripts/make_sample.py")
    pipeline.clock("sample", started)
    report(run_stages(pipeline), pipeline)


if __name__ == "__main__":
    run_script(main, "Stopped. The same command goes on where it was.")
