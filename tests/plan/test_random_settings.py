"""Random combinations of settings: the valid ones load and start, the others raise an error that names the settings."""

import re
import types
import typing
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple, Union

from factories import LORA, MODES, ONLINE, UNMEASURED, Stages, argv_of, write_jsonl

import config
from common.errors import PaddockError
from config import Config
from plan.make import make_plan
from run.build import open_run

COMBINATIONS, BUILT = 300, 60  # the valid ones are built until so many were


# Texts that a setting may have, right and wrong ones; a path of `Stages` or of the test's folder has the form {name}.
NOWHERE = ("{folder}/nowhere", "s3://bucket/key", "$DATA/x")
STARTS = ("{base}", "{teacher}", "{run}", *NOWHERE)
TEXTS = {
    "preset": ("stable", "debug", "stable,debug", "stabel"), "output_dir": ("{folder}/runs", ""),
    "run_name": ("run", "other", "a b", "../up", "n" * 300), "resume": ("auto", "never", "{base}", "{folder}/nowhere"),
    **dict.fromkeys(config.START_FROM, STARTS), "teacher_model": STARTS,
    "allow_resume_mismatch": ("SEED", "seed,DIM", "NOTHING"),
    "extensions": ("", "default", "guards", "default,rounding", "online,evaluate", "nonsense", "default,nonsense"),
    "cache_dir": ("{folder}/cache",), "pretrain_data_path": ("{shards}", "{chats}", *NOWHERE),
    "sft_data_path": ("{chats}", "{shards}", *NOWHERE), "dpo_data_path": ("{pairs}", "{unpaired}", "{chats}", *NOWHERE),
    "grpo_data_path": ("{prompts}", "{pairs}", *NOWHERE), "validation_data_path": ("{shards}", "{chats}", *NOWHERE), "hellaswag_path": ("{items}", "{folder}/nowhere"),
    "eval_tasks": ("farm:{items}", "a:{items},a:{items}", "farm", "Farm:{items}", "val:{items}", "farm:{folder}/nowhere"),
    "hellaswag_name": ("Farm", ""), "tokenizer_path": ("{tokenizer}", "{items}", *NOWHERE),
    "system_prompt": ("", "Be brief."), "train_only": ("0", "0,1", "1,7", "x"),
    "learning_rate_factors": ("none", "*norm*:2", "*norm*:0", "x"), "lora_target_modules": ("wq,wv", "all-linear", "q_proj", "wx", ""), "lora_train_tokens": ("auto", "none", "<|eot_id|>", "cat"),
    "profile_steps": ("1:2", "2:1", "x"), "model_license": ("", "apache-2.0"), "metric": ("", "math:sqrt", "nonsense"),
    "sample_prompts": ("", "The|A", "|"), "reward": ("exact", "length*0.1,contains", "nonsense", "a:b*x"),
    "exclude_data": ("{exclude}", "{folder}/nowhere")}
# Numbers of a toy size, beside those of the toy run and the settings' small defaults.
WHOLE, FRACTIONS = (0, 1, 2, 3, 4, 8), (0.0, 1e-3, 0.1, 0.5, 1.0, 2.0, 1.5)
INVALID = ("-1", "nonsense", "nan", "inf", "1e400", "9" * 30, "0.3.1", "[1]", "true false")
EXTREME = ("9007199254740992", "1e-300", "1e300")  # such runs are loaded, but not built
MOST_TOY_NUMBER = 1000
# Whether they are on changes which other settings matter, so an error may name only those.
SWITCHES = {"TRAINING_STAGE", "DISTILLATION_ENABLED", "PREFERENCE_OBJECTIVE", *map(str.upper, config.START_FROM)}
# A toy may not take them: they have an effect on this process or on other processes, or need another machine.
NOT_DRAWN = {"distributed_timeout", "deterministic", "depth", "preparation_workers"}


class Combination(NamedTuple):
    """A toy run with some settings drawn at random."""

    number: int
    mode: str
    toy: dict[str, Any]
    drawn: dict[str, str]


