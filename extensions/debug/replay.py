"""Replay a step of a run with the same rows and weights, and report on it row by row.

The report shows which rows are not finite or have a high loss, at which token, and the text around it.
Nothing is written into the run's folder. Shape suffixes: B rows, T tokens.
"""

import copy
import math
import textwrap
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

import train
from checkpoint import store
from checkpoint.huggingface import is_vocabulary
from checkpoint.schema import read_entries
from common.errors import CheckpointError, NonFiniteError, SettingsError
from common.files import read_json
from common.text import command, counted, printable, show
from config import Config, rules
from dataloaders import Batch, Rows, SourceRows, load_steps
from extensions.guards import FirstBad, describe_tensors
from learn.objectives import token_logprobs
from learn.optim import gradient_norm, learning_rate, make_reducer
from model_kernels.head import IGNORE_INDEX
from parallel.ranks import Ranks, RunContext, StopSignals
from plan.layers import Layer
from plan.make import Plan
from plan.messages import notes_on_start
from plan.names import validate
from plan.starts import Asked, Known, Start, find_first
from run.build import build
from run.extensions import load_extensions
from run.facts import find_base, open_inputs, prepare_device, with_identities, with_tokens
from run.folder import RunFolder, segment_files
from run.run import Run, StepResult
from run.step_log import median_and_deviation, rows_crc32

CONTEXT_TOKENS = 24  # to show before and after a token
ROUNDING = 1e-3  # largest relative difference of a loss by rounding
OUTLIER = 8.0  # robust standard deviations above the median row


class RowReport(NamedTuple):
    """Results of a single row with the weights before the step."""

    row: int
    loss: float  # mean over the row's units; NaN if there are none
    grad_norm: float  # of the row's contribution to the step's gradient
    bad_module: Optional[str]  # these three as in FirstBad
    bad_gradient: Optional[str]
    bad_token: Optional[int]

    @property
    def is_bad(self) -> bool:
        return self.bad_module is not None or self.bad_gradient is not None


def examine_rows(run: Run, rows: Sequence[int], count: int) -> list[RowReport]:
    """Return reports of the rows without dropout: non-finite ones first, then by descending loss.

    Each gradient is the row's part of that of a step of `count` units.
    """
    reports, scale = [], run.scaler.get_scale() if run.scaler else 1.0
    run.model.eval()
    with FirstBad(run.model, gradients=True) as first_bad:
        for row in tqdm(rows, desc="Row by row", unit="row", delay=2, leave=False, disable=None):
            first_bad.clear()
            batch = run.inputs.rows(np.array([row])).to(run.ranks.device)
            run.optimizer.zero_grad()
            total, _ = run.objective.loss_sum(run.model, batch)
            (total * (scale / count)).backward()
            units = int(run.objective.count(batch))
            reports.append(RowReport(row, float(total.detach()) / units if units else math.nan,
                                     float(gradient_norm(run.model)) / scale,
                                     first_bad.module, first_bad.gradient, first_bad.token))
    return sorted(reports, key=lambda each: (not each.is_bad, 0 if math.isnan(each.loss) else -each.loss))


def numbered(rows: SourceRows) -> SourceRows:
    """Return a source's rows with document ids regardless of DOCUMENT_MASK, and without stored outputs."""
    while hasattr(rows, "rows"):
        rows = rows.rows
    if isinstance(rows, Rows):  # of PREPARE_AHEAD, by shard
        return rows.map(numbered)
    if rows.example_set is None:
        return replace(rows, document_start_id=rows.token_set.document_start_id)
    rows = copy.copy(rows)
    rows.numbered = True
    return rows


def place_of(rows: Rows, row: int, token: int, document: int) -> str:
    """Return the file of a document in a row, and the place in it, given its first token and its id."""
    (number,), (row,) = rows.locate(np.array([row]))
    source = rows.sources[number]
    if isinstance(shards := getattr(source, "rows", None), Rows):
        return place_of(shards, int(row), token, document)
    if source.example_set:
        examples, kind = source.examples_in(row).tolist(), source.example_set.kind
        index = (document - 1) // (2 if kind == "pairs" else 1)
        return f"example {examples[index]:,} of {source.example_set.path} ({kind})"
    offset = row * source.row_tokens + token
    for shard in source.token_set.shards:
        if offset < shard.tokens:
            return f"{shard.path}, token {offset:,}"
        offset -= shard.tokens
    raise AssertionError("the row is beyond the last shard")


