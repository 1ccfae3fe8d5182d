"""Models opened for generation, evaluation and merging, with or without adapters.

For generation, weights are in the compute dtype, packed for a CPU's matmuls, or int8.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor, nn

from checkpoint import huggingface, model_json, peft, store
from checkpoint.model_json import context_of, read_model_config, read_model_json
from checkpoint.tensors import LazyTensor
from common.errors import CheckpointError, PaddockError, SettingsError
from common.text import command, print_safely
from config import START_FROM, ModelConfig, RunConfig, extension_module
from data_pipeline.shards import prepared_folder
from extensions.cautions import better_one
from extensions.inference.engine import never_sample
from extensions.inference.text import LanguageModel
from extensions.other_trainers import unused_fields
from extensions.waiting import watch
from lora import LoRALinear, TrainableTokens, add_adapters, cast_base, load_adapter_state_dict
from model import Linear, Transformer, padded
from model_kernels.head import HeadWeight
from model_kernels.matmul import CPU_MULTIPLIES_BF16, linear
from model_utils import DTYPES, choose_device, choose_dtype, model_on_meta
from parallel.fsdp import is_sharded
from plan.command_line import export
from plan.identity import adapted_model, weights_sha256
from plan.make import make_plan
from plan.names import assignments
from run.facts import find_by_hash
from tokenizer import GENERATION_IDS, SUPPRESSED, load_tokenizer, read_generation

MODEL_FILES = ("config.json", model_json.ADAPTERS)
TOLERANCE = 1e-4  # of merged logits, relative to the largest one: the order of summation differs
PACKED_FOR_ROWS = 8  # the number of rows of x that a packed matrix suits best; others are as fast
INT8_ROWS = 16  # above this many rows of x, torch's int8 kernel is slower than the matmul in x's dtype


def find_model(name: str) -> Path:
    """Resolve a script's model argument like a setting; print and return the folder."""
    path, run_dir = Path(name.removesuffix(store.BEST)).expanduser(), Path("-")
    is_model = any(os.path.exists(path / each) for each in (*MODEL_FILES, "checkpoints"))
    if not (is_model or path.is_file() or [*path.glob("step-*")]):
        loaded = make_plan(complete=False)
        export(loaded)  # HF_TOKEN
        run_dir = Path(loaded.config.output_dir) / "-"
        if path.is_dir() and (run_dir.with_name(path.name) / "checkpoints").is_dir():  # data of this name
            name = str(run_dir.with_name(name))
    folder = store.locate(name, run_dir)
    for text in better_one(name, folder):
        store.warn_on_console(text)
    if folder != Path(name).expanduser():
        print_safely(f"Using {folder}", sys.stderr)
    return folder


def device_and_dtype(device: Optional[torch.device],
                     dtype: Optional[torch.dtype]) -> tuple[torch.device, torch.dtype]:
    """Return device and dtype; the defaults are those of training, such as bf16 where it is fast."""
    device = device or torch.device(choose_device(RunConfig()))
    return device, dtype or choose_dtype(RunConfig(), device.type)


def model_from_tensors(tensors: Mapping[str, LazyTensor], config: ModelConfig, vocab_size: int,
                       dtype: torch.dtype = torch.float32,
                       device: torch.device | str = "cpu") -> Transformer:
    """Return a model with a Hugging Face Llama's tensors in their stored dtype, which computes in `dtype`."""
    state = huggingface.from_huggingface(tensors, config, padded(vocab_size))
    model = model_on_meta(config, vocab_size, dtype)
    model.load_state_dict({name: tensor.full().to(device, copy=True) for name, tensor in state.items()},
                          assign=True)
    return model


def merged_state_dict(model: Transformer) -> dict[str, Tensor]:
    """Return the parameters of an equivalent model without adapters by name, float32 on the CPU."""
    state: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        weight = module.merged() if hasattr(module, "merged") else getattr(module, "weight", None)
        if weight is not None:
            state[f"{name}.weight"] = weight.detach().float().cpu()
    return state


def base_of_adapters(folder: Path, named: Optional[str] = None) -> Path:
    """Return the base of the adapters in a Paddock or PEFT folder: the `named` one, or found by its hash."""
    state, run_dir = store.read_state(folder), folder.resolve().parent.parent
    content = read_model_json(folder / peft.CONFIG_FILE)
    recorded = content.get("base_model_name_or_path")
    if recorded and content.get("revision"):  # a model of the hub
        recorded = f"{recorded}@{content['revision']}"
    if not (named or state or recorded):
        raise CheckpointError(f"the adapters in {folder} do not name their base; set it with --base")
    if named or not state:
        try:
            return store.locate(str(named or recorded), run_dir)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; set the base of {folder} with --base") from error
    names = (state["settings"].get(setting.upper()) for setting in START_FROM)
    return find_by_hash(names, state["progress"], run_dir, store.warn_on_console,
                        "set its current folder with --base")


