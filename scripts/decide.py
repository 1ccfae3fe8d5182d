"""Decide which of two or more recipes is better, with a stated error, with as few runs as that takes.

    ./paddock decide --vary LEARNING_RATE=0.003,0.01 --preset sample
    ./paddock decide first.env second.env --judge val_loss --margin 0.005
    ./paddock decide --vary OPTIMIZER=adamw,muon --error 0.01 --budget 8

All other flags are settings, of all arms. Each seed trains every arm, and the differences of runs with the
same seed decide. They are looked at after each seed: training stops when an arm is better, when no difference
is above the margin, or when the budget ends. An arm that is worse than another one is not trained further.
The runs and the page are in OUTPUT_DIR/NAME. If interrupted, the same command resumes.
"""

import argparse
import itertools
import json
import math
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Optional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.command_line import CommandParser, number  # noqa: E402
from common.errors import PaddockError, SettingsError, local_path, run_script  # noqa: E402
from common.files import atomic_write, read_json  # noqa: E402
from common.text import counted, show  # noqa: E402
from config import PLAIN_NAME, Config  # noqa: E402
from extensions import decide  # noqa: E402
from extensions.arms import (  # noqa: E402
    Fleet,
    Trial,
    as_flags,
    gpus_of,
    make_trial,
    parse_vary,
    prepared_once,
    slug_of,
)
from extensions.cost import forward_flops  # noqa: E402
from extensions.report.compare import are_unlike, titles  # noqa: E402
from extensions.report.data import RunReader  # noqa: E402
from extensions.report.numbers import is_share  # noqa: E402
from extensions.report.page import Report, render  # noqa: E402
from parallel.process import EXIT_PREEMPTED  # noqa: E402
from plan.make import make_plan  # noqa: E402

RECORD, PAGE = "decide.json", "decide.html"
PILOT_STEPS = 20  # of which the second half is measured
ALIKE = 0.01  # difference of tokens or FLOPs that is not mentioned


class Arm(NamedTuple):
    name: str  # in sentences
    slug: str  # in names of runs
    flags: list[str]
    config: Config


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = CommandParser(__doc__, "./paddock train --help lists the settings.", allow_abbrev=False,
                           usage="%(prog)s --vary NAME=VALUE,VALUE [settings]\n"
                                 "       %(prog)s FILE.env FILE.env [settings]")
    parser.add_argument("--vary", metavar="NAME=VALUES", action="append", default=[],
                        help="the arms as values of a setting, separated by commas; can be repeated")
    parser.add_argument("--judge", metavar="METRIC", help="final result that decides, as metrics.jsonl "
                        "names it (default: the main result of the stage)")
    parser.add_argument("--margin", default=0.0, help="largest difference that does not matter (default: 0)",
                        type=number(float, "0 or more", lambda value: 0 <= value < math.inf))
    parser.add_argument("--error", default=decide.ERROR, help="share of comparisons of equal recipes that "
                        "may call them different (default: %(default)s)",
                        type=number(float, "above 0 and below 1", lambda value: 0 < value < 1))
    parser.add_argument("--pairs", metavar="N", default=20, help="largest number of seeds (default: 20)",
                        type=number(int, "from 1 to 1,000", lambda value: 1 <= value <= 1000))
    parser.add_argument("--budget", metavar="HOURS", default=math.inf, help="hours of training, over all "
                        "starts", type=number(float, "above 0", lambda value: value > 0))
    parser.add_argument("--equal", choices=("tokens", "seconds"),
                        help="set MAX_STEPS of each arm to the tokens or the training time of the first one")
    parser.add_argument("--name", help="name of the folder in OUTPUT_DIR (default: decide-SETTING-...)")
    # The values of settings are words without a hyphen, too.
    files = [*itertools.takewhile(lambda word: not word.startswith("-"), sys.argv[1:])]
    args, flags = parser.parse_known_args(sys.argv[1 + len(files):])
    args.file, args.vary = [*map(local_path, files)], parse_vary(args.vary)
    if bool(args.file) == bool(args.vary):
        raise SettingsError("command line: name the arms, either by --vary NAME=VALUE,VALUE or by two files")
    stems = [Path(file).stem for file in args.file]
    args.name = args.name or "-".join(["decide", *stems, *(name for name, _ in args.vary)])
    if not PLAIN_NAME.fullmatch(args.name):
        raise SettingsError(f"--name {args.name}: use letters, digits, '.', '_' and '-'")
    return args, flags