def worst_document(rows: Rows, report: RowReport, loss_T: Tensor) -> tuple[int, slice, int]:
    """Return the worst token of a row's worst document (bad, or of most loss), its slice and its id."""
    document_ids_BT = rows(np.array([report.row])).document_ids_BT
    document_T = torch.ones_like(loss_T, dtype=torch.int32) if document_ids_BT is None else document_ids_BT[0]
    worst = report.bad_token
    if worst is None:
        largest = torch.finfo(torch.float32).max
        excess_T = (loss_T - loss_T.nanmedian()).nan_to_num(0, posinf=largest).clamp(min=0)
        sums = torch.zeros(int(document_T.max()) + 1).scatter_add(0, document_T.long(), excess_T)
        worst = int(torch.where(document_T == int(sums.argmax()), excess_T, -1).argmax())
    inside = (document_T == document_T[worst]).nonzero().flatten()
    return worst, slice(int(inside[0]), int(inside[-1]) + 1), int(document_T[worst])


def describe_row(run: Run, rows: Rows, report: RowReport) -> list[str]:
    """Return the lines of a row's report: its loss, its worst document, the text around its worst token."""
    tokenizer, batch = run.inputs.tokenizer, run.inputs.rows(np.array([report.row])).to(run.ranks.device)
    with torch.no_grad():
        logprob_BT = token_logprobs(run.model.eval(), batch)
    loss_T = torch.where(batch.targets_BT == IGNORE_INDEX, torch.nan, -logprob_BT.float())[0].cpu()
    worst, within, document = worst_document(rows, report, loss_T)
    ids = [*batch.tokens_BT[0].tolist(), int(batch.targets_BT[0, -1])]
    lines = [f"Row {report.row}: loss {report.loss:.4f}, gradient norm of its part {report.grad_norm:.4f}",
             f"  document: {place_of(rows, report.row, within.start, document)}",
             f"  {within.stop - within.start} of its tokens are in this row, mean loss "
             f"{float(loss_T[within].nanmean()):.4f}"]
    if report.is_bad:
        marked = worst
        if report.bad_module:
            lines.append(f"  first non-finite output: {report.bad_module}")
        lines.append(f"  first non-finite gradient: {report.bad_gradient}")
        if report.bad_token is not None:
            lines.append(f"  token: {worst} of the row, {tokenizer.decode(ids[worst:worst + 1])!r}")
    else:
        marked = worst + 1  # the target at the hardest token
        losses = [(loss, token) for token, loss in enumerate(loss_T.tolist())
                  if not math.isnan(loss) and within.start <= token < within.stop]
        hardest = [f"{tokenizer.decode([ids[token + 1]])!r} {loss:.2f}"
                   for loss, token in sorted(losses)[:-6:-1]]
        lines.append(f"  hardest targets: {', '.join(hardest)}")

    # The text around the marked token, within the document
    last = min(within.stop + 1, len(ids)) if marked >= within.stop else within.stop
    start, stop = max(within.start, marked - CONTEXT_TOKENS), min(last, marked + 1 + CONTEXT_TOKENS)
    before, token, after = (tokenizer.decode(piece) for piece in (
        ids[start:marked], ids[marked:marked + 1], ids[marked + 1:stop]))
    text = f"{before.lstrip(' ')}>>{token}<<{after}"
    text = f"{'... ' if start > within.start else ''}{text}{' ...' if stop < last else ''}"
    return [*lines, f"  text: {printable(text)}"]


def describe_parameters(run: Run) -> list[str]:
    """Return a line for each non-finite parameter, with the token of the first bad row."""
    lines = []
    for entry in describe_tensors(run.model):
        if entry["kind"] == "parameter":
            first, token = (~run.model.get_parameter(entry["tensor"]).isfinite()).nonzero()[0].tolist(), ""
            if is_vocabulary(entry["tensor"]):
                token = f" (token {run.inputs.tokenizer.decode(first[:1])!r})"
            lines.append(f"Parameter {entry['tensor']} {tuple(entry['shape'])}: "
                         f"{counted(entry['non_finite'], 'non-finite element')}, the first at {first}{token}")
    return lines


