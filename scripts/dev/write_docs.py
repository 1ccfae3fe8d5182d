"""Write .env.example and the generated tables of the documents; or those of a GPU into scripts/gpu/README.md.

    python scripts/dev/write_docs.py
    python scripts/dev/write_docs.py --gpu-results gpu_suite/results.jsonl
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import groupby, product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.command_line import CommandParser  # noqa: E402
from common.errors import DataError, PaddockError, run_script  # noqa: E402
from common.text import EXIT_UNREAD  # noqa: E402
from parallel.process import EXIT_PREEMPTED  # noqa: E402
from plan.command_line import describe_settings  # noqa: E402
from plan.layers import read_preset  # noqa: E402
from plan.names import validate  # noqa: E402
from scripts.gpu.suite import HEADER, PARTS, verdict  # noqa: E402

SET_FIRST = ("PRESET", "RUN_NAME", "TRAINING_STAGE", "PRETRAIN_DATA_PATH", "TOKENIZER_PATH", "MAX_STEPS",
             "LEARNING_RATE", "WANDB_ENABLED")  # at the top of .env.example


def env_example() -> str:
    lines = ["# Copy this file to .env and uncomment what should differ from the default. MAX_STEPS is",
             "# --max-steps as a flag. Empty values are ignored, and ${NAME} is expanded. Variables of",
             "# libraries (HF_TOKEN, WANDB_API_KEY, CUDA_VISIBLE_DEVICES, ...) may be set here too.",
             "#",
             "# Flags come first, then the environment, --config, --preset, this file, presets that this",
             "# file names, and defaults. A run that resumes keeps its recorded settings: safe ones,",
             "# MAX_STEPS and EPOCHS still come from here, others only from flags and the environment.",
             "", "", "# What most runs set"]
    first = sorted((line for line in describe_settings() if line.name in SET_FIRST),
                   key=lambda line: SET_FIRST.index(line.name))
    lines += [text for line in first for text in ("", f"# {line.meaning}", f"#{line.name}={line.default}")]
    lines += ["", "# accounts: the hub, and Weights & Biases", "#HF_TOKEN=", "#WANDB_API_KEY=",
              "#WANDB_PROJECT=paddock"]
    for section, settings in groupby(describe_settings(), key=lambda line: line.section):
        lines += ["", "", f"# {section}"]
        for _, name, default, meaning, _ in settings:
            lines += ["", f"# {meaning}", f"#{name}={default}"] if name not in SET_FIRST else []
    return "\n".join(lines) + "\n"


def table(*heading: str, rows: Iterable[Iterable[Any]]) -> list[str]:
    lines = [f"| {' | '.join(map(str, row))} |" for row in (heading, *rows)]
    return ["", lines[0], "|" + "---|" * len(heading), *lines[1:], ""]


SHOWN = {"safe": "", "content": ""}  # on resume: these need no explanation


def settings_tables() -> Iterator[str]:
    for section, settings in groupby(describe_settings(), key=lambda line: line.section):
        rows = ((f"`{name}`", f"`{default}`" * bool(default), cell(meaning), SHOWN.get(on_resume, on_resume))
                for _, name, default, meaning, on_resume in settings)
        yield from ("", f"## {section}", *table("setting", "default", "meaning", "on resume", rows=rows)[:-1])
    yield ""


def exit_codes() -> list[tuple[int, str]]:
    """The exit codes with their meanings, those of errors from common/errors.py."""
    meanings = {0: ["Finished, or nothing to do."], 1: ["An unexpected error."],
                130: ["A command other than training was interrupted by Ctrl-C."],
                EXIT_UNREAD: ["The reader of the output is gone, as with `head`."],
                EXIT_PREEMPTED: ["Training was stopped by a signal; its state is saved if it took steps.",
                                 "Another command was stopped by SIGTERM."]}
    for error in PaddockError.__subclasses__():
        meanings.setdefault(error.exit_code, []).append(error.__doc__)
    return [(code, " ".join(sentences)) for code, sentences in sorted(meanings.items())]


# In reading order: a training step, then the rest of the core by package.
STEP = ("train.py", "model.py", "dataloaders.py", "learn/objectives.py", "learn/optim.py", "parallel/fsdp.py",
        "checkpoint/store.py", "config.py")
NOT_CORE = ("data_pipeline", "extensions", "scripts")


def reading_order() -> list[tuple[str, str]]:
    """The files in reading order, with their lines rounded to 50."""
    def row_of(title: str, files: list[Path]) -> tuple[str, str]:
        return title, f"{50 * round(sum(len(file.read_text('utf-8').splitlines()) for file in files) / 50):,}"

    step = [ROOT / name for name in STEP]
    core, other = [file for file in sorted(ROOT.glob("*.py")) if file not in step], []
    rows = [row_of(f"{number}. `{name}`", [ROOT / name]) for number, name in enumerate(STEP, 1)]
    rows += [row_of("**a training step**", step), *(row_of(f"`{file.name}`", [file]) for file in core)]
    packages = {path.parent for path in ROOT.glob("*/__init__.py")}
    for folder in sorted(packages, key=lambda path: (path.name in NOT_CORE, path)):
        files = [file for file in sorted(folder.rglob("*.py")) if file not in step and file.stem[0] != "_"]
        names = ", ".join(f"`{file.relative_to(folder).with_suffix('')}`" for file in files)
        if folder.name not in NOT_CORE:
            core += files
            rows.append(row_of(f"`{folder.name}/`: {names}", files))
        elif folder.name != "scripts":
            other.append(row_of(f"`{folder.name}/`", files))
    return [*rows, row_of("**the core**", step + core), *other]


# Released models by their preset, with the ids of their own tokenizers.
MODELS = {"qwen3-0.6b": 151_936, "llama3.2-1b": 128_256, "qwen3-1.7b": 151_936, "smollm3-3b": 128_256,
          "llama3.2-3b": 128_256, "qwen3-4b": 151_936, "mistral-7b": 32_000, "llama3-8b": 128_256,
          "qwen3-8b": 151_936}
CARDS = (8, 12, 16, 24, 48, 80)  # GB
BF16 = {"weight_dtype": "bf16", "optimizer_dtype": "bf16"}
IN_BACKWARD = {"update_in_backward": True, "max_grad_norm": 0.0}  # a step is one micro-batch
METHODS = {"all weights": {}, "all weights, bf16": BF16, "all weights, bf16, in backward": BF16 | IN_BACKWARD,
           "LoRA": {"lora_enabled": True}, "QLoRA": {"lora_enabled": True, "lora_base_quantization": "nf4"}}


@cache
def largest_that_fits(preset: str, method: str, memory: int) -> tuple[int, int, str] | None:
    """The row length, rows and checkpointing with which SFT fits on one GPU of so many GB, as in --check.

    Longer rows come first, then less recomputation, then more rows.
    """
    from extensions.cost import estimate_memory  # imports torch

    config, _ = validate(read_preset(preset, "").values | {"training_stage": ("sft", "")})
    config = config.model_copy(update=METHODS[method] | {"sharding": "none", "async_save": False})
    for length, how, rows in product((4096, 2048, 1024), ("none", "selective", "block"), (8, 4, 2, 1)):
        changes = {"max_seq_len": length, "activation_checkpointing": how, "micro_batch_size": rows,
                   "total_batch_size": length * (rows if config.update_in_backward else 32)}
        tried = config.model_copy(update=changes)
        if estimate_memory(tried, MODELS[preset], 2).total <= memory * 1e9:
            return length, rows, how
    return None


def model_rows() -> Iterator[list[str]]:
    """What trains on which card, by model and method."""
    for preset, method in product(MODELS, METHODS):
        found = [largest_that_fits(preset, method, memory) for memory in CARDS]
        cells = (f"{each[0]:,} x {each[1]}{'' if each[2] == 'none' else f', {each[2]}'}" if each else "no"
                 for each in found)
        yield [f"`{preset}`", method, *cells]


def method_rows() -> Iterator[list[str]]:
    """The largest of MODELS that trains on each card with rows of 2,048 tokens, by method."""
    for method in METHODS:
        fitting = ([preset for preset in MODELS if (found := largest_that_fits(preset, method, memory))
                    and found[0] >= 2048] for memory in CARDS)
        yield [method, *(f"`{presets[-1]}`" if presets else "none" for presets in fitting)]


def result_tables() -> tuple[dict[str, list[str]], list[str]]:
    """The tables of docs/results.md by name, and that of the README: the rows with words for it."""
    columns = {"question": "question", "compared": "compared with", "answer": "Paddock", "runs": "runs",
               "verdict": "verdict"}
    groups = json.loads((ROOT / "docs/results.json").read_text("utf-8"))

    def of(rows: list[dict[str, str]], names: list[str]) -> list[str]:
        return table(*map(columns.get, names), rows=([cell(row[name]) for name in names] for row in rows))

    marked = [row | row["readme"] for group in groups.values() for row in group["rows"] if "readme" in row]
    tables = {}
    for name, group in groups.items():
        tables[name] = [*of(group["rows"], list(columns)), f"With `{group['command']}`, {group['date']}.", ""]
    return tables, of(marked, ["question", "compared", "answer", "verdict"])


ABOUT = {"resume": "Crashes and resuming", "start": "Starting a run", "files": "Checkpoints and files",
         "ranks": "Several ranks", "training": "Training, data and tokenizers",
         "pages": "Report, server and secrets"}


def promises() -> Iterator[str]:
    """The rows of tests/promises.json, each with its tests, whose names are sentences, under headings."""
    def sentence(test: str) -> str:
        file, _, name = test.partition("::test_")
        return f"`{file}`" + f": {name.replace('_', ' ')}" * bool(name)

    found = json.loads((ROOT / "tests/promises.json").read_text("utf-8")).items()
    for about, heading in ABOUT.items():
        rows = ((number, each["fault"], each["result"], "<br>".join(map(sentence, each["tests"])))
                for number, each in found if each["about"] == about)
        yield from ("", f"## {heading}", *table("", "fault", "result", "tests", rows=rows)[:-1])
    yield ""


def generated() -> dict[str, str]:
    """The text of .env.example and of each page with generated tables, which stand between comments."""
    pages = {"architecture": {"lines": table("read", "lines", rows=reading_order())},
             "settings": {"settings": settings_tables()},
             "files": {"exit codes": table("code", "meaning", rows=exit_codes())}}
    parts = ((part.name, part.group, f"{part.seconds:.0f} s", part.content) for part in PARTS)
    pages["../scripts/gpu/README"] = {"parts": table("part", "group", "time limit", "content", rows=parts)}
    cards = [f"{memory} GB" for memory in CARDS]
    pages["gpu"] = {"cards": table("trained", *cards, rows=method_rows()),
                    "models": table("model", "trained", *cards, rows=model_rows())}
    pages["promises"] = {"promises": promises()}
    pages["results"], in_readme = result_tables()
    pages["../README"] = {"results": in_readme}
    texts = {os.path.normpath(f"docs/{page}.md"): with_tables(page, tables) for page, tables in pages.items()}
    return {".env.example": env_example(), **texts}


def with_tables(page: str, tables: dict[str, Iterable[str]]) -> str:
    """The text of a page of docs/ with these lines between the comments that have their names."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    for name, lines in tables.items():
        (before, _), (_, after) = (text.split(f"<!-- {mark}{name} -->") for mark in ("", "/"))
        text = "\n".join((f"{before}<!-- {name} -->", *lines, f"<!-- /{name} -->{after}"))
    return text


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def found(records: list[dict[str, Any]]) -> list[str]:
    """Return the tables of the last result of each part, for the device and commit of the last header."""
    machine: dict[str, Any] = {}
    last: dict[str, dict[str, Any]] = {}
    for record in records:
        if record["part"] == HEADER:
            now = record["figures"]
            if any(now.get(name) != machine.get(name) for name in ("device", "commit", "torch")):
                last.clear()
            machine = now
        else:
            last[record["part"]] = record
    if "capability" not in machine:
        device = machine.get("device", "an unknown device")
        raise DataError(f"--gpu-results: these are results of {device}, and scripts/gpu/README.md is about a "
                        "GPU; give those of bash scripts/gpu_suite.sh --device cuda")
    shown = [last[part.name] for part in PARTS if part.name in last]
    rows = ((record["part"], verdict(record), f"{record['seconds']:.0f}", cell(record["error"] or ""))
            for record in shown)
    facts = ((cell(name), written(value)) for name, value in machine.items())
    lines = ["", "Results of `scripts/gpu_suite.sh`.", *table("", "", rows=facts),
             "## Parts", *table("part", "result", "s", "error", rows=rows)]
    for record in shown:
        lines += [f"## {record['part']}", *figures_of(record["figures"])] if record["figures"] else []
    return lines


