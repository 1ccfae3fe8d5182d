"""Reports on bad steps (the first bad module, files in debug/), rising losses, and ranks that drift apart."""

import json
import math
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Optional

import numpy as np
import torch
from torch import Tensor, nn

from checkpoint.schema import read_entries
from checkpoint.store import BEST
from checkpoint.tensors import write_tensors
from common.errors import DriftError, LossSpikeError, NonFiniteError
from common.text import command, counted, setting_text
from dataloaders import Batch
from evaluation.during_run import due
from extensions.cautions import cautions
from extensions.decide import difference_text
from extensions.report.curves import Curve
from extensions.report.data import LogFile
from extensions.report.items import NOT_TRIVIAL, item_scores, trends
from extensions.report.numbers import number_text
from learn.optim import Reducer, learning_rate
from model_utils import forced_eager
from parallel import fsdp
from parallel.ranks import Ranks, collective
from plan.layers import read_flags
from plan.names import assignments
from run.extensions import Extension
from run.run import Run, StepResult
from run.step_log import describe_failure, save_before
from train import accumulate_gradients

DIVERGED_LOSS, DIVERGED_STEPS = 1.5, 5  # times the initial loss, in so many consecutive steps
ROWS_SHOWN = 16
TENSORS_SHOWN = 3  # on the console, with DEBUG
KEPT_BYTES = 2**30  # of gradients in a dump
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element
SUMMED_WORDS = {"cpu": 2**16, "cuda": 2**24}  # at a time: what fits into a core's cache, or few launches


class Guards(Extension):
    """Explains steps that do not count, reports losses that rise, and compares the ranks' weights."""

    first_bad: Optional["FirstBad"] = None
    risen_from = (-1, False)  # step of the best loss above which a rise was reported, and if at the end

    def run_start(self, run: Run) -> None:
        self.first_bad = FirstBad(run.model) if run.config.debug else None
        self.divergence, self.losses = Divergence(), trends()["val_loss"]
        self.evaluations = LogFile(run.folder / "evaluations.jsonl")
        argv_R = run.ranks.all_gather_json(sys.argv[1:]) if run.ranks.world_size > 1 else []
        if not run.ranks.is_rank0:
            return
        if run.plan and run.plan.start.kind == "from":
            for text in cautions(run.plan):
                run.log.warn(text)
        for rank, argv in enumerate(argv_R):
            if unused := flags_beside(argv_R[0], argv):
                run.log.warn(f"rank {rank} was started with other flags than rank 0, which decides; not "
                             f"used: {unused}")
        for line in read_entries(run.folder / "ledger.jsonl"):
            self.divergence.add(line["loss"], line["grad_norm"])
        devices = [line["device"] for line in read_entries(run.folder / "events.jsonl") if "device" in line]
        if len({*devices[-2:]}) > 1:  # of this start, and the one before
            run.log.warn(f"the device was {devices[-2]}, is {devices[-1]}: sums are rounded differently")

    def step_begin(self, run: Run) -> None:
        if self.first_bad:  # forget evaluations and fp16 overflows
            self.first_bad.clear()

    def step_end(self, run: Run, batches: list[Batch], result: StepResult) -> None:
        config, step = run.config, run.progress.step + 1
        loss = result.loss if config.has_loss_curve else None
        for kind, sentence in self.divergence.add(loss, result.grad_norm).items():
            text = (f"{sentence}. Start again with RESUME=never and a LEARNING_RATE well below "
                    f"{config.learning_rate:g}")
            if run.ranks.is_rank0:
                run.log.warn(f"step {step}: {text}")
                run.log.event(kind, step, text=text)
        if not result.finite:
            stop_non_finite(run, batches, result, self.first_bad)
        if result.spike:
            handle_loss_spike(run, batches, result)
        if due(config.drift_check_every, step, step >= config.max_steps):
            check_replicas(run)

    def evaluate(self, run: Run) -> dict[str, float]:
        """Warn once, on rank 0, if the validation loss is now significantly above its best."""
        if run.ranks.is_rank0 and "val_loss" in run.progress.pending_metrics:
            for _, entry in self.evaluations.new_lines():
                if entry and (scores := item_scores(entry.model_dump())):
                    self.losses.add(scores)
            best, rise = self.losses.best, self.losses.rise()
            if first := self.losses.first:  # a few items have no test, but may be worse than before training
                since = self.losses.compare(first, self.losses.last)
                run.is_past_best = rise is not None or since.difference > NOT_TRIVIAL * since.a
            if rise and self.risen_from != (best.step, run.finished):
                self.risen_from = (best.step, run.finished)
                advice = f"use {run.folder}{BEST}" if best.step else "the start model is better"
                training = Curve()
                for line in read_entries(run.folder / "ledger.jsonl"):
                    training.add(line["step"], line["loss"])
                rates = Curve()
                for line in read_entries(run.folder / "metrics.jsonl"):
                    rates.add(line["step"], line.get("learning_rate", math.nan))
                rates.add(run.progress.step, learning_rate(run.progress.updates - 1, run.config))
                why = "The run overfits" if run.finished else "If it keeps rising, the run overfits"
                if rates.rises_again_since(best.step) and not run.finished and rates.is_high():
                    why = ("The learning rate has risen since, as MAX_STEPS or LEARNING_RATE was raised. "
                           "The loss usually falls below its best as the rate decays. If it does not")
                elif not training.falls_since(best.step):
                    why = ("The training loss has not fallen since, so LEARNING_RATE="
                           f"{run.config.learning_rate:g} may be too high")
                run.log.warn(f"the validation loss is above its best, {number_text(rise.a)} at step "
                             f"{best.step}{difference_text(rise, best.kind)}. {why}: {advice}")
        return {}


