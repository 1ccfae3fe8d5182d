"""LoRA: a frozen base model with a trainable product of two small matrices beside each of its matrices.

Single token rows can be trained too, for tokens that the base never saw. The base may be quantized.
Source: Hu et al. 2021 (arXiv:2106.09685); Kalajdzievski 2023 (arXiv:2312.03732) for the scale of rsLoRA.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.errors import CheckpointError, SettingsError
from config import LoraConfig
from model import Dropout, Linear, Transformer, VocabularyMatrix
from model_kernels.head import HeadWeight, embed
from model_kernels.matmul import FrozenProduct, dequantize, linear, quantize
from parallel.fsdp import ReadRows, load_rows, local_rows, put


class FrozenLinear(nn.Module):
    """A frozen linear layer of the base; quantized unless `kind` is "none"."""

    def __init__(self, base: Linear, kind: str):
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.scales = base.weight, None
        self.kind = kind
        if kind != "none":
            packed, scales = quantize(base.weight.detach(), kind)
            # Parameters, because DDP broadcasts buffers in every forward.
            self.weight = nn.Parameter(packed, requires_grad=False)
            self.scales = nn.Parameter(scales, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.scales is None:
            return linear(x, self.weight)
        return FrozenProduct.apply(x, self.weight, self.scales, (self.out_features, self.in_features))

    @torch.no_grad()
    def load_base(self, read: ReadRows) -> None:
        if self.scales is None:
            return load_rows(self.weight, read)
        full = read(0, self.out_features).to(self.weight.device, torch.float32)
        for parameter, values in zip((self.weight, self.scales), quantize(full, self.kind)):
            parameter.copy_(values)

    @torch.no_grad()
    def merged(self) -> Tensor:
        """Return the float32 matrix of an equivalent plain layer."""
        if self.scales is None:
            return self.weight.float()
        return dequantize(self.weight, self.scales, (self.out_features, self.in_features), torch.float32)


class LoRALinear(FrozenLinear):
    """A frozen layer plus scale * lora_B lora_A x; the frozen weight keeps its name."""

    def __init__(self, base: Linear, config: LoraConfig):
        super().__init__(base, config.lora_base_quantization)
        rank, device = config.lora_rank, base.weight.device
        self.scale = config.lora_alpha / (math.sqrt(rank) if config.lora_rslora else rank)
        self.dropout, self.enabled = Dropout(config.lora_dropout), True
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features, device=device))
        self.lora_B = nn.Parameter(torch.empty(base.out_features, rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        if not self.enabled:
            return super().forward(x)
        dropped = self.dropout(x) if self.dropout.rate and self.training else None
        base = self.weight, self.scales, (self.out_features, self.in_features)
        return FrozenProduct.apply(x, *base, dropped, self.lora_A, self.lora_B, self.scale)

    @torch.no_grad()
    def merged(self) -> Tensor:
        return super().merged() + self.scale * (self.lora_B @ self.lora_A)


class FullyTrained(VocabularyMatrix):
    """An embedding or head that is trained in float32, with a frozen copy for `disable_adapters`."""

    def __init__(self, base: VocabularyMatrix):
        nn.Module.__init__(self)
        self.enabled = True
        self.weight = nn.Parameter(base.weight.detach().float())
        self.frozen_weight = nn.Parameter(base.weight.detach().clone(), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return embed(tokens, self.weight if self.enabled else self.frozen_weight)

    def as_head(self) -> HeadWeight:
        weight = self.weight if self.enabled else self.frozen_weight
        return HeadWeight(weight, weight)

    def load_base(self, read: ReadRows) -> None:
        load_rows(self.weight, read)
        load_rows(self.frozen_weight, read)


class TrainableTokens(VocabularyMatrix):
    """A frozen embedding or head with trainable float32 rows for the ascending token `ids`.

    Like PEFT's `trainable_token_indices`. The matrix keeps its name and values; the head uses a copy.
    """

    def __init__(self, base: VocabularyMatrix, ids: Sequence[int]):
        nn.Module.__init__(self)
        self.weight, self.ids, self.enabled = base.weight, ids, True
        # A parameter, because DDP broadcasts buffers in every forward.
        self.ids_K = nn.Parameter(torch.tensor(ids, device=base.weight.device), requires_grad=False)
        self.rows = nn.Parameter(base.weight.detach()[self.ids_K].float())

    @torch.no_grad()
    def load_base(self, read: ReadRows) -> None:
        load_rows(self.weight, read)
        self.ids_K.copy_(torch.tensor(self.ids))
        load_rows(self.rows, lambda start, end: torch.cat([read(each, each + 1)
                                                           for each in self.ids[start:end]]))

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = F.embedding(tokens, self.weight)
        if not self.enabled:
            return embedded
        slot = torch.searchsorted(self.ids_K, tokens.contiguous()).clamp(max=len(self.ids_K) - 1)
        return torch.where((self.ids_K[slot] == tokens)[..., None], embed(slot, self.rows), embedded)

    def as_head(self) -> HeadWeight:
        if not self.enabled:
            return HeadWeight(self.weight, self.weight)
        return HeadWeight(self.merged(), self.rows, self.ids_K)

    @torch.no_grad()
    def merged(self) -> Tensor:
        """Return the matrix of an equivalent plain layer, in the dtype of the frozen one."""
        return self.weight.index_copy(0, self.ids_K, self.rows.to(self.weight.dtype))


def named_tokens(setting: str, special_ids: Mapping[str, int]) -> list[int]:
    """Return the ascending ids of the control tokens that LORA_TRAIN_TOKENS names."""
    names = [name.strip() for name in setting.split(",") if name.strip()]
    if unknown := [name for name in names if name not in special_ids]:
        some = ", ".join([*special_ids][:10])
        raise SettingsError(f"LORA_TRAIN_TOKENS={setting}: {unknown[0]!r} is not a control token of the "
                            f"tokenizer; use names such as {some} ..., auto or none")
    return sorted({special_ids[name] for name in names})


def untrained_tokens(used_ids: Sequence[int], special_ids: Mapping[str, int], weight_VD: Tensor,
                     pieces: Mapping[int, Sequence[int]] = MappingProxyType({})) -> list[int]:
    """Return the ascending ids of the tokens that a base has not learned, by their rows.

    Such a row is nearly zero, or nearly the mean of all rows, where resizing puts new ones, or the mean of
    the rows of the pieces of its text: by a hundredth of the usual distance. Or it is close to the reserved
    tokens: at most twice as far from their mean as the farthest of them.

    Args:
        used_ids: ids that occur in the data; reserved tokens among them do not count.
        special_ids: ids of the tokenizer's control tokens.
        weight_VD: the base's head. Training moves all of its rows in each step, while the rows of rare tokens
            in an untied embedding stay near their initial values.
        pieces: ids of the text of each added token without it.
    """
    reserved = sorted({number for name, number in special_ids.items()
                       if re.search("(?<![a-z])reserved", name) and number < len(weight_VD)} - {*used_ids})
    rows_VD = weight_VD.detach().float()
    centres = [torch.zeros_like(rows_VD[0]), rows_VD.mean(dim=0)]
    centres += [rows_VD[reserved].mean(dim=0)] if reserved else []
    # Products of matrices would be inexact here.
    distance_VC = torch.cdist(rows_VD, torch.stack(centres), compute_mode="donot_use_mm_for_euclid_dist")
    limit_C = 0.01 * distance_VC.median(dim=0).values
    if reserved:
        limit_C[2] = 2 * distance_VC[reserved, 2].max()
    is_untrained_V = (distance_VC <= limit_C).any(dim=1)
    for number, ids in pieces.items():
        if ids and number not in ids and max(number, *ids) < len(rows_VD):
            mean_D = rows_VD[ids].mean(dim=0)
            is_untrained_V[number] |= torch.dist(rows_VD[number], mean_D) <= limit_C[1]
    return is_untrained_V.nonzero().flatten().tolist()


def add_adapters(model: Transformer, config: LoraConfig, generator: torch.Generator,
                 token_ids: Optional[Mapping[str, Sequence[int]]] = None) -> None:
    """Freeze a model, and add adapters to the layers of LORA_TARGET_MODULES.

    Call `cast_base` next, then wrap the model, then create the optimizer. A model on the meta device needs
    memory, the base's weights (`load_base`) and `init_adapters`. With tied embeddings, LORA_TRAIN_HEAD and
    LORA_TRAIN_EMBEDDINGS mean the same matrix, and either trains it in both roles.

    Args:
        generator: on any device; the same seed draws the same adapters.
        token_ids: ids whose rows of "tok_embeddings" and "output" to train, unless these are fully trained.
    """
    targets = config.lora_target_modules.split(",")
    model.requires_grad_(False)
    for name, layer in [(name, module) for name, module in model.named_modules() if type(module) is Linear]:
        parent, _, last = name.rpartition(".")
        if last in targets:
            layer = LoRALinear(layer, config)
        elif config.lora_base_quantization != "none":
            layer = FrozenLinear(layer, config.lora_base_quantization)
        setattr(model.get_submodule(parent), last, layer)
    # Embedding and head, fully trained or by rows
    if config.lora_train_embeddings or (config.lora_train_head and model.output is None):
        model.tok_embeddings = FullyTrained(model.tok_embeddings)
    if config.lora_train_head and model.output is not None:
        model.output = FullyTrained(model.output)
    for name, ids in (token_ids or {}).items():
        if not isinstance(layer := model.get_submodule(name), FullyTrained) and ids:
            setattr(model, name, TrainableTokens(layer, sorted(ids)))
    model.train(model.training)  # new layers start in training mode, whatever the model's is
    if not model.norm.weight.is_meta:
        init_adapters(model, generator)


@torch.no_grad()
def init_adapters(model: nn.Module, generator: torch.Generator) -> None:
    """Draw each lora_A, independently of sharding. lora_B is zero, so that the model equals its base."""
    for module in model.modules():
        if isinstance(module, LoRALinear):
            drawn = torch.empty(module.lora_A.shape, device=generator.device)
            put(module.lora_A, nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator))
            local_rows(module.lora_B).zero_()


def cast_base(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast frozen matrices to the compute dtype and frozen vectors to float32, as each use would."""
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype if parameter.ndim >= 2 else torch.float32)


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """A `with` block in which the model computes like its base. Compiled blocks are compiled again for it."""
    adapters = [module for module in model.modules() if hasattr(module, "enabled")]
    assert all(adapter.enabled for adapter in adapters), "the adapters are already disabled"
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True


def trained_token_ids(model: nn.Module) -> dict[str, list[int]]:
    """Return the ids of the tokens whose rows are trained, by layer: "tok_embeddings", "output"."""
    return {name: list(module.ids) for name, module in model.named_modules()
            if isinstance(module, TrainableTokens)}


def adapter_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the trainable parameters by name: the tensors themselves, not copies."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()
            if parameter.requires_grad}


@torch.no_grad()
def load_adapter_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy saved adapters into a model with the same adapters."""
    own = adapter_state_dict(model)
    here, saved = ({name: tuple(tensor.shape) for name, tensor in each.items()} for each in (own, state))
    names = sorted(here.keys() ^ saved.keys()) or [name for name in here if here[name] != saved[name]]
    if names:
        first = names[0]
        raise CheckpointError(
            f"the adapters do not fit the settings: {first} is {saved.get(first, 'none')} in the checkpoint "
            f"and {here.get(first, 'none')} here ({len(names)} differ); set LORA_RANK, LORA_TARGET_MODULES, "
            "LORA_TRAIN_HEAD, LORA_TRAIN_EMBEDDINGS and LORA_TRAIN_TOKENS as in training")

    for name, tensor in own.items():
        put(tensor, state[name])
