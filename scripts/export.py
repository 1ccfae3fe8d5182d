"""Export a model as a folder, with merged adapters, as GGUF, or to the Hugging Face hub.

    ./paddock export first --to hf --output models/first
    ./paddock export lora --to merged --output models/merged
    ./paddock export first --to gguf --type q8_0 --output first.gguf
    ./paddock export first --to hub OWNER/NAME --dry-run

hf copies a checkpoint without the files that only resuming needs. The weights get the dtype of the model that
training began with, or --dtype. Checkpoints and their copies load in `transformers` and PEFT without
conversion. hub uploads the same files as one commit; a new repository is private unless you add --public,
which requires a license in the model card. --dry-run only checks and lists the files. For the flags of the
other formats, run `./paddock export --to merged --help` or `./paddock export --to gguf --help`.
"""

import argparse
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import common  # noqa: F401  # isort: skip (reports a package that is missing)
from common import errors, interrupts  # noqa: E402
from common.command_line import CommandParser  # noqa: E402
from common.errors import run_script  # noqa: E402
from common.text import PROGRAM, aligned, command, counted, show  # noqa: E402

SCRIPTS = {"merged": "merge_lora.py", "gguf": "convert_to_gguf.py"}
ADAPTERS = "adapter_config.json"


def parse_args() -> argparse.Namespace:
    """Return the flags of hf and hub; for merged and gguf, replace this process with their script."""
    target = CommandParser(__doc__, add_help=False, allow_abbrev=False)
    target.add_argument("--to", choices=("hf", "hub", *SCRIPTS))
    known, flags = target.parse_known_args()
    if known.to in SCRIPTS:
        os.environ["PADDOCK_COMMAND"] = f"{PROGRAM} export --to {known.to}"
        script = str(Path(__file__).with_name(SCRIPTS[known.to]))
        interrupts.become(script, *flags)
    parser = CommandParser(__doc__, allow_abbrev=False)
    parser.add_argument("model", help="a run, a checkpoint, or a Hugging Face folder or name")
    parser.add_argument("name", nargs="?", metavar="OWNER/NAME", help="repository, for --to hub")
    parser.add_argument("--to", choices=("hf", "merged", "gguf", "hub"), required=True, help="format")
    parser.add_argument("--output", type=errors.local_path, metavar="FOLDER", help="new folder, for --to hf")
    parser.add_argument("--repo", metavar="OWNER/NAME", help="the same, as a flag")
    parser.add_argument("--public", action="store_true", help="make a new repository public, for --to hub")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"),
                        help="dtype of the weights (default: that of the model that training began with)")
    parser.add_argument("--dry-run", action="store_true", help="only list what --to hub would upload")
    args = parser.parse_intermixed_args()
    if args.dry_run and args.to != "hub":
        parser.error("--dry-run requires --to hub")
    args.repo = args.repo or args.name
    needed, flag = {"hf": ("output", "--output"), "hub": ("repo", "OWNER/NAME")}[args.to]
    if not getattr(args, needed) or (args.name and (args.to == "hf" or args.repo != args.name)):
        parser.error(f"--to {args.to} requires one {flag}")
    return args


def cast_weights(folder: Path, files: list[str], asked: Optional[str]) -> dict[str, Any]:
    """Return the files of a model's weights in the dtype of the export; none if they have it already."""
    from checkpoint.huggingface import load_model_weights, weight_files
    from checkpoint.store import read_state
    from checkpoint.tensors import LazyTensor
    from extensions.inference.weights import export_dtype, refuse_other_model, rounded
    from model_utils import DTYPES

    if ADAPTERS in files:
        if asked:
            raise errors.SettingsError("--dtype is for whole models, and these are adapters; remove it, or "
                                       "use --to merged")
        refuse_other_model(folder)
        return {}
    if not asked and not read_state(folder).get("base_dtype"):
        return {}
    tensors, dtype = load_model_weights(folder), DTYPES.get(asked) or export_dtype(folder)
    if all(tensor.dtype == dtype for tensor in tensors.values()):
        return {}
    reason = "" if asked else ", as of the model that training began with; --dtype chooses another"
    show(f"The weights are exported in {str(dtype).removeprefix('torch.')}{reason}.")

    def cast(name: str, tensor: LazyTensor) -> LazyTensor:
        return replace(tensor, dtype=dtype, read=lambda *rows: rounded(name, tensor.read(*rows), dtype))

    return weight_files({name: cast(name, tensor) for name, tensor in tensors.items()})


