"""Merge LoRA adapters into their base: writes a Hugging Face model folder that gives the same logits.

    python scripts/merge_lora.py runs/my-run --output models/merged
    python scripts/merge_lora.py ADAPTER --base models/start --output FOLDER

The adapters may be Paddock's or PEFT's. The merged weights are loaded and compared before the folder appears.
"""

import os
import sys
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from checkpoint.hf_format import MAX_SHARD_BYTES, load_model_weights, save_model_folder
from checkpoint.store import publish
from common.command_line import CommandParser
from common.errors import CheckpointError, local_path, run_script
from common.text import show
from lora import merged_state_dict
from model_utils import find_model, model_from_tensors
from training.adapters import base_of_adapters, load_adapted

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = 1e-4  # relative to the largest logit, for sums in another order


def merge(adapter_folder: Path, output: Path, base: Optional[str] = None,
          dtype: torch.dtype = torch.float32) -> float:
    """Write base and adapters as one model folder; return the largest difference of a logit, in float32.

    Raises:
        CheckpointError: the output exists, the adapters or the base cannot be used, or do not fit each other.
    """
    if os.path.lexists(output):
        raise CheckpointError(f"{output} exists; name a new folder")

    model, tokenizer, content = load_adapted(adapter_folder, base_of_adapters(adapter_folder, base))
    config = model.config
    tokens_BT = torch.randint(tokenizer.vocab_size, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected_BTV = model.logits(tokens_BT)[..., :tokenizer.vocab_size]
    state = {name: weight.to(dtype) for name, weight in merged_state_dict(model).items()}
    differences = []

    def write(folder: Path) -> None:
        save_model_folder(folder, state, config, tokenizer, content.get("max_position_embeddings", 2048))
        with torch.no_grad():
            merged = model_from_tensors(load_model_weights(folder), config, tokenizer.vocab_size).eval()
            differences.append(float((merged.logits(tokens_BT) - expected_BTV).abs().max()))
        allowed = TOLERANCE * max(1.0, float(expected_BTV.abs().max()))
        if dtype == torch.float32 and not differences[0] <= allowed:
            raise CheckpointError(f"the merged model's logits differ by {differences[0]:.2g} from those of "
                                  "base and adapters; nothing is written: are the adapters finite?")

    size = sum(tensor.nbytes for tensor in state.values())
    publish(output, write, {"step": 0, "world_size": 1, "val_loss": None}, size, min(size, MAX_SHARD_BYTES))
    return differences[0]


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("adapter", help="a LoRA run, a checkpoint of it, or PEFT's folder")
    parser.add_argument("--base", metavar="MODEL",
                        help="the base model (default: the one that the adapters were trained on)")
    parser.add_argument("--output", type=local_path, required=True, metavar="FOLDER",
                        help="the new model's folder")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32",
                        help="of the merged weights (default: %(default)s)")
    args = parser.parse_args()
    difference = merge(find_model(args.adapter), args.output.expanduser(), args.base, DTYPES[args.dtype])
    show(f"{args.output} is ready; its logits differ by at most {difference:.2g} from base and adapters.")


if __name__ == "__main__":
    run_script(main)