# ------------------------------------------------------------------------------ what the run recorded


def read_settings(run_dir: Path, flags: Layer, step: int, for_replay: bool = True) -> tuple[Config, int]:
    """Return a step's settings for one process, changed by flags, and the run's number of ranks."""
    segments = [file for begins, file in segment_files(run_dir) if begins <= step]
    file = segments[-1] if segments else run_dir / "config.json"
    if not file.is_file():
        raise SettingsError(f"{run_dir} is not a run's folder, or the run has not taken a step: it has no "
                            "config.json; name a run's folder, such as runs/first")
    saved = {name.lower(): (value, str(file)) for name, value in read_json(file).items()
             if name.isupper() and name.lower() in Config.model_fields}
    merged = {**saved, **flags.values, "world_size": (1, "replay"), "sharding": ("none", "replay"),
              "cpu_offload": (False, "replay")}
    config, invalid = validate(merged)
    problems = [*flags.problems, *invalid.values()] or [*rules(config)]
    if problems:
        raise SettingsError(*problems)
    if config.training_stage == "grpo" and for_replay:
        raise SettingsError(f"{run_dir}: steps of TRAINING_STAGE=grpo cannot be replayed, because the model "
                            "answered before it learned; rollouts.jsonl has the answers of logged steps")
    return config, int(saved.get("world_size", (1, ""))[0])


def read_step_log(run_dir: Path, step: Optional[int] = None) -> dict[int, dict[str, Any]]:
    """Return a run's lines of the step log by step; SettingsError if `step` is not among them."""
    path = run_dir / "ledger.jsonl"
    step_log = {entry["step"]: entry for entry in read_entries(path)}
    if not run_dir.is_dir():
        raise SettingsError(f"there is no run {run_dir}; {command('scripts/runs.py')} lists the runs")
    if step not in step_log and (step is not None or not step_log):
        recorded = f"has the steps {min(step_log)} to {max(step_log)}" if step_log else "is missing or empty"
        problem = f"step {step}: the run has no such step" if step is not None else f"{run_dir} has no steps"
        raise SettingsError(f"{problem}; {path} {recorded}")
    return step_log


def open_run(run_dir: Path, config: Config, step: int, info: Callable[[str], Any]) -> Run:
    """Return the run at the last verified checkpoint before the step, in this process alone."""
    device = prepare_device(config)
    ranks = Ranks(device=torch.device("cuda", 0) if device.type == "cuda" else device)
    log = SimpleNamespace(info=info, warn=lambda text: info(f"Note: {text}"))
    unmeasured = config.model_copy(update={"validate_every": 0, "hellaswag_every": 0})
    opened = open_inputs(unmeasured, True, load_extensions(unmeasured, log.warn))
    start = start_before(run_dir, config, step, log.warn)
    plan = Plan(config, dict.fromkeys(Config.model_fields, str(run_dir)), start)
    plan = with_tokens(with_identities(plan, opened.inputs, run_dir), opened.inputs)
    for message in (*plan.warnings, *plan.notes, *notes_on_start(plan.start, config)):
        log.warn(message)
    run = build(plan, RunContext(ranks, StopSignals(), log), RunFolder(run_dir), opened, for_replay=True)
    if run.progress.step >= step:
        raise SettingsError(f"--step {step}: this run started with step {run.progress.step + 1}")
    return run


