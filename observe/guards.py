"""The checks of a step: non-finite numbers, loss spikes, replicas that differ; ledger and debug files."""

import json
import math
import statistics
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Optional

import numpy as np
import torch
from torch import Tensor, nn

from checkpoint.tensors import write_tensors
from common.errors import CheckpointError, DriftError, LossSpikeError, NonFiniteError
from common.text import command
from dataloaders import Batch
from parallel.fsdp import is_divided, is_sharded, local_rows, named_parameters, ranks_per_copy
from parallel.ranks import collective
from run.life import Run, StepResult, follow_folder, save_checkpoint

ROWS_SHOWN = 16
CHUNK_WORDS = 2**22  # of a tensor, that a checksum multiplies at a time
KEPT_BYTES = 2**30  # of gradients in a dump


def rows_crc32(rows: np.ndarray) -> str:
    """Return the checksum of a step's rows in the ledger."""
    return f"{zlib.crc32(rows.astype('<i8').tobytes()):08x}"


def append_ledger(run: Run, result: StepResult) -> None:
    """Append the step's line to ledger.jsonl, which `scripts/replay_step.py` compares a replay with.

    Warns once of a run that diverges or no longer learns.
    """
    step = run.progress.step + 1
    if run.ranks.is_rank0:
        rows = run.inputs.order(run.config, run.ranks).all_rows(run.progress.step)
        entry = {"step": step, "rows_crc32": rows_crc32(rows), "loss": result.loss,
                 "grad_norm": result.grad_norm, "updated": result.updated}
        if result.spike:
            entry |= {"spike": round(result.spike, 1), "rows": rows.tolist()}
        run.log.append("ledger", entry)
        for kind, sentence in run.log.divergence.add(result.loss, result.grad_norm).items():
            text = (f"{sentence}. Start again with RESUME=never and a LEARNING_RATE well "
                    f"below {run.config.learning_rate:g}")
            run.log.warn(f"step {step}: {text}")
            run.log.event(kind, step, text=text)


def median_and_deviation(recent: Sequence[float], window: int = 0) -> tuple[float, float]:
    """Return the median, and a standard deviation that outliers do not affect; 0 and infinity until half of
    the window is full.

    It is at least 1 % of the median, so that a flat curve raises no alarm at its first ripple.
    Source: Rousseeuw and Croux 1993: 1.4826 times the median absolute deviation.
    """
    if 2 * len(recent) < window:
        return 0.0, math.inf
    middle = statistics.median(recent)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in recent)
    return middle, max(deviation, 0.01 * abs(middle), 1e-12)


# ---------------------------------------------------------------------------------- what is not finite


def count_bad(tensor: Tensor) -> int:
    """Return the number of elements that are NaN or infinite."""
    return int((~torch.isfinite(tensor)).sum())


def bad_tokens(values: Tensor) -> list[int]:
    """Return the tokens at which the first row of a (B, T, ...) tensor is not finite."""
    if values.ndim <= 2:
        return []
    return (~values[0].isfinite()).flatten(1).any(dim=1).nonzero().flatten().tolist()


class FirstBad:
    """Watches a model for values that are not finite, from its creation on; as a `with` block, until its end.

    `module` is the first with such an output, `gradient` the first such gradient of the backward. `token` is
    the first token of a row with such an output, as later ones attend to it; or else the last one whose
    embedding gets such a gradient, as gradients flow to earlier tokens. Only `gradients` watches these.
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
        """Forget what was found."""
        self.module: Optional[str] = None
        self.gradient: Optional[str] = None
        self.token: Optional[int] = None

    def _watch_output(self, name: str):
        def hook(module, inputs, output):
            if self.module is None and isinstance(output, Tensor) and count_bad(output):
                self.module = name
                self.token = next(iter(bad_tokens(output)), None)
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


def describe_tensors(model: nn.Module) -> list[dict]:
    """Describe each parameter and gradient with NaN or infinity: name, shape, their number, first values."""
    report = []
    for name, parameter in model.named_parameters():
        for kind, tensor in (("parameter", parameter), ("gradient", parameter.grad)):
            if tensor is not None and (bad := count_bad(tensor := local_rows(tensor))):
                first = tensor.detach().flatten()[:4].float().tolist()
                report.append({"tensor": name, "kind": kind, "shape": list(tensor.shape), "non_finite": bad,
                               "first_values": [*map(str, first)]})
    return report


def bad_gradients(model: nn.Module, kind: str) -> dict[str, Tensor]:
    """Return CPU copies of the gradients with NaN or infinity, by `<kind>.<parameter>`.

    Of a sharded model, they are the rank's own rows. They take at most KEPT_BYTES. The first are those with
    the smallest share of such elements, which say most about the cause.
    """
    gradients = {name: local_rows(parameter.grad) for name, parameter in model.named_parameters()
                 if parameter.grad is not None}
    shares = {name: count_bad(gradient) / max(1, gradient.numel()) for name, gradient in gradients.items()}
    kept, room = {}, KEPT_BYTES
    for name in sorted(filter(shares.get, shares), key=shares.__getitem__):
        gradient = gradients[name]
        if gradient.nbytes <= room:
            room -= gradient.nbytes
            kept[f"{kind}.{name}"] = gradient.to("cpu", copy=True)
    return kept


def write_dump(folder: Path, report: dict, tensors: dict[str, Tensor]) -> None:
    """Write one rank's report of a failed step: `rank-N.json`, and `rank-N.safetensors` with its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank-{report['rank']}.json").write_text(json.dumps(report, indent=2) + "\n")
    write_tensors(folder / f"rank-{report['rank']}.safetensors", tensors)


