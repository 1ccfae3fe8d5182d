"""Evaluate a model: loss, perplexity, bits per byte, multiple choice and generated answers.

    ./paddock eval runs/first
    ./paddock eval runs/first --eval-tasks arc:arc.jsonl
    ./paddock eval owner/Llama --data data/pretrain/0123
    ./paddock eval runs/first --tasks arc_easy,winogrande,piqa

For a run, the newest valid checkpoint is evaluated with the run's data and settings. The results equal those
the run logged. For other models, choose the data with flags. Flags also change settings, for example
--validation-rows 1000, --hellaswag-batch-tokens 4096, --max-seq-len 512, --generation-eval-every 1 or
--validate-every 0. --tasks runs tasks of lm-evaluation-harness, which downloads their data.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.command_line import CommandParser  # noqa: E402
from common.errors import PaddockError, SettingsError, local_path, run_script  # noqa: E402
from common.files import disk_errors  # noqa: E402
from common.text import aligned, print_safely, show  # noqa: E402
from settings.load import read_flags  # noqa: E402


def parse_args():
    parser = CommandParser(__doc__, allow_abbrev=False)
    parser.add_argument("model", help="a run, a checkpoint, or a Hugging Face folder or name of a Llama")
    parser.add_argument("--base", metavar="MODEL", help="the adapters' base model (default: as in training)")
    parser.add_argument("--data", metavar="FOLDER",
                        help="prepared data; its validation split is used (default: the run's)")
    parser.add_argument("--hellaswag", metavar="FILE", help="HellaSwag items (default: the run's)")
    parser.add_argument("--tasks", metavar="NAME,...", help="tasks of lm-evaluation-harness")
    parser.add_argument("--include-path", metavar="FOLDER", help="folder with more tasks (YAML files)")
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
    if flags.layer.problems:
        raise SettingsError(*flags.layer.problems)
    if not args.tasks and (args.include_path or args.limit is not None or args.num_fewshot is not None):
        parser.error("--include-path, --num-fewshot and --limit require --tasks")
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(f"--json {args.json}: the folder {args.json.parent} does not exist")
    return args, flags.layer


def table(rows) -> list[str]:
    def number(value, form: str = ".4f") -> str:
        return "" if value is None else format(value, form)

    cells = [("", "metric", "value", "+-", "chance", "n")]
    cells += [(row.name, row.metric.replace("_", " "), number(row.value), number(row.stderr),
               number(row.chance), number(row.n, ",")) for row in rows]
    return aligned(cells, left=2)


def main() -> None:
    args, flags = parse_args()
    # Imported here, because torch takes seconds.
    from types import SimpleNamespace

    from evaluation.during_run import evaluations
    from evaluation.standalone import Harness, open_model, settings_for
    from model_utils import choose_dtype, find_model
    from parallel.ranks import RunContext, StopSignals, joined_ranks
    from run.log import finite
    from run.start import prepare_device

    folder = find_model(args.model)
    config = settings_for(folder, flags, args.data)
    harness = args.tasks and Harness(args.tasks.split(","), args.include_path, args.num_fewshot, args.limit,
                                    "tokenizer_path" not in flags.values)
    if harness:
        _ = harness.task_classes  # report a misspelt task before anything slow starts
    device, results, rows, problem = prepare_device(config), {}, [], None
    with joined_ranks(device.type, config.distributed_timeout) as ranks:
        say = (lambda text: print_safely(text, sys.stderr)) if ranks.is_rank0 else lambda text: None
        # StopSignals is not entered: there is nothing to save, so Ctrl-C ends the process immediately.
        context = RunContext(ranks, StopSignals(), SimpleNamespace(info=say, warn=say))
        run = open_model(folder, config, args.base, context)
        for evaluation in evaluations(run):
            result = evaluation.measure()
            results |= result.metrics
            rows += result.table
        step, is_rank0, device = run.progress.step, ranks.is_rank0, ranks.device
        if harness:
            del run  # frees its memory
            try:
                metrics, task_rows = harness.evaluate(folder, args.base, config, ranks)
                results |= metrics
                rows += task_rows
            except PaddockError as error:  # raised after the other results have been printed
                problem = error
    if not is_rank0:
        return
    if not rows and problem is None:
        raise SettingsError(f"nothing to evaluate: the settings in {folder} name no evaluation data; pass "
                            "prepared data with --data, HellaSwag items with --hellaswag, other items with "
                            "--eval-tasks name:file, or tasks of lm-evaluation-harness with --tasks")
    dtype = str(choose_dtype(config, device.type)).removeprefix("torch.")
    if rows:
        show(f"{folder}{f' (step {step:,})' if step else ''}, {dtype} on {device}, "
             f"{config.max_seq_len:,} tokens at a time", *table(rows))
    if args.json:
        content = {"model": str(folder), "step": step, "metrics": finite(results)}
        with disk_errors(args.json, SettingsError, "choose another file with --json"):
            args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if problem:
        raise problem


if __name__ == "__main__":
    run_script(main)