def start_before(run_dir: Path, config: Config, step: int, warn: store.Warn) -> Start:
    """Return the start from the newest verified checkpoint before the step, or from where the run started."""
    folder, messages = store.newest_verified(run_dir / "checkpoints", step - 1)
    for message in messages:
        warn(message)
    if folder:
        return Start("continue", str(folder), True, step=store.read_state(folder)["progress"]["step"])
    if config.resume not in ("auto", "never"):
        folder = store.locate(config.resume, run_dir, warn, store.verify)
        return Start("continue", str(folder), False, config.resume, "resume")
    later, _ = store.newest_verified(run_dir / "checkpoints", check=store.read_state)
    progress = store.read_state(later)["progress"] if later else {}
    setting = config.start_settings[0] if config.start_settings else None
    asked = Asked(config.model_copy(update={"run_name": run_dir.name, "output_dir": str(run_dir.parent)}),
                  setting, {setting or "": str(run_dir)}, frozenset())
    try:
        start = find_first(asked, Known(), warn)
    except CheckpointError:
        if not progress.get("base"):
            raise
        start = Start("from", "", False, asked.named, setting or "")
    if start.kind == "from" and progress.get("base") and not start.has_adapters:  # wherever it is now
        folder = str(find_base(config, progress, run_dir, warn))
        start = start._replace(folder=folder, base=folder if config.lora_enabled else None)
    return start


# ------------------------------------------------------------------------------------------ the steps


def take_step(run: Run, batches: list[Batch], count: int) -> StepResult:
    """Take the next step; `count` is the number of units in the step."""
    if prepare := getattr(run.objective, "prepare_step", None):
        batches, count, _ = prepare(batches, run.progress.step)
    reducer = make_reducer(run.model, run.ranks, run.config, run.optimizer)
    return train.take_step(run, reducer, batches, count, learning_rate(run.progress.updates, run.config))


def difference(now: float, then: Optional[float]) -> float:
    """Return the relative difference from the step log's value; infinite if only one of them is finite."""
    if then is None or not math.isfinite(now):
        return 0.0 if then is None and not math.isfinite(now) else math.inf
    return abs(now - then) / max(abs(then), 1e-12)


def replay_before(run: Run, step: int, step_log: dict[int, dict[str, Any]]) -> tuple[str, bool]:
    """Take the steps before `step`; return a description, and whether their losses are the recorded ones."""
    # `largest` is the largest relative difference; `deviating` describes the first one beyond rounding.
    first, largest, deviating = run.progress.step + 1, 0.0, ""
    start = f"from {run.started_from}" if run.started_from else "the initial ones"
    if first == step:
        return start, True
    order, device = run.inputs.order(run.config, run.ranks), run.ranks.device
    with load_steps(run.inputs.rows, order, device, run.objective.count, run.progress.step) as loader:
        title = f"Replaying steps {first} to {step - 1}"
        for now in tqdm(range(first, step), desc=title, unit="step", delay=2, leave=False, disable=None):
            result = take_step(run, *next(loader))
            if not result.finite:
                raise NonFiniteError(f"step {now} is not finite already: replay it, or add --at-checkpoint")
            if now in step_log:
                largest = max(largest, difference(result.loss, step_log[now]["loss"]))
                if largest > ROUNDING and not deviating:
                    deviating = f"the loss of step {now} is {result.loss:.6g}, not {step_log[now]['loss']}"
            run.advance(result)
    steps = f"step {first}" if first == step - 1 else f"steps {first} to {step - 1}"
    agreement = f"losses within {largest:.1e} of the step log" if largest else "losses equal to the step log"
    if deviating:
        agreement = f"BUT {deviating}: settings, data or machine have changed"
    return f"{start}, then {steps} replayed; {agreement}", not deviating


# ----------------------------------------------------------------------------------------- the report


def compare(name: str, now: float, then: Optional[float]) -> str:
    apart, recorded = difference(now, then), "not finite" if then is None else f"{then:.6g}"
    result = f"differs by {apart:.1e}, which is rounding" if apart else "the same"
    return f"{name:<14} {now:<12.6g} recorded {recorded:<12} {result if apart <= ROUNDING else 'DIFFERENT'}"


def rows_of(reports: list[RowReport]) -> str:
    """Return the numbers of the first rows, as in "rows 3, 5"."""
    noun = counted(len(reports), "row").split()[1]
    return f"{noun} {', '.join(str(report.row) for report in reports[:8])}"