def refuse_other_model(adapters: Path) -> None:
    """Raise SettingsError if adapters were trained with other settings than their base's config.json has."""
    with suppress(CheckpointError):  # without the base, there is nothing to compare with
        base = base_of_adapters(adapters)
        there, here = dict(read_model_config(base)), dict(adapted_model(adapters, base))
        if other := {name: here[name] for name in here if here[name] != there[name]}:
            raise SettingsError(f"the adapters in {adapters} were trained with {assignments(other)}, which "
                                "PEFT would not know; use --to merged")


def load_model(folder: Path, device: Optional[torch.device] = None, dtype: Optional[torch.dtype] = None,
               tokenizer: Any = None, base: Optional[Path] = None,
               quantization: str = "none") -> tuple[Transformer, Any]:
    """Return the model in a folder, which computes in `dtype`, and its tokenizer.

    The weights keep their stored dtypes. The folder may hold adapters of a `base` with this
    LORA_BASE_QUANTIZATION. Without device and dtype, `device_and_dtype` chooses them.
    """
    extension_module("cpu_kernels")
    watch()
    source = base or folder
    model_json.refuse_adapters(source)
    config = adapted_model(folder, base) if base else read_model_config(source)
    tensors = huggingface.load_model_weights(source)
    rows, adapter = huggingface.vocabulary_rows(tensors), None
    place = folder if (folder / "tokenizer.json").is_file() else source
    own, tokenizer = tokenizer is None, tokenizer or load_tokenizer(str(place))
    tokenizer.generation = read_generation(source) | read_generation(folder)
    ids = tokenizer.vocab_size
    if base:
        adapter = peft.load_adapter_folder(folder, config, padded(max(rows, ids)))
        adapter.check_base(weights_sha256(base), base)
        if adapter.base_sha256 is None:
            print_safely(f"The adapters store no hash of their base; {base} is not verified.", sys.stderr)
        elif ids > rows:  # trained here, where new rows started like this
            rows, tensors = ids, huggingface.with_rows(tensors, ids)
    if ids > rows:
        which, remedy = f"{place}: its tokenizer", "replace it by the model's tokenizer"
        if not own:
            which, remedy = "TOKENIZER_PATH", (
                "use the model's own tokenizer. The losses of models with different tokenizers cannot be "
                "compared; evaluate each alone, and compare bits per byte")
        raise CheckpointError(f"{which} has {ids:,} ids, but the model in {source} has {rows:,}; {remedy}")
    device, dtype = device_and_dtype(device, dtype)
    model = model_from_tensors(tensors, config, rows, dtype, device)
    never_sample(model, tokenizer.generation.get(SUPPRESSED, ()))
    if adapter:
        if quantization != "none":
            model.float()  # training quantizes float32 weights
        lora_config = adapter.config.model_copy(update={"lora_base_quantization": quantization})
        add_adapters(model, lora_config, torch.Generator(), adapter.token_ids)
        load_adapter_state_dict(model, adapter.state)
    return model.eval() if adapter else model, tokenizer


def load_for_use(folder: Path, base: Optional[str] = None, device: Optional[torch.device] = None,
                 dtype: Optional[torch.dtype] = None, tokenizer: Any = None,
                 compiled: bool = False) -> tuple[Transformer, Any]:
    """Return the model in a folder, including adapters on `base`, and its tokenizer, for inference.

    The base is that of training if it is not given, and quantized as in training. All parameters are frozen,
    and matrices have the compute dtype, unless they will be compiled: as in training, the kernels convert
    them then. Use `load_model` for weights to save.
    """
    source, quantization = None, "none"
    if (folder / peft.CONFIG_FILE).exists():
        quantization = store.read_state(folder).get("settings", {}).get("LORA_BASE_QUANTIZATION", "none")
        source = base_of_adapters(folder, base)
    model, tokenizer = load_model(folder, device, dtype, tokenizer, source, quantization)
    cast_base(model if compiled else model.requires_grad_(False), model.compute_dtype)  # what is frozen
    return model.requires_grad_(False), tokenizer


def export_dtype(folder: Path) -> torch.dtype:
    """Return the dtype that training began with, in which a model is exported, or that of its weights."""
    stored = huggingface.load_model_weights(folder)["model.embed_tokens.weight"].dtype
    began_with = f"torch.{store.read_state(folder).get('base_dtype')}"
    return next((dtype for dtype in DTYPES.values() if str(dtype) == began_with), stored)


