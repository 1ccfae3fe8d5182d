"""Add layers to a checkpoint, or widen its feed-forwards, without changing what it computes.

    python scripts/grow_checkpoint.py runs/first --layers 24 --ffn-dim 4096 \\
        --output models/grown
    ./paddock train --run-name grown --pretrain-checkpoint models/grown

New layers are copies of the layers before them, evenly spaced, whose WO and W2 are zero, so the logits are
equal to the last bit. Their numbers are printed; TRAIN_ONLY can train these layers alone. New rows of W1 and
W3 are random, and new columns of W2 zero. The optimizer's state is kept; that of new parameters starts from
zero. A run from the folder continues the schedule at its step.
Source: Wu et al. 2024 (arXiv:2401.02415); Chen et al. 2016 (arXiv:1511.05641).
"""

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # noqa: F401  # isort: skip (reports a package that is missing)

import torch
from torch.nn import functional as F

from checkpoint import huggingface, store
from checkpoint.tensors import LazyTensor, TensorFile, lazy, write_files
from common.command_line import CommandParser
from common.errors import CheckpointError, SettingsError, local_path, run_script
from common.text import show
from config import ModelConfig
from model_utils import find_model, read_model_config
from run.card import derived_card, write_card
from tokenizer import load_tokenizer

LAYER = re.compile(r"((?:model\.)?layers\.)(\d+)(\..+)")


def layers_and_copies(old: ModelConfig, new: ModelConfig) -> list[tuple[int, int]]:
    """Return for each layer of the larger model the layer that it comes from, and 0, or the copy's number."""
    added = new.n_layers - old.n_layers
    after = [-(-(number + 1) * old.n_layers // added) - 1 for number in range(added)]
    return [(layer, copy) for layer in range(old.n_layers) for copy in range(1 + after.count(layer))]


def grown(tensors: Mapping[str, LazyTensor], old: ModelConfig, new: ModelConfig,
          is_optimizer: bool) -> dict[str, LazyTensor]:
    """Return a model's tensors under Hugging Face's names, or its optimizer's state, for the larger model."""
    places = layers_and_copies(old, new)
    generator, wider, result = torch.Generator().manual_seed(0), new.hidden_dim - old.hidden_dim, {}
    for name, tensor in tensors.items():
        value = tensor.whole()
        if value.ndim == 2 and re.search(r"\.(gate_proj|up_proj|w1|w3)\.", name):
            rows = torch.zeros(wider, value.shape[1])
            if not is_optimizer:
                rows.normal_(0.0, old.init_std, generator=generator)
            value = torch.cat([value, rows.to(value.dtype)])
        elif value.ndim == 2 and re.search(r"\.(down_proj|w2)\.", name):
            value = F.pad(value, (0, wider))
        if not (match := LAYER.fullmatch(name)):
            result[name] = lazy(value)
            continue
        is_zero = is_optimizer or re.search(r"\.(o_proj|down_proj)\.", name)
        for place, (layer, copy) in enumerate(places):
            if layer == int(match[2]):
                placed = torch.zeros_like(value) if copy and is_zero else value
                result[f"{match[1]}{place}{match[3]}"] = lazy(placed)
    return result


def grow(folder: Path, layers: Optional[int], ffn_dim: Optional[int], output: Path) -> list[int]:
    """Write the grown checkpoint, with the optimizer's state if it has one; return the new layers."""
    if os.path.lexists(output):
        raise CheckpointError(f"{output} already exists; choose a new folder")
    store.verify(folder) if store.read_state(folder) else store.verify_model(folder)
    old = read_model_config(folder)
    new = old.model_copy(update={"n_layers": layers or old.n_layers, "ffn_dim": ffn_dim or old.hidden_dim})
    if new.n_layers < old.n_layers or new.hidden_dim < old.hidden_dim or new == old:
        raise SettingsError(f"{folder} has {old.n_layers} layers and feed-forwards of {old.hidden_dim}; set "
                            "--layers to more, or --ffn-dim to a larger width")
    if layers and (old.no_rope_every or (old.sliding_window and old.sliding_every)):
        raise SettingsError("new layers would shift which layers have a window or no rotary embedding; use "
                            "--ffn-dim")
    weights = grown(huggingface.load_model_weights(folder), old, new, is_optimizer=False)
    files = huggingface.weight_files(weights, new.head_dim)
    state, tokenizer = store.read_state(folder), load_tokenizer(str(folder))
    context = huggingface.context_length(huggingface.read_json(folder / "config.json"))
    all_files = dict(files)
    if state:
        state["settings"] |= {"N_LAYERS": new.n_layers, "FFN_DIM": new.hidden_dim}
        state["identity"]["HIDDEN_DIM"] = new.hidden_dim
        moments = grown(store.read_optimizer(folder), old, new, is_optimizer=True)
        all_files[store.OPTIMIZER] = TensorFile(moments, block_multiple=new.head_dim)

    def write(temporary: Path) -> dict[str, Any]:
        huggingface.save_settings(temporary, files, new, tokenizer, context)
        write_card(temporary, derived_card(output.name, folder, folder, (
            f"Grown from {old.n_layers} to {new.n_layers} layers, and from feed-forwards of {old.hidden_dim} "
            f"to {new.hidden_dim}. Growing did not change the logits.")))
        if state:
            (temporary / store.STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        return write_files(temporary, all_files)

    sizes = [sum(tensor.nbytes for tensor in file.tensors.values()) for file in all_files.values()]
    step = state["progress"]["step"] if state else 0
    store.publish(output, write, {"step": step, "world_size": 1, "val_loss": None}, sum(sizes), max(sizes))
    return [place for place, (_, copy) in enumerate(layers_and_copies(old, new)) if copy]


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("model", help="a run, a checkpoint or a model folder")
    parser.add_argument("--layers", type=int, metavar="N", help="layers of the grown model (default: as now)")
    parser.add_argument("--ffn-dim", type=int, metavar="N",
                        help="width of its feed-forwards (default: as now)")
    parser.add_argument("--output", type=local_path, required=True, metavar="FOLDER", help="new folder")
    args = parser.parse_args()
    new = grow(find_model(args.model), args.layers, args.ffn_dim, args.output.expanduser())
    alone = f"; TRAIN_ONLY={','.join(map(str, new))} trains only its new layers" if new else ""
    show(f"The grown checkpoint is in {args.output}. Start a run with PRETRAIN_CHECKPOINT={args.output}"
         f"{alone}.")


if __name__ == "__main__":
    run_script(main)
