"""Add layers to a checkpoint, or widen its feed-forwards, without changing what it computes.

    python scripts/grow_checkpoint.py runs/first --layers 24 --ffn-dim 4096 \\
        --output models/grown
    ./paddock train --run-name grown --resume models/grown --max-steps 2000

GROW_LAYERS=16:24 and GROW_FFN_DIM=1024:4096 do the same at the start of a run, without a new folder. The
numbers of the new layers are printed; TRAIN_ONLY can train these layers alone. The optimizer's state is kept;
that of new parameters starts from zero. A run from the folder continues the schedule at its step.
"""

import json
import sys
from pathlib import Path
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # noqa: F401  # isort: skip (reports a package that is missing)

from checkpoint import huggingface, store
from checkpoint.tensors import TensorFile, write_files
from common.command_line import CommandParser
from common.errors import SettingsError, local_path, run_script
from common.text import ROOT, command, counted, show
from config import grown_layers
from extensions.card import derived_card, write_card
from model_utils import find_model, read_model_config
from scripts.prepare import free_run_name
from settings.load import load_config
from tokenizer import load_tokenizer


def grow(folder: Path, layers: Optional[int], ffn_dim: Optional[int], output: Path) -> list[int]:
    """Write the grown checkpoint, with the optimizer's state if it has one; return the new layers."""
    store.check_new(output)
    store.verify(folder) if store.read_state(folder) else store.verify_model(folder)
    old = read_model_config(folder)
    new = old.model_copy(update={"n_layers": layers or old.n_layers, "ffn_dim": ffn_dim or old.hidden_dim})
    if new.n_layers < old.n_layers or new.hidden_dim < old.hidden_dim or new == old:
        raise SettingsError(f"{folder} has {counted(old.n_layers, 'layer')} and feed-forwards of "
                            f"{old.hidden_dim}; set --layers to more, or --ffn-dim to a larger width")
    weights = huggingface.grown(huggingface.load_model_weights(folder), old, new)
    files = huggingface.weight_files(weights, new.head_dim)
    state, tokenizer = store.read_state(folder), load_tokenizer(str(folder))
    context = huggingface.context_length(huggingface.read_json(folder / "config.json"))
    all_files = dict(files)
    if state:
        state = huggingface.grown_state(state, new)
        moments = huggingface.grown(store.read_optimizer(folder), old, new, is_optimizer=True)
        all_files[store.OPTIMIZER] = TensorFile(moments, block_multiple=new.head_dim)

    def write(temporary: Path) -> dict[str, Any]:
        huggingface.save_settings(temporary, files, new, tokenizer, context)
        write_card(temporary, derived_card(output.name, folder, folder, (
            f"Grown from {old.n_layers} to {counted(new.n_layers, 'layer')}, and from feed-forwards of "
            f"{old.hidden_dim} to {new.hidden_dim}. Growing did not change the logits.")))
        if state:
            (temporary / store.STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        return write_files(temporary, all_files)

    sizes = [sum(tensor.nbytes for tensor in file.tensors.values()) for file in all_files.values()]
    step = state["progress"]["step"] if state else 0
    store.publish(output, write, {"step": step}, sum(sizes), max(sizes))
    return [place for place, (_, copy) in enumerate(grown_layers(old.n_layers, new.n_layers)) if copy]


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("model", help="a run, a checkpoint or a model folder")
    parser.add_argument("--layers", type=int, metavar="N", help="layers of the grown model (default: as now)")
    parser.add_argument("--ffn-dim", type=int, metavar="N",
                        help="width of its feed-forwards (default: as now)")
    parser.add_argument("--output", type=local_path, required=True, metavar="FOLDER", help="new folder")
    args = parser.parse_args()
    new = grow(find_model(args.model), args.layers, args.ffn_dim, args.output.expanduser())
    alone = f" --train-only {','.join(map(str, new))} trains only its new layers." if new else ""
    output, state = args.output.expanduser(), store.read_state(args.output.expanduser())
    line = f"Generate text with it: {command('scripts/generate.py', output)}"
    if state:  # its record has the settings
        longer = max(state["settings"]["MAX_STEPS"], 2 * state["progress"]["step"])
        script = "scripts/run.py" if Path.cwd() == ROOT else "train.py"  # run.py works in ROOT
        name = free_run_name(output.name, load_config(complete=False).config)
        flags = ("--run-name", name, "--resume", output, "--max-steps", str(longer))
        line = f"Train it: {command(script, *flags)}"
    show(f"The grown checkpoint is in {args.output}.{alone}", line)


if __name__ == "__main__":
    run_script(main)