EXTENSION = Guards


class Divergence:
    """Recognizes a run that diverges or no longer learns, from the losses and gradient norms of its steps.

    The initial loss is the median of the first DIVERGED_STEPS, but at most twice the first one: noise in a
    small batch does not decide, and neither do losses that diverged within these steps.
    """

    def __init__(self):
        self.first_losses: list[float] = []
        self.recent: deque[tuple[float, Optional[float]]] = deque(maxlen=DIVERGED_STEPS)
        self.reported: set[str] = set()

    def add(self, loss: Optional[float], grad_norm: Optional[float]) -> dict[str, str]:
        """Add a step; return what it shows for the first time, as {kind of event: sentence}."""
        if loss is None or not math.isfinite(loss):
            return {}
        if len(self.first_losses) < DIVERGED_STEPS:
            self.first_losses.append(loss)
        self.recent.append((loss, grad_norm))
        if len(self.recent) < DIVERGED_STEPS:
            return {}
        initial = min(statistics.median(self.first_losses), 2 * self.first_losses[0])
        shown = {}
        if all(loss > DIVERGED_LOSS * initial for loss, _ in self.recent):
            first = number_text(self.first_losses[0])
            shown["divergence"] = (f"the loss has been above {DIVERGED_LOSS} times the initial loss for "
                                   f"{DIVERGED_STEPS} steps ({first} in the first step, now "
                                   f"{number_text(loss)}): the run diverges")
        if all(norm == 0 for _, norm in self.recent):
            shown["no gradient"] = (f"the gradient norm has been exactly 0 for {DIVERGED_STEPS} steps: the "
                                    "model no longer learns")
        shown = {kind: sentence for kind, sentence in shown.items() if kind not in self.reported}
        self.reported |= shown.keys()
        return shown


@collective
def recheck_locally(run: Run, batches: list[Batch], count: int) -> bool:
    """Recompute this rank's part of a step; return if it is finite. Collective if the model is sharded."""
    local = Reducer(run.model, Ranks(device=run.ranks.device), run.config)
    local.loss_scale = run.ranks.world_size / count
    if not fsdp.is_sharded(run.model):
        sums = accumulate_gradients(run, local, batches)
        return math.isfinite(sums["loss"]) and math.isfinite(local.norm())
    with forced_eager(), finite_gradients(run.model) as are_finite:
        return math.isfinite(accumulate_gradients(run, local, batches)["loss"]) and are_finite()


