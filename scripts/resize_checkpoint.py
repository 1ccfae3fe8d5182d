"""Grow a checkpoint without changing its logits, by layers or wider feed-forwards; or keep some layers.

    python scripts/resize_checkpoint.py runs/first --layers 24 --ffn-dim 4096 \\
        --output models/grown
    ./paddock train --run-name grown --resume models/grown --max-steps 2000
    python scripts/resize_checkpoint.py runs/first --layers 6 --evenly \\
        --output models/half

The numbers of new layers are printed; TRAIN_ONLY can train these layers alone. A larger model keeps the
optimizer's state, where that of new parameters starts from zero, and a run from the folder continues the
schedule at its step. A model with fewer layers starts a new run. It keeps the first ones, or with --evenly
evenly spaced ones from the first on: of 12, each second.
"""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # noqa: F401  # isort: skip (reports a package that is missing)

import torch
from torch import nn

from checkpoint import huggingface, model_json, store
from checkpoint.model_json import read_model_config
from checkpoint.tensors import LazyTensor, TensorFile, lazy, read_optimizer, write_files
from common.command_line import CommandParser
from common.errors import SettingsError, local_path, run_script
from common.text import command, counted, show
from config import ModelConfig
from extensions.card import derived_card, write_card
from extensions.inference.weights import find_model
from plan.make import make_plan
from scripts.prepare import free_run_name
from tokenizer import load_tokenizer