def figures_of(figures: dict[str, Any]) -> list[str]:
    """Return the tables of a part: comparisons side by side, single figures, the profiler's rows."""
    lines: list[str] = []
    several = [(name, value) for name, value in figures.items() if isinstance(value, dict)]
    by_columns: dict[tuple, list[tuple[str, dict]]] = {}
    for name, value in several:
        columns = tuple(key for key, entry in value.items() if not isinstance(entry, list))
        # A row with fewer figures goes where all of them have a column.
        fitting = next((known for known in by_columns if set(columns) <= set(known)), columns)
        by_columns.setdefault(fitting, []).append((name, value))
    for columns, rows in by_columns.items():
        cells = [[cell(name), *(written(value.get(key, "")) for key in columns)] for name, value in rows]
        lines += table("", *map(cell, columns), rows=cells)
    if single := [(name, value) for name, value in figures.items() if not isinstance(value, dict)]:
        lines += table("figure", "value", rows=((cell(name), written(value)) for name, value in single))
    for name, value in several:
        if profile := value.get("profile"):
            rows = [(f"{row['ms']:.3f}", f"{row['share']:.1%}", row["calls"], f"`{cell(row['name'])}`")
                    for row in profile]
            lines += [f"First rows of the profiler, {name}:", *table("ms", "share", "calls", "", rows=rows)]
    return lines


def written(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else cell(str(value))


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--gpu-results", type=Path, metavar="FILE", help="results.jsonl of gpu_suite.sh")
    results = parser.parse_args().gpu_results
    if results:
        try:
            records = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as error:
            raise DataError(f"--gpu-results {results} cannot be read: {error}") from error
        page = with_tables("../scripts/gpu/README", {"results": found(records)})
        (ROOT / "scripts/gpu/README.md").write_text(page, "utf-8")
    for path, text in generated().items():
        (ROOT / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    run_script(main)
