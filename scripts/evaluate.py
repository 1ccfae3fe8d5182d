"""Evaluate a model: loss, perplexity, bits per byte, multiple choice and generated answers.

    ./paddock eval runs/first
    ./paddock eval runs/first --eval-tasks arc:arc.jsonl
    ./paddock eval owner/Llama --data data/pretrain/0123
    ./paddock eval runs/first --tasks arc_easy,winogrande,piqa
    ./paddock eval runs/first --tasks core --include-path eval_bundle
    ./paddock eval runs/first runs/chat

Two models, such as the base of a run and the run, are compared in one table by paired tests over the same
items, with their answers to some prompts. Both use the data and settings of the second.

For a run, the newest valid checkpoint is evaluated with the run's data and settings, compiled if the run was.
The results equal those that the run logged, on the same hardware. For other models, choose the data with
flags. Flags also change settings, for example --validation-rows 1000, --max-seq-len 512, --compile false,
--generation-eval-every 1 or --validate-every 0. --tasks runs tasks of lm-evaluation-harness, which downloads
their data. --tasks core computes the CORE metric of DCLM and nanochat from the items in nanochat's
eval_bundle.
"""

import csv
import json
import random
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, Optional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.command_line import CommandParser  # noqa: E402
from common.errors import CheckpointError, DataError, PaddockError, SettingsError, local_path, run_script  # noqa: E402
from common.files import disk_errors  # noqa: E402
from common.text import aligned, duration, print_safely, show, status_line  # noqa: E402
from extensions.report.numbers import (  # noqa: E402
    metric_title,
    number_text,
    result_text,
    without_control_tokens,
)
from plan.layers import read_flags  # noqa: E402

BUNDLE = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"  # the items of CORE


def parse_args():
    parser = CommandParser(__doc__, allow_abbrev=False)
    parser.add_argument("model", nargs="+", metavar="MODEL",
                        help="a run, a checkpoint, or a Hugging Face folder or name of a Llama; two models "
                             "are compared on the same items, with the settings of the second")
    parser.add_argument("--base", metavar="MODEL", help="the adapters' base model (default: as in training)")
    parser.add_argument("--data", metavar="FOLDER",
                        help="prepared data; its validation split is used, or all of it if it holds nothing "
                             "out (default: the run's)")
    parser.add_argument("--hellaswag", metavar="FILE", help="HellaSwag items (default: the run's)")
    parser.add_argument("--tasks", metavar="NAME,...", help="tasks of lm-evaluation-harness, or core")
    parser.add_argument("--include-path", metavar="FOLDER",
                        help="folder with more tasks (YAML files); for core, nanochat's eval_bundle")
    parser.add_argument("--num-fewshot", type=int, metavar="N",
                        help="examples in the prompt of each --tasks item (default: set by the task)")
    parser.add_argument("--limit", type=int, metavar="N",
                        help="maximum items of each --tasks task (default: all)")
    parser.add_argument("--json", type=local_path, metavar="FILE", help="also write the results as JSON")
    args, rest = parser.parse_known_args()
    if args.hellaswag is not None:
        rest.append(f"--hellaswag-path={args.hellaswag}")
    flags = read_flags(rest)
    if flags.env_file or flags.config_files or flags.check:
        raise SettingsError("command line: only settings that should differ from the run's can be given here")
    if flags.problems:
        raise SettingsError(*flags.problems)
    if not args.tasks and (args.include_path or args.limit is not None or args.num_fewshot is not None):
        parser.error("--include-path, --num-fewshot and --limit require --tasks")
    if "core" in (args.tasks or "").split(","):
        if args.tasks != "core" or args.num_fewshot is not None:
            parser.error("--tasks core runs alone, and its tasks set the examples in a prompt: leave out "
                         "the other tasks and --num-fewshot")
        if not args.include_path:
            parser.error("--tasks core requires --include-path FOLDER, nanochat's eval_bundle: "
                         "docs/evaluation.md says where to download it")
    if len(args.model) > 2 or args.tasks and len(args.model) > 1:
        parser.error("--tasks evaluates one model" if args.tasks else "at most two models can be compared")
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(f"--json {args.json}: the folder {args.json.parent} does not exist")
    return args, flags


def read_bundle(folder: Path, limit: Optional[int]) -> list[dict]:
    """Return the tasks of CORE, each with its first items in nanochat's order."""
    import yaml

    try:
        with open(folder / "eval_meta_data.csv", encoding="utf-8") as file:
            percent = {row["Eval Task"]: float(row["Random baseline"]) for row in csv.DictReader(file)}
        tasks = yaml.safe_load((folder / "core.yaml").read_text(encoding="utf-8"))["icl_tasks"]
        for task in tasks:
            with open(folder / "eval_data" / task["dataset_uri"], encoding="utf-8") as file:
                items = [*map(json.loads, file)]
            random.Random(1337).shuffle(items)
            task |= {"items": items[:limit], "chance": percent[task["label"]] / 100}
            if len(task["items"]) <= task["num_fewshot"][0]:
                raise ValueError(f"{task['label']} has {len(task['items'])} items, too few for its examples")
    except (OSError, KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"--include-path {folder}: {error!r}; name the unpacked folder of {BUNDLE}, and set "
                        "no --limit, or a larger one") from error
    return tasks