def list_arms(args: argparse.Namespace, flags: list[str]) -> list[Arm]:
    """Return the arms; raise if there are fewer than two, or two with the same name."""
    named = [(Path(file).stem, Path(file).stem, [f"--env-file={file}"]) for file in args.file]
    for values in itertools.product(*(values for _, values in args.vary)) if args.vary else ():
        chosen = dict(zip((name for name, _ in args.vary), values))
        name = ", ".join(f"{setting.upper()}={value}" for setting, value in chosen.items())
        named.append((name, slug_of(values), as_flags(chosen)))
    if not 2 <= len({slug for _, slug, _ in named}) == len(named):
        raise SettingsError("command line: decide needs two or more arms with different names; it has "
                            f"{', '.join(name for name, *_ in named)}")
    return [Arm(name, slug, (words := [*flags, *own]), make_plan(words, complete=False).config)
            for name, slug, own in named]


class Comparison:
    """The arms of a command, the folder of their runs, and what the runs say so far."""

    def __init__(self, args: argparse.Namespace, arms: list[Arm]):
        self.args, self.arms = args, arms
        self.first = arms[0].config.seed
        self.folder = Path(arms[0].config.output_dir) / args.name
        self.fleet = Fleet(gpus_of(arms[0].config), quiet=True)
        self.runs: dict[str, list[RunReader]] = {arm.name: [] for arm in arms}  # by seed
        self.judge, self.title, self.lower = args.judge, "", True
        self.is_same = False  # recipe
        self.record = self.open_record()

    # ------------------------------------------------------------------------------------------ the runs

    def open_record(self) -> dict[str, Any]:
        """Return what the folder records; an earlier start must have asked the same."""
        asked = {name: getattr(self.args, name) for name in ("judge", "margin", "error", "equal")}
        asked["arms"] = {arm.name: arm.flags for arm in self.arms}
        record = {"seconds": 0.0, **asked}
        if (self.folder / RECORD).exists():
            record = read_json(self.folder / RECORD)
            if other := [name for name, value in asked.items() if record.get(name) != value]:
                raise SettingsError(f"{self.folder} was started with another {', '.join(other)}; the error "
                                    "holds for what was asked before the first look: choose another --name")
        return record

    def trial(self, arm: Arm, seed: int, end: str = "", **settings: Any) -> Trial:
        chosen = {"seed": seed, **settings}
        if arm.config.data_seed is not None:  # else, all seeds would read the rows in one order
            chosen["data_seed"] = arm.config.data_seed + seed - self.first
        name = f"{self.args.name}-{arm.slug}-{end or f'seed{seed}'}"
        return make_trial(self.folder / name, arm.flags, chosen)

    def train(self, trials: list[Trial]) -> None:
        """Train these runs, and record the time that they take."""
        started = time.monotonic()
        self.fleet.train(trials)
        self.record["seconds"] += time.monotonic() - started
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.folder / RECORD) as temporary:
            temporary.write_text(json.dumps(self.record, indent=1) + "\n")
        if self.fleet.received is not None:
            show("Stopped. Run the same command again to resume.")
            raise SystemExit(EXIT_PREEMPTED)
        for trial in trials:
            if not has_ended(trial):
                code = self.fleet.failed.get(trial.name, 0)
                raise PaddockError(f"{trial.name} ended without a result (exit code {code}); see "
                                   f"{trial.folder / 'log'}, and run the same command again")

    def equalize(self) -> None:
        """Set the steps of each arm so that all have the tokens, or the training time, of the first."""
        if with_epochs := [arm.name for arm in self.arms if arm.config.epochs]:
            raise SettingsError(f"--equal sets MAX_STEPS, but EPOCHS decides the steps of "
                                f"{', '.join(with_epochs)}; set MAX_STEPS instead")
        costs = [float(arm.config.total_batch_size) for arm in self.arms]
        if self.args.equal == "seconds":
            watched = {"stop_step": PILOT_STEPS, "log_every": 1, "validate_every": 0, "hellaswag_every": 0}
            pilots = [self.trial(arm, self.first, "pilot", **watched) for arm in self.arms]
            if waiting := [pilot for pilot in pilots if not has_ended(pilot)]:
                self.train(waiting)
            readers = [pilot.reader() for pilot in pilots]
            if failed := [run.name for run in readers if run.state()[0] == "failed"]:
                raise PaddockError(f"{', '.join(failed)} failed, so its time for a step is unknown; compare "
                                   "with --equal tokens, or without this arm")
            costs = [median(run.curves["step_seconds"].y[PILOT_STEPS // 2:]) for run in readers]
        steps = [max(1, round(self.arms[0].config.max_steps * costs[0] / cost)) for cost in costs]
        self.arms = [arm._replace(flags=[*arm.flags, f"--max-steps={count}"])
                     for arm, count in zip(self.arms, steps)]

    def run(self) -> None:
        """Train seed by seed until the question is decided, or pairs or budget end."""
        if self.args.equal:
            self.equalize()
        seen = self.look()
        for place in range(self.args.pairs):
            trials = {arm.name: self.trial(arm, self.first + place) for arm in self.arms
                      if arm.name in seen.left}
            waiting = [trial for trial in trials.values() if not has_ended(trial)]
            probably = self.record["seconds"] * (1 + 1 / max(1, place))  # after another seed
            if waiting and probably > 3600 * self.args.budget:
                show(self.answer(seen, f"the budget of {self.args.budget:g} h does not allow another"))
                break
            if waiting:
                self.train(waiting)
            for name, trial in trials.items():
                self.runs[name].append(trial.reader())
            if place == 0:
                self.find_judge()
                logs = [ledger(runs[0]) for runs in self.runs.values()]
                self.is_same = bool(logs[0]) and all(log == logs[0] for log in logs)
            seen = self.look()
            more_follow = place + 1 < self.args.pairs
            text = self.answer(seen, "more follow" if more_follow else "--pairs allows no more")
            self.write(seen, text)
            show(text)
            if seen.is_over or self.is_same:
                break
        show(str(self.folder / PAGE))

    # --------------------------------------------------------------------------------------- what they say

    def find_judge(self) -> None:
        runs = [each for of_arm in self.runs.values() for each in of_arm]
        known, self.judge = titles(runs), self.judge or runs[0].main.curve
        if self.judge not in known:
            raise SettingsError(f"--judge {self.judge}: the runs have no such result; choose among "
                                f"{', '.join(known)}")
        if are_unlike([runs[0] for runs in self.runs.values()], self.judge):
            raise SettingsError(f"--judge {self.judge}: the arms were evaluated on different items; set the "
                                "same VALIDATION_DATA_PATH for all, and choose another --name")
        self.title, better = known[self.judge]
        self.lower = better == "lower"

    def results(self) -> dict[str, list[float]]:
        """Return the final result of each arm by seed; infinite if the run failed or diverged."""
        worst = math.inf if self.lower else -math.inf
        return {name: [worst if (value := result_of(run, self.judge)) is None else value for run in runs]
                for name, runs in self.runs.items()}

    def look(self) -> decide.Look:
        return decide.look(self.results(), self.lower, self.args.error, self.args.margin)

    def answer(self, seen: decide.Look, why: str) -> str:
        """Return the sentence that comes first; `why` there are no more pairs yet."""
        names = [arm.name for arm in self.arms]
        if self.is_same:
            return f"{' and '.join(names)} are the same recipe: with seed {self.first}, all steps are equal."
        if len(names) == 2:
            verdict = seen.verdicts[names[0], names[1]]
            text = decide.sentence(*names, verdict, self.lower, is_share(self.title))
        elif len(seen.left) == 1:
            text = f"{seen.left[0]} is the best of {len(names)}"
        else:
            words = "have no difference that matters" if seen.is_over else "are not told apart"
            text = f"of {len(names)}, {' and '.join(seen.left)} {words}"
        after = f"decided after {seen.seeds} of at most {self.args.pairs} pairs"
        after += f"; of comparisons of equal recipes, at most {100 * self.args.error:g} % decide"
        if not seen.is_over:
            after = f"{counted(seen.seeds, 'pair')} so far, {why}"
            needed = decide.fewest_pairs(self.args.error / math.comb(len(names), 2))
            after += f"; a decision takes {needed} or more" * (seen.seeds < needed)
        failed = [run.name for runs in self.runs.values() for run in runs
                  if result_of(run, self.judge) is None]
        after += f"; {', '.join(failed)} failed, which counts as the worst" * bool(failed)
        costs = unequal(self.runs, has_seconds=self.args.equal == "seconds")
        return f"{self.title}: {text}{costs}; {after}."

    def write(self, seen: decide.Look, text: str) -> None:
        """Write the page: the sentence, the sequence, and the curves of all arms by seed."""
        report = Report([run.folder for runs in self.runs.values() for run in runs])
        report.read()
        data, results, names = report.data(), self.results(), [*self.runs]
        columns, rows = ["seed", *names], []
        for place in range(seen.seeds):
            values = [f"{of_arm[place]:.4f}" if place < len(of_arm) else "out" for of_arm in results.values()]
            rows.append([str(self.first + place), *values])
        if len(names) == 2:
            columns += ["difference", f"evidence, {1 / self.args.error:g} is needed"]
            differences = decide.differences_of(*results.values())
            for row, difference, proof in zip(rows, differences, decide.evidence(differences)):
                row += [f"{difference:+.4f}", f"{proof:.1f}"]
        more = [decide.sentence(a, b, verdict, self.lower, is_share(self.title)) + "."
                for (a, b), verdict in seen.verdicts.items() if len(names) > 2]
        if read_the_same(self.runs):
            more.append("All arms read the same rows in every step.")
        data["title"] = f"{self.args.name}: {' or '.join(names)}?"
        data["comparison"] |= {"sentences": [text, *more], "sequence": {"columns": columns, "rows": rows}}
        with atomic_write(self.folder / PAGE) as temporary:
            temporary.write_text(render(data), encoding="utf-8")


def has_ended(trial: Trial) -> bool:
    """Return whether the run is finished, at STOP_STEP, or failed by itself; one that was killed resumes."""
    reader = trial.reader()
    if not reader or not reader.processes:
        return False
    state, reason = reader.state()[0], reader.processes[-1].end.get("reason")
    return state == "finished" or reason == "STOP_STEP" or state == "failed" and reason is not None


def result_of(run: RunReader, judge: str) -> Optional[float]:
    """Return the result at the run's last step; None if it failed or diverged."""
    if run.state()[0] == "failed":
        return None
    value, step = run.curves[judge].newest if judge in run.curves else (math.nan, -1)
    if step != run.step:
        raise PaddockError(f"{run.name} has no {judge} at its last step, {run.step}; name another --judge, "
                           "or set the interval of its evaluation")
    return None if math.isnan(value) else value


def unequal(runs: dict[str, list[RunReader]], has_seconds: bool) -> str:
    """Return by how much the costs of the first seed's runs differ from those of the first arm."""
    (first, (base, *_)), *others = runs.items()
    costs = {"tokens": tokens, "FLOPs": flops} | ({"seconds": seconds} if has_seconds else {})
    texts = []
    for name, (run, *_) in others:
        pairs = {unit: (cost(run), cost(base)) for unit, cost in costs.items()}
        ratios = {unit: one / other for unit, (one, other) in pairs.items() if one and other}  # 0: not known
        if parts := [f"{ratio:.2f} times the {unit}" for unit, ratio in ratios.items()
                     if abs(ratio - 1) > ALIKE]:
            texts.append(f"{name} has {' and '.join(parts)} of {first}")
    return f" ({'; '.join(texts)})" * bool(texts)


def tokens(run: RunReader) -> float:
    return run.max_steps * run.settings["TOTAL_BATCH_SIZE"]


def seconds(run: RunReader) -> float:
    """Return the time of all training steps, without evaluations, saves and starts."""
    return sum(process.steps_seconds for process in run.processes)


def flops(run: RunReader) -> float:
    """Return the FLOPs of all forwards; backwards take the same multiple of them."""
    saved = run.newest_checkpoint()
    shape = read_json(saved / "config.json") if saved and (saved / "config.json").exists() else {}
    config = Config.model_construct(**{name.lower(): value for name, value in run.settings.items()})
    return tokens(run) * sum(forward_flops(config, shape.get("vocab_size", 0), config.max_seq_len))


def ledger(run: RunReader) -> list[dict[str, Any]]:
    from checkpoint.schema import read_entries

    return [*read_entries(run.folder / "ledger.jsonl")]


def read_the_same(runs: dict[str, list[RunReader]]) -> bool:
    """Return whether the arms read the same rows, of the same data, in every step with the same seed."""
    seeds = [[(data_of(run), [line["rows_crc32"] for line in ledger(run)]) for run in of_seed]
             for of_seed in zip(*runs.values())]
    return all(read[0][0] is not None and read == [read[0]] * len(read) for read in seeds)


def data_of(run: RunReader) -> Optional[dict[str, Any]]:
    """Return the hashes of data and tokenizer, and a row's length; None if no checkpoint has them."""
    saved = run.newest_checkpoint()
    if saved is None:
        return None
    identity = read_json(saved / "trainer_state.json")["identity"]
    paths = {name: value for name, value in identity.items() if name.endswith("_PATH")}
    return paths | {"MAX_SEQ_LEN": run.settings.get("MAX_SEQ_LEN")}


def main() -> None:
    args, flags = parse_args()
    arms = list_arms(args, flags)
    Comparison(args, [arm._replace(flags=[*arm.flags, *prepared_once(arm.config, arm.flags)])
                      for arm in arms]).run()


if __name__ == "__main__":
    run_script(main)