@contextmanager
def finite_gradients(model: nn.Module) -> Iterator[Callable[[], bool]]:
    """Yield to a backward a function: whether this rank's gradients were finite, before their exchange."""
    finite: list[Tensor] = []
    with ExitStack() as stack:
        for module in filter(fsdp.is_sharded, model.modules()):
            module.unshard()  # each gathering fills the same parameters
            for parameter in module.parameters():
                if parameter.requires_grad and not fsdp.is_divided(parameter):
                    stack.enter_context(parameter.register_hook(
                        lambda gradient: finite.append(gradient.isfinite().all())))
            module.reshard()
        yield lambda: all(map(bool, finite))


# ------------------------------------------------------------------------------------ non-finite values


def count_bad(tensor: Tensor) -> int:
    return int((~torch.isfinite(tensor)).sum())


def bad_tokens(values: Tensor) -> list[int]:  # in the first row of a (B, T, ...) tensor
    is_bad_T = (~values[0].isfinite()).flatten(1).any(dim=1) if values.ndim > 2 else torch.zeros(0)
    return is_bad_T.nonzero().flatten().tolist()


class FirstBad:
    """Watches a model for non-finite values from its creation until the end of a `with` block.

    `outputs` describes each such output, by module, in the order of the forward, and `module` is the first.
    `gradient` is the first such gradient in the backward. `token` is the first token with such an output,
    since later tokens attend to it; or else, if `gradients` is true, the last token whose embedding gets such
    a gradient, since gradients flow to earlier tokens.
    """

    def __init__(self, model: nn.Module, gradients: bool = False):
        self.clear()
        self.gradients = gradients
        self.handles = [module.register_forward_hook(self._watch_output(name or "the head"))
                        for name, module in model.named_modules()]
        if gradients:
            self.handles += [parameter.register_post_accumulate_grad_hook(self._watch_gradient(name))
                             for name, parameter in model.named_parameters() if parameter.requires_grad]

    def clear(self) -> None:
        self.outputs: dict[str, dict] = {}
        self.gradient: Optional[str] = None
        self.token: Optional[int] = None

    @property
    def module(self) -> Optional[str]:
        return next(iter(self.outputs), None)

    def _watch_output(self, name: str):
        def hook(module, inputs, output):
            if name not in self.outputs and isinstance(output, Tensor) and count_bad(output):
                if not self.outputs:
                    self.token = next(iter(bad_tokens(output)), None)
                self.outputs[name] = describe_tensor(name, "output", output)
            if self.gradients and name == "tok_embeddings" and output.requires_grad:
                output.register_hook(watch_embeddings)

        def watch_embeddings(gradient_BTD: Tensor) -> None:
            if self.token is None and (tokens := bad_tokens(gradient_BTD)):
                self.token = tokens[-1]

        return hook

    def _watch_gradient(self, name: str):
        def hook(parameter):
            if self.gradient is None and count_bad(parameter.grad):
                self.gradient = name
        return hook

    def __enter__(self) -> "FirstBad":
        return self

    def __exit__(self, *_) -> None:
        for handle in self.handles:
            handle.remove()


def describe_tensor(name: str, kind: str, tensor: Tensor) -> dict:
    """Describe a tensor that contains NaN or infinity, as JSON."""
    bad, nan = count_bad(tensor), int(tensor.isnan().sum())
    first = int((~tensor.isfinite()).flatten().byte().argmax())  # nonzero() takes 8 bytes a dimension
    return {"tensor": name, "kind": kind, "shape": list(tensor.shape), "non_finite": bad, "nan": nan,
            "infinite": bad - nan, "first_at": [*map(int, np.unravel_index(first, tensor.shape))],
            "first_values": [*map(str, tensor.detach().flatten()[:4].float().tolist())]}


