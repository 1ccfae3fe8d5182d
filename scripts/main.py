"""The command `paddock`: it lists the commands, and runs the script of one in the folder of the user.

./paddock runs this file, with any Python, before it sets up the environment: `--requirements` prints what the
command must have, as scripts/setup.sh's set_up takes it, and nothing if it works without an environment.
"""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common import __version__, interrupts  # noqa: E402
from common.command_line import SYNONYMS  # noqa: E402
from common.errors import SettingsError, run_script  # noqa: E402
from common.text import suggestion  # noqa: E402
from parallel.process import ERROR_FILE, LAUNCHER_PID, RANK_VARIABLES, choose_waiting  # noqa: E402

COMMANDS = """
Start
demo                             : run.py --preset sample : train a small model (a minute on two CPU cores)
doctor                           : doctor.py              : check the environment, GPU, NCCL and disk
Data
prepare text|chats|pairs SOURCE  : prepare.py             : tokenize text, chats or preference pairs
inspect DATA                     : inspect_data.py        : show statistics and rows of prepared data
import SOURCE FOLDER             : import_checkpoint.py   : import a Llama model to start from
Train
check                            : run.py --check         : check settings, data, memory and time
train                            : run.py                 : train on the CPU, one GPU or all GPUs
sweep --vary NAME=VALUES         : sweep.py               : compare settings, each with several seeds
decide --vary NAME=A,B           : decide.py              : decide which recipe is better
pipeline                         : pipeline.py            : train every stage on sample data
Look
runs                             : runs.py                : list runs; --clean suggests deletions
report [RUN ...]                 : report.py              : write a report of a run, or compare runs
Use
chat MODEL                       : chat.py                : chat with a model in the terminal
serve MODEL                      : chat.py --serve        : serve a chat page and an OpenAI API
generate MODEL                   : generate.py            : generate text
export MODEL --to FORMAT         : export.py              : convert to hf, merged or gguf, or upload
Prove
eval MODEL                       : evaluate.py            : evaluate a run or a model
verify RUN                       : verify_checkpoint.py   : verify the hashes of checkpoints
diff RUN RUN                     : diff_runs.py           : find where two runs first differ
replay RUN --step N              : replay_step.py         : repeat one step and examine it
at-step RUN STEP --output FOLDER : at_step.py             : re-create any past step, with proof
without RUN --find PATTERN       : without.py             : train a run without some data, and compare
test                             : test.sh                : run the tests
"""
# [usage, script, meaning] of a command, or [title] of a group
LINES = [[*map(str.strip, line.split(" : "))] for line in COMMANDS.strip().splitlines()]
SCRIPTS = {words[0].split()[0]: words[1].split() for words in LINES if len(words) > 1}
# Commands of other trainers; docs/coming-from.md explains them.
ELSEWHERE = {name: ours for ours, names in (
    ("train", "pretrain base_train pt run run_training train_gpt main pretrain_main train"),
    ("train --distillation-enabled true", "distill distillation"), ("prepare text", "prepare_dataset"),
    ("train --training-stage dpo", "dpo orpo simpo kto"),
    ("train --training-stage sft", "sft chat_sft finetune finetune_full instruct"), ("prepare", "preprocess"),
    ("train --training-stage sft --lora-enabled true", "finetune_lora lora qlora"),
    ("prepare tokenizer", "tok_train"),
    ("train --training-stage grpo", "grpo chat_rl rl"), ("eval", "base_eval chat_eval evaluate batch_eval"),
    ("chat", "chat_cli inference cli chat_completion"), ("serve", "chat_web webchat api webui"),
    ("export", "merge_lora convert_from_litgpt convert checkpoint_converter")) for name in names.split()}
EXTRAS = "requirements-extras.txt"


def show_list(program: str) -> None:
    print(f"usage: {program} COMMAND [flags]\n       {program} COMMAND --help\n")
    for first, *words in LINES:
        print(f"  {first:32} {words[1]}" if words else first)
    print("\nComing from another trainer: docs/coming-from.md")


def requirements(name: str, words: list[str]) -> list[str]:
    """Return the arguments of scripts/setup.sh's set_up."""
    if name in ("doctor", "test") or {"-h", "--help"} & {*words}:  # scripts/test.sh sets up itself
        return []
    is_plot = any(word.startswith(("--plot", "--figure")) for word in words)
    is_scored = any(map(re.compile("--generation.eval.every").match, words))
    return ["requirements.txt", *[f"{EXTRAS}:starlette,uvicorn"] * ("--serve" in words),
            *[f"{EXTRAS}:matplotlib"] * is_plot,
            *[f"{EXTRAS}:gguf"] * any(word.endswith("gguf") for word in words),
            *[f"{EXTRAS}:rouge-score,sacrebleu"] * is_scored]


def main() -> None:
    typed = os.environ.pop("PADDOCK_TYPED", sys.argv[0])
    program = "./paddock" if typed.endswith("main.py") else typed
    program = "paddock" if program == shutil.which("paddock") else shlex.quote(program)
    is_question = sys.argv[1:2] == ["--requirements"]
    name, *flags = sys.argv[1 + is_question:] or ["--help"]
    if name in ("-h", "--help", "help", "--version"):
        if not is_question:
            show_list(program) if name != "--version" else print(f"Paddock {__version__}")
        return
    if name not in SCRIPTS:
        word = name.removesuffix(".py").removesuffix(".sh").replace("-", "_")
        nearest = ELSEWHERE.get(word) or suggestion(name, SCRIPTS, SYNONYMS)
        guess = f" (did you mean {nearest}?)" if nearest else ""
        raise SettingsError(f"unknown command {name[:80]}{guess}; {program} lists the commands")
    script, *fixed = SCRIPTS[name]
    path, words, needs_help = ROOT / "scripts" / script, [*fixed, *flags], {"-h", "--help"} & {*flags}
    if is_question:
        print(*requirements(name, words))
        return
    os.environ["PADDOCK_COMMAND"] = f"{program} {name}"
    if {"RANK", "LOCAL_RANK"} & os.environ.keys():  # left by an earlier job
        for variable in (*RANK_VARIABLES, ERROR_FILE, LAUNCHER_PID):
            os.environ.pop(variable, None)
    if script in ("evaluate.py", "generate.py", "chat.py"):  # a run chooses after it has read `.env`
        choose_waiting()
    if script.endswith(".sh"):
        if not path.exists():
            raise SettingsError(f"{program} {name} needs a clone of Paddock; an installed one has no tests")
        os.execvp("bash", ["bash", str(path), *words])
    # Without the packages, most scripts cannot list their flags.
    if needs_help and not find_spec("torch"):
        if subprocess.run([sys.executable, path, *words], stderr=subprocess.DEVNULL).returncode == 2:
            print(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))))
            print("\nTo see the flags, install the packages: bash scripts/setup.sh")
        return
    interrupts.become(str(path), *words)


def run() -> None:
    """The installed command `paddock`."""
    run_script(main)


if __name__ == "__main__":
    run_script(main)