def values_of(name: str, toy: dict[str, Any]) -> list[str]:
    field = Config.model_fields[name]
    kinds = [field.annotation]
    while any(typing.get_origin(kind) in (Union, types.UnionType) for kind in kinds):
        kinds = [part for kind in kinds for part in (typing.get_args(kind) or (kind,))]
    values: list[Any] = [*([field.default] if isinstance(field.default, int | float) and field.default <= MOST_TOY_NUMBER else [])]
    for kind in kinds:
        if kind is type(None):
            values.append("none")
        elif typing.get_origin(kind) is Literal:
            values += typing.get_args(kind)
        elif kind is bool:
            values += ["true", "false"]
        elif kind is str:
            values += TEXTS[name]
        else:
            values += WHOLE if kind is int else FRACTIONS
            values += [2 * toy[name.upper()]] if name.upper() in toy else []
    return [str(value).lower() if isinstance(value, bool) else str(value) for value in values]


def combinations(stages: Stages, folder: Path) -> Iterator[Combination]:
    modes = {**MODES, **ONLINE, "pretrain": {"TRAINING_STAGE": "pretrain"}}
    exclude = write_jsonl(folder / "exclude.jsonl", [{"text": "The cat saw the dog."}])
    paths = {name: str(getattr(stages, name)) for name in ("base", "teacher", "chats", "pairs", "prompts", "unpaired")}
    paths |= {**{name: str(path) for name, path in stages.prepared._asdict().items()}, "exclude": exclude,
              "run": str(stages.base.parents[1])}
    names = sorted(Config.model_fields.keys() - NOT_DRAWN)
    for number in range(COMBINATIONS):
        rng, own = Random(number), folder / str(number)
        own.mkdir()
        mode = rng.choice(sorted(modes))
        toy = {**stages.settings(mode, modes), **UNMEASURED, "OUTPUT_DIR": own / "runs", "CACHE_DIR": folder / "cache"}
        if rng.random() < 0.2 and "PRETRAIN_CHECKPOINT" in toy:
            toy |= LORA
        drawn = {}
        for name in rng.sample(names, 1 if number < COMBINATIONS // 3 else rng.randint(2, 6)):
            (values,) = rng.choices((values_of(name, toy), INVALID, EXTREME), weights=(92, 4, 4))
            value = rng.choice(values)
            drawn[name.upper()] = value.format(**paths, folder=own) if name in TEXTS else value
        yield Combination(number, mode, toy, drawn)


def names_what_was_drawn(error: PaddockError, drawn: dict[str, str]) -> bool:
    """Whether an error names one of these settings, in any spelling, or the path or name that it has."""
    text = str(error)
    known = map(str.upper, Config.model_fields) if SWITCHES & drawn.keys() else drawn
    names = "|".join(name.replace("_", "[_-]") for name in known)
    values = [value for value in drawn.values() if len(value) > 3 and value not in ("none", "true", "false", "auto")]
    of_preset = "PRESET" in drawn and "plan/presets/" in text  # its file and line are named
    return of_preset or bool(re.search(rf"\b({names})\b", text, re.IGNORECASE)) or any(value in text for value in values)


def test_random_combinations_start_or_name_their_settings(stages, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # With COMPILE=true, a start compiles a kernel, for seconds; test_model_utils.py sees one that cannot be compiled.
    monkeypatch.setattr("model_utils.why_no_kernel", lambda device_type: None)
    for name in Config.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)
    wrong, built, refused = [], 0, 0
    for number, mode, toy, drawn in combinations(stages, tmp_path):
        argv = argv_of(toy | drawn)
        try:
            plan = make_plan(argv, {})
            if built < BUILT and not {*drawn.values()} & {*EXTREME}:
                with open_run(plan, partial(make_plan, argv, {})) as run:  # in this process, up to its first step
                    assert run.progress.step <= max(run.config.max_steps, run.config.start_step or 0)
                built += 1
        except Exception as error:
            is_ours = isinstance(error, PaddockError)
            refused += is_ours
            if not is_ours or not names_what_was_drawn(error, drawn):
                wrong.append(f"#{number} {mode}: {drawn}\n    {type(error).__name__}: {error}")
    assert wrong == [], "\n".join(wrong)
    assert built == BUILT and refused > COMBINATIONS // 10
