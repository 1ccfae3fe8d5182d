"""Distillation: find a teacher, compare its vocabulary with the student's, run it in each step, and the loss.

Shapes: B rows, T tokens, M positions with a target, V vocabulary.
"""

import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Optional, Protocol

import torch
from torch import Tensor, nn

import model_utils
from checkpoint import store
from checkpoint.huggingface import load_model_weights
from checkpoint.model_json import hub_model, read_model_config, read_model_json
from common.errors import CheckpointError, SettingsError
from common.files import json_sha256, read_json
from common.remote import is_hub_name
from common.text import command
from config import Config, DistillationConfig, extension_module
from dataloaders import Batch
from extensions.online import Rollouts, take_updates
from learn.objectives import LossSum, NextToken, Prepared, Reference, sums_by_item
from model import Transformer
from model_kernels.head import IGNORE_INDEX, add_at, slices, with_any_rows
from model_kernels.matmul import linear
from parallel.fsdp import DeviceMesh, is_sharded
from parallel.ranks import Ranks
from plan.identity import weights_sha256
from plan.make import Plan
from run.run import Run
from tokenizer import load_tokenizer

CACHE_BYTES = 2**19  # block of logits on a CPU, where memory is slower than arithmetic
LogitsOfSlice = Callable[[slice], Tensor]  # from a slice of a batch's target positions to (M, V) float32


def find_teacher(config: Config, tokenizer) -> Path:
    """Return the folder of TEACHER_MODEL, after comparing its vocabulary with the student's `tokenizer`.

    TEACHER_MODEL is a path, a name in OUTPUT_DIR, or a hub model. Control tokens may have other names.
    Without a tokenizer.json only the vocabulary sizes are compared; with one, the teacher's matrices may be
    padded.
    """
    name, run_dir = config.teacher_model, Path(config.output_dir) / (config.run_name or "-")
    setting = f"TEACHER_MODEL={name}"
    try:
        # Unlike a start, a teacher may be any hub model, also one without an owner such as gpt2.
        is_local = "/" in name or any(os.path.exists(place) for place in store.places(name, run_dir))
        on_hub = not is_local and is_hub_name(name.partition("@")[0])
        folder = hub_model(name) if on_hub else store.locate(name, run_dir)
    except CheckpointError as error:
        raise CheckpointError(f"{setting}: {error}") from error
    if not (folder / "config.json").exists():
        has_adapters = (folder / "adapter_config.json").exists()
        raise CheckpointError(f"{setting}: {folder} " + (
            "holds adapters only; merge them into their base with "
            f"{command('scripts/merge_lora.py', folder)} --output FOLDER" if has_adapters else
            "has no config.json; name a checkpoint or a model folder"))
    rows, student_ids = read_model_json(folder / "config.json").get("vocab_size"), tokenizer.vocab_size
    if not isinstance(rows, int):
        raise CheckpointError(f"{folder / 'config.json'} has no vocab_size; name another TEACHER_MODEL")

    def refusal(detail: str) -> SettingsError:
        return SettingsError(f"{setting} has another vocabulary: {rows:,} ids, and the student's "
                             f"tokenizer has {student_ids:,}{detail}; choose a teacher with the "
                             "student's tokenizer, or set TOKENIZER_PATH to the teacher's and prepare the "
                             "data again")

    if not (folder / "tokenizer.json").exists():
        if rows != student_ids:
            raise refusal("")
        return folder
    teacher_tokenizer = load_tokenizer(str(folder), "huggingface")
    if teacher_tokenizer.vocab_size != student_ids or rows < student_ids:
        own_ids = teacher_tokenizer.vocab_size
        raise refusal(f" (its tokenizer {own_ids:,})" if own_ids != rows else "")
    if teacher_tokenizer.sha256 == tokenizer.sha256:
        return folder
    if difference := teacher_tokenizer.differing_id(tokenizer):
        token, *words = difference
        raise refusal(f", and the id {token} is {words[0]!r} to it, {words[1]!r} to the student")
    return folder