def conclude(result: StepResult, then: dict[str, Any], reports: list[RowReport], bad_parameters: bool,
             is_same: bool) -> str:
    """Return the conclusion in one or two sentences; `then` is the step's line in the step log."""
    # A value is not finite, now or then.
    bad = [report for report in reports if report.is_bad]
    if bad_parameters:
        used = f", and {rows_of(bad)} used them" if bad else ""
        return f"The weights were not finite before this step{used}: replay an earlier one to find the cause."
    if bad:
        return f"Not finite because of {rows_of(bad)}."
    if not result.finite:
        return "The step is not finite, but each row alone is: lower LEARNING_RATE, or set PRECISION=bf16."
    if then["loss"] is None or then["grad_norm"] is None:
        cause = "its rows or weights differ from the recorded ones"
        if is_same:
            cause = "data and weights are not the cause. The machine or its kernels may be faulty"
        return f"It is finite now, but was not then: {cause}."

    # All is finite.
    losses = [report.loss for report in reports if math.isfinite(report.loss)]
    middle, deviation = median_and_deviation(losses)
    outliers = [report for report in reports if (report.loss - middle) / deviation > OUTLIER]
    conclusion = "no row is an outlier"
    if outliers:
        are = "are outliers" if len(outliers) > 1 else "is an outlier"
        conclusion = f"{rows_of(outliers)} {are}: loss {outliers[0].loss:.4f}, the median is {middle:.4f}"
    numbers = {"loss": (result.loss, then["loss"]), "gradient norm": (result.grad_norm, then["grad_norm"])}
    apart = [name for name, pair in numbers.items() if difference(*pair) > ROUNDING]
    if apart or not is_same:
        why = f"a different {' and '.join(apart)}" if is_same else "different rows or weights"
        return (f"This is not the recorded step: it has {why}. Everything is finite now and {conclusion}, "
                "which does not explain the recorded step.")
    return f"{'Everything is finite;' if outliers else 'Nothing is wrong: all is finite, and'} {conclusion}."


def print_wrapped(text: str) -> None:
    indent = " " * (4 + len(text) - len(text.lstrip()))
    show(*textwrap.wrap(printable(text), 120, subsequent_indent=indent, break_long_words=False,
                        break_on_hyphens=False))


def replay(run_dir: Path, step: int, flags: Layer, rows_shown: int = 3, at_checkpoint: bool = False,
           info: Callable[[str], Any] = print_wrapped) -> None:
    """Replay a step of a run in this process, with settings changed by flags, and describe its worst rows.

    If `at_checkpoint`, use the weights of the last checkpoint instead of replaying the steps after it.
    """
    config, _ = read_settings(run_dir, flags, step)
    step_log = read_step_log(run_dir, step)
    then = step_log[step]
    run = open_run(run_dir, config, step, info)
    info(f"Step {step} of {run_dir} ({config.training_stage}), replayed on {run.ranks.device.type.upper()}")

    # Its rows and weights
    order = run.inputs.order(config, run.ranks)
    rows = order.all_rows(step - 1)
    same_rows = rows_crc32(rows) == then["rows_crc32"]
    info(f"Rows: {len(rows)}, " + ("as in the step log" if same_rows else
                                   "NOT those of the step log: settings or data have changed since"))
    if at_checkpoint and run.progress.step < step - 1:
        weights, same_weights = f"of step {run.progress.step}, older than the recorded step's", False
    else:
        weights, same_weights = replay_before(run, step, step_log)
    info(f"Weights: {weights}")

    # Row by row, in eager mode, as hooks watch the modules; then the step itself
    batches = [run.inputs.rows(micro_batch).to(run.ranks.device)
               for micro_batch in order.micro_batches(step - 1)]
    count = sum(int(run.objective.count(batch)) for batch in batches)
    parameters, bare = describe_parameters(run), run.inputs.rows.map(numbered)
    with torch.compiler.set_stance("force_eager") if config.compile else nullcontext():
        reports = examine_rows(run, rows.tolist(), count)
        details = [line for report in reports[:rows_shown] for line in describe_row(run, bare, report)]
    run.progress.step = step - 1
    result = take_step(run, batches, count)
    info(compare("Loss", result.loss, then["loss"]))
    info(compare("Gradient norm", result.grad_norm, then["grad_norm"]))
    for line in (*parameters, *details, conclude(result, then, reports, bool(parameters),
                                                 same_rows and same_weights)):
        info(line)
