"""Write .env.example, docs/settings.md and the reading order of docs/architecture.md; or docs/gpu.md.

    python scripts/dev/write_docs.py
    python scripts/dev/write_docs.py --gpu-results gpu_suite/results.jsonl
"""

import json
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.command_line import CommandParser  # noqa: E402
from common.errors import DataError, run_script  # noqa: E402
from scripts.gpu.suite import HEADER, MINUTES, PARTS, verdict  # noqa: E402
from settings.load import describe_settings  # noqa: E402

SETTINGS_HEAD = """# Settings

Generated from `config.py` by `python scripts/dev/write_docs.py`.

`MAX_STEPS` in `.env` and the environment is `--max-steps` as a flag and `max_steps` in JSON (`--config
FILE.json`). Later sources override earlier ones: defaults, `DEPTH`, `.env`, preset, JSON, environment,
flags. A preset named in `.env` itself (`PRESET=`) has lower priority than the rest of `.env`. A run prints
what a preset overrides and what comes from the environment. Presets are `.env` files in `settings/presets/`
and can be combined: `--preset llama3.2-1b,stable`. An unknown name is an error that suggests the nearest
known one.

`.env` can also set variables of libraries (`HF_HOME`, `WANDB_MODE`, `NCCL_DEBUG`, `CUDA_VISIBLE_DEVICES`,
`OMP_NUM_THREADS`, ...); the environment overrides them. torchrun sets `OMP_NUM_THREADS=1` for several ranks,
`scripts/launch.py` does not. `${HOME}` is expanded. `PYTORCH_ALLOC_CONF` is `expandable_segments:True`
unless you set it.

A setting that you do not give takes its value from what is known: a resumed run keeps the values that it
recorded, the stages sft and dpo have their own learning rate, batch and length (`EPOCHS`), and
`TOKENIZER_PATH` comes from the prepared data or the start checkpoint. The run prints each of these values.

The last column shows what happens if a run resumes with another value. A *safe* setting can change freely.
A *curve* setting changes the loss curve from there on and causes a warning. Changing a *fixed* setting is an
error unless `ALLOW_RESUME_MISMATCH` lists it, because it would make a different run."""


def env_example() -> str:
    """Return the text of .env.example: every setting, commented out, with its default and meaning."""
    lines = ["# Copy this file to .env and uncomment what should differ from the default. .env overrides a",
             "# preset that it names. Other presets, the environment and flags override .env. MAX_STEPS is",
             "# --max-steps as a flag. Empty values are ignored, and ${NAME} is expanded. Variables of",
             "# libraries (HF_HOME, WANDB_MODE, NCCL_DEBUG, CUDA_VISIBLE_DEVICES, ...) may be set here too."]
    for section, settings in groupby(describe_settings(), key=lambda line: line.section):
        lines += ["", "", f"# {section}"]
        for _, name, default, meaning, _ in settings:
            lines += ["", f"# {meaning}", f"#{name}={default}"]
    return "\n".join(lines) + "\n"


def settings_page() -> str:
    """Return the text of docs/settings.md: a table of settings for each section."""
    lines = [SETTINGS_HEAD]
    for section, settings in groupby(describe_settings(), key=lambda line: line.section):
        lines += ["", f"## {section}", "", "| setting | default | meaning | on resume |", "|---|---|---|---|"]
        lines += [f"| `{name}` | {f'`{default}`' if default else ''} | {cell(meaning)} | {on_resume} |"
                  for _, name, default, meaning, on_resume in settings]
    return "\n".join(lines) + "\n"


CHAPTERS = ("train", "model", "dataloaders", "tokenizer", "data_preparation_utils", "model_utils", "lora",
            "hellaswag_utils", "config")
BEGIN, END = "<!-- lines -->\n", "<!-- /lines -->"


