"""Train on all GPUs, or on the CPU if there is none. Data that is not prepared yet is prepared first.

    ./paddock train --preset llama3.2-1b
    ./paddock train --gpus idle:2 --pretrain-data-path 'corpus/*.jsonl'
    ./paddock train --source corpus/ --documents blank

PRETRAIN_DATA_PATH (or that of another stage, such as SFT_DATA_PATH) and --source accept a prepared set, or
files to prepare: a file, folder, glob, URL or hub dataset such as fineweb-edu. Prepared data is cached, and
an interrupted preparation resumes. Without any data or .env, the command trains on the sample data.

Flags are settings (`python train.py --help`), launcher flags (`python scripts/launch.py --help`) and
preparation flags (`./paddock prepare text --help`). NPROC=N in the environment starts N ranks. After a crash
or a hang, the run is started again from its newest checkpoint, up to three times (--max-restarts). `./paddock
check` with the same flags prepares the data and checks the run, but does not train.
"""

import os
import subprocess
import sys
from argparse import Namespace
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from launch import make_parser  # noqa: E402, I001

from common import interrupts  # noqa: E402
from common.command_line import CommandParser  # noqa: E402
from common.errors import SettingsError, run_script  # noqa: E402
from common.text import TYPED, show  # noqa: E402
from config import KIND_OF_STAGE, KINDS, Config  # noqa: E402
from data_pipeline.shards import MANIFEST, MIXTURE  # noqa: E402
from extensions.preparation import is_source  # noqa: E402
from extensions.preparation_flags import OUTPUTS, describe, flag_parser, prepare_from_flags  # noqa: E402
from scripts.gpus import choose_gpus  # noqa: E402
from plan.command_line import exit_with  # noqa: E402
from plan.layers import read_flags  # noqa: E402
from plan.make import make_plan, peek  # noqa: E402

RESTARTS = 3  # unless --max-restarts is given
CHECK_HELP = """Check settings, data, memory and time of a run, without training.

    ./paddock check --preset llama3.2-1b
    ./paddock check --preset llama3-8b --device-memory 80 --world-size 8

Data that is not prepared yet is prepared first. Each line starts with ok, warn or FAIL. The exit code is 0 if
the run would start. --device-memory GB plans for GPUs that are not here: their memory, and the time that
follows from the FLOPs of a step at an assumed share of the peak of an H100 (or of PEAK_TFLOPS). Such a plan
downloads no data. --world-size N plans for N ranks.

All flags of ./paddock train apply (`./paddock train --help`).
"""
DEMO_HELP = """Train a small model on the embedded sample, with a report: about a minute on two CPU cores.

    ./paddock demo
    ./paddock demo --max-steps 100 --run-name short

The first run creates the sample, short stories made from templates, in data/sample. This is ./paddock train
--preset sample, so all flags of ./paddock train apply (`./paddock train --help`).
"""
SAMPLE_TEXT = (
    "The sample is a small Llama 3 and short stories made from templates. Its 300 steps take about a minute "
    "on two idle CPU cores. Evaluations during training ask the model which of four endings fits an unseen "
    "story (chance is 25 %).")
SAMPLE = "data/sample/"


def with_sample(argv: list[str], names_source: bool) -> list[str]:
    """Add the sample's preset if no flag, file, preset or variable names data or a run to resume."""
    flags, values = read_flags(argv), peek(argv)[0]
    presets = values.get("preset", "").split(",")
    run = Path(values.get("output_dir", "runs"), values.get("run_name", ""), "checkpoints")
    data = [name for name, _ in KINDS.values() if name.lower() in flags.values or os.environ.get(name)
            or not values.get(name.lower(), SAMPLE).startswith(SAMPLE)]  # sample-sft belongs on top of sample
    is_given = names_source or "data_path" in flags.values or "preset" in flags.notes  # by another name
    has_own = data or is_given or flags.config_files or flags.env_file or os.path.exists(".env")
    if has_own or "sample" in presets or values.get("run_name") and run.exists():
        return argv
    return [*argv, "--preset", ",".join(["sample", *filter(None, presets)])]


def flag(name: str) -> str:
    return f"--{name.lower().replace('_', '-')}"


def count_ranks(launching: Namespace, values: dict[str, str]) -> int:
    if launching.nproc_per_node or launching.gpus:
        return launching.nproc_per_node or launching.gpus.count
    if asked := os.environ.get("NPROC"):
        if not asked.isdecimal() or not int(asked):
            raise SettingsError(f"NPROC={asked} must be a number of ranks, 1 or more")
        return int(asked)
    if values.get("device") == "cpu" or version("torch").endswith("+cpu"):  # torch's import takes a second
        return 1
    import torch  # after .env's CUDA_VISIBLE_DEVICES has been exported

    return torch.cuda.device_count() or 1


def job_size(launching: Namespace, ranks: int) -> dict[str, str]:
    """Return the variables that describe a job with this many ranks on each machine."""
    sizes = {"WORLD_SIZE": launching.nnodes * ranks, "LOCAL_WORLD_SIZE": ranks if launching.nnodes > 1 else 0}
    return {name: str(size) for name, size in sizes.items() if size}


