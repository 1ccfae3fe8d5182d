"""Average the weights of checkpoints of the same model.

    python scripts/merge_checkpoints.py runs/first/checkpoints/step-* \\
        --output models/mean
    python scripts/merge_checkpoints.py A B --weights 3,1 --output models/mean

Each number is the weighted mean, computed in float64 and rounded once to its dtype. Checkpoints of the stable
phase of LR_SCHEDULE=wsd, averaged, replace part of its decay.
Source: Izmailov et al. 2018 (arXiv:1803.05407); Li et al. 2025 (arXiv:2505.12082).
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # noqa: F401  # isort: skip (reports a package that is missing)

import torch

from checkpoint import huggingface, model_json, store
from checkpoint.model_json import read_model_config, refuse_adapters
from checkpoint.tensors import LazyTensor
from common.command_line import CommandParser
from common.errors import CheckpointError, local_path, run_script
from common.text import command, counted, show
from extensions.card import derived_card, run_and_step, write_card
from extensions.inference.weights import find_model, publish_model
from model import padded
from tokenizer import load_tokenizer


def mean(name: str, tensors: Sequence[LazyTensor], weights: Sequence[float]) -> LazyTensor:
    """Return the weighted mean of tensors, rounded once to the dtype of the first."""
    tensors = [huggingface.checked(name, tensor) for tensor in tensors]

    def read(start: int, stop: int) -> torch.Tensor:
        total = sum(weight * tensor.read(start, stop).double() for weight, tensor in zip(weights, tensors))
        return (total / sum(weights)).to(tensors[0].dtype)

    return replace(tensors[0], read=read)


def merge(folders: Sequence[Path], weights: Sequence[float], output: Path) -> None:
    """Write the weighted mean of model folders as a model folder."""
    store.check_new(output)
    for folder in folders:
        refuse_adapters(folder)
        store.verify_model(folder)
    models = [(read_model_config(folder), load_tokenizer(str(folder)), huggingface.load_model_weights(folder))
              for folder in folders]
    config, tokenizer, first = models[0]
    for folder, (other, its_tokenizer, tensors) in zip(folders, models):
        shapes = ({name: tensor.shape for name, tensor in each.items()} for each in (first, tensors))
        if other != config or not its_tokenizer.is_same(tokenizer.sha256) or next(shapes) != next(shapes):
            raise CheckpointError(f"{folder} and {folders[0]} are different models, or have different "
                                  "tokenizers; average only checkpoints of the same model")
    merged = {name: mean(name, [tensors[name] for _, _, tensors in models], weights) for name in first}
    state = huggingface.from_huggingface(merged, config, padded(tokenizer.vocab_size), finite=False)
    longest = model_json.context_length(model_json.read_model_json(folders[0] / "config.json"))
    sources = "\n".join(f"- {run_and_step(str(folder.resolve()))}, weight {weight:g}"
                        for folder, weight in zip(folders, weights))
    card = derived_card(output.name, folders[0], folders[0], f"The mean of these checkpoints:\n\n{sources}")
    publish_model(output, state, config, tokenizer, longest, lambda folder: write_card(folder, card))


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="runs, checkpoints or model folders")
    parser.add_argument("--weights", metavar="NUMBER,...", help="their weights (default: equal)")
    parser.add_argument("--output", type=local_path, required=True, metavar="FOLDER", help="new folder")
    args = parser.parse_args()
    try:
        weights = [*map(float, args.weights.split(","))] if args.weights else [1.0] * len(args.models)
    except ValueError:
        weights = []
    if len(weights) != len(args.models) or not all(0 < weight < float("inf") for weight in weights):
        parser.error(f"--weights needs {counted(len(args.models), 'positive number')}, separated by commas")
    merge([*map(find_model, args.models)], weights, args.output.expanduser())
    show(f"Averaged {counted(len(weights), 'checkpoint')} into {args.output}.",
         f"Generate text with it: {command('scripts/generate.py', args.output.expanduser())}")


if __name__ == "__main__":
    run_script(main)
