"""Prepare data for training: read and tokenize it, and write it as token shards.

    ./paddock prepare text corpus/
    ./paddock prepare chats 'chats/*.jsonl' --on-bad-record skip
    ./paddock prepare pairs pairs.parquet --map chosen=better,rejected=worse
    ./paddock prepare tokenizer corpus/ --vocab-size 32000 --output my.model

KIND is text (for pretraining), chats (SFT), pairs (DPO), prompts (GRPO), tokenizer (train a tokenizer on
your text), hellaswag (download HellaSwag's items) or sample (create the sample data). SOURCE is a file,
folder, glob or URL, or the name of a dataset on the hub. For a kind's flags, run for example `./paddock
prepare text --help`.
"""

import itertools
import os
import re
import sys
from operator import itemgetter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import interrupts  # noqa: E402
from common.command_line import CommandParser  # noqa: E402
from common.errors import PaddockError, run_script  # noqa: E402
from common.text import PROGRAM, command, show  # noqa: E402

SCRIPTS = {"text": "load_pretrain_dataset.py", "chats": "load_instruct_dataset.py",
           "pairs": "load_dpo_dataset.py", "prompts": "load_prompts_dataset.py",
           "tokenizer": "train_tokenizer.py", "hellaswag": "load_hellaswag_dataset.py",
           "sample": "make_sample.py"}


def train_command(kind: str, folder: Path, used) -> str:
    """Return the command that trains on a set prepared with the settings `used`, whatever `.env` is for."""
    from checkpoint.store import BEST
    from common.remote import is_hub_name
    from config import STAGE_OF_KIND, START_FROM
    from data_pipeline import mixture
    from data_pipeline.prepare import read_prepared
    from extensions.cautions import past_best
    from plan.derived import saved_settings
    from plan.make import make_plan

    stage, loaded = STAGE_OF_KIND[kind], make_plan(complete=False)
    config = loaded.config
    place = Path(mixture.read_mixture(folder).sources[0].set) if mixture.is_mixture(folder) else folder
    splits, examples = (read_prepared(place)[name] for name in ("splits", "examples"))
    splits = {name: split for name, split in splits.items() if split["tokens"]}
    wanted = {"training_stage": stage, f"{stage}_data_path": folder,
              "tokenizer_path": config.tokenizer_path and used.tokenizer_path,
              "validate_every": config.validate_every if "validation" in splits else 0,
              "generation_eval_every": config.generation_eval_every if stage in ("sft", "dpo") else 0}
    if kind == "documents":  # a row must not be longer than a split
        tokens = min(split["tokens"] for split in splits.values())
        wanted["max_seq_len"] = min(config.max_seq_len, 1 << max(0, (tokens - 1).bit_length() - 1))
        # Without a size, the default model would read a small text for hours. Depth d has about 49,000 d^3
        # parameters, so that four passes, as many as help, give each 20 tokens.
        depth = max(2, round((splits["train"]["tokens"] / 245e3) ** (1 / 3)))
        if depth < 12 and not {"depth", "dim", "n_layers", "preset", *START_FROM} & loaded.sources.keys():
            is_timed = config.epochs or "max_steps" in loaded.sources
            wanted |= {"depth": depth} | ({} if is_timed else {"epochs": 4})
            row, batch = wanted["max_seq_len"], splits["train"]["tokens"] // 16
            # A step must not read more than the text.
            if batch < 4096 and "total_batch_size" not in loaded.sources:
                wanted["total_batch_size"] = max(1, batch // row) * row
    else:
        if stage == "dpo" and examples and examples[0].count("\u27e6") == 1:  # one answer is a target
            wanted |= {"preference_objective": "kto", "generation_eval_every": 0}
        tokenizer = used.tokenizer_path
        is_model = os.path.isfile(os.path.join(tokenizer, "config.json")) or is_hub_name(tokenizer)
        steps = sorted(Path(config.output_dir).glob("*/checkpoints/step-*"), key=os.path.getmtime)
        runs = [(int(step.name[5:]) >= saved["MAX_STEPS"], step) for step in steps
                if (saved := saved_settings(step)) and saved["TOKENIZER_PATH"] == tokenizer
                and saved["TRAINING_STAGE"] == ("pretrain" if stage == "sft" else "sft")]
        newest = [step.parents[1].name + BEST * bool(past_best(step))
                  for _, step in sorted(runs, key=itemgetter(0))[-1:]]  # a finished one, if there is one
        named = [getattr(used, name) for name in used.start_settings]
        start = [*named, *([tokenizer] if is_model else newest), "MODEL"][0]
        wanted["pretrain_checkpoint" if stage == "sft" else "instruct_checkpoint"] = start
        wanted["random_init"] = False
    flags = [word for name, value in wanted.items() if str(getattr(config, name)) != str(value)
             for word in (f"--{name.replace('_', '-')}", value if name.endswith("data_path") else str(value))]
    try:
        make_plan([*map(str, flags)])
    except PaddockError as error:
        if "MICRO_BATCH_SIZE=" in str(error):  # of `.env`, for another batch
            flags += ["--micro-batch-size", "0"]
    return command("scripts/run.py", "--run-name", free_run_name(folder.name, config), *flags)


def free_run_name(stem: str, config) -> str:
    """Return a RUN_NAME like `stem` that no run has."""
    plain = re.sub(r"[^\w-]+", "-", stem)
    names = (plain if number == 1 else f"{plain}-{number}" for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(Path(config.output_dir, name)))


def run_preparation(kind: str, records: str = "", legend: str = "") -> None:
    """Run the script that prepares a kind of data; print its counts, examples, and the line for `.env`.

    `records` describes the records that it accepts, and `legend` the printed examples.
    """
    from config import KINDS
    from extensions.preparation_flags import describe, flag_parser, prepare_from_flags, used_settings

    def main() -> None:
        flag_parser(kind, records).refuse_unused(sys.argv[1:], *used_settings(kind))
        folder = prepare_from_flags(kind, sys.argv[1:], records)
        line = train_command(kind, folder, flag_parser(kind, records).parse(sys.argv[1:])[1])
        to_choose = " (MODEL is the model to start from)" * line.endswith(" MODEL")
        show(*describe(folder), f"Ready. {legend}The line for .env:", f"{KINDS[kind][0]}={folder}",
             f"Train on it{to_choose}: {line}")

    run_script(main, "Stopped. Run the same command again to continue.")


def main() -> None:
    parser = CommandParser(__doc__, usage="%(prog)s KIND [SOURCE] [flags]")
    parser.add_argument("kind", choices=SCRIPTS)
    kind, flags = parser.parse_args(sys.argv[1:2] or ["--help"]).kind, sys.argv[2:]
    if flags and not flags[0].startswith("-") and kind != "tokenizer":  # which takes several sources
        if any(flag.split("=")[0] == "--source" for flag in flags):
            parser.error(f"the source is given twice, as {flags[0]} and by --source; remove one")
        flags.insert(0, "--source")
    os.environ["PADDOCK_COMMAND"] = f"{PROGRAM} prepare {kind}"
    script = str(Path(__file__).with_name(SCRIPTS[kind]))
    interrupts.become(script, *flags)


if __name__ == "__main__":
    run_script(main)