class LlamaTeacher:
    """A Llama run by Paddock's model: packed documents in one forward, and the head in chunks."""

    def __init__(self, model: Transformer, vocab_size: int):
        self.model, self.vocab_size = model.requires_grad_(False).eval(), vocab_size

    @torch.no_grad()
    def logits(self, batch: Batch) -> LogitsOfSlice:
        hidden_MD = self.model(batch.tokens_BT, document_ids_BT=batch.document_ids_BT,
                               target_index_M=batch.target_index_M, mode="hidden").flatten(0, -2)
        if is_sharded(self.model.head_matrix):
            self.model.head_matrix.unshard()  # until its next forward ends
        weight_VD = self.model.head_matrix.as_head().values_VD
        return lambda chunk: linear(hidden_MD[chunk], weight_VD)[:, :self.vocab_size].float()


def load_teacher(folder: Path, config: Config, vocab_size: int, ranks: Ranks,
                 mesh: Optional[DeviceMesh] = None) -> Any:
    """Load the model in a folder of `find_teacher`: with Paddock's code if it is a Llama, else transformers.

    A Llama is sharded over the student's mesh.
    """
    described = read_model_json(folder / "config.json")
    try:
        shape = read_model_config(folder)
        shape = shape.model_copy(update={"attention_backend": config.attention_backend})
    except CheckpointError:  # not a Llama, or one that Paddock does not support
        if not (others := extension_module("hf_teacher")):
            raise
        return others.load_with_transformers(folder, described, config, vocab_size, ranks.device)
    stored = next(iter(load_model_weights(folder).values()))
    dtype = teacher_dtype(config, stored.dtype, ranks.device)
    model = model_utils.model_on_meta(shape, described["vocab_size"], dtype)
    model.requires_grad_(False).to(dtype)
    model_utils.allocate_model(model, config, ranks, mesh)
    model_utils.load_weights(folder, model)
    model_utils.compile_where_possible(model, config, ranks.device.type)
    return LlamaTeacher(model, vocab_size)


