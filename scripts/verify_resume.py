"""Does your run survive? A few steps straight, and the same steps with a kill -9 in the middle: both must end alike, bit by bit.

    python scripts/verify_resume.py --preset sample
    python scripts/verify_resume.py --nproc-per-node 2 --steps 20
    python scripts/verify_resume.py --layouts 1x4,1x2,2x2

Settings are read as train.py reads them (.env, environment, flags), but for how long it trains and how often it saves. With
--layouts, each RANKSxMICRO_BATCH_SIZE also takes one step of the same batch, and their gradients are compared; --steps 0 does
only that. What is written lies in a folder of its own in OUTPUT_DIR, which is removed at the end unless something was not alike.
The exit code is 0 where all was alike, 1 where it was not, 2 where a setting is wrong.
"""

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Optional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from checkpoint.schema import read_entries, read_state_file  # noqa: E402
from common.errors import PaddockError, SettingsError, run_script  # noqa: E402
from common.text import show  # noqa: E402
from config import START_FROM, Config  # noqa: E402
from settings.load import exit_with, load_config  # noqa: E402

CLOCKS = ("tokens_per_second", "peak_memory_bytes", "mfu")  # metrics that differ from one run to the next
STOPPING_SECONDS = 60  # that a run has to save and leave, when this script is stopped
KILLS_TRIED = 5
# Of the largest gradient: sums in another order; and in bf16 and fp16, that each micro-batch's gradient is rounded by itself.
ALLOWED = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}


class Verdict(NamedTuple):
    """One line of the table."""

    name: str
    alike: bool
    text: str


# ----------------------------------------------------------------------------------------------------------------- the settings


def few_steps(config: Config, first: int, steps: int) -> dict[str, Any]:
    """What is changed of the settings, so that everything that happens in a run happens in a few steps."""
    often = max(1, steps // 4)

    def now_and_then(every: int) -> int:
        return min(every, often)  # 0 stays 0

    return {"MAX_STEPS": first + steps, "SAVE_EVERY": often, "KEEP_LAST": 1, "KEEP_BEST": 0, "LOG_EVERY": 1,
            "VALIDATE_EVERY": now_and_then(config.validate_every), "EARLY_STOPPING_PATIENCE": 0,
            "VALIDATION_ROWS": min(config.validation_rows, 2 * config.micro_batch_size * config.world_size),
            "HELLASWAG_EVERY": now_and_then(config.hellaswag_every), "HELLASWAG_EXAMPLES": min(config.hellaswag_examples or 8, 8),
            "SAMPLE_EVERY": now_and_then(config.sample_every), "SAMPLE_TOKENS": min(config.sample_tokens, 8),
            "DRIFT_CHECK_EVERY": now_and_then(config.drift_check_every), "WANDB_ENABLED": "false", "TENSORBOARD_ENABLED": "false"}


def where_it_starts(config: Config) -> tuple[dict[str, Any], int]:
    """The settings that name a checkpoint, as they are to be read from another run's folder, and the steps that are done in it.

    Raises:
        CheckpointError: it is not there.
    """
    from checkpoint import store
    from training.start import continues, named_checkpoint

    named = named_checkpoint(config)
    if named is None:
        return {"RESUME": "auto"}, config.start_step or 0
    folder = store.locate(named, Path(config.output_dir) / (config.run_name or "-")).resolve()
    state = store.read_state(folder)
    setting = "RESUME" if config.resume == named else next(name.upper() for name in START_FROM if getattr(config, name))
    goes_on = continues(state, config.resume == named, config)
    done = state["progress"]["step"] if goes_on else 0
    counts_anew = config.resume != named and config.start_step is not None
    return {"RESUME": "auto", setting: folder}, config.start_step if counts_anew else done


def load(flags: list[str], ranks: int) -> Config:
    """The configuration of a run on so many ranks.

    Raises:
        SettingsError: it cannot be.
    """
    return load_config(flags, {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)}).config


# -------------------------------------------------------------------------------------------------------------------- the runs


class Place(NamedTuple):
    """One run: its folder, how it is started."""

    folder: Path
    flags: list[str]
    ranks: int

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The ledger's lines so far."""
        return list(read_entries(self.folder / "ledger.jsonl"))

    @property
    def saved(self) -> list[int]:
        """The steps of its checkpoints."""
        return sorted(int(path.name.removeprefix("step-")) for path in (self.folder / "checkpoints").glob("step-*"))

    @property
    def output(self) -> Path:
        """What it has said."""
        return self.folder.with_suffix(".txt")


def place(flags: list[str], folder: Path, ranks: int, settings: Mapping[str, Any]) -> Place:
    """A run with some of the settings changed; the last flag wins."""
    own = {**settings, "OUTPUT_DIR": folder.parent, "RUN_NAME": folder.name}
    return Place(folder, [*flags, *(f"--{name.lower().replace('_', '-')}={value}" for name, value in own.items())], ranks)


