"""Merge LoRA adapters into their base: writes a Hugging Face model folder that gives the same logits.

    python scripts/merge_lora.py ADAPTER --output models/merged
    python scripts/merge_lora.py ADAPTER --base models/start --output FOLDER

The adapters may be Paddock's or PEFT's. The merged weights are loaded and compared before the folder appears.
"""

import os
import sys
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from checkpoint import peft_format
from checkpoint.hf_format import (
    MAX_SHARD_BYTES,
    load_model_weights,
    model_settings_from_huggingface,
    read_json,
    save_model_folder,
    vocabulary_rows,
    weights_sha256,
)
from checkpoint.store import MANIFEST, publish, read_state, verify
from common.command_line import CommandParser
from common.errors import CheckpointError, local_path, run_script
from common.text import show
from config import ModelConfig
from lora import add_adapters, load_adapter_state_dict, merged_state_dict
from model import padded
from model_utils import model_from_tensors
from tokenizer import load_tokenizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = 1e-4  # relative to the largest logit, for sums in another order


def find_base(adapter: Path, base: Optional[Path]) -> Path:
    """Return the base's folder: `base`, or the one that the adapters name, even if it moved with their run.

    Raises:
        CheckpointError: it does not exist.
    """
    named = base or read_json(adapter / peft_format.CONFIG_FILE).get("base_model_name_or_path")
    beside = read_state(adapter).get("progress", {}).get("base_beside")
    places = [named, adapter.resolve().parents[1] / beside] if beside and not base else [named]
    found = next((place for place in places if place and os.path.isfile(f"{place}/config.json")), None)
    if found is None:
        what = f"{named} is no model folder here" if named else "the adapters do not name their base"
        raise CheckpointError(f"{what}; name the base's folder with --base (download a model of the hub "
                              "with: hf download NAME --local-dir FOLDER)")
    return Path(str(found))


def merge(adapter_folder: Path, output: Path, base: Optional[Path] = None,
          dtype: torch.dtype = torch.float32) -> float:
    """Write base and adapters as one model folder; return the largest difference of a logit, in float32.

    Raises:
        CheckpointError: the output exists, the adapters or the base cannot be used, or do not fit each other.
    """
    if os.path.lexists(output):
        raise CheckpointError(f"{output} exists; name a new folder")

    # The base and the adapters
    base = find_base(adapter_folder, base)
    for folder in (adapter_folder, base):
        if os.path.exists(folder / MANIFEST):
            verify(folder)
    content, tensors = read_json(base / "config.json"), load_model_weights(base)
    config = ModelConfig(**model_settings_from_huggingface(content))
    rows = vocabulary_rows(tensors)
    adapter = peft_format.load_adapter_folder(adapter_folder, config, padded(rows))
    adapter.check_base(weights_sha256(tensors), base)
    if adapter.base_sha256 is None:
        show(f"The adapters have no hash of their base; whether it is {base} cannot be verified.")
    tokenizer = load_tokenizer(str(adapter_folder if (adapter_folder / "tokenizer.json").is_file() else base))
    if tokenizer.vocab_size > rows:
        raise CheckpointError(f"the tokenizer has {tokenizer.vocab_size:,} ids and the base {rows:,}; use "
                              "the base's own tokenizer")

    # Their logits, and the merged weights
    model = model_from_tensors(tensors, config, rows).eval()
    add_adapters(model, adapter.config, torch.Generator(), adapter.token_ids)
    load_adapter_state_dict(model, adapter.state)
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
    parser.add_argument("adapter", type=Path, help="a checkpoint of a LoRA run, or PEFT's folder")
    parser.add_argument("--base", type=Path, metavar="FOLDER",
                        help="the base model's folder (default: the one that the adapters name)")
    parser.add_argument("--output", type=local_path, required=True, metavar="FOLDER",
                        help="the new model's folder")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32",
                        help="of the merged weights (default: %(default)s)")
    args = parser.parse_args()
    base = args.base.expanduser() if args.base else None
    difference = merge(args.adapter.expanduser(), args.output.expanduser(), base, DTYPES[args.dtype])
    show(f"{args.output} is ready; its logits differ by at most {difference:.2g} from base and adapters.")


if __name__ == "__main__":
    run_script(main)