def describe_tensors(model: nn.Module) -> list[dict]:
    """Describe each parameter and gradient with NaN or infinity, that with the smallest share first."""
    report = []
    for name, parameter in model.named_parameters():
        for kind, tensor in (("parameter", parameter), ("gradient", parameter.grad)):
            if tensor is not None and count_bad(tensor := fsdp.local_rows(tensor)):
                report.append(describe_tensor(name, kind, tensor))
    return sorted(report, key=lambda entry: entry["non_finite"] / math.prod(entry["shape"]))


def affected(report: dict) -> list[str]:
    """Return lines on a rank's non-finite tensors: the layers, then each tensor, the most revealing first."""
    names = [entry["tensor"].removeprefix("layers.").split(".")[0] for entry in report["tensors"]]
    return [f"layers affected: {', '.join(dict.fromkeys(names)) or 'none'}",
            *(f"{entry['kind']} {entry['tensor']} {tuple(entry['shape'])}: {entry['nan']:,} NaN, "
              f"{entry['infinite']:,} infinite, the first at {entry['first_at']}; first values "
              f"{', '.join(f'{float(value):.4g}' for value in entry['first_values'])}"
              for entry in report["tensors"])]


def how_to_load(folder: Path, rank: int) -> list[str]:
    """Return the three lines of Python that load a rank's dump."""
    return ["from safetensors.torch import load_file",
            f"dump = load_file({str(folder / f'rank-{rank}.safetensors')!r})",
            "print({name: (tuple(each.shape), int(each.isnan().sum())) for name, each in dump.items()})"]


def bad_gradients(model: nn.Module, kind: str) -> dict[str, Tensor]:
    """Return CPU copies of this rank's gradients with NaN or infinity, by `<kind>.<parameter>`.

    At most KEPT_BYTES are kept, those with the smallest share of such elements, which reveal most, first.
    """
    gradients = {name: fsdp.local_rows(parameter.grad) for name, parameter in model.named_parameters()
                 if parameter.grad is not None}
    shares = {name: count_bad(gradient) / max(1, gradient.numel()) for name, gradient in gradients.items()}
    copies, bytes_left = {}, KEPT_BYTES
    for name in sorted(filter(shares.get, shares), key=shares.__getitem__):
        gradient = gradients[name]
        if gradient.nbytes <= bytes_left:
            bytes_left -= gradient.nbytes
            copies[f"{kind}.{name}"] = gradient.to("cpu", copy=True)
    return copies