@contextmanager
def started(run: Place) -> Iterator[subprocess.Popen]:
    """The run's processes, in a group that Ctrl-C does not reach; none is left behind."""
    command = ([ROOT / "train.py"] if run.ranks == 1 else
               [ROOT / "scripts" / "launch.py", f"--nproc-per-node={run.ranks}"])
    with open(run.output, "a") as output:
        process = subprocess.Popen([sys.executable, *map(str, command), *run.flags], stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOPPING_SECONDS)
        if process.poll() is None:
            process.kill()
            process.wait()


def follow(process: subprocess.Popen, run: Place, what: str, steps: int,
           until: Callable[[], bool] = lambda: False) -> list[float]:
    """Show the steps as they come, until something holds or the run ends; returns when each step was seen."""
    from tqdm import tqdm

    seen: list[float] = []
    with tqdm(desc=what, total=steps, unit="step", leave=False, disable=None) as bar:
        while process.poll() is None and not until():
            new = len(run.steps) - len(seen)
            seen += [time.monotonic()] * new
            bar.update(new)
            time.sleep(0.005)
    return seen


def finish(run: Place, what: str, steps: int) -> list[float]:
    """Run to the end.

    Raises:
        PaddockError: it ends otherwise.
    """
    with started(run) as process:
        seen = follow(process, run, what, steps)
    if process.returncode:
        said = [line for line in run.output.read_text(errors="replace").splitlines() if line.strip()]
        cause = next((line for line in reversed(said) if line.startswith("error: ")), said[-1] if said else "it said nothing")
        raise PaddockError(f"the run ({what}) ended with exit code {process.returncode}: {cause.removeprefix('error: ')} "
                           f"(all it said is in {run.output})")
    return seen


def kill_in_the_middle(run: Place, first: int, steps: int, often: int, seconds: float, dice: random.Random) -> str:
    """Start a run, and kill -9 its rank 0 at a random instant after one of its checkpoints; returns in words when that was.

    Args:
        often: steps between checkpoints.
        seconds: that these take.
    Raises:
        PaddockError: it was always finished before.
    """
    saves = range(first + often, first + steps - often + 1, often)
    for attempt in range(KILLS_TRIED):
        wanted, delay = dice.choice(saves), seconds * dice.random() / 2**attempt
        with started(run) as process:
            follow(process, run, "killed", steps, until=lambda step=wanted: bool(run.saved) and run.saved[-1] >= step)
            follow(process, run, "killed", steps, until=lambda due=time.monotonic() + delay: time.monotonic() >= due)
            holder = re.match(r"process (\d+) ", (run.folder / "run.lock").read_text()) if run.saved else None
            if holder and process.poll() is None:
                with suppress(ProcessLookupError):
                    os.kill(int(holder[1]), signal.SIGKILL)
            process.wait()
        if process.returncode and not run.saved:
            finish(run, "killed", steps)  # it failed by itself, and will again: that tells why
        if process.returncode and len(run.steps) < steps:
            saving = " and in the middle of a save" if any((run.folder / "checkpoints").glob("tmp-*")) else ""
            return f"kill -9 of rank 0 after step {first + len(run.steps)}{saving}; step {run.saved[-1]} was saved"
        shutil.rmtree(run.folder)
    raise PaddockError(f"the run was finished before it could be killed, {KILLS_TRIED} times; take more: --steps {4 * steps}")


# --------------------------------------------------------------------------------------------------------------- the comparison


def tensor_files(checkpoint: Path, optimizer: bool) -> dict[str, Path]:
    """Where each tensor of the weights (or adapters), or of the optimizer, lies."""
    from safetensors import safe_open

    places = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        if (path.name == "optimizer.safetensors") == optimizer:
            with safe_open(path, framework="pt") as file:
                places |= dict.fromkeys(file.keys(), path)
    return places


def read_tensor(places: Mapping[str, Path], name: str):
    """One tensor, on the CPU."""
    from safetensors import safe_open

    with safe_open(places[name], framework="pt") as file:
        return file.get_tensor(name)


def compare_tensors(what: str, one: Mapping[str, Path], other: Mapping[str, Path]) -> Verdict:
    """Whether all are the same, bit by bit."""
    import torch

    if one.keys() != other.keys():
        return Verdict(what, False, f"only in one of them: {', '.join(sorted(one.keys() ^ other.keys())[:3])}")
    differing = []
    for name in one:
        mine, others = read_tensor(one, name), read_tensor(other, name)
        if mine.shape != others.shape or not torch.equal(mine.flatten().view(torch.uint8), others.flatten().view(torch.uint8)):
            apart = float((mine.double() - others.double()).abs().max()) if mine.shape == others.shape else float("inf")
            differing.append((name, apart))
    if differing:
        return Verdict(what, False, f"{len(differing)} of {len(one)} tensors, first {differing[0][0]} by {differing[0][1]:.2g}")
    return Verdict(what, True, f"{len(one)} tensors, bit for bit")