def rounded(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in another dtype; CheckpointError if it has numbers beyond those of float16."""
    result = tensor.to(dtype)
    if dtype == torch.float16 and not result.isfinite().all() and tensor.isfinite().all():
        raise CheckpointError(f"{name} has numbers up to {float(tensor.abs().max()):.3g}, beyond those of "
                              "float16; choose bf16, or fp32")
    return result


def publish_model(folder: Path, state: Mapping[str, Tensor | LazyTensor], model_config: ModelConfig,
                  tokenizer: Any, max_seq_len: int, complete: Callable[[Path], object]) -> None:
    """Write a new model folder with its manifest; `complete` adds the card, and may check the weights."""
    def write(temporary: Path) -> Mapping[str, dict[str, Any]]:
        written = huggingface.save_model_folder(temporary, state, model_config, tokenizer, max_seq_len)
        complete(temporary)
        return written

    store.publish(folder, write, {"step": 0}, sum(tensor.nbytes for tensor in state.values()))


def merge(adapters: Path, output: Path, base: Optional[str] = None,
          dtype: Optional[torch.dtype] = None,
          describe: Callable = lambda *_: None) -> float:
    """Merge base and adapters into a model folder; return the largest change of a logit, in float32.

    Without a dtype, the merged weights have the base's.
    `describe(folder, output, base, adapters, dtype)` may write a card before the folder is named `output`.
    """
    store.check_new(output)
    if not (adapters / peft.CONFIG_FILE).exists():
        copy = command("scripts/export.py", adapters, "--to", "hf", "--output", "FOLDER")
        raise CheckpointError(f"{adapters} has no adapters to merge; copy the whole model with {copy}")
    base_folder, cpu = base_of_adapters(adapters, base), torch.device("cpu")
    dtype = dtype or export_dtype(base_folder)
    for message in unused_fields(base_folder):
        print_safely(message, sys.stderr)
    model, tokenizer = load_model(adapters, cpu, torch.float32, base=base_folder)
    for module in filter(lambda each: isinstance(each, TrainableTokens), model.modules()):
        module.float()  # rows that were trained are not rounded to the base's dtype
    tokens_BT = torch.randint(tokenizer.vocab_size, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected_BTV = model(tokens_BT, mode="logits")[..., :tokenizer.vocab_size]
    state = {name: rounded(name, weight, dtype) for name, weight in merged_state_dict(model).items()}
    longest = context_of(base_folder, model.config)
    differences = []

    def complete(folder: Path) -> None:
        tensors = huggingface.load_model_weights(folder)
        with torch.no_grad():
            merged = model_from_tensors(tensors, model.config, tokenizer.vocab_size).eval()
            differences.append(float((merged(tokens_BT, mode="logits") - expected_BTV).abs().max()))
        allowed = TOLERANCE * max(1.0, float(expected_BTV.abs().max()))
        if dtype == torch.float32 and not differences[0] <= allowed:
            raise CheckpointError(f"the merged model's logits differ by {differences[0]:.2g} from those of "
                                  "base and adapters, so nothing is written; are the adapters finite?")
        describe(folder, output, base_folder, adapters, dtype)

    publish_model(output, state, model.config, tokenizer, longest, complete)
    return differences[0]


def pack(weight: Tensor) -> Tensor:
    """Return a matrix in oneDNN's layout, for `linear` on a CPU; unchanged where that is not possible.

    A few rows of x are multiplied up to 2.5 times as fast.
    """
    is_fast = weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and CPU_MULTIPLIES_BF16)
    if weight.device.type != "cpu" or not is_fast or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)


class Int8Linear(nn.Module):
    """A linear layer with int8 weights, rounded to nearest, and one scale per output."""

    def __init__(self, weight: Tensor):
        super().__init__()
        scales = (weight.abs().amax(dim=1) / 127).clamp(min=1e-12)
        rounded = (weight.float() / scales.float()[:, None]).round().clamp(-127, 127)
        self.weight = nn.Parameter(rounded.to(torch.int8), requires_grad=False)
        self.register_buffer("scales", scales)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        if len(rows) > INT8_ROWS:
            return linear(x, self.weight) * self.scales
        return torch._weight_int8pack_mm(rows, self.weight, self.scales).unflatten(0, x.shape[:-1])


@torch.no_grad()
def add_products(model: Transformer) -> None:
    """Add the adapters' products to their matrices, for speed; a quantized base keeps adapters."""
    for name, layer in [*model.named_modules()]:
        if isinstance(layer, LoRALinear) and layer.scales is None:
            parent, _, last = name.rpartition(".")
            with torch.device("meta"):
                merged = Linear(layer.in_features, layer.out_features)
            merged.weight = nn.Parameter(layer.merged().to(model.compute_dtype), requires_grad=False)
            setattr(model.get_submodule(parent), last, merged)


@torch.no_grad()
def pack_weights(model: Transformer, int8: bool = False) -> None:
    """Lay out a frozen model's matrices for `linear`; `int8` quantizes the blocks'."""
    for name, layer in [*model.named_modules()]:
        if type(layer) is Linear and int8:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, Int8Linear(layer.weight))
        elif type(layer) is Linear:
            layer.weight = nn.Parameter(pack(layer.weight.to(model.compute_dtype)), requires_grad=False)
    head = model.head_matrix
    packed = pack(head.as_head().values_VD.detach().to(model.compute_dtype))
    head.as_head = partial(HeadWeight, packed, head.weight)


