"""What would a run be without some data, or with other settings from a step on? Train it, and compare.

The other arm continues a copy of the newest kept checkpoint before the first step that differs, by train.py
with the recorded settings, so that the change is the only difference. Influence is estimated as in TracIn
(Pruthi et al. 2020, arXiv:2002.08484), and verified by arms without single examples.
"""

import html
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import stdev
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from checkpoint import store
from common.errors import CheckpointError, SettingsError
from common.files import atomic_write
from common.text import setting_text, show
from extensions.debug import history
from extensions.debug.replay import open_run, read_settings, read_step_log
from extensions.decide import ERROR, compare, differences_of, fewest_pairs, sentence
from extensions.exclude import Excluded, digest_of, exclude
from extensions.inference.engine import generate
from extensions.inference.text import LanguageModel
from extensions.inference.weights import load_for_use
from extensions.report.compare import SEEDS, results, tests
from extensions.report.data import RunReader
from extensions.report.numbers import is_share
from extensions.report.page import ASSETS, csp_hash, fill_template, join_assets
from extensions.settings import Selector, read_selectors
from learn.optim import learning_rate
from model_kernels.head import IGNORE_INDEX
from parallel.ranks import Ranks
from run.extensions import load_extensions
from run.facts import read_inputs

# Arms keep their evaluations and checkpoints.
UNWATCHED = {name: value for name, value in history.UNNEEDED.items()
             if name != "METRIC" and not name.endswith(("_EVERY", "_LAST", "_BEST"))}
ANSWER_TOKENS, SHOWN_EXAMPLES, BATCH_ROWS = 64, 8, 4
ONE_SEED = ("One seed: this shows what differs, not whether the data caused it. "
            f"--seeds {fewest_pairs(ERROR)} or more can tell")
NUDGE = 0.1  # nats by which a screening changes the loss of the answer, in either direction


class Question(NamedTuple):
    """A prompt and an answer, whose loss tells what examples did."""

    prompt: str
    answer: str

    def loss(self, model: torch.nn.Module, language: LanguageModel) -> Tensor:
        """Return the cross-entropy of the answer's tokens in nats."""
        prompt, answer = encoded(language, self.prompt), language.tokenizer.encode(self.answer)
        tokens_BT = torch.tensor([[*prompt, *answer]], device=next(model.parameters()).device)
        targets_BT = tokens_BT[:, 1:].clone()
        targets_BT[:, :len(prompt) - 1] = IGNORE_INDEX
        return -model(tokens_BT[:, :-1], targets_BT, mode="sum")


def encoded(language: LanguageModel, prompt: str) -> list[int]:
    """Return the ids of a prompt: a text, or a message to a model that was trained on chats."""
    if language.no_chat_reason:
        return [*language.text_prompt(prompt).ids]
    return [*language.chat_prompt([{"role": "user", "content": prompt}]).ids]


def language_of(run_dir: Path) -> LanguageModel:
    """Return the model of a run's newest checkpoint, in float32."""
    folder, _ = store.newest_verified(run_dir / "checkpoints")
    settings = store.read_state(folder)["settings"]
    model, tokenizer = load_for_use(folder, dtype=torch.float32)
    return LanguageModel(run_dir.name, model.eval(), tokenizer, settings["MAX_SEQ_LEN"],
                         settings["TRAINING_STAGE"] == "pretrain")


def left_out(run_dir: Path, selectors: Sequence[Selector]) -> tuple[Excluded, Optional[int]]:
    """Return what the selectors leave out of a run's data, and the first step that read some of it."""
    steps = read_step_log(run_dir)
    config, _ = read_settings(run_dir, history.NO_FLAGS, min(steps), for_replay=False)
    load_extensions(config, show)
    inputs = read_inputs(config.model_copy(update={"validate_every": 0, "hellaswag_every": 0}), verify=False)
    excluded, order = exclude(inputs.rows, inputs.tokenizer, selectors), inputs.order(config, Ranks())
    return excluded, next((step for step in steps if excluded.affects(order.all_rows(step - 1))), None)


