"""Put adapters into their base for good: a Hugging Face model folder that gives the logits of both together.

    python scripts/merge_lora.py runs/my-run/checkpoints/step-00001000 --output models/merged
    python scripts/merge_lora.py ADAPTER --base models/start --output models/merged --dtype bf16

The adapters may be ours or PEFT's. What is written is read again and compared before it gets its name.
"""

import argparse
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
from common.errors import CheckpointError, local_path, run_script
from common.text import show
from config import ModelConfig
from lora import add_adapters, load_adapter_state_dict, merged_state_dict
from model import padded
from model_utils import transformer_of
from tokenizer import load_tokenizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = 1e-4  # of the largest logit; float32 sums in another order


def base_of(adapter: Path, base: Optional[Path]) -> Path:
    """The base's folder: the one that was named, or the one that the adapters name, also where it was moved along with their run.

    Raises:
        CheckpointError: it is not here.
    """
    named = base or read_json(adapter / peft_format.CONFIG_FILE).get("base_model_name_or_path")
    beside = read_state(adapter).get("progress", {}).get("base_beside")
    places = [named, adapter.resolve().parents[1] / beside] if beside and not base else [named]
    found = next((place for place in places if place and os.path.isfile(f"{place}/config.json")), None)
    if found is None:
        what = f"{named} is no model folder here" if named else "the adapters do not name their base"
        raise CheckpointError(f"{what}; name the base's folder with --base (one on the hub is fetched with: "
                              "hf download NAME --local-dir FOLDER)")
    return Path(str(found))


def merge(adapter_folder: Path, output: Path, base: Optional[Path] = None, dtype: torch.dtype = torch.float32) -> float:
    """Write base and adapters as one model folder; returns the largest difference of a logit, compared in float32.

    Raises:
        CheckpointError: the output is there already, the adapters or the base cannot be used, or they do not belong together.
    """
    if os.path.lexists(output):
        raise CheckpointError(f"{output} exists; name a new folder")
    base = base_of(adapter_folder, base)
    for folder in (adapter_folder, base):
        if os.path.exists(folder / MANIFEST):
            verify(folder)
    content, tensors = read_json(base / "config.json"), load_model_weights(base)
    config = ModelConfig(**model_settings_from_huggingface(content))
    rows = vocabulary_rows(tensors)
    adapter = peft_format.load_adapter_folder(adapter_folder, config, padded(rows))
    adapter.check_base(weights_sha256(tensors), base)
    if adapter.base_sha256 is None:
        show(f"The adapters do not say which weights they were trained on; {base} is taken on trust.")
    tokenizer = load_tokenizer(str(adapter_folder if (adapter_folder / "tokenizer.json").is_file() else base))
    if tokenizer.vocab_size > rows:
        raise CheckpointError(f"the tokenizer has {tokenizer.vocab_size:,} ids and the base {rows:,}; take the base's own")
    model = transformer_of(tensors, config, rows).eval()
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
            merged_BTV = transformer_of(load_model_weights(folder), config, tokenizer.vocab_size).eval().logits(tokens_BT)
        differences.append(float((merged_BTV - expected_BTV).abs().max()))
        if dtype == torch.float32 and not differences[0] <= TOLERANCE * max(1.0, float(expected_BTV.abs().max())):
            raise CheckpointError(f"the merged model's logits differ by {differences[0]:.2g} from base and adapters'; nothing is "
                                  "written: are the adapters finite?")

    size = sum(tensor.nbytes for tensor in state.values())
    publish(output, write, {"step": 0, "world_size": 1, "val_loss": None}, size, min(size, MAX_SHARD_BYTES))
    return differences[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("adapter", type=Path, help="a checkpoint of a LoRA run, or PEFT's folder")
    parser.add_argument("--base", type=Path, metavar="FOLDER", help="the base model's folder, where it is not the one that the "
                                                                    "adapters name")
    parser.add_argument("--output", type=local_path, required=True, metavar="FOLDER", help="the new model's folder")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the weights that are written (default: %(default)s)")
    args = parser.parse_args()
    base = args.base.expanduser() if args.base else None
    difference = merge(args.adapter.expanduser(), args.output.expanduser(), base, DTYPES[args.dtype])
    show(f"{args.output} is ready; its logits differ from base and adapters' by {difference:.2g} at most.")


if __name__ == "__main__":
    run_script(main)
