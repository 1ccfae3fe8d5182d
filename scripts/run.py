"""Prepare the data that the settings name, and train: on all GPUs, or on the CPU if there is none.

    ./paddock train --preset llama3.2-1b
    ./paddock train --gpus idle:2 --pretrain-data-path 'corpus/*.jsonl'
    ./paddock train --source corpus/ --documents blank

If PRETRAIN_DATA_PATH (SFT_DATA_PATH, DPO_DATA_PATH) or --source names text or records instead of a prepared
set (a file, folder, glob or URL, or a hub dataset such as fineweb-edu), the data is prepared first. Later
runs reuse the prepared set, and an interrupted preparation continues. Without .env and data, the embedded
sample is trained.

The flags are those of train.py, of scripts/launch.py, and of the script that prepares: load_pretrain_dataset,
load_instruct_dataset or load_dpo_dataset. NPROC=N in the environment starts N ranks. With --check it
prepares the data and checks the run without training.
"""

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from launch import make_parser  # noqa: E402, I001

from common.command_line import CommandParser  # noqa: E402
from common.errors import SettingsError, run_script  # noqa: E402
from common.text import CALLED_FROM, show  # noqa: E402
from data_pipeline.shards import KINDS  # noqa: E402
from data_preparation_utils import OUTPUTS, describe, flag_parser, is_source, prepare_from_flags  # noqa: E402
from parallel import process  # noqa: E402
from settings.load import exit_with, load_config, peek, read_flags, split_forecast  # noqa: E402

KIND_OF_STAGE = {"sft": "chats", "dpo": "pairs"}  # else documents
SAMPLE_TEXT = """\
Paddock's embedded sample: a small Llama 3 learns to read and write stories of a made-up world, from random
weights. It takes four to five minutes on two CPU cores, less on a GPU. During training it is asked which of
four endings fits a story that it has not seen; guessing gives 25 %. At the end it writes its own stories
and saves a model folder, from which training can continue."""


def with_sample(argv: list[str], names_source: bool) -> list[str]:
    """Return the flags, with the preset of the sample if they, .env and the environment name no data, and no
    run to resume.
    """
    flags, values = read_flags(argv), peek(argv)[0]
    presets = values.get("preset", "").split(",")
    run = Path(values.get("output_dir", "runs"), values.get("run_name", ""), "checkpoints")
    data = [name for name, _ in KINDS.values() if name.lower() in flags.layer.values or os.environ.get(name)]
    has_own = data or names_source or flags.config_files or flags.env_file or os.path.exists(".env")
    if has_own or "sample" in presets or values.get("run_name") and run.exists():
        return argv
    return [*argv, "--preset", ",".join(["sample", *filter(None, presets)])]


def flag(name: str) -> str:
    return f"--{name.lower().replace('_', '-')}"


def count_ranks(launching: Namespace, values: dict[str, str]) -> int:
    """Return the number of ranks to start on this machine."""
    if launching.nproc_per_node or launching.gpus:
        return launching.nproc_per_node or launching.gpus.count
    if asked := os.environ.get("NPROC"):
        if not asked.isdecimal() or not int(asked):
            raise SettingsError(f"NPROC={asked} must be a number of ranks, 1 or more")
        return int(asked)
    if values.get("device") == "cpu":
        return 1
    import torch  # which sees the GPUs that the environment variables of .env leave

    return torch.cuda.device_count() or 1


def main() -> None:
    if split_forecast(sys.argv[1:])[0]:  # which needs neither data nor ranks
        os.execv(sys.executable, [sys.executable, str(ROOT / "train.py"), *sys.argv[1:]])
    CommandParser(__doc__, allow_abbrev=False, usage="%(prog)s [flags]").parse_known_args()
    os.environ.setdefault(CALLED_FROM, os.getcwd())
    os.chdir(ROOT)
    argv = sys.argv[1:]
    kind = KIND_OF_STAGE.get(peek(argv)[0].get("training_stage", ""), "documents")
    setting, parser = KINDS[kind][0], flag_parser(kind, "")
    how, named = parser.split(argv)
    flags, asked = with_sample(named, bool(how.source or how.mix)), read_flags(named)
    if flags != named and asked.check and "device_memory" in asked.layer.values:  # a plan needs no data
        os.execv(sys.executable, [sys.executable, str(ROOT / "train.py"), *named])
    launching, settings = make_parser().parse_known_args(flags)
    values, environ = peek(settings)
    os.environ.update(environ)
    ranks = count_ranks(launching, values)
    planned = {"RANK": "0", "WORLD_SIZE": str(launching.nnodes * ranks)}
    if is_check := read_flags(settings).check:
        planned = {"WORLD_SIZE": os.environ.get("WORLD_SIZE") or planned["WORLD_SIZE"]}

    # All that can be wrong in the settings is found before the preparation, which may take hours.
    path = os.path.expanduser(values.get(setting.lower(), ""))
    to_prepare = how.source or how.mix or path and is_source(kind, path)
    try:
        load_config([*settings, *([flag(setting), OUTPUTS[kind]] if to_prepare else [])],
                    os.environ | (planned if is_check or planned["WORLD_SIZE"] != "1" else {}))
    except SettingsError as error:
        exit_with(error)
    given = [name for name, value in vars(how).items() if value != parser.get_default(name)]
    if given and not to_prepare:
        raise SettingsError(f"command line: {flag(given[0])} describes a source to prepare, but no source is "
                            "given; add --source, or remove it")
    if launching.gpus:
        process.choose_gpus(launching.gpus)

    # Prepare.
    if "sample" in values.get("preset", "").split(","):
        show(*SAMPLE_TEXT.splitlines())
        if code := subprocess.run([sys.executable, "scripts/make_sample.py"]).returncode:
            raise SystemExit(code)
    if to_prepare:
        source = [] if how.source or how.mix else ["--source", path]
        how_flags = [f"{flag(name)}={value}" for name, value in vars(how).items() if value is not None]
        known = {place.resolve() for place in Path(how.output).glob("*")}
        folder = prepare_from_flags(kind, [*settings, *how_flags, *source])
        facts = ["Prepared before:"] if folder.resolve() in known else describe(folder)
        show(*facts, f"{setting}={folder}")
        flags, settings = ([*each, flag(setting), str(folder)] for each in (flags, settings))

    # Train.
    command = ["train.py", *settings]
    if is_check:
        os.environ.update(planned)
    elif ranks > 1 or launching != make_parser().parse_args([]):
        command = ["scripts/launch.py", *([] if launching.gpus else ["--nproc-per-node", str(ranks)]), *flags]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *command])


if __name__ == "__main__":
    run_script(main, "Stopped. The same command continues.")