def compare_lines(what: str, one: list[dict], other: list[dict], names: Optional[tuple[str, ...]] = None) -> Verdict:
    """Whether the lines are the same, in these entries or in all but clocks."""
    def kept(line: dict) -> dict:
        return {name: value for name, value in line.items() if (name in names if names else name not in CLOCKS)}

    for mine, others in zip(one, other):
        if mine["step"] != others["step"]:
            return Verdict(what, False, f"step {mine['step']} in one, step {others['step']} in the other")
        for name in kept(mine).keys() | kept(others).keys():
            if mine.get(name) != others.get(name):
                return Verdict(what, False, f"step {mine['step']}: {name} is {mine.get(name)}, and {others.get(name)}")
    if len(one) != len(other):
        return Verdict(what, False, f"{len(one)} lines, and {len(other)}")
    return Verdict(what, bool(one), f"{len(one)} lines" if one else "there is none to compare")


def compare_runs(one: Place, other: Place, last: int) -> list[Verdict]:
    """All that two runs have left behind."""
    folders = [run.folder / "checkpoints" / f"step-{last:08d}" for run in (one, other)]
    verdicts = [compare_tensors(what, *(tensor_files(folder, what != "weights") for folder in folders))
                for what in ("weights", "optimizer state")]
    verdicts += [compare_lines("rows", one.steps, other.steps, ("step", "rows_crc32")),
                 compare_lines("losses and norms", one.steps, other.steps),
                 compare_lines("metrics", *(list(read_entries(run.folder / "metrics.jsonl")) for run in (one, other)))]
    states = [read_state_file(folder / "trainer_state.json")["progress"] | {"wandb_run_id": None} for folder in folders]
    unlike = [name for name in states[0] if states[0][name] != states[1].get(name)]
    return [*verdicts, Verdict("progress", not unlike, ", ".join(unlike) if unlike else f"{len(states[0])} entries")]


def check_resume(flags: list[str], config: Config, folder: Path, steps: int, info: Callable[[str, str], None]) -> list[Verdict]:
    """Train straight, and with a kill in the middle, and compare."""
    begins, first = where_it_starts(config)
    settings = {**begins, **few_steps(config, first, steps)}
    straight, killed = (place(flags, folder / name, config.world_size, settings) for name in ("straight", "killed"))
    begun = time.monotonic()
    seen = finish(straight, "straight", steps)
    info("straight", f"{steps} steps in {time.monotonic() - begun:.0f} s")
    found = re.search(r"Hardware: (.*)", straight.output.read_text(errors="replace"))
    hardware = found[1] if found else "not known"
    info("hardware", f"{hardware}; DETERMINISTIC={str(config.deterministic).lower()}")
    often = settings["SAVE_EVERY"]
    a_step = (seen[-1] - seen[0]) / (len(seen) - 1) if len(seen) > 1 else 0.0
    info("killed", kill_in_the_middle(killed, first, steps, often, often * a_step, random.Random(config.seed)))
    finish(killed, "resumed", steps)
    went_on = re.findall(r"resuming after step (\d+)", killed.output.read_text(errors="replace"))
    resumed = Verdict("resumed", bool(went_on) and int(went_on[-1]) > first,
                      f"on from step {went_on[-1]} to {first + steps}" if went_on else "it began anew")
    verdicts = [resumed, *compare_runs(straight, killed, first + steps)]
    if not all(verdict.alike for verdict in verdicts):
        again = place(flags, folder / "straight-again", config.world_size, settings)
        finish(again, "straight again", steps)
        same = all(verdict.alike for verdict in compare_runs(straight, again, first + steps))
        advice = "" if config.deterministic or hardware.startswith("CPU") else "; set DETERMINISTIC=true, and verify again"
        verdicts.append(Verdict("straight again", same, "two straight runs are alike: it is the resume that is not" if same else
                                "two straight runs are not alike either: with these settings this machine gives other bits each "
                                f"time, and no resume could be held against them{advice}"))
    return verdicts


# ------------------------------------------------------------------------------------------------------------------ the layouts


def parse_layouts(text: str) -> list[tuple[int, int]]:
    """(ranks, rows of a micro-batch) of each.

    Raises:
        SettingsError: it is not written so.
    """
    found = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", part.strip()) for part in text.split(",")]
    if not all(found) or len(found) < 2:
        raise SettingsError(f"command line: --layouts {text}: expected two or more RANKSxMICRO_BATCH_SIZE, such as 1x4,1x2,2x2")
    return [(int(match[1]), int(match[2])) for match in found]