def prepare_and_describe(kind: str, argv: list[str], output: str, config: Config) -> Path:
    """Prepare what the flags describe, with PREPARE_AHEAD only its start; print what it has."""
    def complete() -> set[Path]:
        places = [*Path(output).glob(f"*/{MANIFEST}"), *Path(output).glob(f"*/{MIXTURE}")]
        return {place.parent.resolve() for place in places}

    existing = complete()
    if config.prepare_ahead:
        from extensions.preparation import start

        folder = start(argv, config)
    else:
        folder = prepare_from_flags(kind, argv)
    if folder.resolve() in existing:
        show("Using data prepared earlier:")
    elif folder.resolve() in complete():
        show(*describe(folder))
    else:
        show("Training starts on the first shard, while the others are prepared:")
    return folder


def main() -> None:
    is_demo = (TYPED or "").endswith(" demo")
    doc = CHECK_HELP if "--check" in sys.argv else DEMO_HELP if is_demo else __doc__
    CommandParser(doc, allow_abbrev=False, usage="%(prog)s [flags]").parse_known_args()
    argv = sys.argv[1:]
    kind = KIND_OF_STAGE.get(peek(argv)[0].get("training_stage", ""), "documents")
    setting, parser = KINDS[kind][0], flag_parser(kind, "")
    preparing, own = parser.split(argv)
    flags, given = with_sample(own, bool(preparing.source or preparing.mix)), read_flags(own)
    launching, settings = make_parser().parse_known_args(flags)
    if flags != own and given.check and "device_memory" in given.values:  # a plan needs no data
        size = job_size(launching, launching.nproc_per_node or 1)
        os.environ.update(size if size["WORLD_SIZE"] != "1" else {})
        interrupts.become(str(ROOT / "train.py"), *make_parser().parse_known_args(own)[1])
    has_source = preparing.source or preparing.mix  # then DEBUG alone needs no sample
    values, environ = peek([*settings, *([flag(setting), OUTPUTS[kind]] if has_source else [])])
    os.environ.update(environ)
    ranks = count_ranks(launching, values)
    planned = {"RANK": "0", "WORLD_SIZE": str(launching.nnodes * ranks)}
    if is_check := read_flags(settings).check:
        planned = job_size(launching, ranks)
        planned["WORLD_SIZE"] = os.environ.get("WORLD_SIZE") or planned["WORLD_SIZE"]
    else:
        os.environ.pop("WORLD_SIZE", None)  # the launcher sets it
    if flags != own and ((name := peek(own)[0].get("run_name")) or values["preset"] != "sample"):
        run = Path(values.get("output_dir", "runs"), name or "")
        reason = f"There is no run {run} to resume, and no data is set" if name else "No data is set"
        show(f"{reason}, so a new run uses the sample data. To use other data, set {setting}.")

    # Validate the settings before the preparation, which may take hours.
    path = os.path.expanduser(values.get(setting.lower(), ""))
    is_plan = is_check and "device_memory" in values and not os.path.exists(path)  # it downloads no data
    to_prepare = preparing.source or preparing.mix or path and not is_plan and is_source(kind, path)
    own_validation = os.path.expanduser(values.get("validation_data_path", ""))
    prepares_validation = own_validation and not is_plan and is_source(kind, own_validation)
    try:
        loaded = make_plan([*settings, *([flag(setting), OUTPUTS[kind]] if to_prepare else [])],
                             os.environ | (planned if is_check or planned["WORLD_SIZE"] != "1" else {}),
                             own_flags=(*vars(launching), *vars(preparing)))
    except SettingsError as error:
        exit_with(error)
    unused = [name for name, value in vars(preparing).items() if value != parser.get_default(name)]
    if unused and not (to_prepare or prepares_validation):
        raise SettingsError(f"command line: {flag(unused[0])} needs data to prepare; add --source")
    if launching.gpus:
        choose_gpus(launching.gpus)

    if "sample" in values.get("preset", "").split(","):
        name = values.get("run_name")
        is_new = not (name and Path(values.get("output_dir", "runs"), name).exists())
        if is_new and values["preset"] == "sample" and values.get("training_stage", "pretrain") == "pretrain":
            show(SAMPLE_TEXT)
        if code := subprocess.run([sys.executable, str(ROOT / "scripts/make_sample.py")]).returncode:
            raise SystemExit(code)
    if to_prepare:
        if own_validation and "validation_fraction" not in loaded.sources:
            settings = [*settings, "--validation-fraction=0"]  # nothing needs to be held out
        source = [] if preparing.source or preparing.mix else ["--source", path]
        others = [f"{flag(name)}={value}" for name, value in vars(preparing).items() if value is not None]
        folder = prepare_and_describe(kind, [*settings, *others, *source], preparing.output, loaded.config)
        note = "  (which other launchers, such as slurm.sh, need in .env)" * is_check
        show(f"{setting}={folder}{note}")
        flags, settings = ([*each, flag(setting), str(folder)] for each in (flags, settings))
    if prepares_validation:
        others = [f"{flag(name)}={value}" for name, value in vars(preparing).items()
                  if name in ("map", "column", "documents", "on_bad_record", "output") and value is not None]
        argv = [*settings, *others, "--source", own_validation]
        folder = prepare_from_flags(kind, argv, holds_out=False)
        show(f"VALIDATION_DATA_PATH={folder}")
        flags, settings = ([*each, "--validation-data-path", str(folder)] for each in (flags, settings))

    command = [str(ROOT / "train.py"), *settings]
    if is_check:
        os.environ.update(planned)
    else:
        counted = [] if launching.gpus else ["--nproc-per-node", str(ranks)]
        launch = str(ROOT / "scripts/launch.py")
        command = [launch, *counted, "--max-restarts", str(RESTARTS), *flags]
    sys.stdout.flush()
    interrupts.become(*command)


if __name__ == "__main__":
    run_script(main, "Stopped. Run the same command again to resume.")