def resized_layers(old: int, new: int, evenly: bool = False) -> list[tuple[int, int]]:
    """Return for each layer of a resized model the layer that it comes from, and 0, or the copy's number."""
    if new <= old:
        return [(layer * old // new if evenly else layer, 0) for layer in range(new)]
    after = [-(-(number + 1) * old // (new - old)) - 1 for number in range(new - old)]
    return [(layer, copy) for layer in range(old) for copy in range(1 + after.count(layer))]


def resized(tensors: Mapping[str, LazyTensor], old: ModelConfig, new: ModelConfig,
            is_optimizer: bool = False, evenly: bool = False) -> dict[str, LazyTensor]:
    """Return a model's tensors under Hugging Face's names, or its optimizer's state, for another size.

    A smaller model keeps the first layers, or evenly spaced ones. In a larger one, new layers are copies of
    the layers before them, evenly spaced, with WO and W2 of zero: the logits stay equal to the last bit. New
    rows of W1 and W3 are random, and new columns of W2 zero, as is all new state.
    Source: Wu et al. 2024 (arXiv:2401.02415); Chen et al. 2016 (arXiv:1511.05641).
    """
    places = resized_layers(old.n_layers, new.n_layers, evenly)
    wider, result = new.hidden_dim - old.hidden_dim, {}
    if any(not copy and new.layer_kinds[place] != old.layer_kinds[layer]
           for place, (layer, copy) in enumerate(places)):
        raise SettingsError(f"resizing from {old.n_layers} to {new.n_layers} layers would shift which layers "
                            "have a window or no rotary embedding; widen the feed-forwards instead, or keep "
                            "the first layers")
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if wider and len(tensor.shape) == 2 and re.search(r"\.(gate_proj|up_proj|w1|w3)\.", name):
            value = tensor.padded(new.hidden_dim).full()
            if not is_optimizer:
                value[tensor.rows:].normal_(0.0, old.init_std, generator=generator)
            tensor = lazy(value)
        elif wider and len(tensor.shape) == 2 and re.search(r"\.(down_proj|w2)\.", name):
            tensor = lazy(nn.functional.pad(tensor.full(), (0, wider)))
        if not (match := re.fullmatch(r"((?:model\.)?layers\.)(\d+)(\..+)", name)):
            result[name] = tensor
            continue
        added = tensor
        if is_optimizer or re.search(r"\.(o_proj|down_proj)\.", name):
            added = replace(tensor, read=lambda *rows, read=tensor.read: torch.zeros_like(read(*rows)))
        result |= {f"{match[1]}{place}{match[3]}": added if copy else tensor
                   for place, (layer, copy) in enumerate(places) if layer == int(match[2])}
    return result


def resize(folder: Path, layers: Optional[int], ffn_dim: Optional[int], output: Path,
           evenly: bool = False) -> list[int]:
    """Write the resized checkpoint, if larger with its optimizer's state; return the new layers."""
    store.check_new(output)
    store.verify(folder) if store.read_state(folder) else store.verify_model(folder)
    old = read_model_config(folder)
    new = old.model_copy(update={"n_layers": layers or old.n_layers, "ffn_dim": ffn_dim or old.hidden_dim})
    if new.n_layers < 1 or new.hidden_dim < old.hidden_dim or new == old:
        raise SettingsError(f"{folder} has {counted(old.n_layers, 'layer')} and feed-forwards of "
                            f"{old.hidden_dim}; set another --layers, or a larger --ffn-dim")
    weights = resized(huggingface.load_model_weights(folder), old, new, evenly=evenly)
    files = huggingface.weight_files(weights, new.head_dim)
    tokenizer = load_tokenizer(str(folder))
    state = store.read_state(folder) if new.n_layers >= old.n_layers else {}
    context = model_json.context_length(model_json.read_model_json(folder / "config.json"))
    all_files = dict(files)
    if state:
        sizes = {"N_LAYERS": new.n_layers, "FFN_DIM": new.hidden_dim}
        state = {**state, "settings": state["settings"] | sizes,
                 "identity": state["identity"] | {"HIDDEN_DIM": new.hidden_dim}}
        moments = resized(read_optimizer(folder), old, new, is_optimizer=True)
        all_files[store.OPTIMIZER] = TensorFile(moments, block_multiple=new.head_dim)

    def write(temporary: Path) -> dict[str, Any]:
        huggingface.save_settings(temporary, files, new, tokenizer, context)
        unchanged = " The logits did not change." if new.n_layers >= old.n_layers else ""
        write_card(temporary, derived_card(output.name, folder, folder, (
            f"Resized from {old.n_layers} to {counted(new.n_layers, 'layer')}, and from feed-forwards of "
            f"{old.hidden_dim} to {new.hidden_dim}.{unchanged}")))
        if state:
            (temporary / store.STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        return write_files(temporary, all_files)

    step = state["progress"]["step"] if state else 0
    store.publish(output, write, {"step": step}, sum(file.nbytes for file in all_files.values()))
    return [place for place, (_, copy) in enumerate(resized_layers(old.n_layers, new.n_layers)) if copy]


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("model", help="a run, a checkpoint or a model folder")
    parser.add_argument("--layers", type=int, metavar="N", help="number of layers (default: unchanged)")
    parser.add_argument("--ffn-dim", type=int, metavar="N",
                        help="width of the feed-forwards (default: unchanged)")
    parser.add_argument("--evenly", action="store_true",
                        help="keep evenly spaced layers, instead of the first ones")
    parser.add_argument("--output", type=local_path, required=True, metavar="FOLDER", help="new folder")
    args = parser.parse_args()
    new = resize(find_model(args.model), args.layers, args.ffn_dim, args.output.expanduser(), args.evenly)
    alone = f" --train-only {','.join(map(str, new))} trains only its new layers." if new else ""
    output, state = args.output.expanduser(), store.read_state(args.output.expanduser())
    line = f"Generate text with it: {command('scripts/generate.py', output)}"
    if state:  # its record has the settings
        longer = max(state["settings"]["MAX_STEPS"], 2 * state["progress"]["step"])
        name = free_run_name(output.name, make_plan(complete=False).config)
        flags = ("--run-name", name, "--resume", output, "--max-steps", str(longer))
        line = f"Train it: {command('scripts/run.py', *flags)}"
    show(f"The resized checkpoint is in {args.output}.{alone}", line)


if __name__ == "__main__":
    run_script(main)