@collective
def dump_step(run: Run, batches: list[Batch], result: StepResult, first_bad: Optional[FirstBad] = None,
              recheck_locally: Callable[[], bool] = lambda: True) -> tuple[Path, list[dict], str]:
    """Write what is known of a bad step into the debug folder, and save the state before it if that is good.

    A rank's tensors are its micro-batches (`tokens_BT.0`, `targets_BT.0`, ...); those of rank 0 also the
    non-finite gradients (`gradient.<parameter>`), averaged over the ranks; and of several ranks those that
    are not finite by themselves have `own_gradient.<parameter>`, of their own micro-batches. Of a sharded
    model, each rank of one copy has its own part of the averaged gradients.

    Returns the debug folder, the reports of all ranks, and whether the state is saved, as a clause.
    """
    follow_folder(run)
    step = run.progress.step + 1
    report = {"step": step, "rank": run.ranks.rank,
              "loss": str(result.loss), "grad_norm": str(result.grad_norm),
              "rows": run.inputs.order(run.config, run.ranks).micro_batches(step - 1).tolist(),
              "first_bad_module": first_bad and first_bad.module,
              "tensors": describe_tensors(run.model)}
    # Before the gradients are computed again. The exchange has made them equal on all ranks.
    keeps = run.ranks.rank < ranks_per_copy(run.model)
    gradients = bad_gradients(run.model, "gradient") if keeps else {}
    report["finite"] = recheck_locally()
    if run.ranks.world_size > 1 and not report["finite"] and not is_sharded(run.model):
        gradients |= bad_gradients(run.model, "own_gradient")
    reports = run.ranks.all_gather_json(report)
    folder = run.folder / "debug" / f"step-{step:08d}"
    inputs = {f"{name}.{number}": getattr(batch, name) for number, batch in enumerate(batches)
              for name in ("tokens_BT", "targets_BT")}
    try:
        write_dump(folder, report, inputs | gradients)
    except OSError as error:
        run.log.warn(f"{folder} cannot be written: {error}")

    # Weights that were not finite before the step are no state to resume from.
    if any(tensor["kind"] == "parameter" for report in reports for tensor in report["tensors"]):
        return folder, reports, "the weights were not finite before it and are not saved"
    try:
        if run.saved is None:
            save_checkpoint(run)
    except CheckpointError as error:  # on every rank
        run.log.warn(str(error))
    return folder, reports, f"the state before it {'is' if run.saved else 'could not be'} saved"


def replay_command(run: Run) -> str:
    """The command that examines the step that was just taken."""
    return command("scripts/replay_step.py", run.folder, "--step", str(run.progress.step + 1))


def banner(reports: list[dict], advice: str) -> list[str]:
    """Return the lines to print when a step was not finite, from the reports of all ranks."""
    culprits = [report["rank"] for report in reports if not report["finite"]]
    first = reports[culprits[0] if culprits else 0]
    source = f"from rank {', '.join(map(str, culprits))}" if culprits else "and finite when computed again"
    # The tensor with the smallest share says most about the cause.
    tensors = sorted(first["tensors"], key=lambda entry: entry["non_finite"] / math.prod(entry["shape"]))
    places = [f"{entry['kind']} {entry['tensor']} ({entry['non_finite']} of {math.prod(entry['shape'])})"
              for entry in tensors]
    if first["first_bad_module"]:
        places.insert(0, f"output of {first['first_bad_module']}")
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return [f"{advice[0].upper()}{advice[1:]}.",
            f"NON-FINITE in step {first['step']}, {source}: the update was skipped. Loss "
            f"{float(first['loss']):.4g}, |g| {float(first['grad_norm']):.4g}.",
            f"Where: {(places or ['nothing that is left'])[0]}{more}."]


