"""Measure what `./paddock decide` claims, on toy runs whose truth is known.

    .venv/bin/python scripts/dev/decide_truth.py train FOLDER
    .venv/bin/python scripts/dev/decide_truth.py measure FOLDER

`train` has 30 arms of 40 seeds each, in one process; `measure` resamples decisions from them.
Steps are those of train.py without its files: the same rows, model, objective and optimizer. Finished runs
are kept in FOLDER/runs.jsonl, and training resumes after them. Pairs are null by construction (other seeds,
another micro-batch size) or have an effect of more than four standard errors over all seeds. Others are left
out.
"""

import itertools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from random import Random
from statistics import NormalDist
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.command_line import CommandParser  # noqa: E402
from common.errors import run_script  # noqa: E402
from extensions.decide import ERROR, Verdict, compare, evidence, t_halves  # noqa: E402

SEEDS, STEPS, VOCABULARY = 40, 32, 320
# A step takes less than 5 ms of CPU time.
TOY = {"preset": "sample", "hellaswag_path": "none", "hellaswag_every": 0, "device": "cpu",
       "precision": "fp32", "dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 64,
       "max_seq_len": 64,
       "total_batch_size": 256, "micro_batch_size": 2, "max_steps": STEPS, "warmup_steps": 4,
       "validation_rows": 16, "extensions": "", "learning_rate": 0.02}
OFFSETS = {"base": (0, 1000, 2000, 3000), "learning_rate=0.03": (0, 1000), "dim=24": (0, 1000)}
CHANGES = ("micro_batch_size=4", "micro_batch_size=1", "learning_rate=0.01", "learning_rate=0.014",
           "learning_rate=0.017", "learning_rate=0.05", "warmup_steps=0", "warmup_steps=10",
           "warmup_steps=20",
           "total_batch_size=128", "total_batch_size=512", "dim=16", "dim=48", "ffn_dim=128", "n_layers=2",
           "weight_decay=0", "weight_decay=1", "decay_fraction=0.2", "decay_fraction=1", "optimizer=adamw",
           "damaged=0.1", "damaged=0.4")
ARMS = [*((name, offset) for name, offsets in OFFSETS.items() for offset in offsets),
        *((change, 0) for change in CHANGES)]
EFFECTS, DRAWS, MARGIN = 28, 100, 0.01