def teacher_dtype(config: Config, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype for TEACHER_PRECISION; float32 in place of float16 on a CPU, where that is slow."""
    dtype = model_utils.DTYPES.get(config.teacher_precision, stored)
    return torch.float32 if dtype == torch.float16 and device.type == "cpu" else dtype


# ------------------------------------------------------------------------------------------ losses


class Teacher(Protocol):
    """Interface of a teacher that runs in each step."""

    def logits(self, batch) -> Callable[[slice], Tensor]:
        """Run on a batch; return a function from a slice of its target positions to (M, V) float32 logits."""


def divergence(student_logits_MV: Tensor, teacher_logits_MV: Tensor, kind: str, temperature: float = 1.0,
               jsd_beta: float = 0.5) -> tuple[Tensor, Tensor]:
    """Return the divergence of two softened distributions and its gradient to the student's logits.

    With teacher p and student q, "forward_kl" is KL(p || q), "reverse_kl" KL(q || p), and "jsd" is
    beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q. Both results, (M,) and (M, V)
    float32 in nats, are multiplied by temperature squared.
    Source: Hinton et al. 2015 (arXiv:1503.02531), section 2; Agarwal et al. 2023 (arXiv:2306.13649), eq. 1.
    """
    student_MV = softened_logprobs(student_logits_MV, temperature)
    teacher_MV = softened_logprobs(teacher_logits_MV, temperature)
    if kind == "forward_kl":
        p_MV = teacher_MV.exp()
        value_M = teacher_MV.sub_(student_MV).mul_(p_MV).sum(dim=-1)
        gradient_MV = student_MV.exp_().sub_(p_MV)
    elif kind == "reverse_kl":
        value_M, gradient_MV = _expectation_under_student(student_MV, student_MV - teacher_MV)
    else:
        assert kind == "jsd", kind
        mixture_MV = torch.logaddexp(student_MV + math.log1p(-jsd_beta), teacher_MV + math.log(jsd_beta))
        value_M, gradient_MV = _expectation_under_student(student_MV, student_MV - mixture_MV)
        teacher_part_M = teacher_MV.sub(mixture_MV).mul_(teacher_MV.exp_()).sum(dim=-1)
        value_M = jsd_beta * teacher_part_M + (1 - jsd_beta) * value_M
        gradient_MV.mul_(1 - jsd_beta)  # the mixture's derivatives sum to zero
    return value_M * temperature**2, gradient_MV.mul_(temperature)


def softened_logprobs(logits_MV: Tensor, temperature: float) -> Tensor:
    """Return float32 log-probabilities at a temperature, in new memory."""
    scaled_MV = logits_MV if temperature == 1 else logits_MV / temperature
    return torch.log_softmax(scaled_MV, dim=-1, dtype=torch.float32)


def _expectation_under_student(student_MV: Tensor, ratio_MV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean log-ratio under the student, and KL's gradient to its logits, in `ratio_MV`."""
    q_MV = student_MV.exp()
    value_M = (q_MV * ratio_MV).sum(dim=-1)
    return value_M, ratio_MV.sub_(value_M[:, None]).mul_(q_MV)


class MixedLoss(NamedTuple):
    """The losses of positions, and the gradient of their weighted sum with respect to the logits."""

    gradient_MV: Tensor
    divergence_M: Tensor
    cross_entropy_M: Tensor


def mixed_loss(logits_MV: Tensor, targets_M: Tensor, teacher_logits_MV: Tensor, weight: float,
               settings: tuple[str, float, float]) -> MixedLoss:
    """Return `weight` times the divergence plus (1 - weight) times the cross-entropy, over all targets.

    `settings` are kind, temperature and jsd_beta of `divergence`.
    """
    divergence_M, gradient_MV = divergence(logits_MV, teacher_logits_MV, *settings)
    # Written out, so that value and gradient of the cross-entropy share its exponentials.
    counted_M = (targets_M != IGNORE_INDEX).float()
    index_M1 = targets_M.clamp(min=0)[:, None]
    highest_M1 = logits_MV.amax(dim=-1, keepdim=True)
    exp_MV = (logits_MV - highest_M1).exp_()
    sum_M1 = exp_MV.sum(dim=-1, keepdim=True)
    cross_entropy_M = (sum_M1.log() + highest_M1 - logits_MV.gather(1, index_M1))[:, 0]
    share_M1 = ((1 - weight) * counted_M)[:, None]
    gradient_MV.mul_((weight * counted_M)[:, None]).addcmul_(exp_MV, share_M1 / sum_M1)
    gradient_MV = add_at(gradient_MV, index_M1, -share_M1)
    return MixedLoss(gradient_MV, divergence_M * counted_M, cross_entropy_M * counted_M)


class Distillation(NextToken):
    """DISTILLATION_WEIGHT times the divergence from the teacher, plus the remaining share of cross-entropy.

    Both, in nats per target and without weights, are also metrics. `compiled` compiles the
    computation over the vocabulary, which is faster only on a GPU.
    """

    def __init__(self, config: DistillationConfig, teacher: Teacher, compiled: bool = False):
        self.config, self.teacher = config, teacher
        self.mixed_loss = torch.compile(mixed_loss) if compiled else mixed_loss

    def loss_sum(self, model: nn.Module, batch, blocks: Optional[list[MixedLoss]] = None) -> LossSum:
        """Return the sums, and append the losses of positions to `blocks`."""
        config, target_index_M = self.config, batch.target_index_M
        settings = config.distillation_loss, config.distillation_temperature, config.distillation_jsd_beta
        weight, targets_M = config.distillation_weight, batch.targets_BT.flatten()
        targets_M = targets_M if target_index_M is None else targets_M[target_index_M]
        logits_of = self.teacher.logits(batch)
        sums = {name: torch.zeros((), device=targets_M.device) for name in ("divergence", "cross_entropy")}

        def loss(logits_MV: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
            """Return a chunk's loss, and its gradient, which on a CPU overwrites the logits."""
            teacher_MV, chunk_targets_M, rows = logits_of(chunk), targets_M[chunk], len(logits_MV)
            total = torch.zeros_like(sums["divergence"])
            if logits_MV.device.type == "cpu":
                rows = CACHE_BYTES // (4 * logits_MV.shape[1])
            gradient_MV = logits_MV
            for block in slices(len(logits_MV), max(1, rows)):
                inputs = with_any_rows(target_index_M is not None, logits_MV[block], chunk_targets_M[block],
                                       teacher_MV[block])
                mixed = self.mixed_loss(*inputs, weight, settings)
                if rows < len(logits_MV):
                    logits_MV[block] = mixed.gradient_MV
                else:
                    gradient_MV = mixed.gradient_MV  # a copy would take time
                each, entropy = mixed.divergence_M.sum(), mixed.cross_entropy_M.sum()
                sums["divergence"] += each
                sums["cross_entropy"] += entropy
                total += weight * each + (1 - weight) * entropy
                if blocks is not None:
                    blocks.append(mixed._replace(gradient_MV=None))
            return total, gradient_MV

        total = model(batch.tokens_BT, batch.targets_BT, batch.document_ids_BT, target_index_M=target_index_M,
                      mode=loss)
        return LossSum(total, sums)

    def by_item(self, model: nn.Module, batch, items: str) -> LossSum:
        weight, sums, blocks = self.config.distillation_weight, {}, []
        zeros = torch.zeros(batch.targets_BT.numel(), device=batch.targets_BT.device)
        for index, name in enumerate(self.loss_sum(model, batch, blocks).metrics, 1):
            values = torch.cat([zeros[:0], *(block[index] for block in blocks)])
            if batch.target_index_M is not None:
                values = zeros.index_put((batch.target_index_M,), values)
            sums[name] = sums_by_item(values.view_as(batch.targets_BT), batch, items)
        return LossSum(weight * sums["divergence"] + (1 - weight) * sums["cross_entropy"], sums)

    def text_loss(self, batch, summed: LossSum) -> tuple[Tensor, Tensor]:
        return batch.targets_BT, summed.metrics["cross_entropy"]


class OnPolicyDistillation(Distillation):
    """Distillation, without cross-entropy, on the student's own answers or, rarely, on those of the records.

    Source: Agarwal et al. 2023, algorithm 1 (arXiv:2306.13649). `rollouts` are as for `GRPO`.
    """

    def __init__(self, config: Config, teacher: Teacher, rollouts: Callable,
                 compiled: bool = False):
        super().__init__(config.model_copy(update={"distillation_weight": 1.0}), teacher, compiled)
        self.rollouts = rollouts
        if config.grpo_updates > 1:
            self.take_step = take_updates

    def prepare_step(self, prompts: list, step: int) -> Prepared:
        return self.rollouts(prompts, step, self.count)


def teacher_of(plan: Plan, tokenizer) -> dict[str, str]:
    """Return the identity of a run's teacher, and its folder."""
    teacher = find_teacher(plan.config, tokenizer)
    model, recorded = identity_of(teacher), plan.start.state.get("identity", {}).get("TEACHER_MODEL")
    # The run that TEACHER_MODEL names may have trained on: its step that was the teacher is beside it.
    for beside in teacher.parent.glob("step-*"):
        with suppress(CheckpointError, OSError, ValueError):
            if recorded not in (None, model) and identity_of(beside) == recorded:
                teacher, model = beside, recorded
    return {"model": model, "folder": str(teacher)}


def identity_of(teacher: Path) -> str:
    return json_sha256([weights_sha256(teacher), read_json(teacher / "config.json")])


def objective_of(run: Run, _: Optional[Reference], mesh: Optional[DeviceMesh]) -> Distillation:
    """Return the objective of a run."""
    config, rollouts, folder = run.config, None, Path(run.plan.identities["teacher"]["folder"])
    if config.training_stage == "grpo":
        rollouts = Rollouts.of(run)
    teacher = load_teacher(folder, config, run.inputs.tokenizer.vocab_size, run.ranks, mesh)
    compiled = config.compile and run.ranks.device.type == "cuda"
    if rollouts:
        return OnPolicyDistillation(config, teacher, rollouts, compiled)
    return Distillation(config, teacher, compiled)
