"""The remedies in error messages work: each error is provoked, and its remedy applied.

The remedies of a resumed run are tested in test_train and test_start, those of a bad step in test_step_guards.
"""

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from bad_input_cases import (
    IMPORT,
    MERGE,
    PAIR,
    PREPARE,
    Spoil,
    all_of,
    env,
    gone,
    json_of,
    lines,
    manifest,
    nothing,
    put,
)
from test_bad_input import farm, place, run_here  # noqa: F401 (fixtures)

PREPARING = f"scripts/load_pretrain_dataset.py {PREPARE} --source"
CHECK = "train.py --check"
SFT, DPO = (f"{CHECK} --training-stage {stage} --pretrain-checkpoint model" for stage in ("sft", "dpo"))
SCRIPT = r"(?:'[^']+/python[\d.]*'|\S+/python[\d.]*) "  # a path with a space is quoted
ADVISED = rf"({SCRIPT}[^;,(]*)"


class Remedy(NamedTuple):
    """A command that fails in a spoilt folder, the advice in its output, and what the advice says to do.

    After `mend`, all `commands` must succeed; {0} in them is the first group that `advice` matched.
    """

    name: str
    spoil: Spoil
    command: str
    advice: str
    mend: Spoil
    commands: tuple[str, ...]


REMEDIES = [Remedy(*fields[:5], fields[5:]) for fields in (
    ("batch", env(TOTAL_BATCH_SIZE=65536), CHECK, "lower TOTAL_BATCH_SIZE to ([0-9]+) or less",
     env(TOTAL_BATCH_SIZE=2560), CHECK),
    ("row", env(TOTAL_BATCH_SIZE=2048, MAX_SEQ_LEN=2048, MICRO_BATCH_SIZE=1), CHECK, "lower MAX_SEQ_LEN$", nothing,
     f"{CHECK} --max-seq-len 64"),
    ("chats", nothing, f"{SFT} --total-batch-size 65536", "lower TOTAL_BATCH_SIZE to ([0-9]+) or less", nothing,
     SFT + " --total-batch-size {0}"),
    ("pairs", env(VALIDATE_EVERY=0, PAIR_TRUNCATION="drop"), DPO, "set it to ([0-9]+) to keep all", nothing,
     DPO + " --max-seq-len {0} --micro-batch-size 1 --total-batch-size {0}"),
    ("held-out", manifest(lambda m: m["splits"].pop("validation")), CHECK, "or VALIDATE_EVERY=0", nothing,
     f"{CHECK} --validate-every 0"),
    ("text", all_of(put("t.txt", "a line\n" * 999), env(PRETRAIN_DATA_PATH="t.txt")), CHECK, f"prepare it with {ADVISED}",
     nothing,
     "{0} --documents line " + PREPARE, f"{CHECK} --pretrain-data-path out --validate-every 0"),
    ("unread", all_of(put("t.md", "a line\n" * 999), env(PRETRAIN_DATA_PATH="t.md")), CHECK,
     f"call it .txt or .jsonl, and prepare that with {ADVISED}", lambda: Path("t.md").rename("t.txt"),
     "{0} --source t.txt --documents line " + PREPARE),
    ("no-row", lambda: np.arange(40, dtype="<u2").tofile("train.bin") or env(PRETRAIN_DATA_PATH="train.bin", VALIDATE_EVERY=0)(),
     f"{CHECK} --max-seq-len 64 --micro-batch-size 1 --total-batch-size 64", "lower (MAX_SEQ_LEN)$", nothing,
     f"{CHECK} --max-seq-len 32 --micro-batch-size 1 --total-batch-size 32"),
    ("raw", lambda: (np.arange(999, dtype="<u2") % 256).tofile("t.bin") or env(PRETRAIN_DATA_PATH="t.bin")(), CHECK,
     "call it (train.bin) or", lambda: Path("t.bin").rename("train.bin"),
     CHECK + " --pretrain-data-path {0} --validate-every 0"),
    ("several-sets", env(PRETRAIN_DATA_PATH="."), CHECK, "name one: .*(set)$", nothing,
     CHECK + " --pretrain-data-path {0}"),
    ("all-held-out", nothing, f"{PREPARING} y.jsonl --column prompt --validation-fraction 0.99999",
     r"lower VALIDATION_FRACTION \(0 ", nothing, f"{PREPARING} y.jsonl --column prompt --validation-fraction 0"),
    ("one-document", put("t.txt", "a\nb\nc\nd\n"), f"{PREPARING} t.txt --validation-fraction 0.99999", r"\(--documents\)$",
     nothing, f"{PREPARING} t.txt --validation-fraction 0.5 --documents line"),
    ("bad-record", put("in.jsonl", '{"text": "good"}\n{\n'), f"{PREPARING} in.jsonl", "(--on-bad-record skip)$", nothing,
     PREPARING + " in.jsonl {0}"),
    ("latin-1", put("t.txt", "caf\u00e9\n".encode("latin-1")), f"{PREPARING} t.txt --on-bad-record skip", "save it as UTF-8",
     put("t.txt", "caf\u00e9\n"), f"{PREPARING} t.txt"),
    ("column", put("in.jsonl", '{"body": "x"}\n'), f"{PREPARING} in.jsonl", r"it has '(\w+)' \(--column\)", nothing,
     PREPARING + " in.jsonl --column {0}"),
    ("preference", put("in.jsonl", lines(PAIR, PAIR)), f"scripts/load_instruct_dataset.py --source in.jsonl {PREPARE}",
     f"prepare it with {ADVISED}", nothing, "{0} --source in.jsonl --validation-fraction 0 " + PREPARE),
    ("known-files", lambda: (Path("out").mkdir(), put("out/.known-files.json", "{")()), f"{PREPARING} y.jsonl --column prompt",
     "delete it and start again", gone("out/.known-files.json"),
     f"{PREPARING} y.jsonl --column prompt"),
    ("vocabulary", nothing, "scripts/train_tokenizer.py --output t.model --vocab-size 9999 --column prompt y.jsonl",
     "yields only ([0-9]+) tokens.*lower it", nothing,
     "scripts/train_tokenizer.py --output t.model --vocab-size {0} --column prompt y.jsonl"),
    ("no-tokenizer", env(TOKENIZER_PATH="t.model"), CHECK, f"train one with {ADVISED}$", nothing,
     "{0} --output t.model --vocab-size 256 --column prompt y.jsonl",
     f"{PREPARING} y.jsonl --column prompt --output made",
     f"{CHECK} --pretrain-data-path made --total-batch-size 64 --validate-every 0"),
    ("adapters", nothing, f"{CHECK} --pretrain-checkpoint adapter", rf"({SCRIPT}.*) --output FOLDER",
     nothing, "{0} --output merged", f"{CHECK} --pretrain-checkpoint merged"),
    ("base", json_of("adapter/adapter_config.json", lambda d: d.update(base_model_name_or_path="gone")), MERGE, "with (--base)",
     nothing, MERGE + " {0} model"),
    ("import", lambda: Path("start").mkdir(), IMPORT, "start already exists; choose a new folder", nothing,
     "scripts/import_checkpoint.py model other"),
    ("another-model", nothing, f"{CHECK} --pretrain-checkpoint model --dim 64", r"(DIM) is 32 there and 64 here", nothing,
     f"{CHECK} --pretrain-checkpoint model --dim 32"),
    ("lora", nothing, f"{CHECK} --lora-enabled", "set PRETRAIN_CHECKPOINT", nothing,
     f"{CHECK} --lora-enabled --pretrain-checkpoint model"),
    ("items", env(HELLASWAG_PATH="h.jsonl"), CHECK, f"get it with {ADVISED}$", nothing,
     "{0} --source items.jsonl --output h.jsonl", CHECK),
    ("item-too-long", nothing, f"{CHECK} --max-seq-len 4", "does not fit into MAX_SEQ_LEN=4; raise it", nothing, CHECK),
)]


@pytest.mark.parametrize("remedy", REMEDIES, ids=lambda remedy: remedy.name)
def test_what_a_command_advises_helps(remedy, place, capsys):  # noqa: F811
    remedy.spoil()
    refused = run_here(remedy.command, capsys)
    assert refused.code in (2, 3, 5) and "Traceback" not in refused.errors, refused
    told = (refused.output + refused.errors).splitlines()
    messages = [found for line in told if (found := re.search(remedy.advice, line.strip()))]
    assert messages, refused
    remedy.mend()
    for command in remedy.commands:
        outcome = run_here(command.format(*messages[-1].groups()), capsys)
        assert outcome.code == 0, outcome
