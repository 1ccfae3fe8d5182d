"""Take two steps with what docs/gpu.md names for each card, on a null GPU with that much memory (build.sh).

    FOLDER/run python scripts/gpu/null/cards.py --output RESULTS

For each method and card, the largest model must take them, within 2 % of the forecast. The next larger one,
with one row of 2,048 tokens and all activations recomputed, should run out of memory: if it does not, the
forecast is too careful there. Weights are zeros that need no disk and no host memory. The exit code is 1 if
a model that is named does not run, or if its forecast is off.
"""

import json
import re
import sys
from math import prod
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from common.command_line import CommandParser  # noqa: E402
from common.errors import run_script  # noqa: E402
from data_preparation_utils import PreparationOptions, prepare_set  # noqa: E402
from plan.layers import read_preset  # noqa: E402
from plan.names import validate  # noqa: E402
from scripts.dev.write_docs import CARDS, METHODS, MODELS, largest_that_fits  # noqa: E402
from scripts.gpu.parts import Task  # noqa: E402

BEGIN, END = "<|begin|>", "<|end|>"
TEMPLATE = ("{{ bos_token }}{% for each in messages %}{% if each.role == 'assistant' %}{% generation %}"
            "{{ each.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ each.content }}{% endif %}\n"
            "{% endfor %}")
PER_CENT = 2
SHORTEST = (2048, 1, "block")
LARGE_DISK = "import shutil, types\nshutil.disk_usage = lambda path: types.SimpleNamespace(free=2**50)"


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def make_tokenizer(folder: Path, size: int) -> Path:
    """Write a tokenizer of bytes, with as many ids as the model's own."""
    from tokenizers.pre_tokenizers import ByteLevel

    words = [BEGIN, END, *sorted(ByteLevel.alphabet())]
    words += [f"unused {number}" for number in range(len(words), size)]
    special = [{"id": number, "content": word, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True} for number, word in enumerate((BEGIN, END))]
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    write(folder / "tokenizer.json", {
        "version": "1.0", "added_tokens": special, "pre_tokenizer": by_bytes, "decoder": by_bytes,
        "model": {"type": "BPE", "vocab": {word: number for number, word in enumerate(words)}, "merges": []}})
    write(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BEGIN, "eos_token": END,
        "chat_template": TEMPLATE})
    return folder