def prepare(folder: Path, share: float) -> Path:
    """Prepare the sample's stories, with the words of this share of them in random order."""
    from data_pipeline.vocabulary import train_bpe, write_tiktoken
    from data_preparation_utils import PreparationOptions, prepare_set
    from scripts.sample.stories import texts

    rng, output, tokenizer = Random(0), folder / f"damaged-{share}", folder / "tokenizer.model"
    if not output.exists():
        stories = [*itertools.islice(texts(), 4000)]
        if not tokenizer.exists():
            write_tiktoken(train_bpe(stories, VOCABULARY), tokenizer)
        damaged = [" ".join(rng.sample(words, len(words))) if rng.random() < share else " ".join(words)
                   for words in (story.split(" ") for story in stories)]
        (folder / "stories.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in damaged))
        prepare_set("documents", str(folder / "stories.jsonl"), output,
                    PreparationOptions(str(tokenizer), "tiktoken", 100_000_000, 0.005, workers=1))
    return output


def train_one(config: Any, seed: int, inputs_of: dict[str, Any]) -> dict[str, Any]:
    """Return the validation loss of a run at its early step and at its end."""
    import torch

    import model_utils
    from learn.objectives import NextToken
    from learn.optim import Optimizer, clip_scale, gradient_norm, learning_rate
    from parallel.ranks import Ranks
    from run.facts import read_inputs

    config = config.model_copy(update={"seed": seed})
    inputs = inputs_of.get(config.pretrain_data_path) or read_inputs(config, verify=False)
    inputs_of[config.pretrain_data_path] = inputs
    ranks, objective = Ranks(), NextToken()
    model = model_utils.build_model(config, inputs.tokenizer.vocab_size, ranks, torch.float32)
    optimizer, order, losses = Optimizer(model, config), inputs.order(config, ranks), {}
    batch = inputs.validation_rows(np.arange(config.validation_rows))
    for step in range(config.max_steps):
        optimizer.zero_grad()
        for rows in order.micro_batches(step):
            total = objective.loss_sum(model, inputs.rows(rows)).total
            (total / config.total_batch_size).backward()
        norm = gradient_norm(model)
        optimizer.step(learning_rate(step, config), clip_scale(norm, config.max_grad_norm), torch.tensor(0.0))
        if step + 1 in (config.max_steps // 4, config.max_steps // 2, config.max_steps):
            with torch.no_grad():
                by_row = objective.by_item(model, batch, "rows").total.double()
                losses[step + 1] = float(by_row.sum()) / batch.targets
    early, half, final = losses.values()
    return {"early": early, "half": half, "final": final, "steps": config.max_steps}


def train(folder: Path) -> None:
    """Train all arms, seed by seed, and append each result."""
    import torch

    from plan.make import make_plan

    torch.set_num_threads(1)
    path, inputs_of = folder / "runs.jsonl", {}
    done = {(each["arm"], each["offset"], each["seed"]) for each in read(folder)} if path.exists() else set()
    folder.mkdir(parents=True, exist_ok=True)
    data = {f"damaged={share}": prepare(folder, share) for share in (0, 0.1, 0.4)}
    configs = {}
    for arm in dict.fromkeys(arm for arm, _ in ARMS):
        flags = {**TOY, "tokenizer_path": folder / "tokenizer.model",
                 "pretrain_data_path": data.get(arm, data["damaged=0"]),
                 "validation_data_path": data["damaged=0"]}
        if arm not in ("base", *data):
            flags |= [arm.split("=")]
        words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        configs[arm] = make_plan(words, complete=False).config
    for seed, (arm, offset) in itertools.product(range(SEEDS), ARMS):
        if (arm, offset, seed) in done:
            continue
        losses = train_one(configs[arm], seed + offset, inputs_of)
        result = {"arm": arm, "offset": offset, "seed": seed} | losses
        with path.open("a") as lines:
            lines.write(json.dumps(result) + "\n")


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]


def pairs_of(runs: Sequence[Mapping[str, Any]]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the null pairs and those with an effect: early, half and final differences (seeds, 3)."""
    values: dict[tuple[str, int], dict[int, list[float]]] = {}
    for run in runs:
        results = [run[name] for name in ("early", "half", "final")]
        values.setdefault((run["arm"], run["offset"]), {})[run["seed"]] = results

    def difference(a: tuple[str, int], b: tuple[str, int]) -> np.ndarray:
        common = sorted(values[a].keys() & values[b].keys())
        return np.array([np.subtract(values[b][seed], values[a][seed]) for seed in common])

    nulls = {f"{arm}, seeds + {one} and + {other}": difference((arm, one), (arm, other))
             for arm, offsets in OFFSETS.items() for one, other in itertools.combinations(offsets, 2)}
    base, equal = ("base", 0), ("micro_batch_size=4", "micro_batch_size=1")
    arms = [(arm, 0) for arm in (*equal, *CHANGES[2:], *[*OFFSETS][1:])]
    nulls |= {f"base and {arm}": difference(base, (arm, 0)) for arm in equal}
    nulls["micro-batches of 4 and 1"] = difference(*((arm, 0) for arm in equal))
    nulls["base + 1000 and micro_batch_size=4"] = difference(("base", 1000), (equal[0], 0))
    others = itertools.combinations([base, *arms[2:]], 2)
    effects = {f"{a[0]} and {b[0]}": difference(a, b) for a, b in others}
    return nulls, {name: each for name, each in effects.items() if abs(standardized(each[:, 2])) > 4}


def standardized(differences: np.ndarray) -> float:
    return float(differences.mean() / (differences.std(ddof=1) / math.sqrt(len(differences))))


def fixed_size(deviation: float, margin: float, error: float = 0.05, power: float = 0.9) -> int:
    """Return the pairs of a t-test that finds a difference of the margin with this power (normal formula)."""
    quantile = NormalDist().inv_cdf
    return math.ceil(((quantile(1 - error / 2) + quantile(power)) * deviation / margin) ** 2)


def measure(folder: Path) -> None:
    """Resample decisions from the pairs; print how often they are wrong, cover the truth, and end early."""
    nulls, effects = pairs_of(read(folder))
    names = sorted(effects, key=lambda name: sha256(name.encode()).digest())[:EFFECTS]  # nobody chose them
    rng = np.random.default_rng(0)
    for title, pairs in (("null", nulls), ("effect", {name: effects[name] for name in names})):
        steps, fixed, wrong, missed = [], [], 0, 0
        for name, differences in pairs.items():
            final, seeds = differences[:, 2], len(differences)
            truth, deviation = (0.0 if title == "null" else final.mean()), final.std(ddof=1)
            found = []
            for _ in range(DRAWS):
                signs = rng.choice([-1, 1], seeds) if title == "null" else 1
                found.append(follow(rng.permutation(final) * signs))
            decided = [verdict for verdict in found if verdict.outcome == "decided"]
            wrong += sum(verdict.favoured != np.sign(truth) for verdict in decided)
            missed += sum(abs(verdict.difference - truth) > verdict.half for verdict in found)
            steps.append(np.mean([verdict.pairs for verdict in found]))
            fixed.append(min(seeds, fixed_size(deviation, MARGIN)))
            # Arms that differ only later have no early differences.
            early = [np.corrcoef(each, final)[0, 1] if each.any() else 0.0 for each in differences.T[:2]]
            print(f"{title}: {name}: {final.mean():+.4f} with deviation {deviation:.4f} "
                  f"({standardized(final):+.1f} errors); {len(decided)} of {DRAWS} decided, after "
                  f"{steps[-1]:.1f} pairs, fixed {fixed[-1]}; correlation at a quarter {early[0]:.2f}, half "
                  f"{early[1]:.2f}")
        draws = DRAWS * len(pairs)
        low, high = (100 * each for each in binomial_interval(wrong, draws))
        print(f"{title}, {len(pairs)} pairs: {wrong} of {draws} decisions are wrong ({low:.2f} to "
              f"{high:.2f} %), {100 * (1 - missed / draws):.1f} % of intervals cover; {np.mean(steps):.1f} "
              f"pairs, a fixed test takes {np.mean(fixed):.1f}: {np.mean(np.divide(steps, fixed)):.2f} of it")


def follow(sequence: np.ndarray) -> Verdict:
    """Return the verdict at the first decision, or at the end."""
    counts = np.arange(1, len(sequence) + 1)
    reach = np.abs(np.cumsum(sequence) / counts) + t_halves(sequence, ERROR)
    may_end = (evidence(sequence) >= 1 / ERROR) | (reach <= MARGIN)  # at others, nothing can be decided
    for count in [*counts[:-1][may_end[:-1]], len(sequence)]:
        verdict = compare(sequence[:count], margin=MARGIN)
        if verdict.outcome != "undecided":
            break
    return verdict


def binomial_interval(count: int, n: int) -> tuple[float, float]:
    """Return the exact 95 % interval (Clopper and Pearson 1934) of a share."""
    from scipy.stats import beta

    low = beta.ppf(0.025, count, n - count + 1) if count else 0.0
    return float(low), float(beta.ppf(0.975, count + 1, n - count) if count < n else 1.0)


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("task", choices=("train", "measure"))
    parser.add_argument("folder", type=Path, help="folder of the runs' results")
    args = parser.parse_args()
    {"train": train, "measure": measure}[args.task](args.folder)


if __name__ == "__main__":
    run_script(main)