@collective
def stop_non_finite(run: Run, batches: list[Batch], result: StepResult, first_bad: Optional[FirstBad],
                    recheck_locally: Callable[[], bool]) -> None:
    """Keep what is known of a non-finite step, and the last good state.

    `recheck_locally` computes this rank's part again and returns whether it is finite: the exchange of
    gradients has mixed those of all ranks.
    """
    folder, reports, saved = dump_step(run, batches, result, first_bad, recheck_locally)
    if ranks := [str(report["rank"]) for report in reports if not report["finite"]]:
        where = f"was not finite on rank {', '.join(ranks)}"
        presets = ",".join(filter(None, (run.config.preset, "stable")))
        advice = f"try a lower LEARNING_RATE, --preset {presets}, or DEBUG=true for details"
    else:
        where = ("was not finite, but is finite on every rank when computed again: a transient fault, most "
                 "likely of the hardware or the network")
        advice = "resume with the same command; if it happens again, find the machine that causes it"
    for line in banner(reports, advice):
        run.log.info(line)
    raise NonFiniteError(f"step {run.progress.step + 1} {where}; nothing was updated, {saved}. {folder} has "
                         "its rows (rank-*.json), and its tokens and non-finite gradients "
                         f"(rank-*.safetensors). Examine it with {replay_command(run)}, or {advice}")


@collective
def handle_loss_spike(run: Run, batches: list[Batch], result: StepResult) -> None:
    """Report a loss spike with its rows, and act as LOSS_SPIKE_POLICY says."""
    config, step = run.config, run.progress.step + 1
    rows = run.inputs.order(config, run.ranks).all_rows(step - 1).tolist()
    shown = f"{rows[:ROWS_SHOWN]}"[:-1] + (", ... (all in ledger.jsonl)]" if len(rows) > ROWS_SHOWN else "]")
    what = (f"loss spike in step {step}: {result.loss:.4f} is {result.spike:.0f} robust standard deviations "
            f"above the last {len(run.progress.recent_losses)}; rows {shown}")
    if config.loss_spike_policy != "stop":
        skipped = "; its update is skipped" if config.loss_spike_policy == "skip" else ""
        run.log.warn(f"{what}{skipped}. Examine it with {replay_command(run)}")
        return
    folder, _, saved = dump_step(run, batches, result)
    raise LossSpikeError(f"{what}. Nothing was updated, {saved}, and {folder} has its rows. Examine it with "
                         f"{replay_command(run)}; to continue past it, LOSS_SPIKE_POLICY=skip or warn")


# -------------------------------------------------------------------------------------------- replicas


def checksums(tensors: Iterable[Tensor]) -> Tensor:
    """Return a checksum of each tensor's bits, int64 on the CPU; different tensors collide once in 2**32.

    Each word is weighted by its index, so that two changes do not cancel out as in a plain sum.
    """
    sums = []
    for tensor in tensors:
        words = tensor.detach().contiguous().flatten().view(torch.uint8)
        words = words.view(torch.int32) if len(words) % 4 == 0 else words.to(torch.int32)
        # Of nothing, too: a rank may hold no row of a sharded matrix.
        weights = 2 * torch.arange(min(len(words), CHUNK_WORDS), dtype=torch.int32, device=words.device) + 1
        total = torch.zeros((), dtype=torch.int64, device=words.device)
        for chunk in words.split(CHUNK_WORDS):
            total = total * 1_000_003 + (chunk * weights[:len(chunk)]).sum(dtype=torch.int64)
        sums.append(total)
    return torch.stack(sums).cpu()


@collective
def check_replicas(run: Run) -> None:
    """Check that parameters and optimizer state are bit-identical on all ranks that hold the same rows."""
    if run.ranks.world_size == 1:
        return
    parameters, states = named_parameters(run.model), run.optimizer.state_tensors()
    tensors = {name: local_rows(parameter) for name, parameter in parameters.items()} | states
    # A tensor is whole on all ranks, or divided over every `degree` of them.
    degree = ranks_per_copy(run.model)
    divided_N = np.array([is_divided(parameters.get(name, parameters.get(name.rpartition(".")[0])))
                          for name in tensors])
    first_RN = np.arange(run.ranks.world_size)[:, None] % np.where(divided_N, degree, 1)

    sums_RN = np.array(run.ranks.all_gather_json(checksums(tensors.values()).tolist()))
    differs_RN = sums_RN != np.take_along_axis(sums_RN, first_RN, axis=0)
    if not differs_RN.any():
        return
    tensor, rank = np.argwhere(differs_RN.T)[0]
    first = first_RN[rank, tensor]
    others = np.flatnonzero(differs_RN[:, tensor] & (first_RN[:, tensor] == first))
    raise DriftError(f"after step {run.progress.step} the ranks no longer have the same model: "
                     f"{[*tensors][tensor]} differs between rank {first} and rank "
                     f"{', '.join(map(str, others))}. Nothing more is saved; a GPU or its memory may be "
                     "failing. Resume from an earlier checkpoint: the ranks were last found equal "
                     f"{run.config.drift_check_every} steps ago")