def make_model(folder: Path, preset: str) -> Path:
    """Write a model of zeros in bf16, whose file has no blocks on the disk."""
    from checkpoint.huggingface import huggingface_name
    from checkpoint.model_json import huggingface_config

    vocab = MODELS[preset]
    if not (folder / "model.safetensors").exists():
        config, _ = validate(read_preset(preset, "").values)
        make_tokenizer(folder, vocab)
        write(folder / "config.json", huggingface_config(config, vocab, 8192, 0, 1, "bfloat16"))
        header, end = {}, 0
        for name, shape in config.parameter_shapes(vocab).items():
            start, end = end, end + 2 * prod(shape)
            header[huggingface_name(name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        with open(folder / "model.safetensors", "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(file.tell() + end)
    return folder


def prepared(folder: Path, vocab: int) -> Path:
    """Prepare chats for a tokenizer of that size. Nearly all tokens are targets, as the forecast assumes."""
    output = folder / f"chats-{vocab}"
    if not output.exists():
        tokenizer = make_tokenizer(folder / f"tokenizer-{vocab}", vocab)
        chats = [{"messages": [{"role": "user", "content": str(number)},
                               {"role": "assistant", "content": "abcdefghi" * 110}]}
                 for number in range(1000)]
        source = folder / "chats.jsonl"
        source.write_text("".join(f"{json.dumps(chat)}\n" for chat in chats), encoding="utf-8")
        options = PreparationOptions(str(tokenizer), "auto", 100_000_000, None)
        prepare_set("chats", str(source), output, options)
    return output


def memory_of(task: Task, preset: str, method: str, memory: int, how: tuple[int, int, str]
              ) -> tuple[float, float]:
    """Return forecast and peak GiB of two steps of SFT on a card of so many GB; 0 if memory runs out."""
    (length, rows, recomputed), changes = how, METHODS[method]
    settings: dict[str, Any] = {
        "preset": preset, "training_stage": "sft", "device": "cuda", "max_seq_len": length,
        "micro_batch_size": rows, "activation_checkpointing": recomputed, "async_save": False,
        "sharding": "none",
        "total_batch_size": length * rows * (1 if changes.get("update_in_backward") else 2),
        "sft_data_path": prepared(task.folder, MODELS[preset]),
        "output_dir": task.runs, "run_name": re.sub(r"\W+", "-", f"{preset} {method} {memory}"),
        "learning_rate": 1e-5, "warmup_steps": 0, "max_steps": 3, "drift_check_every": 0, "report": False,
        **changes}
    settings |= dict.fromkeys(("validate_every", "hellaswag_every", "sample_every", "save_every"), 0)
    if "lora_enabled" in changes:
        base = make_model(task.folder / "models" / preset, preset)
        settings |= {"pretrain_checkpoint": base, "lora_train_tokens": "none"}
    else:
        settings |= {"random_init": True, "tokenizer_path": task.folder / f"tokenizer-{MODELS[preset]}"}
    texts = {name: str(value).lower() if isinstance(value, bool) else value
             for name, value in settings.items()}
    flags = (f"--{name.replace('_', '-')}={text}" for name, text in texts.items())
    env = {"NULL_MIB": str(memory * 1024), "NULL_STEPS": "2", "NULL_HOLDS": "0"}
    code, output = task.train(*flags, prelude=LARGE_DISK, env=env)
    peaks = [int(line.split()[2]) for line in output.splitlines() if line.startswith("NULL peak")]
    if code and "out of memory" not in output:
        task.note(fault=f"{preset}, {method}, {memory} GB: exit code {code}")
        raise RuntimeError(f"{preset}, {method}: exit code {code}")
    if code:
        return 0, 0
    record = json.loads((task.runs / settings["run_name"] / "config.json").read_text("utf-8"))
    return record["memory_forecast_gib"], max(peaks) / 2**30


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER",
                        help="for the models, chats, runs and table")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS], metavar="METHOD",
                        help=f"of {', '.join(METHODS)}")
    parser.add_argument("--cards", nargs="+", type=int, choices=CARDS, default=CARDS, metavar="GB",
                        help=f"of {', '.join(map(str, CARDS))}")
    options = parser.parse_args()
    folder = options.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    task = Task("cards", "cuda", False, folder, 3600, folder / "figures.jsonl")
    lines = ["| trained | card | model | rows | forecast GiB | allocated GiB | the next larger one |",
             "|---|---|---|---|---|---|---|"]
    faults = 0
    for method in options.methods:
        for memory in options.cards:
            ways = {preset: largest_that_fits(preset, method, memory) for preset in MODELS}
            fitting = [preset for preset, how in ways.items() if how and how[0] >= SHORTEST[0]]
            larger = [*MODELS][[*MODELS].index(fitting[-1]) + 1 if fitting else 0:][:1]
            cells = [method, f"{memory} GB"]
            for preset in fitting[-1:]:
                length, rows, recomputed = ways[preset]
                forecast, peak = memory_of(task, preset, method, memory, ways[preset])
                faults += not peak or abs(forecast / peak - 1) > PER_CENT / 100
                cells += [f"`{preset}`", f"{length:,} x {rows}, {recomputed}", f"{forecast:.2f}",
                          f"{peak:.2f}" if peak else "out of memory"]
            cells += ["none", "", "", ""] * (not fitting)
            for preset in larger:
                _, peak = memory_of(task, preset, method, memory, SHORTEST)
                cells += [f"`{preset}`: " + (f"{peak:.2f} GiB, runs" if peak else "out of memory")]
            lines.append(f"| {' | '.join(cells)}{'' if larger else ' | '} |")
            (folder / "cards.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines), flush=True)
    sys.exit(bool(faults))


if __name__ == "__main__":
    run_script(main)
