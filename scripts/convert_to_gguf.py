"""Convert a model to GGUF for llama.cpp and Ollama, using llama.cpp's converter.

    git clone --depth 1 https://github.com/ggml-org/llama.cpp
    pip install transformers sentencepiece
    ./paddock export runs/first --to gguf --llama-cpp llama.cpp \\
        --output first.gguf

llama.cpp's converter identifies a tokenizer by a hash of its output and rejects unknown ones. This script
makes it accept a tokenizer that you trained, if that splits text like Llama 3's.
"""

import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # noqa: F401  # isort: skip (reports a package that is missing)

from checkpoint.huggingface import read_json
from checkpoint.peft import refuse_adapters
from common.command_line import CommandParser
from common.errors import CheckpointError, local_path, requires_package, run_script
from common.text import show
from model_utils import find_model
from tokenizer import PATTERN

CONVERTER = "convert_hf_to_gguf.py"
LLAMA_3 = "llama-bpe"  # llama.cpp's name for Llama 3's pre-tokenizer


def splits_as_llama_3(tokenizer: dict[str, Any]) -> bool:
    """Return True if a tokenizer.json splits text like Llama 3's, and keeps pieces that are tokens."""
    before, model = tokenizer.get("pre_tokenizer") or {}, tokenizer.get("model") or {}
    patterns = [step.get("pattern", {}).get("Regex") for step in before.get("pretokenizers", [before])
                if step.get("type") == "Split"]
    return patterns == [PATTERN] and model.get("ignore_merges") is True


def convert(folder: Path, llama_cpp: Path, output: Path, dtype: str) -> None:
    if not (llama_cpp / CONVERTER).is_file():
        raise CheckpointError(f"{llama_cpp} contains no {CONVERTER}; clone "
                              "https://github.com/ggml-org/llama.cpp and pass its folder as --llama-cpp")
    if output.exists():
        raise CheckpointError(f"{output} already exists; choose a new file")
    refuse_adapters(folder)
    tokenizer = read_json(folder / "tokenizer.json")
    if not (tokenizer.get("model") or {}).get("merges"):
        raise CheckpointError(f"{folder / 'tokenizer.json'} has no merges, which llama.cpp requires; train a "
                              "tokenizer with a larger vocabulary")
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    for package in ("transformers", "sentencepiece"):
        with requires_package(package, CONVERTER):
            import_module(package)
    text_model = import_module("conversion.base").TextModel
    if splits_as_llama_3(tokenizer):
        text_model.get_vocab_base_pre = lambda *_: LLAMA_3
    sys.argv = [CONVERTER, str(folder), "--outfile", str(output), "--outtype", dtype]
    runpy.run_path(str(llama_cpp / CONVERTER), run_name="__main__")


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("model", help="a run, a checkpoint, or a Hugging Face folder or name")
    parser.add_argument("--llama-cpp", type=local_path, required=True, metavar="FOLDER",
                        help="folder of a llama.cpp clone")
    parser.add_argument("--output", type=local_path, required=True, metavar="FILE",
                        help=".gguf file to write")
    parser.add_argument("--dtype", choices=("f32", "f16", "bf16", "q8_0"), default="f16",
                        help="dtype of the matrices (default: %(default)s)")
    args = parser.parse_args()
    convert(find_model(args.model), args.llama_cpp.expanduser(), args.output.expanduser(), args.dtype)
    show(f"{args.output} is ready. In llama.cpp: llama-cli -m {args.output}",
         f"For Ollama, write in a Modelfile: FROM ./{args.output.name}")


if __name__ == "__main__":
    run_script(main)