def fork(run_dir: Path, arm: Path, first: int, changes: Mapping[str, Any]) -> None:
    """Train another arm of a run in the folder `arm`: with changed settings from step `first` on."""
    step_log = read_step_log(run_dir)
    kept = history.kept_checkpoints(run_dir, first - 1)
    nearest = max(kept, default=min(step_log) - 1)
    (arm / "checkpoints").mkdir(parents=True)
    if kept:
        for log in run_dir.glob("*.jsonl"):
            shutil.copy(log, arm)
        shutil.copytree(kept[nearest], arm / "checkpoints" / kept[nearest].name)
    before = {"RUN_NAME": arm.name, **UNWATCHED}
    for segment in history.read_segments(run_dir, nearest + 1, max(step_log)):
        for difference in history.differences(segment):
            raise CheckpointError(f"{difference}, as the other arm must differ in nothing else")
        allowed = ",".join(filter(None, [segment.settings["ALLOW_RESUME_MISMATCH"], *changes]))
        changed = {**before, **changes, "ALLOW_RESUME_MISMATCH": allowed}
        for begin, end, settings in ((segment.first, min(segment.last, first - 1), before),
                                     (max(segment.first, first), segment.last, changed)):
            if begin <= end:
                show(f"{arm.name}: steps {begin:,} to {end:,}")
                is_start = not kept and begin == nearest + 1 and segment.settings["RESUME"] != "never"
                history.take_steps(segment._replace(first=begin, last=end), arm.parent,
                           segment.settings["RESUME"] if is_start else "auto", settings)
    parted, fields = history.compare_step_logs(step_log, read_step_log(arm))
    if parted and parted < first:
        raise CheckpointError(f"{arm}: step {parted} is not the recorded step, by its {fields[0]}: data, "
                              "code, machine or threads have changed")


def recorded(run_dir: Path) -> dict[str, Any]:
    """Return the settings with which a run took its first step."""
    first = min(read_step_log(run_dir))
    return history.read_segments(run_dir, first, first)[0].settings


def with_seeds(run_dir: Path, folder: Path, seeds: int) -> Iterator[tuple[Path, Path]]:
    """Yield each run and the folder of its other arm: this run, then runs with other seeds."""
    yield run_dir, folder / "without"
    settings = recorded(run_dir)
    for number in range(1, seeds):
        changes = {name: settings[name] + number for name in SEEDS if settings[name] is not None}
        run = folder / f"seed-{changes['SEED']}"
        fork(run_dir, run, min(read_step_log(run_dir)), changes)
        yield run, run.with_name(f"{run.name}-without")


# ---------------------------------------------------------------------------------------------- influence


