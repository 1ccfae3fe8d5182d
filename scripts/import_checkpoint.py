"""Import a Llama model from a Hugging Face folder, as a checkpoint to start training from.

    ./paddock import models/Llama-3.2-1B models/start
    ./paddock import meta-llama/Llama-3.2-1B models/start

PRETRAIN_CHECKPOINT accepts Hugging Face folders and names directly, but only an imported copy is verified at
each start. The folder must contain safetensors.
"""

import sys
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # noqa: F401  # isort: skip (reports a package that is missing)

from checkpoint import huggingface
from checkpoint.huggingface import read_model_json
from checkpoint.peft import refuse_adapters
from checkpoint.store import check_new, publish_model
from common.command_line import CommandParser
from common.errors import CheckpointError, local_path, run_script
from common.text import command, counted, show
from config import ModelConfig
from extensions.card import code, derived_card, hub_name_of, inherited, run_and_step, write_card
from model_utils import find_model
from tokenizer import load_tokenizer, read_generation


def import_checkpoint(source: Path, output: Path, tokenizer_path: Optional[str] = None) -> None:
    check_new(output)
    source = find_model(str(source))
    refuse_adapters(source)
    content, tensors = read_model_json(source / "config.json"), huggingface.load_model_weights(source)
    config = ModelConfig(**huggingface.model_settings_from_huggingface(content))
    max_seq_len = huggingface.context_length(content)
    state = huggingface.from_huggingface(tensors, config, huggingface.vocabulary_rows(tensors))
    tokenizer = load_tokenizer(tokenizer_path or str(source))
    tokenizer.generation = read_generation(source)
    rows = state["tok_embeddings.weight"].rows
    if tokenizer.vocab_size > rows:
        raise CheckpointError(f"the tokenizer has {tokenizer.vocab_size:,} ids, but the model only {rows:,}; "
                              "pass the model's own tokenizer with --tokenizer")
    if tokenizer.vocab_size < rows:
        dropped = counted(rows - tokenizer.vocab_size, "row")
        show(f"Dropping {dropped} at the end of the embedding, without a token.")

    def complete(folder: Path) -> None:
        digest = huggingface.weights_sha256(huggingface.load_model_weights(folder))
        name, rest = hub_name_of(str(source)), "Its card describes the data."
        if inherited(source):
            rest = "The sections below are from its card."
        where = f"[{name}](https://huggingface.co/{name})" if name else code(run_and_step(str(source)))
        write_card(folder, derived_card(output.name, source, source, (
            f"The weights of {where}, imported unchanged. {rest}\n\n"
            f"- context length: {max_seq_len:,} tokens\n- SHA-256 of the weights: {code(digest)}")))

    publish_model(output, state, config, tokenizer, max_seq_len, complete)


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("source", type=Path,
                        help="a Hugging Face folder or name, or a run")
    parser.add_argument("output", type=local_path, help="folder of the new checkpoint")
    parser.add_argument("--tokenizer", metavar="PATH",
                        help="the model's tokenizer (default: the one next to the weights)")
    args = parser.parse_args()
    import_checkpoint(args.source.expanduser(), args.output.expanduser(), args.tokenizer)
    show(f"Imported into {args.output}. Add to .env:", f"PRETRAIN_CHECKPOINT={args.output}",
         f"TOKENIZER_PATH={args.output}",
         f"Generate text with it: {command('scripts/generate.py', args.output.expanduser())}")


if __name__ == "__main__":
    run_script(main)
