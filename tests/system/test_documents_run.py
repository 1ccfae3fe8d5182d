"""The commands of each document run as they are typed there, in its order, in a folder with toy data and finished runs.

What needs a GPU, a cluster, the hub or minutes, or never ends, is left out.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from commands import ROOT
from factories import TINY, UNMEASURED, write_jsonl

pytestmark = pytest.mark.slow
ELSEWHERE = re.compile("|".join((
    r"--gpus|--nnodes|--nproc|NPROC|torchrun|--memory-snapshot|--ranks|--profile-steps", "serve",  # GPUs and clusters; what does not end
    r"[\w-]+/[\w.-]*(?:Llama|SmolLM)|OWNER/|hf://|fineweb|models/smollm2|appointments|layouts|sample.preferences|results/|\bgsm8k|--tasks|PADDOCK_UV|prepare hellaswag",  # the hub
    r"\b(?:NAME|RUN|SWEEP|PATTERN|FOLDER|SOURCE|FILES?|MODEL|ITEMS|DATA|N|K|STEP)\b",  # the reader's own names
    r"paddock (?:demo|pipeline|decide|test|sweep|without|doctor)|scripts/dev|gpu_suite|mutations|pytest|verify_resume|heroes|results\.py",
    r"--preset sample|recipes.py|--prepare-ahead|--figure|theirs|write_docs|golden\.py",
    r"paddock (?:train|check)$|/grown|data/pretrain|sums|guesses|runs/pipeline|prepare sample|first\.txt|characters|--to gguf")))  # what needs .env, the output of a command above, or merges
TOY = {name: TINY[name] for name in ("DIM", "N_LAYERS", "N_HEADS", "N_KV_HEADS", "MULTIPLE_OF", "MAX_SEQ_LEN", "MICRO_BATCH_SIZE", "MAX_STEPS",
                                    "DEVICE", "PRECISION", "COMPILE")} | UNMEASURED
BLOCK = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"(?:^|&& )((?:[A-Z_]+=\S+ +)*"
                     r"(?:\./paddock [a-z]|(?:\.venv/bin/)?python \S+\.py|bash scripts/).*?)(?= && |$)")


def commands_in(page: Path) -> Iterator[str]:
    """The commands of a page's code blocks: lines joined where they continue, without shell variables and comments."""
    for language, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language not in ("", "bash", "sh", "console"):
            continue
        block = re.sub(r"\\\n *", "", re.sub(r"<<'?(\w+)'?.*?^\1$", "", block, flags=re.DOTALL | re.MULTILINE))
        variables = dict(re.findall(r'^ *(\w+)="(.*?)"(?= *(?:#|$))', block, re.MULTILINE))
        for line in map(str.strip, block.splitlines()):
            for variable in [*variables] * 2:  # one may contain another
                line = line.replace(f"${variable}", variables[variable])
            for command in COMMAND.findall(re.sub(r"\s+#.*", "", line)):
                if not ELSEWHERE.search(command := command.removesuffix(" ...")):
                    yield command


DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PAGES = {str(page.relative_to(ROOT)): lines for page in DOCUMENTS
         if page.name not in ("log.md", "CHANGELOG.md") and (lines := [*commands_in(page)])}


@pytest.fixture(scope="module")
def world(whole, stages, tmp_path_factory):
    """A folder with texts, chats, pairs, prompts, items and runs under the names that the documents use."""
    folder, rng = tmp_path_factory.mktemp("world"), Random(3)
    (folder / "paddock").write_text(f"#!/bin/sh\nexec {sys.executable} {ROOT}/scripts/main.py \"$@\"\n")
    (folder / "paddock").chmod(0o755)
    words = ["".join(rng.choices("aeioubcdfghlmnprst", k=rng.randint(2, 9))) for _ in range(6000)]  # enough for 4,096 tokens
    text = "\n\n".join(" ".join(rng.choices(words, k=60)) for _ in range(400))
    (folder / "book.txt").write_text(text)
    (folder / "corpus").mkdir()
    write_jsonl(folder / "corpus/a.jsonl", ({"text": each} for each in text.split("\n\n")))
    for kind in ("chats", "pairs", "prompts"):
        source, = Path(getattr(stages, kind)).parents[1].glob(f"{kind}.jsonl")
        for place in (f"{kind}/a.jsonl", f"{kind}.jsonl", f"Downloads/{kind}.jsonl"):
            (folder / place).parent.mkdir(exist_ok=True)
            shutil.copy(source, folder / place)
    write_jsonl(folder / "questions.jsonl", ({"messages": [{"role": "user", "content": "cat?"}]} for _ in range(3)))
    (folder / "data").mkdir()
    write_jsonl(folder / "data/arc.jsonl", ({"question": "The cat", "choices": ["sat", "fox"], "answer": 0} for _ in range(5)))
    adapters, preferred = (stages.run(mode, folder / "made", RUN_NAME=mode, MAX_STEPS=2, **UNMEASURED | {"VALIDATE_EVERY": 2}).trained().folder
                           for mode in ("lora-sft", "dpo-live"))
    for source, names in ((whole.folder, ("first", "second", "other", "book")), (preferred, ("preferred", "better")),
                          (adapters, ("adapters", "chat", "helper"))):
        for name in names:
            shutil.copytree(source, folder / "runs" / name)
    return folder


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_document_run_as_typed(page, world, prepared, tmp_path):
    place = shutil.copytree(world, tmp_path / "world")
    for line in PAGES[page]:
        made = [place / name for name in re.findall(r"--output (\S+)", line)]  # perhaps by a command above
        made += [place / "runs" / name for name in re.findall(r"--run-name (\S+)", line) if "-data-path" in line]
        for each in filter(os.path.exists, made):
            shutil.rmtree(each) if each.is_dir() else each.unlink()
        for name in re.findall(r"Downloads/(\S+jsonl)", line):
            shutil.copy(place / ("pairs.jsonl" if "preferences" in name else "chats.jsonl"), place / "Downloads" / name)
        settings = {} if "--device-memory" in line else {**TOY, "PREPARATION_WORKERS": 1}
        if re.search("prepare (text|chats|pairs|prompts)", line) and not re.search("checkpoint|tokenizer", line):
            settings["TOKENIZER_PATH"] = prepared.tokenizer  # which is in .env
        line = line.replace("1234", "4").replace(".venv/bin/python scripts", f"{sys.executable} {ROOT}/scripts")
        done = subprocess.run(["bash", "-c", line], cwd=place, env=os.environ | {name: str(value) for name, value in settings.items()}
                              | {"HOME": str(place)}, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