def table(rows) -> list[str]:
    cells = [("", "metric", "value", "chance", "n")]
    for row in rows:
        error = None if row.n == 1 else row.stderr  # of one item it is unknown
        chance = "" if row.chance is None else number_text(row.chance, None, True)
        cells.append((row.name, metric_title(row.metric), result_text(row.metric, row.value, error), chance,
                      "" if row.n is None else f"{row.n:,}"))
    return [*aligned(cells, left=2), LEGEND]


LONGEST_NAME = 24  # of a column
LEGEND = "± is one standard error, over the n items."
# The scores of items, by the metric in the table that is their mean.
PAIRED = {"loss": "loss", "reward_accuracy": "preferred", "acc": "correct", "acc_norm": "correct_norm",
          "exact_match": "exact", "rouge_l": "rouge_l", "reward": "reward"}


class Measured(NamedTuple):
    """The results of one model."""

    step: int
    metrics: dict
    rows: list  # of the table
    scores: list  # of the items, for each row; None if they are unknown or not finite
    answers: list  # (prompt, answer)


def measure(folder: Path, config, args, context, compared_with: Optional[Path] = None) -> Measured:
    """Evaluate a model; to compare it, by the objective of another one, and with its answers."""
    from evaluation.during_run import evaluations
    from extensions.evaluate import open_model, samples
    from extensions.report.items import item_scores
    from tokenizer import load_tokenizer

    has_adapters = (folder / "adapter_config.json").exists()
    base = args.base if has_adapters or compared_with is None else None
    run = open_model(folder, config, base, context, compared_with)
    own = None
    with suppress(PaddockError):  # the model may have no tokenizer
        own = load_tokenizer(str(folder))
    if own and compared_with and (difference := own.differing_id(run.inputs.tokenizer)):
        number, its_token, token = difference
        raise CheckpointError(f"{folder} uses another tokenizer than {run.config.tokenizer_path}: id "
                              f"{number} is {its_token!r} there and {token!r} here, so that losses per token "
                              "cannot be compared; evaluate each alone, and compare bits per byte")
    metrics, rows, scores, answers = {}, [], [], []
    for evaluation in evaluations(run):
        result = evaluation.measure()
        metrics |= result.metrics
        rows += result.table
        items = item_scores({"step": 0, **result.line})
        scores += [None if items and items.not_finite else items] * len(result.table)
    if compared_with:
        config = run.config
        length = max(config.sample_tokens, config.generation_eval_tokens * bool(config.generation_eval_every))
        greedy = config.model_copy(update={"sample_temperature": 0.0, "sample_tokens": length})
        answers = samples(run.model, run.inputs.tokenizer, greedy, 0, run.inputs.validation_rows)
    return Measured(run.progress.step, metrics, rows, scores, answers)


def paired_tests(before: Measured, after: Measured, own: str) -> list:
    """Return the paired test of each row, or None; `own` is the name of METRIC's function."""
    from extensions.decide import compare_items

    tests = []
    for row, one, other in zip(after.rows, before.scores, after.scores):
        name = {own: "own", **PAIRED}.get(row.metric)
        is_same = one and other and one.items == other.items and name in one.scores
        a, b = (each.scores[name] for each in (one, other)) if is_same else (None, None)
        tests.append(None if a is None else compare_items(a, b, other.scores.get("count")))
    return tests


def comparison(before: Measured, after: Measured, tests: list, names: list[str]) -> list[str]:
    """Return the lines of the table and the answers; `names` are those of the models."""
    from extensions.decide import FEWEST
    names = [Path(name).name for name in names]
    if len({*names}) < 2 or max(map(len, names)) > LONGEST_NAME:
        names = ["first", "second"]
    cells = [("", "metric", *names, "difference", "p", "n")]
    for first, last, test in zip(before.rows, after.rows, tests):
        change, has_test = last.value - first.value, test is not None and test.n >= FEWEST
        size = result_text(last.metric, abs(change), test.stderr if has_test else None)
        p = "" if not has_test else f"{test.p:.2g}" if test.p >= 1e-4 else "<0.0001"
        values = (result_text(last.metric, each.value) for each in (first, last))
        cells.append((last.name, metric_title(last.metric), *values,
                      f"{'-' if change < 0 else '+'}{size}".replace("%", "points"),
                      p, "" if test is None else f"{test.n:,}"))
    lines = [*aligned(cells, left=2), LEGEND]
    if any(test and test.n < FEWEST for test in tests):
        lines.append(f"Fewer than {FEWEST} items are too few for an error or a verdict.")
    lines += ["", "Greedy answers:"] * bool(after.answers)
    for (prompt, first), (_, last) in zip(before.answers, after.answers):
        texts = {"prompt": without_control_tokens(prompt), names[0]: first, names[1]: last}
        width = max(map(len, texts)) + 1
        lines += ["", *(f"{name + ':':<{width}}  {text}" for name, text in texts.items())]
    return lines