@contextmanager
def packed_weights(model: Transformer) -> Iterator[None]:
    """Round and lay out the matrices of a model in training, once for all tokens; restore them at the end."""
    # In float32, packing pays for large matrices only. Sharded ones are gathered in the compute dtype.
    if model.compute_dtype == torch.float32 or is_sharded(model):
        return (yield)
    before = [(layer, layer.weight) for layer in model.modules() if type(layer) is Linear]
    try:
        pack_weights(model)
        yield
    finally:
        for layer, weight in before:
            layer.weight = weight
        vars(model.head_matrix).pop("as_head", None)


def load_to_generate(folder: Path, base: Optional[str] = None,
                     weights: Optional[str] = None) -> tuple[Transformer, Any]:
    """Return the model of `load_for_use`, laid out to generate in fp32, bf16 or int8, and its tokenizer."""
    dtype = DTYPES.get("bf16" if weights == "int8" else weights)
    if weights == "int8" and device_and_dtype(None, dtype)[0].type != "cpu":
        raise SettingsError("--weights int8 is for a CPU; choose bf16 on a GPU")
    model, tokenizer = load_for_use(folder, base, dtype=dtype)
    if weights != "int8":  # whose rounding would change the adapters too
        add_products(model)
    pack_weights(model, weights == "int8")
    unused = {key: value for key, value in tokenizer.generation.items()
              if key not in (*GENERATION_IDS, SUPPRESSED, "transformers_version", "use_cache")
              and not key.startswith(("_", "output_"))}  # those do not change the text
    if unused:
        print_safely("The model's generation_config.json also has "
                     f"{', '.join(f'{key}={value!r:.40}' for key, value in unused.items())}, which is not "
                     "applied; set what you need by flags, or by the fields of requests.", sys.stderr)
    return model, tokenizer


def open_model(name: str, base: Optional[str] = None, weights: Optional[str] = None) -> LanguageModel:
    """Return a model, given a run, checkpoint, Hugging Face folder or name, with any adapters applied."""
    shape_folder = folder = find_model(name)
    if (folder / peft.CONFIG_FILE).exists():
        shape_folder = base_of_adapters(folder, base)
        base = str(shape_folder)
    model, tokenizer = load_to_generate(folder, base, weights)
    longest = context_of(shape_folder, model.config)
    settings = store.read_state(folder).get("settings", {})
    stage = settings.get("TRAINING_STAGE")
    opened = LanguageModel(name, model, tokenizer, longest, stage == "pretrain")
    opened.prompts = prompts_to_try(opened, settings.get(f"{stage}_DATA_PATH".upper()))
    return opened


def prompts_to_try(model: LanguageModel, data_path: Optional[str]) -> list[str]:
    """Return the beginnings of examples from a run's training data, if it still exists."""
    try:
        examples = read_model_json(prepared_folder(Path(data_path)) / "manifest.json")["examples"]
        prompt = model.chat_format and model.chat_prompt([{"role": "user", "content": "?"}])
    except (TypeError, OSError, ValueError, KeyError, PaddockError):
        return []
    decode = model.tokenizer.decode
    if prompt is None:
        start = decode([model.tokenizer.document_start_id])
        return [" ".join(text.removeprefix(start).split()[:8]) for text in examples]
    # User messages of single-turn examples that the manifest does not shorten
    before, after = decode(prompt.ids).split("?", 1)
    message = rf"{re.escape(before)}([^\u27e6]*?){re.escape(after.strip())}\s*(\u27e6|\nchosen: |$)"
    messages = dict.fromkeys(match[1] for text in examples if (match := re.match(message, text.strip())))
    return [text for text in messages if " tokens ...] " not in text]
