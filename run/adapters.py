"""Load models with or without adapters for generation, evaluation and merging."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import torch

from checkpoint import huggingface, peft, store
from checkpoint.huggingface import read_model_json
from common.errors import CheckpointError
from common.text import command, print_safely
from config import START_FROM
from lora import add_adapters, cast_base, load_adapter_state_dict, merged_state_dict
from model import Transformer, padded
from model_utils import device_and_dtype, model_from_tensors, read_model_config
from run.extensions import load_kernels
from run.start import find_by_hash
from tokenizer import SUPPRESSED, load_tokenizer, read_generation

TOLERANCE = 1e-4  # of merged logits, relative to the largest one: the order of summation differs


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


def load_model(folder: Path, device: Optional[torch.device] = None, dtype: Optional[torch.dtype] = None,
               tokenizer: Any = None, base: Optional[Path] = None,
               quantization: str = "none") -> tuple[Transformer, Any]:
    """Return the model in a folder, which computes in `dtype`, and its tokenizer.

    The weights keep their stored dtypes. The folder may hold adapters of a `base` with this
    LORA_BASE_QUANTIZATION. Without device and dtype, `device_and_dtype` chooses them.
    """
    load_kernels()
    source = base or folder
    peft.refuse_adapters(source)
    config, tensors = read_model_config(source), huggingface.load_model_weights(source)
    rows, adapter = huggingface.vocabulary_rows(tensors), None
    place = folder if (folder / "tokenizer.json").is_file() else source
    tokenizer = tokenizer or load_tokenizer(str(place))
    tokenizer.generation = read_generation(source) | read_generation(folder)
    ids = tokenizer.vocab_size
    if base:
        adapter = peft.load_adapter_folder(folder, config, padded(max(rows, ids)))
        adapter.check_base(huggingface.weights_sha256(tensors), base)
        if adapter.base_sha256 is None:
            print_safely(f"The adapters store no hash of their base; {base} is not verified.", sys.stderr)
        elif ids > rows:  # trained here, where new rows started like this
            rows, tensors = ids, huggingface.with_rows(tensors, ids)
    if ids > rows:
        raise CheckpointError(f"{place}: its tokenizer has {ids:,} ids, but the model in {source} has "
                              f"{rows:,}; replace it by the model's tokenizer")
    device, dtype = device_and_dtype(device, dtype)
    model = model_from_tensors(tensors, config, rows, dtype, device)
    model.suppress(tokenizer.generation.get(SUPPRESSED, ()))
    if adapter:
        if quantization != "none":
            model.float()  # training quantizes float32 weights
        lora_config = adapter.config.model_copy(update={"lora_base_quantization": quantization})
        add_adapters(model, lora_config, torch.Generator(), adapter.token_ids)
        load_adapter_state_dict(model, adapter.state)
    return model.eval() if adapter else model, tokenizer


def load_for_use(folder: Path, base: Optional[str] = None, device: Optional[torch.device] = None,
                 dtype: Optional[torch.dtype] = None, tokenizer: Any = None) -> tuple[Transformer, Any]:
    """Return the model in a folder, including adapters on `base`, and its tokenizer, for inference.

    The base is that of training if it is not given, and quantized as in training. All parameters are frozen,
    and matrices have the compute dtype. Use `load_model` for weights to save.
    """
    source, quantization = None, "none"
    if (folder / peft.CONFIG_FILE).exists():
        quantization = store.read_state(folder).get("settings", {}).get("LORA_BASE_QUANTIZATION", "none")
        source = base_of_adapters(folder, base)
    model, tokenizer = load_model(folder, device, dtype, tokenizer, source, quantization)
    cast_base(model.requires_grad_(False), model.compute_dtype)
    return model, tokenizer


def merge(adapters: Path, output: Path, base: Optional[str] = None,
          dtype: torch.dtype = torch.float32,
          describe: Callable = lambda *_: None) -> float:
    """Merge base and adapters into a model folder; return the largest change of a logit, in float32.

    `describe(folder, output, base, adapters, dtype)` may write a card before the folder is named `output`.
    """
    store.check_new(output)
    if not (adapters / peft.CONFIG_FILE).exists():
        copy = command("scripts/export.py", adapters, "--to", "hf", "--output", "FOLDER")
        raise CheckpointError(f"{adapters} has no adapters to merge; copy the whole model with {copy}")
    base_folder, cpu = base_of_adapters(adapters, base), torch.device("cpu")
    model, tokenizer = load_model(adapters, cpu, torch.float32, base=base_folder)
    tokens_BT = torch.randint(tokenizer.vocab_size, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected_BTV = model(tokens_BT, mode="logits")[..., :tokenizer.vocab_size]
    state = {name: weight.to(dtype) for name, weight in merged_state_dict(model).items()}
    longest = huggingface.context_length(read_model_json(base_folder / "config.json"))
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

    store.publish_model(output, state, model.config, tokenizer, longest, complete)
    return differences[0]
