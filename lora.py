"""Low-rank adapters: a frozen base, and beside each of its matrices a product of two small ones that learns.

Of embedding and head the rows of single tokens can learn besides: of those that the base never met. The base can be
held in fewer bits with bitsandbytes. Source: Hu et al. 2021 (arXiv:2106.09685); Kalajdzievski 2023 (arXiv:2312.03732) for the
scale of rsLoRA; Dettmers et al. 2023 (arXiv:2305.14314) for nf4.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.errors import CheckpointError, SettingsError
from config import LoraConfig
from fused.chunked_head import HeadWeight
from fused.matmul import linear, upcast_for_matmul
from model import Linear, Transformer

NF4_BLOCK = 64  # numbers that share a scale


def adapter_scale(config: LoraConfig) -> float:
    """What the adapters' product is multiplied by: alpha / rank, or alpha / sqrt(rank) for rsLoRA."""
    return config.lora_alpha / (math.sqrt(config.lora_rank) if config.lora_rslora else config.lora_rank)


def quantized(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """A matrix in int8 (a scale a row) or nf4 (two numbers a byte, a scale a block), and its float32 scales.

    Raises:
        SettingsError: bitsandbytes is missing, or has no kernel for this device.
    """
    wish = f"LORA_BASE_QUANTIZATION={kind}"
    try:
        import bitsandbytes  # noqa: F401  # makes the operators below
    except ImportError as error:
        raise SettingsError(f"{wish} needs bitsandbytes: pip install bitsandbytes; or set it to none ({error})") from error
    operators = torch.ops.bitsandbytes
    try:
        if kind == "int8":
            packed, scales, _ = operators.int8_vectorwise_quant(weight.half())
        else:
            packed, scales = operators.quantize_4bit(weight.contiguous(), NF4_BLOCK, "nf4", torch.uint8)
        dequantized(packed, scales, weight.shape, weight.dtype)  # now, rather than in the first step
    except (RuntimeError, ValueError, AttributeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise SettingsError(f"{wish}: bitsandbytes has no working kernel for {weight.device.type} here; set it to none "
                            f"({str(error).splitlines()[0]:.200})") from error
    return packed, scales


def dequantized(packed: Tensor, scales: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The matrix that `quantized` has kept, as near as its bits allow."""
    if packed.dtype == torch.int8:
        return torch.ops.bitsandbytes.int8_vectorwise_dequant(packed, scales).to(dtype)
    return torch.ops.bitsandbytes.dequantize_4bit(packed, scales, NF4_BLOCK, "nf4", shape, dtype)


class QuantizedProduct(torch.autograd.Function):
    """x @ weight.T, with the weight unpacked anew for the backward instead of kept."""

    @staticmethod
    def forward(ctx, x, packed, scales, shape):
        ctx.save_for_backward(packed, scales)
        ctx.shape = shape
        product = F.linear(upcast_for_matmul(x), upcast_for_matmul(dequantized(packed, scales, shape, x.dtype)))
        # torch 2.11 compiles a conversion that changes nothing, where a forward ends with it, into gradients of zero.
        return product if product.dtype == x.dtype else product.to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        weight = dequantized(*ctx.saved_tensors, ctx.shape, gradient.dtype)
        return (upcast_for_matmul(gradient) @ upcast_for_matmul(weight)).to(gradient.dtype), None, None, None


class FrozenLinear(nn.Module):
    """A matrix of the base that does not learn, in fewer bits; its `weight` holds the packed numbers."""

    def __init__(self, base: Linear, kind: str):
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        packed, scales = quantized(base.weight.detach(), kind)
        # Parameters, because data parallelism sends buffers around again and again.
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return QuantizedProduct.apply(x, self.weight, self.scales, (self.out_features, self.in_features))


class LoRALinear(nn.Module):
    """A frozen matrix plus scale * lora_B lora_A, which are never multiplied out; the base's weight keeps its name.

    Args:
        base: the layer that this one replaces.
        generator: draws lora_A; lora_B is zero, so that at birth the layer is the base.
    """

    def __init__(self, base: Linear | FrozenLinear, config: LoraConfig, generator: torch.Generator):
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.scales = base.weight, getattr(base, "scales", None)
        self.scale, self.dropout, self.enabled = adapter_scale(config), config.lora_dropout, True
        drawn = torch.empty(config.lora_rank, base.in_features, device=generator.device)
        nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
        self.lora_A = nn.Parameter(drawn.to(base.weight.device))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, config.lora_rank, device=base.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        if self.scales is None:
            output = linear(x, self.weight)
        else:
            output = QuantizedProduct.apply(x, self.weight, self.scales, (self.out_features, self.in_features))
        if not self.enabled:
            return output
        low = linear(F.dropout(x, self.dropout, self.training), self.lora_A)
        # Laid out anew, because CPUs take several times longer over a matrix whose rows are as short as the rank.
        return output + linear(low * self.scale, self.lora_B.t().contiguous().t())

    @torch.no_grad()
    def merged(self) -> Tensor:
        """The one float32 matrix that does the same."""
        shape = (self.out_features, self.in_features)
        weight = self.weight.float() if self.scales is None else dequantized(self.weight, self.scales, shape, torch.float32)
        return weight + self.scale * (self.lora_B @ self.lora_A)


class TrainedRows(nn.Module):
    """An embedding or a head that is frozen but for the rows of some tokens, whose values learn in float32.

    As PEFT's `trainable_token_indices`. The matrix keeps its name and its values; for the head, which is used as a whole, the
    rows are put into a copy.

    Args:
        base: the layer that this one replaces.
        ids: of the tokens, ascending.
    """

    def __init__(self, base: nn.Embedding | Linear, ids: Sequence[int]):
        super().__init__()
        self.weight, self.enabled = base.weight, True
        # A parameter, because data parallelism sends buffers around again and again.
        self.ids_K = nn.Parameter(torch.tensor(ids, device=base.weight.device), requires_grad=False)
        self.rows = nn.Parameter(base.weight.detach()[self.ids_K].float())

    def forward(self, tokens: Tensor) -> Tensor:
        """The embedding of ids of any shape."""
        embedded = F.embedding(tokens, self.weight)
        if not self.enabled:
            return embedded
        slot = torch.searchsorted(self.ids_K, tokens.contiguous()).clamp(max=len(self.ids_K) - 1)
        return torch.where((self.ids_K[slot] == tokens)[..., None], F.embedding(slot, self.rows), embedded)

    def as_head(self) -> HeadWeight:
        """The matrix with the rows in it, in its own dtype, of which these learn."""
        return HeadWeight(self.merged(), self.rows, self.ids_K) if self.enabled else HeadWeight(self.weight, self.weight)

    @torch.no_grad()
    def merged(self) -> Tensor:
        """The one matrix that does the same."""
        return self.weight.index_copy(0, self.ids_K, self.rows.to(self.weight.dtype))


def tokens_to_train(wish: str, used_ids: Sequence[int], special_ids: Mapping[str, int], weight_VD: Tensor) -> list[int]:
    """The ids whose rows LORA_TRAIN_TOKENS wants to learn, ascending: with `auto` of the data's tokens that the base never met.

    A row that was never met has stayed among its like: no farther from the mean of the reserved tokens' rows than twice the
    farthest of these. Where the tokenizer reserves none, it is a row that is nearly zero.

    Args:
        used_ids: that occur in the data.
        special_ids: of the tokenizer's control tokens.
        weight_VD: the base's embedding.
    Raises:
        SettingsError: a token is none of the tokenizer's control tokens.
    """
    if wish == "none":
        return []
    if wish != "auto":
        names = [name.strip() for name in wish.split(",") if name.strip()]
        if unknown := [name for name in names if name not in special_ids]:
            raise SettingsError(f"LORA_TRAIN_TOKENS={wish}: {unknown[0]!r} is no control token of the tokenizer; name some of "
                                f"{', '.join([*special_ids][:10])} ..., auto or none")
        return sorted({special_ids[name] for name in names})
    reserved = sorted({number for name, number in special_ids.items() if "reserved" in name} - {*used_ids})
    rows_VD = weight_VD.detach().float()
    centre_D, limit = torch.zeros_like(rows_VD[0]), 0.01 * rows_VD.norm(dim=1).median()
    if reserved:
        centre_D = rows_VD[reserved].mean(dim=0)
        limit = 2 * (rows_VD[reserved] - centre_D).norm(dim=1).max()
    used = torch.as_tensor(used_ids, device=weight_VD.device)
    return used[(rows_VD[used] - centre_D).norm(dim=1) <= limit].tolist()


def add_adapters(model: Transformer, config: LoraConfig, generator: torch.Generator,
                 token_ids: Optional[Mapping[str, Sequence[int]]] = None) -> None:
    """Freeze a model that has its weights, and put adapters beside the layers of LORA_TARGET_MODULES.

    Then comes `keep_base_in`, then the wrapping, then the optimizer. With tied embeddings LORA_TRAIN_HEAD and
    LORA_TRAIN_EMBEDDINGS mean the same matrix, and either trains it in both of its roles.

    Args:
        generator: on any device; equally seeded ones give equal adapters.
        token_ids: whose rows learn, of "tok_embeddings" and "output"; not where these are trained as a whole.
    Raises:
        SettingsError: a layer is unknown, or LORA_BASE_QUANTIZATION cannot be had here.
    """
    # The head is left out: its weight is used without its forward.
    layers = [(name, module) for name, module in model.named_modules() if type(module) is Linear and module is not model.output]
    known = list(dict.fromkeys(name.rpartition(".")[2] for name, _ in layers))
    targets = [name.strip() for name in config.lora_target_modules.split(",") if name.strip()]
    unknown = [name for name in targets if name not in known]
    if unknown or not targets:
        raise SettingsError(f"LORA_TARGET_MODULES={config.lora_target_modules} names "
                            f"{f'{unknown[0]!r}, which this model has not' if unknown else 'no layer'}; "
                            f"choose from {','.join(known)}")
    model.requires_grad_(False)
    for name, layer in layers:
        parent, _, own_name = name.rpartition(".")
        if config.lora_base_quantization != "none":
            layer = FrozenLinear(layer, config.lora_base_quantization)
        if own_name in targets:
            layer = LoRALinear(layer, config, generator)
        setattr(model.get_submodule(parent), own_name, layer)
    if config.lora_train_embeddings or (config.lora_train_head and model.output is None):
        train_whole(model.tok_embeddings)
    if config.lora_train_head and model.output is not None:
        train_whole(model.output)
    for name, ids in (token_ids or {}).items():
        if not hasattr(layer := model.get_submodule(name), "frozen_weight") and ids:
            setattr(model, name, TrainedRows(layer, sorted(ids)))
    model.train(model.training)  # new layers are born training, whatever the model does


def train_whole(module: nn.Module) -> None:
    """Let a module's weight learn, in float32, and keep what it was as `frozen_weight`, for `disable_adapters`."""
    module.frozen_weight = nn.Parameter(module.weight.detach().clone(), requires_grad=False)
    module.weight = nn.Parameter(module.weight.detach().float())


def keep_base_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Round the frozen matrices to the compute dtype, to which each use would round them anyhow; norms stay float32."""
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.ndim >= 2 and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Make the model its base for a while, wrapped and compiled as it may be; a compiled block is compiled once more."""
    adapters = [module for module in model.modules() if isinstance(module, (LoRALinear, TrainedRows))]
    whole = [module for module in model.modules() if hasattr(module, "frozen_weight")]
    assert all(adapter.enabled for adapter in adapters), "they are off already"

    def switch(on: bool) -> None:
        for adapter in adapters:
            adapter.enabled = on
        for module in whole:
            module.weight, module.frozen_weight = module.frozen_weight, module.weight

    switch(False)
    try:
        yield
    finally:
        switch(True)


def trained_token_ids(model: nn.Module) -> dict[str, list[int]]:
    """Ids of the tokens whose rows learn, of "tok_embeddings" and "output", where these have such."""
    return {name: module.ids_K.tolist() for name, module in model.named_modules() if isinstance(module, TrainedRows)}


def adapter_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """What learns, under its names: the tensors themselves, not copies."""
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def load_adapter_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put saved adapters into a model that has the same ones.

    Raises:
        CheckpointError: they are others than the settings describe.
    """
    own = adapter_state_dict(model)
    differing = sorted(own.keys() ^ state.keys()) or [name for name in own if own[name].shape != state[name].shape]
    if differing:
        shapes = [tuple(tensors[differing[0]].shape) if differing[0] in tensors else "none" for tensors in (state, own)]
        raise CheckpointError(f"the adapters are not those of the settings: {differing[0]} is {shapes[0]} in the checkpoint and "
                              f"{shapes[1]} here ({len(differing)} differ); set LORA_RANK, LORA_TARGET_MODULES, LORA_TRAIN_HEAD, "
                              "LORA_TRAIN_EMBEDDINGS and LORA_TRAIN_TOKENS as they were")
    for name, tensor in own.items():
        tensor.copy_(state[name])


def merged_state_dict(model: Transformer) -> dict[str, Tensor]:
    """The parameters of the model without adapters that gives the same logits, float32 on the CPU, under our names."""
    state: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        weight: Optional[Tensor] = getattr(module, "weight", None)
        if isinstance(module, (LoRALinear, TrainedRows)):
            weight = module.merged()
        elif isinstance(module, FrozenLinear):
            weight = dequantized(weight, module.scales, (module.out_features, module.in_features), torch.float32)
        if weight is not None:
            state[f"{name}.weight"] = weight.detach().float().cpu()
    return state