def main() -> None:
    args, flags = parse_args()
    with status_line(lambda: "loading torch"):  # which takes seconds
        from types import SimpleNamespace

        import extensions.hang_report  # noqa: F401
        from extensions.evaluate import Harness, settings_for
        from extensions.inference.weights import find_model
        from model_utils import choose_dtype, why_not_compile
        from parallel.ranks import RunContext, StopSignals, meeting
        from run.facts import prepare_device

    *earlier, folder = map(find_model, args.model)
    config = settings_for(folder, flags, args.data)
    core = read_bundle(Path(args.include_path), args.limit) if args.tasks == "core" else None
    harness = args.tasks and Harness(args.tasks.split(","), args.include_path, args.num_fewshot, args.limit,
                                    "tokenizer_path" not in flags.values, core)
    if harness:
        if config.world_size > 1:
            raise SettingsError("--tasks runs in a single process; start it without torchrun, or run lm_eval "
                                "itself on the folder of the model")
        _ = harness.task_classes  # report a misspelled task before anything slow starts
    device, problem = prepare_device(config), None
    terms = {"device": device.type, "timeout": config.distributed_timeout}
    with meeting(lambda: terms) as (ranks, _):
        say = (lambda text: print_safely(text, sys.stderr)) if ranks.is_rank0 else lambda text: None
        # StopSignals is not entered: there is nothing to save, so Ctrl-C ends the process immediately.
        context = RunContext(ranks, StopSignals(), SimpleNamespace(info=say, warn=say))
        results: list[Measured] = []
        for each in (*earlier, folder):
            begun = time.monotonic()
            with status_line(partial("evaluating {}".format, each)):
                results.append(measure(each, config, args, context, folder if earlier else None))
            if earlier:
                values = [f"{row.name} {metric_title(row.metric)} {result_text(row.metric, row.value)}"
                          for row in results[-1].rows]
                say(f"{each}, in {duration(time.monotonic() - begun)}: {', '.join(values)}")
        *before, found = results
        is_rank0, device = ranks.is_rank0, ranks.device
        if harness:
            try:
                metrics, task_rows = harness.evaluate(folder, args.base, config, device)
                found.metrics.update(metrics)
                found.rows.extend(task_rows)
            except PaddockError as error:  # raised after the other results have been printed
                problem = error
    if not is_rank0:
        return
    if not found.rows and problem is None:
        raise SettingsError(f"nothing to evaluate: the settings in {folder} name no evaluation data; pass "
                            "prepared data with --data, HellaSwag items with --hellaswag, other items with "
                            "--eval-tasks name:file, or tasks of lm-evaluation-harness with --tasks")
    dtype = str(choose_dtype(config, device.type)).removeprefix("torch.")
    is_validated = any(row.name == "validation" for row in found.rows)
    how = f"{dtype} on {device}{', compiled' * (is_validated and not why_not_compile(config, device.type))}"
    own = config.metric.rpartition(":")[2]
    tests = [test for each in before for test in paired_tests(each, found, own)]
    if found.rows:
        names = [f"{each}{f' (step {result.step:,})' if result.step else ''}"
                 for each, result in zip([*earlier, folder], [*before, found])]
        lines = comparison(before[0], found, tests, args.model) if before else table(found.rows)
        show(f"{', then '.join(names)}, {how}, {config.max_seq_len:,} tokens at a time", *lines)
    if args.json:
        write_json(args.json, [*earlier, folder], [*before, found], tests)
    if problem:
        raise problem


def write_json(file: Path, folders: list[Path], results: list[Measured], tests: list) -> None:
    from run.log import finite

    *before, content = [{"model": str(folder), "step": result.step, "metrics": finite(result.metrics)}
                        for folder, result in zip(folders, results)]
    if before:
        names = [f"{row.name} {row.metric}" for row in results[-1].rows]
        content |= {"before": before[0], "answers": [
                        {"prompt": prompt, "before": first, "after": last}
                        for (prompt, first), (_, last) in zip(results[0].answers, results[1].answers)],
                    "tests": {name: finite(test._asdict()) for name, test in zip(names, tests) if test}}
    with disk_errors(file, SettingsError, "choose another file with --json"):
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_script(main)