@collective
def dump_step(run: Run, batches: list[Batch], result: StepResult,
              first_bad: Optional[FirstBad] = None) -> tuple[Path, list[dict], str]:
    """Write a bad step's rows and tensors into the debug folder, and save the state before it if it is good.

    Each rank writes its micro-batches (`tokens_BT.0`, `targets_BT.0`, ...). Rank 0 (if sharded, each rank of
    one copy, its part) also writes the non-finite gradients averaged over the ranks (`gradient.<parameter>`).
    If there are several ranks, those whose own gradients are not finite add `own_gradient.<parameter>`.

    Returns the debug folder, the reports of all ranks, and a sentence on whether the state is saved.
    """
    step = run.progress.step + 1
    report = {"step": step, "rank": run.ranks.rank,
              "loss": str(result.loss), "grad_norm": str(result.grad_norm),
              "rows": run.order.micro_batches(step - 1).tolist(),
              "first_bad_module": first_bad and first_bad.module,
              "tensors": [*(first_bad.outputs.values() if first_bad else []), *describe_tensors(run.model)]}
    # Before the recomputation: the averaged gradients, which are equal on all ranks.
    keeps = run.ranks.rank < fsdp.ranks_per_copy(run.model)
    gradients = bad_gradients(run.model, "gradient") if keeps else {}
    report["finite"] = result.finite or recheck_locally(run, batches, result.count)
    if run.ranks.world_size > 1 and not report["finite"] and not fsdp.is_sharded(run.model):
        gradients |= bad_gradients(run.model, "own_gradient")
    reports = run.ranks.all_gather_json(report)
    folder, name = run.folder / "debug" / f"step-{step:08d}", f"rank-{run.ranks.rank}"
    inputs = {f"{name}.{number}": getattr(batch, name) for number, batch in enumerate(batches)
              for name in ("tokens_BT", "targets_BT")}
    try:
        for made in (folder.parent, folder):  # without the run's folder, which may have been deleted
            made.mkdir(exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n")
        write_tensors(folder / f"{name}.safetensors", inputs | gradients)
        if run.ranks.is_rank0 and not result.finite:
            lines = [line for each in reports for line in (
                f"step {step}, rank {each['rank']}", *affected(each), *how_to_load(folder, each["rank"]), "")]
            (folder / "report.txt").write_text("\n".join(lines), encoding="utf-8")
    except OSError as error:
        run.log.warn(f"{folder} cannot be written: {error}")

    return folder, reports, save_before(run)


def flags_beside(first: list[str], argv: list[str]) -> str:
    """Return the settings and mistakes among flags that are not among the first ones."""
    theirs, ours = (read_flags(each) for each in (first, argv))
    values = {name: value for name, (value, _) in ours.values.items()
              if name not in theirs.values or theirs.values[name][0] != value}
    return "; ".join(filter(None, (assignments(values), *ours.problems)))


def how_to_examine(run: Run) -> str:
    """Return a sentence about the step's replay; empty for GRPO, whose steps cannot be replayed."""
    replay = command("scripts/replay_step.py", run.folder, "--step", str(run.progress.step + 1))
    return "" if run.config.training_stage == "grpo" else f" Examine it with {replay}"


@collective
def stop_non_finite(run: Run, batches: list[Batch], result: StepResult,
                    first_bad: Optional[FirstBad]) -> None:
    """Write a non-finite step to the debug folder, save the last good state, and raise NonFiniteError.

    With DEBUG, the console also has the layers, the first tensors, and how to load the dump.
    """
    folder, reports, saved = dump_step(run, batches, result, first_bad)
    bad = [report for report in reports if not report["finite"]]
    first = (bad or reports)[0]
    bad_tensors = [f"{entry['kind']} {entry['tensor']} ({entry['non_finite']} of {math.prod(entry['shape'])})"
              for entry in first["tensors"]]
    more = f" and {len(bad_tensors) - 1} more" if len(bad_tensors) > 1 else ""
    ranks = ", ".join(str(report["rank"]) for report in bad)
    run.log.info(f"NON-FINITE in step {first['step']}, "
                 f"{f'from rank {ranks}' if bad else 'but finite when recomputed'}: loss "
                 f"{float(first['loss']):.4g}, |g| {float(first['grad_norm']):.4g}, in "
                 f"{(bad_tensors or ['no remaining tensor'])[0]}{more}.")
    if run.config.debug:
        more = f"all of them: {folder / 'report.txt'}; to load rows and gradients in Python:"
        for line in (*affected(first)[:1 + TENSORS_SHOWN], more, *how_to_load(folder, first["rank"])):
            run.log.info(line)
    where = f" on rank {ranks}" * (run.ranks.world_size > 1)
    now = setting_text(run.config.learning_rate)
    advice = (f"Try a lower LEARNING_RATE (now {now}){', DEBUG=true' * (not run.config.debug)} or --preset "
              "stable.")
    if not bad:
        where = ", but not when recomputed: a transient fault, most likely of the hardware or the network"
        advice = "Resume with the same command. If it happens again, find the faulty machine."
    raise NonFiniteError(f"{describe_failure(run, result)}{where}. {saved} {advice} Details: {folder} has "
                         "a report (report.txt), the step's rows (rank-*.json), tokens and NaN or infinite "
                         f"gradients (rank-*.safetensors).{how_to_examine(run)}")


@collective
def handle_loss_spike(run: Run, batches: list[Batch], result: StepResult) -> None:
    """Report a loss spike with its rows, and follow LOSS_SPIKE_POLICY."""
    config, step = run.config, run.progress.step + 1
    rows = run.order.all_rows(step - 1).tolist()
    shown = f"{rows[:ROWS_SHOWN]}"[:-1] + (", ... (all in ledger.jsonl)]" if len(rows) > ROWS_SHOWN else "]")
    text = (f"loss spike in step {step}: {number_text(result.loss)} is {result.spike:.0f} robust standard "
            f"deviations above the median of the last {len(run.progress.recent_losses)}; rows {shown}.")
    if config.loss_spike_policy != "stop":
        skipped = "" if result.updated else " Its update is skipped."
        run.log.warn(f"{text}{skipped}{how_to_examine(run)}")
        return
    folder, _, saved = dump_step(run, batches, result)
    raise LossSpikeError(f"{text} {saved} To continue past it, set LOSS_SPIKE_POLICY=skip or warn. "
                         f"Details: {folder} has its rows.{how_to_examine(run)}")


# -------------------------------------------------------------------------------------------- replicas


@collective
def check_replicas(run: Run) -> None:
    """Raise DriftError unless weights and optimizer state are bit-identical on ranks with the same rows."""
    if run.ranks.world_size == 1:
        return
    parameters, states = fsdp.named_parameters(run.model), run.optimizer.state_tensors()
    tensors = {name: fsdp.local_rows(parameter) for name, parameter in parameters.items()} | states
    # A tensor is whole on all ranks, or divided over every `degree` of them.
    degree = fsdp.ranks_per_copy(run.model)
    divided_N = np.array([fsdp.is_divided(parameters.get(name, parameters.get(name.rpartition(".")[0])))
                          for name in tensors])
    first_RN = np.arange(run.ranks.world_size)[:, None] % np.where(divided_N, degree, 1)

    sums = torch.stack([checksum(tensor) for tensor in tensors.values()]).tolist()
    sums_RN = np.array(run.ranks.all_gather_json(sums))
    differs_RN = sums_RN != np.take_along_axis(sums_RN, first_RN, axis=0)
    if not differs_RN.any():
        return
    tensor, rank = np.argwhere(differs_RN.T)[0]
    first = first_RN[rank, tensor]
    others = np.flatnonzero(differs_RN[:, tensor] & (first_RN[:, tensor] == first))
    raise DriftError(f"after step {run.progress.step + 1} the ranks no longer have the same model: "
                     f"{[*tensors][tensor]} differs between rank {first} and rank "
                     f"{', '.join(map(str, others))}. A GPU or its memory may be failing, so nothing more is "
                     "saved. Resume from an earlier checkpoint: the ranks were last equal "
                     f"{counted(run.config.drift_check_every, 'step')} ago")


@cache
def multipliers(seed: int, device: torch.device, count: int) -> Tensor:
    """Return odd pseudo-random int64 factors: the same on every machine, a longer list starts the same."""
    raw = np.random.PCG64(seed).random_raw(count).view(np.int64)
    return torch.from_numpy(raw | 1).to(device)


@torch.no_grad()
def checksum(rows: Tensor, start: int = 0) -> Tensor:
    """Return a checksum, an int64 scalar, of the bits of rows that begin at row `start` of a tensor.

    The sum over all elements of bits x factor of the row x factor of the column, modulo 2^64. Integer sums do
    not depend on their order, so the shards of a tensor add up. A factor is odd, so that any change of one
    element changes the sum; other changes cancel out with a probability of about 2^-31.
    Source: multilinear hashing, Carter & Wegman 1979; Lemire & Kaser 2014 (arXiv:1202.4961).
    """
    rows = rows.detach() if rows.ndim else rows.detach()[None]
    columns, end = rows.shape[1:].numel(), start + len(rows)
    bits = rows.view(WORDS[rows.element_size()]).reshape(len(rows), columns)
    longest = 1 << max(end, columns).bit_length()
    rows_R, columns_C = (multipliers(seed, rows.device, longest) for seed in (0, 1))
    chunk = max(1, SUMMED_WORDS[rows.device.type] // max(1, columns))
    sums_R = torch.cat([(part * columns_C[:columns]).sum(dim=1) for part in bits.split(chunk)])
    return (sums_R * rows_R[start:end]).sum()
