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
from common.text import command, show
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
    difference = merge(find_model(args.adapter), args.output.expanduser(), args.base,
                       DTYPES.get(args.dtype), write_merged_card)
    output = args.output.expanduser()
    next_step = "chat" if (output / "chat_template.jinja").exists() else "generate"
    show(f"Merged into {args.output}. In float32, its logits differ by at most {difference:.2g} from base "
         "and adapters; in bf16, where chat and generate use it, a greedy answer can differ.",
         f"Try it: {command(f'scripts/{next_step}.py', output)}")


if __name__ == "__main__":
    run_script(main)