def with_reading_order(page: str) -> str:
    """Return docs/architecture.md with its table of files and their lines, rounded to 50, as they are now."""
    def lines_of(files: Iterable[Path]) -> int:
        return 50 * round(sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) / 50)

    chapters = [ROOT / f"{name}.py" for name in CHAPTERS]
    packages = sorted(path.parent for path in ROOT.glob("*/__init__.py") if path.parent.name != "scripts")
    rows = [(f"{number}. `{path.name}`", [path]) for number, path in enumerate(chapters, 1)]
    rows += [("**chapters**", chapters)]
    rows += [(f"`{folder.name}/`: {', '.join(f'`{file.stem}`' for file in sorted(folder.glob('[!_]*.py')))}",
              folder.glob("*.py")) for folder in packages]
    rows += [("**packages**", [file for folder in packages for file in folder.glob("*.py")])]
    table = "".join(f"| {name} | {lines_of(files):,} |\n" for name, files in rows)
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}| read | lines |\n|---|---|\n{table}{END}{rest.partition(END)[2]}"


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


NEVER_RUN = """Nothing of Paddock has been run on a GPU yet. After the suite has run on one, this page
lists the device, the versions, the commit, the errors, and every measurement."""
HOW_IT_RUNS = """Each of the two takes less than ten minutes on one H200 and needs no network. `--parts` also
accepts names. Each part is a process with a time limit, and a failure does not stop the others.
`bash scripts/gpu_suite.sh --device cpu --tiny` runs the code of every part at toy size."""


def gpu_page(records: list[dict[str, Any]]) -> str:
    """Return the text of docs/gpu.md: what the suite found last, if it has been run, and how to run it."""
    lines = ["# GPU suite", "", *(found(records) if records else [NEVER_RUN]), "",
             "## How to run it", "", "```",
             *(f"bash scripts/gpu_suite.sh --device cuda --parts {group}" for group in MINUTES),
             "python scripts/dev/write_docs.py --gpu-results gpu_suite/results.jsonl",
             "```", "", HOW_IT_RUNS, "",
             "| part | group | time limit | content |", "|---|---|---|---|",
             *(f"| {part.name} | {part.group} | {part.seconds:.0f} s | {part.what} |" for part in PARTS)]
    return "\n".join(lines) + "\n"


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
        raise DataError(f"--gpu-results: these are results of {device}, and docs/gpu.md is about a GPU; give "
                        "those of bash scripts/gpu_suite.sh --device cuda")
    shown = [last[part.name] for part in PARTS if part.name in last]
    lines = ["Results of `scripts/gpu_suite.sh`.", "", *table_of(machine, ("", "")), "", "## Parts", "",
             "| part | result | s | error |", "|---|---|---|---|"]
    for record in shown:
        error = cell(record["error"] or "")
        lines.append(f"| {record['part']} | {verdict(record)} | {record['seconds']:.0f} | {error} |")
    for record in shown:
        if record["figures"]:
            lines += ["", f"## {record['part']}", *figures_of(record["figures"])]
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
        lines += ["", f"| | {' | '.join(map(cell, columns))} |", "|---|" + "---|" * len(columns)]
        lines += [f"| {cell(name)} | {' | '.join(written(value.get(column, '')) for column in columns)} |"
                  for name, value in rows]
    if single := {name: value for name, value in figures.items() if not isinstance(value, dict)}:
        lines += ["", *table_of(single, ("figure", "value"))]
    for name, value in several:
        if rows := value.get("profile"):
            lines += ["", f"The profiler's first rows, {name}, a step:", "", "| ms | share | calls | |",
                      "|---|---|---|---|"]
            lines += [f"| {row['ms']:.3f} | {100 * row['share']:.1f} % | {row['calls']} "
                      f"| `{cell(row['name'])}` |" for row in rows]
    return lines


def table_of(values: dict[str, Any], heading: tuple[str, str]) -> list[str]:
    rows = (f"| {cell(name)} | {written(value)} |" for name, value in values.items())
    return [f"| {' | '.join(heading)} |", "|---|---|", *rows]


def written(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else cell(str(value))


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--gpu-results", type=Path, metavar="FILE",
                        help="results.jsonl of scripts/gpu_suite.sh")
    results = parser.parse_args().gpu_results
    if results:
        try:
            records = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as error:
            raise DataError(f"--gpu-results {results} cannot be read: {error}") from error
        (ROOT / "docs" / "gpu.md").write_text(gpu_page(records), encoding="utf-8")
        return
    (ROOT / ".env.example").write_text(env_example(), encoding="utf-8")
    (ROOT / "docs" / "settings.md").write_text(settings_page(), encoding="utf-8")
    architecture = ROOT / "docs" / "architecture.md"
    architecture.write_text(with_reading_order(architecture.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    run_script(main)
