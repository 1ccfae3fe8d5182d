"""Merge LoRA adapters into their base model and write a Hugging Face model folder.

    ./paddock export runs/my-run --to merged --output models/merged
    ./paddock export ADAPTER --to merged --base models/start --output FOLDER

The adapters can come from Paddock or PEFT. The folder is created only after the merged model's logits have
been compared with those of base and adapters.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # noqa: F401  # isort: skip (reports a package that is missing)

from common.command_line import CommandParser
from common.errors import local_path, run_script
from common.text import command, show, status_line
from extensions.card import write_merged_card
from extensions.inference.weights import find_model, merge
from model_utils import DTYPES


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("adapter", help="a LoRA run, one of its checkpoints, or a PEFT folder")
    parser.add_argument("--base", metavar="MODEL",
                        help="the adapters' base model (default: as in training)")
    parser.add_argument("--output", type=local_path, required=True, metavar="FOLDER",
                        help="folder of the merged model")
    parser.add_argument("--dtype", choices=DTYPES,
                        help="dtype of the merged weights (default: the base's)")
    args = parser.parse_args()
    folder, output = find_model(args.adapter), args.output.expanduser()
    with status_line(lambda: f"merging into {output.name}, and comparing the two"):
        difference = merge(folder, output, args.base, DTYPES.get(args.dtype), write_merged_card)
    next_step = "chat" if (output / "chat_template.jinja").exists() else "generate"
    show(f"Merged into {args.output}. In float32, its logits differ by at most {difference:.2g} from base "
         "and adapters; chat and generate may compute in bf16, where a greedy answer can differ.",
         f"Try it: {command(f'scripts/{next_step}.py', output)}")


if __name__ == "__main__":
    run_script(main)