def screen(run_dir: Path, question: Question, excluded: Excluded) -> list[np.ndarray]:
    """Estimate for each source's examples the rise of the answer's loss without them (E,), up to a factor.

    The sum over kept checkpoints of learning rate x dot product of the gradients of answer and example. Two
    forwards give the products of all examples at once: they are derivatives of the examples' losses in the
    direction of the answer's gradient.
    """
    estimates = [np.zeros(len(each.source)) for each in excluded.rows.sources]
    last = max(read_step_log(run_dir))
    for step in sorted(history.kept_checkpoints(run_dir, last)):
        config, _ = read_settings(run_dir, history.NO_FLAGS, step)
        run = open_run(run_dir, config.model_copy(update={"precision": "fp32"}), step + 1, lambda text: None)
        language = LanguageModel("", run.model, run.inputs.tokenizer, config.max_seq_len,
                                 config.training_stage == "pretrain")
        run.model.eval()
        run.optimizer.zero_grad()
        question.loss(run.model, language).backward()
        trained = [each for each in run.model.parameters() if each.grad is not None]
        direction = [each.grad.clone() for each in trained]
        start = [each.detach().clone() for each in trained]
        size = NUDGE / sum(float(each.square().sum()) for each in direction)
        items = "pairs" if config.training_stage == "dpo" else "chats"
        order = run.inputs.order(config, run.ranks)
        rows = np.unique(np.concatenate([order.all_rows(each) for each in range(last)]))
        for indices in tqdm(np.split(rows, range(BATCH_ROWS, len(rows), BATCH_ROWS)), disable=None,
                            desc=f"Examples at step {step}", delay=2, leave=False):
            batch, sides = run.inputs.rows(indices).to(run.ranks.device), []
            with torch.no_grad():
                for sign in (1, -1):
                    for each, before, gradient in zip(trained, start, direction):
                        torch.add(before, gradient, alpha=sign * size, out=each)
                    sides.append(run.objective.by_item(run.model, batch, items).total.double().cpu().numpy())
            slopes = learning_rate(run.progress.updates, config) * (sides[0] - sides[1]) / (2 * size)
            for row, (source, examples) in zip(slopes, excluded.in_rows(indices)):
                values = row[items != "pairs":][:len(examples)]  # document 0 has no example
                np.add.at(estimates[source], examples[:len(values)], values)
    return estimates


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the rank correlation."""
    return float(np.corrcoef(*(np.argsort(np.argsort(values)) for values in (a, b)))[0, 1])


# --------------------------------------------------------------------------------------------- the experiment


class Experiment(NamedTuple):
    """What the other arm does differently: it leaves out examples, or has other settings from a step on."""

    run_dir: Path
    folder: Path  # of the arms and the page
    selectors: Sequence[Selector] = ()
    settings: Mapping[str, Any] = {}
    from_step: Optional[int] = None
    seeds: int = 1
    prompts: Sequence[str] = ()
    answer: str = ""
    verify: int = 3

    def arm(self, run_dir: Path, arm: Path, selectors: Sequence[Selector]) -> tuple[Optional[Excluded], int]:
        """Train the other arm of a run; return what it leaves out, and the first step that differs."""
        if not selectors:
            fork(run_dir, arm, self.from_step, self.settings)
            return None, self.from_step
        before = recorded(run_dir).get("EXCLUDE_DATA")
        lines = [*(read_selectors(before) if before else ()), *selectors]
        excluded, first = left_out(run_dir, selectors)
        if first is None:
            raise SettingsError(f"{run_dir}: no step read the named examples: "
                                f"{excluded.describe()}; name others")
        path = arm.with_suffix(".txt")
        path.write_text("".join(f"{' '.join(line)}\n" for line in lines))
        fork(run_dir, arm, first, {"EXCLUDE_DATA": str(path.absolute())})
        return excluded, first

    def run(self) -> Path:
        """Train all arms, and write the page."""
        if self.folder.exists() and any(self.folder.iterdir()):
            raise SettingsError(f"{self.folder} exists; choose another folder with --output")
        self.folder.mkdir(parents=True, exist_ok=True)
        influence, selectors = None, self.selectors
        if self.answer:
            influence, selectors = self.influence()
        folders = [*with_seeds(self.run_dir, self.folder, self.seeds)]
        (excluded, first), *_ = [self.arm(*pair, selectors) for pair in folders]
        pairs = [[*map(RunReader, pair, ("the run", "the other arm"))] for pair in folders]
        for reader in sum(pairs, []):
            reader.read()
        arm = folders[0][1]
        parted, fields = history.compare_step_logs(read_step_log(self.run_dir), read_step_log(arm))
        by_seed, tested = [*over_seeds(pairs)], tests(pairs[0])[0]
        said = [f"{each['name']}: {each['sentence']}" for each in by_seed[:1]]
        said = said or [*(test["sentence"] for test in tested[:1]), ONE_SEED]
        data = {"title": f"{self.run_dir.name} and its other arm", "first": first, "parted": parted,
                "answer": " ".join(f"{text}." for text in said),
                "fields": fields, "fork": max(history.kept_checkpoints(self.run_dir, first - 1), default=0),
                "settings": {name: setting_text(value) for name, value in self.settings.items()},
                "left_out": excluded and excluded.describe(),
                "selectors": [" ".join(each) for each in selectors][:SHOWN_EXAMPLES],
                "examples": [source.text(number) for source, number in
                             islice(excluded.examples(), SHOWN_EXAMPLES)] if excluded else [],
                "curves": [[[*zip(*(values.tolist() for values in reader.curves["val_loss"].known()))]
                            for reader in pair if "val_loss" in reader.curves] for pair in pairs],
                "tests": tested, "seeds": by_seed, "influence": influence,
                "prompts": side_by_side(self.run_dir, arm, self.prompts)}
        return write_page(self.folder / "without.html", data)

    def influence(self) -> tuple[dict[str, Any], list[Selector]]:
        """Screen all examples, and verify the estimates of the top ones; return the page's data and these."""
        settings = recorded(self.run_dir)
        if settings["TRAINING_STAGE"] != "dpo" and not settings["DOCUMENT_MASK"]:
            raise SettingsError(f"{self.run_dir}: --answer needs a run with DOCUMENT_MASK=true, in which "
                                "documents have their own gradients")
        question = Question(self.prompts[0], self.answer)
        excluded, _ = left_out(self.run_dir, [])
        estimates = screen(self.run_dir, question, excluded)
        if not any(map(np.any, estimates)):
            raise CheckpointError(f"{self.run_dir}: at its kept checkpoints, the learning rate is 0; set "
                                  "KEEP_EVERY in the run, to keep earlier ones")
        ranked = sorted(((value, source, example) for source, values in enumerate(estimates)
                         for example, value in enumerate(values.tolist())), reverse=True)[:self.verify]
        before, rows, selectors = answer_loss(self.run_dir, question), [], []
        for number, (value, source, example) in enumerate(ranked, 1):
            found = excluded.rows.sources[source].source
            selectors.append(Selector("hash", digest_of(found.ids(example))))
            arm = self.folder / f"verify-{number}"
            self.arm(self.run_dir, arm, selectors[-1:])
            rows.append({"text": found.text(example), "estimate": value,
                         "truth": answer_loss(arm, question) - before})
        return {"prompt": question.prompt, "answer": question.answer, "loss": before, "rows": rows,
                "screened": sum(map(len, estimates)), "correlation": spearman(
                    *([row[name] for row in rows] for name in ("estimate", "truth")))}, selectors