def copy_model(source: Path, sizes: dict[str, int], output: Path, weights: dict[str, Any]) -> None:
    """Copy the model's files into a new folder with a manifest, atomically, perhaps with cast weights."""
    from checkpoint.huggingface import save_index
    from checkpoint.model_json import read_model_json, write_json
    from checkpoint.store import check_new, publish
    from checkpoint.tensors import write_files

    check_new(output)
    tensors = {name: tensor for file in weights.values() for name, tensor in file.tensors.items()}

    def write(folder: Path) -> dict[str, dict[str, Any]]:
        for name in sizes.keys() - weights:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, folder / name)
        if weights:
            save_index(folder, weights, tensors)
            dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
            config = read_model_json(source / "config.json")
            write_json(folder / "config.json", {**config, "dtype": dtype, "torch_dtype": dtype})
        return write_files(folder, weights)

    publish(output, write, {"step": 0}, sum(sizes.values()))


def check_card(source: Path, public: bool) -> None:
    """Raise CheckpointError without a model card, or for a public upload without a license in it."""
    from extensions.card import card_metadata, read_card

    card = read_card(source)
    if not card.strip():
        raise errors.CheckpointError(f"{source} has no model card; write one, README.md, in this folder")
    known = card_metadata(card).get("license", "unknown") != "unknown"
    if public and not known:
        raise errors.CheckpointError(f"{source / 'README.md'} names no license, so the model stays private; "
                                     "replace `license: unknown` there, or leave out --public")


def upload(source: Path, files: list[str], repo: str, public: bool) -> str:
    """Upload the model's files to the hub as one commit; return its URL."""
    from common.remote import first_line, status_of

    with errors.requires_package("huggingface_hub", "--to hub"):
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.errors import HFValidationError
    advice = "set HF_TOKEN, in .env or the environment, to a token with write access"
    if not get_token():
        raise errors.SettingsError(f"--to hub requires a token; {advice}")
    try:
        api = HfApi()
        api.create_repo(repo, private=not public, exist_ok=True)
        commit = api.upload_folder(repo_id=repo, folder_path=source, allow_patterns=files,
                                   commit_message=f"Upload {source.name}")
    except HFValidationError as error:
        raise errors.SettingsError(f"--repo {repo}: {first_line(error)}") from error
    except Exception as error:  # the class depends on huggingface_hub's version
        again = "run the command again; uploaded files are not uploaded twice"
        if code := status_of(error):
            raise errors.SettingsError(f"the hub refused to upload to {repo} (HTTP {code}); "
                                f"{advice if code in (401, 403) else again}") from error
        raise errors.PaddockError(f"cannot reach the hub ({first_line(error)}); {again}") from error
    return str(commit.commit_url)


def main() -> None:
    args = parse_args()
    from checkpoint.store import MANIFEST, OPTIMIZER, STATE, verify_model
    from extensions.card import read_card
    from extensions.inference.weights import find_model
    from plan.command_line import export
    from plan.make import make_plan

    export(make_plan(complete=False))  # HF_TOKEN
    folder = find_model(args.model)
    verify_model(folder)
    excluded = (MANIFEST, OPTIMIZER, STATE)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*")
                   if path.is_file() and path.name not in excluded and not path.name.startswith("."))
    if pickled := [name for name in files if name.endswith((".bin", ".pt", ".pth", ".distcp"))]:
        show(f"Leaving out pickled files of another trainer: {', '.join(pickled)}")
        files = [name for name in files if name not in pickled]
    script = f"scripts/{'chat' if 'apply_chat_template' in read_card(folder) else 'generate'}.py"
    weights = cast_weights(folder, files, args.dtype)
    sizes = {name: (folder / name).stat().st_size for name in files
             if not (weights and name.endswith(".safetensors"))}
    sizes |= {name: file.nbytes for name, file in weights.items()}
    if args.to == "hub":
        check_card(folder, args.public)
        if args.dry_run:
            visibility, flags = ("public", ["--public"]) if args.public else ("private", [])
            line = command("scripts/export.py", args.model, "--to", "hub", args.repo, *flags)
            return show(f"Would upload {counted(len(sizes), 'file')}, {sum(sizes.values()):,} bytes, from "
                        f"{folder} to {args.repo} ({visibility} if it is new):",
                        *aligned([(name, f"{size:,} bytes") for name, size in sizes.items()]),
                        f"To upload them: {line}")
        with tempfile.TemporaryDirectory() as place:
            if weights:
                copy_model(folder, sizes, Path(place) / folder.name, weights)
                folder = Path(place) / folder.name
            url = upload(folder, [*sizes], args.repo, args.public)
        return show(f"Uploaded: {url}", f"Try it: {command(script, args.repo)}")
    copy_model(folder, sizes, args.output.expanduser(), weights)
    kind = "PEFT adapters" if ADAPTERS in files else "Hugging Face model"
    show(f"Exported to {args.output} ({kind}, {counted(len(sizes) + 1, 'file')} with {MANIFEST}).",
         f"Try it: {command(script, args.output.expanduser())}")


if __name__ == "__main__":
    run_script(main)