def compare_gradients(name: str, one: Mapping[str, Path], other: Mapping[str, Path], dtype: str) -> Verdict:
    """How far the gradients of one step are apart, by the optimizers' first moments, which are then a share of them."""
    furthest, where = 0.0, ""
    for kind in ("exp_avg", "momentum_buffer"):
        names = [key for key in one if key.endswith(f".{kind}")]
        largest = max((float(read_tensor(one, key).abs().max()) for key in names), default=0.0)
        for key in names:
            mine, others = read_tensor(one, key).double(), read_tensor(other, key).double()
            apart = float((mine - others).abs().max()) / largest if largest else 0.0
            if not apart <= furthest:
                furthest, where = apart, f", most in {key.removesuffix(f'.{kind}')}"
    if not any(key.endswith((".exp_avg", ".momentum_buffer")) for key in one):
        return Verdict(name, False, "no update was made, which fp16 does at first: take PRECISION=bf16 or fp32")
    return Verdict(name, furthest <= ALLOWED[dtype], f"gradients {furthest:.1e} of the largest apart{where} "
                                                     f"({ALLOWED[dtype]:.0e} is allowed in {dtype})")


def check_layouts(flags: list[str], config: Config, folder: Path, layouts: list[tuple[int, int]]) -> Iterator[Verdict]:
    """One step of the same batch in each layout, its gradients beside those of the first."""
    from model_utils import choose_device, choose_dtype

    dtype = str(choose_dtype(config, choose_device(config))).removeprefix("torch.")
    begins, first = where_it_starts(config)
    settings = {**begins, **few_steps(config, first, 1), "VALIDATE_EVERY": 0, "HELLASWAG_EVERY": 0, "SAMPLE_EVERY": 0,
                "LORA_DROPOUT": 0, "TF32": "false"}  # each rank draws its own dropout; TF32 rounds where it likes
    runs = []
    for ranks, rows in layouts:
        runs.append(place(flags, folder / f"layout-{ranks}x{rows}", ranks, {**settings, "MICRO_BATCH_SIZE": rows}))
        finish(runs[-1], f"layout {ranks}x{rows}", 1)
        moments, reference = (tensor_files(run.folder / "checkpoints" / f"step-{first + 1:08d}", optimizer=True)
                              for run in (runs[-1], runs[0]))
        name = f"layout {ranks}x{rows}"
        if len(runs) == 1:
            yield Verdict(name, True, f"loss {runs[0].steps[0]['loss']:.6f}; the others are held against it")
            continue
        rows_alike = compare_lines(name, runs[0].steps, runs[-1].steps, ("step", "rows_crc32"))
        yield compare_gradients(name, reference, moments, dtype) if rows_alike.alike else rows_alike


# -------------------------------------------------------------------------------------------------------------------- the command


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=8, metavar="N",
                        help="steps to train; 0 = only --layouts (default: %(default)s)")
    parser.add_argument("--layouts", metavar="RxM,...", help="ranks x MICRO_BATCH_SIZE to compare, such as 1x4,1x2,2x2")
    parser.add_argument("--nproc-per-node", "--nproc_per_node", type=int, default=1, metavar="N",
                        help="ranks (default: %(default)s)")
    args, flags = parser.parse_known_args()
    if args.steps in (1, 2, 3) or args.steps < 0 or args.nproc_per_node < 1 or (args.steps == 0 and not args.layouts):
        parser.error("--steps must be 4 or more, or 0 with --layouts; --nproc-per-node must be 1 or more")
    return args, flags


def main() -> None:
    args, flags = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        config = load(flags, args.nproc_per_node)
        layouts = parse_layouts(args.layouts) if args.layouts else []
        for ranks, rows in layouts:
            load([*flags, f"--micro-batch-size={rows}"], ranks)
    except SettingsError as error:
        exit_with(error)
    output_dir = Path(config.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    folder, failed = Path(tempfile.mkdtemp(prefix="verify-resume-", dir=output_dir)), True

    def info(name: str, text: str) -> None:
        show(f"  {name:<18}{text}")

    def tell(verdict: Verdict) -> bool:
        info(verdict.name, f"{'ok' if verdict.alike else 'DIFFERS'}: {verdict.text}")
        return verdict.alike

    try:
        show(f"Training ({config.training_stage}, ranks: {args.nproc_per_node}) in {folder}")
        alike = [tell(verdict) for verdict in check_resume(flags, config, folder, args.steps, info)] if args.steps else []
        alike += [tell(verdict) for verdict in check_layouts(flags, config, folder, layouts)] if layouts else []
        failed = not all(alike)
    except KeyboardInterrupt:
        failed = False
        raise
    finally:
        if failed:
            show(f"What was trained is left in {folder}")
        else:
            shutil.rmtree(folder)
    if failed:
        raise SystemExit(1)
    print("All is alike.")


if __name__ == "__main__":
    run_script(main)