@torch.no_grad()
def answer_loss(run_dir: Path, question: Question) -> float:
    language = language_of(run_dir)
    return float(question.loss(language.model, language))


def side_by_side(run_dir: Path, arm: Path, prompts: Sequence[str]) -> list[dict[str, str]]:
    """Return the greedy continuation or answer of both models to each prompt."""
    texts = []
    for language in map(language_of, (run_dir, arm)):
        ids, tokenizer = [encoded(language, prompt) for prompt in prompts], language.tokenizer
        outputs = generate(language.model, ids, ANSWER_TOKENS, stop_ids=tokenizer.stop_ids)
        texts.append([tokenizer.decode(each) for each in outputs])
    return [{"prompt": prompt, "run": one, "without": other} for prompt, one, other in zip(prompts, *texts)]


def over_seeds(pairs: Sequence[Sequence[RunReader]]) -> Iterator[dict[str, Any]]:
    """Yield the results of the runs and of their other arms over seeds, and what their pairs say."""
    readers = [reader for pair in pairs for reader in pair]
    for row in results(readers) if len(pairs) > 1 else ():
        values = [cell and cell["value"] for cell in row["cells"]]
        if None not in values and row["better"] and not row["name"].startswith(("tokens", "mfu", "hfu")):
            runs, arms = values[::2], values[1::2]
            verdict = compare(differences_of(runs, arms))
            text = sentence("the run", "the other arm", verdict, row["better"] == "lower",
                            is_share(row["name"]))
            yield {"name": row["name"], "runs": runs, "arms": arms, "spread": stdev(runs),
                   "difference": verdict.difference, "sentence": text}


def write_page(path: Path, data: Mapping[str, Any]) -> Path:
    """Write the page of an experiment, which shows its data by a script and charts, as the report does."""
    style, library = join_assets("uPlot.min.css", "base.css", "page.css"), join_assets("uPlot.iife.min.js")
    script = join_assets("elements.js", "chart.js", "export.js", "without.js")
    text = json.dumps(data).translate({ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&"})
    policy = (f"default-src 'none'; script-src {csp_hash(library)} {csp_hash(script)}; "
              f"style-src {csp_hash(style)}; img-src data:; base-uri 'none'; form-action 'none'")
    report, body = ((ASSETS / name).read_text(encoding="utf-8") for name in ("page.html", "without.html"))
    title = html.escape(data["title"])
    page = fill_template(report.partition("<body")[0] + body, {
        "policy": policy, "title": title, "style": style, "library": library, "script": script,
        "data": text})
    with atomic_write(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return path
