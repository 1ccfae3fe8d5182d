"""One dial for the size of a pretraining run: the settings that DEPTH decides where nothing else sets them.

Parameters are those of the blocks' matrices: the vocabulary is not known when settings are read. A resumed
run computes all this again and compares it with its checkpoint, so a changed formula would refuse old runs.
The batch does not depend on the number of ranks, so that a run can continue on another number.


Unknown names of settings, and which setting was probably meant.

What --help and the documents say of each setting.

Reading settings: defaults < DEPTH < `.env` < preset < JSON file < environment < flags.

A preset that `.env` itself names lies below `.env`. All mistakes in all layers are reported at once, each
with its file and line. Nothing is read at import.
"""

import difflib
import io
import json
import math
import os
import re
import sys
from collections import ChainMap, Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, Optional, get_args, get_origin

from dotenv.parser import parse_stream
from dotenv.variables import Variable, parse_variables
from pydantic import ValidationError

from common.command_line import VERSION, filled
from common.errors import SettingsError
from common.files import read_text
from common.text import command, exit_if_unread, print_safely, printable, show, without_passwords
from config import SECRETS, SECTIONS, Config, input_rules, on_resume, rules
from parallel.process import configure_allocator, first_on_machine

HEAD_DIM = 64
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022 (arXiv:2203.15556)
ROWS = 48  # a batch is a multiple of so many rows, which 1, 2, 3, 4, 6, 8, 12, 16, 24 or 48 ranks can share
ACTIVATIONS = 3e8  # tokens x DIM x N_LAYERS of a micro-batch: about 7 GiB in bf16, compiled
MOST_ROWS = 256  # of a micro-batch


def settings_of_depth(config: Config, given: Container[str]) -> dict[str, Any]:
    """Return the settings that config.depth decides and their values, without those in `given`.

    What is given enters the formulas of the rest: a longer row makes the batch larger, not invalid.
    Source: Li et al. 2025 (arXiv:2503.04715) for the batch. The rate was measured at depths 1 to 4
    (scripts/measure_depth.py), and falls with the width as muP has it (Yang et al. 2022, arXiv:2203.03466).
    """
    assert config.depth is not None
    chosen: dict[str, Any] = {}

    def choose(**values) -> None:
        nonlocal config
        values = {name: value for name, value in values.items() if name not in given}
        chosen.update(values)
        config = config.model_copy(update=values)

    # The shape; of Llama 3's proportions, at every depth.
    choose(n_layers=config.depth, dim=HEAD_DIM * config.depth)
    choose(n_heads=max(1, config.dim // HEAD_DIM), multiple_of=HEAD_DIM)
    choose(ffn_dim=config.hidden_dim)
    heads = config.n_heads
    choose(n_kv_heads=next(n for n in range(1, heads + 1) if heads % n == 0 and 4 * n >= heads))
    # With 0.02 at every width a narrow model learns more slowly: 4.29 against 3.70 nats at depth 2.
    choose(init_std=round(0.02 * math.sqrt(768 / config.dim), 4))
    choose(max_seq_len=2 ** min(11, int(math.log2(128 * config.depth))))
    if config.training_stage != "pretrain":
        return chosen  # how long and how fast to fine-tune does not follow from the size

    # How it is trained. With these rates and steps, a constant WEIGHT_DECAY forgets equally often at each
    # depth from 6 on: rate x steps x decay is 0.9 to 2 (Wang & Aitchison 2024, arXiv:2405.13698).
    tokens = TOKENS_PER_PARAMETER * config.matrix_count
    row_groups = 0.58 * tokens**0.571 / (ROWS * config.max_seq_len)
    choose(total_batch_size=max(1, round(row_groups)) * ROWS * config.max_seq_len)
    rows = max(1, config.rows_per_step // config.world_size)
    most = min(rows, MOST_ROWS, int(ACTIVATIONS / (config.dim * config.n_layers * config.max_seq_len)))
    choose(micro_batch_size=next(n for n in range(max(1, most), 0, -1) if rows % n == 0))
    steps = math.ceil(tokens / config.total_batch_size)
    choose(max_steps=steps)
    choose(warmup_steps=min(2000, steps // 10, config.max_steps // 10))
    choose(learning_rate=float(f"{0.64 / config.dim:.2g}"))
    return chosen


def unequal_shares(config: Config, given: Container[str]) -> str:
    """Return the message for a batch that config.depth chose and the ranks cannot share equally.

    Args:
        given: the settings that config.depth did not choose.
    """
    rows, ranks, size = config.rows_per_step, config.world_size, config.max_seq_len
    micro_batch = config.micro_batch_size if "micro_batch_size" in given else 1
    whole = f" in micro-batches of {micro_batch} rows" if micro_batch > 1 else ""
    at_once = ranks * micro_batch
    sizes = [f"TOTAL_BATCH_SIZE={count * at_once * size}" for count in (rows // at_once, -(-rows // at_once))
             if count]
    fewer = next((n for n in range(ranks, 0, -1) if rows % (n * micro_batch) == 0), 0)
    resumed = f"; to resume a run that has steps, use {fewer} ranks" if fewer else ""
    return (f"DEPTH={config.depth} chose TOTAL_BATCH_SIZE={config.total_batch_size}, {rows} rows of "
            f"MAX_SEQ_LEN={size}, which {ranks} rank{'s' * (ranks > 1)} cannot share equally{whole}; for a "
            f"new run, set {' or '.join(sizes)}{resumed}")


SWITCHES = {name for name, field in Config.model_fields.items() if field.annotation is bool}
# What other trainers call these settings.
FOREIGN_NAMES = {foreign: name for name, names in {
    "learning_rate": "max_lr lr max_learning_rate peak_lr", "min_learning_rate": "min_lr",
    "micro_batch_size": "batch_size max_batch_size train_batch_size local_batch_size per_device_batch_size "
                        "per_device_train_batch_size per_device_eval_batch_size device_batch_size",
    "total_batch_size": "global_batch_size grad_accum_steps gradient_accumulation_steps",
    "max_seq_len": "block_size context_length context_size seq_len seq_length sequence_length max_length "
                   "max_seq_length max_position_embeddings n_ctx n_positions cutoff_len model_max_length "
                   "max_prompt_length",
    "max_steps": "max_iters num_iterations num_steps train_steps total_steps steps iters iterations epochs "
                 "num_epochs num_train_epochs max_epochs",
    "warmup_steps": "warmup warmup_iters warmup_ratio",
    "decay_fraction": "lr_decay_iters decay_ratio cooldown_iters",
    "lr_schedule": "lr_scheduler lr_scheduler_type scheduler decay_lr lr_decay_style",
    "max_grad_norm": "grad_clip clip_grad gradient_clipping gradient_clip_val max_norm", "weight_decay": "wd",
    "adam_beta1": "beta1 betas", "adam_beta2": "beta2", "adam_eps": "eps epsilon adam_epsilon",
    "precision": "dtype torch_dtype bf16 fp16 mixed_precision", "seed": "random_seed",
    "validate_every": "eval_interval eval_every eval_steps eval_freq val_every val_steps val_interval "
                      "validation_every validation_steps", "validation_rows": "eval_iters",
    "validation_fraction": "val_set_size validation_split",
    "save_every": "save_interval save_steps save_freq checkpoint_every checkpoint_interval checkpoint_steps",
    "keep_last": "save_total_limit",
    "log_every": "log_interval log_steps log_freq logging_steps print_every print_freq",
    "sample_every": "sample_interval sample_steps",
    "output_dir": "out_dir save_dir checkpoint_dir", "run_name": "name exp_name experiment_name",
    "pretrain_data_path": "data data_path data_dir data_files dataset dataset_dir dataset_name dataset_path "
                          "datasets input_file train_data train_file train_files training_data",
    "resume": "resume_from resume_from_checkpoint",
    "pretrain_checkpoint": "init_from model_name_or_path pretrained_model base_model checkpoint model_path "
                           "model_name model_id pretrained_model_name_or_path initial_checkpoint_dir "
                           "load_checkpoint load_from",
    "preset": "model_size model model_flavor flavor size",
    "n_layers": "n_layer num_layers num_hidden_layers",
    "n_heads": "n_head num_heads num_attention_heads",
    "n_kv_heads": "num_kv_heads num_key_value_heads n_kv_head",
    "dim": "n_embd d_model hidden_size model_dim embedding_dim width",
    "ffn_dim": "intermediate_size hidden_dim d_ff", "tokenizer_path": "vocab_size tokenizer tokenizer_name",
    "attention_backend": "attn attn_implementation flash_attn use_flash_attn",
    "rope_theta": "rotary_base", "init_std": "initializer_range",
    "lora_rank": "lora_r", "lora_enabled": "use_lora use_peft peft adapter",
    "lora_base_quantization": "load_in_4bit load_in_8bit", "lora_train_head": "modules_to_save",
    "dpo_beta": "beta", "dpo_loss": "loss_type", "dpo_reference": "ref_model", "dpo_sft_weight": "rpo_alpha",
    "teacher_model": "teacher", "sharding": "fsdp deepspeed zero_stage",
    "world_size": "num_gpus",
    "activation_checkpointing": "gradient_checkpointing", "wandb_enabled": "use_wandb",
}.items() for foreign in names.split()}


def nearest(name: str, known: Iterable[str] = Config.model_fields) -> Optional[str]:
    """Return the known name that a misspelt one most likely means, or None."""
    name, known = name.lower().replace("-", "_")[:60], [*known]
    if FOREIGN_NAMES.get(name) in known:
        return FOREIGN_NAMES[name]

    def words(name: str) -> set[str]:
        return {word.removesuffix("s") for word in name.split("_")}

    # A whole word says more than letters, and the more the fewer settings have it: `log` more than `steps`.
    frequency = Counter(chain.from_iterable(map(words, known)))
    scores = {}
    for candidate in known:
        letters = difflib.SequenceMatcher(None, candidate, name).ratio()
        shared = sum(1 / frequency[word] for word in words(name) & words(candidate))
        if letters >= 0.6 or shared and letters >= 0.5:
            scores[candidate] = letters + min(shared, 1) / 2
    return max(scores, key=scores.__getitem__, default=None)


def unknown(where: str, name: str) -> str:
    """Return the message for an unknown name in a file."""
    guess = nearest(name)
    advice = f"did you mean {guess.upper()}?" if guess else "--help lists every setting"
    return f"{where}: unknown setting {shortened(name)}; {advice}"


def shortened(text: str) -> str:
    """Return a user's text on one line of at most 80 characters."""
    text = printable(text)
    return text if len(text) <= 80 else f"{text[:77]}..."


def misspelt(key: str) -> Optional[str]:
    """Return the setting that an environment variable seems to mean, or None.

    Stricter than `nearest`, because the environment holds other programs' variables: COMPILER, DEVICES and
    LOCAL_WORLD_SIZE are no mistakes.
    """
    name = key.lower()
    if key != key.upper():
        return name if name in Config.model_fields and "_" in name else None
    if name in Config.model_fields or len(name) < 6:
        return None
    if name in FOREIGN_NAMES and "_" in name and name not in ("model_path", "model_name", "model_id"):
        return FOREIGN_NAMES[name]
    match = next(iter(difflib.get_close_matches(name, Config.model_fields, n=1, cutoff=0.88)), None)
    return None if match is None or ("_" not in match and name.startswith(match)) else match


def unknown_flag(flag: str, known: Sequence[str]) -> str:
    """Return the message for an unknown flag."""
    name = flag.lstrip("-").lower().replace("-", "_")
    guess, value = name if name in known else nearest(name, known), ""
    if name.removeprefix("no_") in SWITCHES:
        guess, value = name.removeprefix("no_"), " false"
    advice = f"did you mean --{guess.replace('_', '-')}{value}?" if guess else "--help lists every setting"
    return f"command line: unknown flag {shortened(flag)}; {advice}"


PRESETS_DIR = Path(__file__).parent / "presets"


class SettingLine(NamedTuple):
    """What the help and the documents say of a setting."""

    section: str
    name: str
    default: str  # empty = none
    meaning: str
    on_resume: str  # safe | curve | fixed


def describe_settings() -> Iterator[SettingLine]:
    """Yield every setting, in order."""
    for section in SECTIONS:
        for name, info in section.model_fields.items():
            default = "" if info.default is None else str(info.default)
            choices = get_args(info.annotation) if get_origin(info.annotation) is Literal else ()
            meaning = info.description + (f" ({' | '.join(choices)})" if choices else "")
            default = default.lower() if info.annotation is bool else default
            title = section.__name__.removesuffix("Config")
            yield SettingLine(title, name.upper(), default, meaning, on_resume(name))


def help_text(usage: str) -> str:
    """Return what --help prints: every setting with its default and meaning."""
    lines = [*filled(f"usage: {usage}", subsequent_indent="  "), "",
             *filled("Order: defaults < .env < preset < JSON < environment < flags; a preset that .env names "
                     "lies below .env. MAX_STEPS in .env is --max-steps as a flag."), ""]

    def add(flag: str, meaning: str) -> None:
        lines.extend(filled(meaning, initial_indent=f"  {flag:<27} ", subsequent_indent=" " * 30))

    presets = ", ".join(sorted(file.stem for file in PRESETS_DIR.glob("*.env")))
    add("--config FILE.json", "settings from a JSON file, flat or in sections")
    add("--env-file FILE", "settings from this file instead of .env")
    add("--check", "report everything that can be known before the run, and exit")
    add("--version", "show the version and exit")
    for section, settings in groupby(describe_settings(), key=lambda line: line.section):
        lines += ["", section]
        for _, name, default, meaning, _ in settings:
            is_secret = name.lower() in SECRETS
            flag = f"{name} in .env" if is_secret else f"--{name.lower().replace('_', '-')}"
            known = f": {presets}" if name == "PRESET" else ""
            add(flag, f"{meaning}{known} [{default or 'none'}]")
    return "\n".join(lines)


class Layer(NamedTuple):
    """Settings from one place: name -> (value, where it was found); and the libraries' keys in `.env`."""

    values: dict[str, tuple[Any, str]]
    problems: list[str]
    exports: Mapping[str, str] = {}


# Settings that hold several values, which JSON may give as a list, and their separator elsewhere.
LISTS = {"preset": ",", "allow_resume_mismatch": ",", "lora_target_modules": ",", "sample_prompts": "|",
         "eval_tasks": ","}
# Environment variables of libraries, which `.env` may contain too.
LIBRARIES = re.compile(
    "(HF|HUGGINGFACE|HUGGING_FACE|TRANSFORMERS|TOKENIZERS|RAYON|TIKTOKEN|WANDB|TENSORBOARD|TRACKIO|CUDA"
    "|CUBLAS|CUDNN|NVIDIA|NCCL|GLOO|TORCH|TORCHINDUCTOR|TORCHDYNAMO|PYTORCH|TRITON|OMP|KMP|GOMP|MKL|OPENBLAS"
    "|ONEDNN|DNNL|ATEN|BNB)_[A-Z0-9_]+|MASTER_(ADDR|PORT)|(HTTPS?|NO)_PROXY")
OPTIONAL = {name for name, field in Config.model_fields.items() if field.default is None}
LOADER_FLAGS = ("env_file", "config", "check")


def read_env_file(path: Path, environ: Mapping[str, str] = {}) -> Layer:
    """Return the settings and libraries' keys of a `.env` file, each with its line. Empty values are ignored.

    python-dotenv expands `${NAME}` and `${NAME:-default}`: from the environment, then from earlier lines.
    """
    # Not python-dotenv's dotenv_values, which reports neither lines nor duplicates nor mistakes.
    values, problems, earlier = {}, [], {}
    known = ChainMap(environ, earlier)
    try:
        text = read_text(path, "utf-8-sig")
    except (OSError, ValueError) as error:
        return Layer({}, [f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"])
    for binding in parse_stream(io.StringIO(text)):
        # A binding may begin with blank and comment lines; its own line is the first with something in it.
        source = binding.original.string
        blank = len(source) - len(source.lstrip())
        where = f"{path}:{binding.original.line + source[:blank].count(chr(10))}"
        key, value = binding.key, binding.value
        if re.match(r"[^=]*=[^\S\n]+#", source[blank:]):
            value = ""  # a comment only, which the parser takes for the value
        if key is None and not binding.error:
            continue
        # The line itself is not repeated: it may hold a secret.
        if binding.error or value is None:
            problems.append(f"{where}: not of the form NAME=value")
            continue

        atoms = [*parse_variables(value)]
        unset = [atom for atom in atoms
                 if isinstance(atom, Variable) and atom.default is None and atom.name not in known]
        earlier[key] = value = "".join(atom.resolve(known) for atom in atoms)
        name = key.lower() if key.lower() in Config.model_fields else key
        if unset:
            problems.append(f"{where}: {shortened(key)} uses a variable that is set neither in the "
                            "environment nor in an earlier line; set it, or write ${NAME:-default}")
        elif name not in Config.model_fields and (not LIBRARIES.fullmatch(name) or misspelt(name)):
            problems.append(unknown(where, key))
        elif name in values:
            problems.append(f"{where}: {key} is set a second time (first at {values[name][1]}); keep one")
        else:
            values[name] = (value, where)
    given = {name: pair for name, pair in values.items() if pair[0] != ""}
    return Layer({name: pair for name, pair in given.items() if name in Config.model_fields}, problems,
                 {name: value for name, (value, _) in given.items() if name not in Config.model_fields})


class Pairs(tuple):
    """A JSON object as its pairs, because a dictionary would hide duplicate names."""


def read_json_file(path: Path) -> Layer:
    """Return the settings of a JSON file, flat or grouped in sections of any name."""
    values, problems = {}, []
    try:
        content = json.loads(read_text(path, "utf-8-sig"), object_pairs_hook=Pairs)
    except OSError as error:
        return Layer({}, [f"{path}: cannot be read: {error.strerror or error}"])
    except (ValueError, RecursionError) as error:
        return Layer({}, [f"{path}: not valid JSON: {error}"])
    if not isinstance(content, Pairs):
        return Layer({}, [f"{path}: expected an object of settings, such as {{\"max_steps\": 1000}}"])

    def leaves(content: Pairs, section: str = "") -> Iterator[tuple[str, str, Any]]:
        for key, value in content:
            if isinstance(value, Pairs):
                yield from leaves(value, f"{section}{key}.")
            else:
                yield section, key, value

    for section, key, value in leaves(content):
        name, where = key.lower().replace("-", "_"), f"{path}: {shortened(section + key)}"
        if name not in Config.model_fields:
            problems.append(unknown(f"{path} in {shortened(section[:-1])}" if section else str(path), key))
        elif name in values:
            problems.append(f"{where} is set a second time (first at {values[name][1]}); keep one")
        elif isinstance(value, list) and name in LISTS and all(isinstance(part, str) for part in value):
            values[name] = (LISTS[name].join(value), where)
        else:
            values[name] = (value, where)
    return Layer(values, problems)


def read_environment(environ: Mapping[str, str]) -> tuple[Layer, list[str]]:
    """Return the settings of the process environment, and warnings of variables like a misspelt setting."""
    values = {name: (environ[name.upper()], "environment")
              for name in Config.model_fields if environ.get(name.upper(), "") != ""}
    warnings = [f"environment: {key} is no setting; did you mean {guess.upper()}?"
                for key in environ if (guess := misspelt(key)) is not None]
    return Layer(values, []), warnings


class Flags(NamedTuple):
    """The command line."""

    layer: Layer
    env_file: Optional[str]
    config_files: list[str]
    check: bool
    rest: dict[str, str]


def read_flags(argv: Sequence[str], extra: Sequence[str] = ()) -> Flags:
    """Return the settings among the flags. `extra` names a script's own flags, returned in `rest`."""
    # Not by argparse: it stops at the first mistake, repeats the value of a secret in its message, and takes
    # a value such as -1e-3 for a flag.
    values, problems, rest, config_files = {}, [], {}, []
    env_file, check = None, False
    own = {name.replace("-", "_") for name in extra}
    known = (*Config.model_fields, *own, *LOADER_FLAGS)
    arguments = list(argv)
    while arguments:
        flag, has_value, value = arguments.pop(0).partition("=")
        name = flag.lstrip("-").lower().replace("-", "_")
        if not flag.startswith("-"):
            # What follows "=" is not repeated: it may be a secret.
            problems.append(f"command line: {shortened(flag + has_value)} has no name; write --name value")
            continue
        # The next argument is the value, unless it is a flag or this one needs none.
        if not has_value and arguments and not arguments[0].startswith("--") and name != "check":
            value, has_value = arguments.pop(0), "="
        elif not has_value and (name == "check" or name in SWITCHES):
            value, has_value = "true", "="

        if not flag.startswith("--") or name not in known:
            problems.append(unknown_flag(flag, known))
        elif name in SECRETS:
            problems.append(f"command line: {flag} is a secret, which everyone could read in a process list; "
                            f"set {name.upper()} in .env or the environment")
        elif not has_value or (value == "" and name in (*own, "env_file", "config")):
            problems.append(f"command line: {flag} needs a value")
        elif name == "check":
            check = value.lower() not in ("false", "0", "no", "off")
        elif name == "env_file":
            env_file = value
        elif name == "config":
            config_files.append(value)
        elif name in own:
            rest[name] = value
        else:
            values[name] = (value, "command line")
    return Flags(Layer(values, problems), env_file, config_files, check, rest)


def read_preset(names: str, where: str) -> Layer:
    """Return the settings of one preset, or of several separated by commas."""
    values, problems = {}, []
    known = {file.stem: file for file in sorted(PRESETS_DIR.glob("*.env"))}
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name in known:
            layer = read_env_file(known[name])
            values.update(layer.values)
            problems += layer.problems
        else:
            guess = nearest(name, known)
            advice = f"did you mean {guess}? " if guess in known else ""
            problems.append(f"{where}: unknown preset {shortened(name)}; {advice}known: {', '.join(known)}")
    return Layer(values, problems)


@dataclass(frozen=True)
class Loaded:
    """A valid configuration, where each setting that is not at its default was found, and what to report."""

    config: Config
    sources: dict[str, str]
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    check: bool = False
    is_plan: bool = False  # for GPUs or ranks that are not here: data and tokenizer may be missing
    rest: dict[str, str] = field(default_factory=dict)
    exports: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold secrets

    def with_defaults(self, values: Mapping[str, Any]) -> "Loaded":
        """Return this with these valid values for the settings that no layer sets: a layer below all others.

        The rules between settings are the caller's to check again.
        """
        unset = {name: value for name, value in values.items() if name not in self.sources}
        return replace(self, config=self.config.model_copy(update=unset))


def read_layers(flags: Flags, environ: Mapping[str, str], environment: Layer) -> list[Layer]:
    """Return all layers, the lowest first."""
    env_path = Path(flags.env_file or ".env")
    exists = flags.env_file or env_path.is_file()
    layers = [read_env_file(env_path, environ) if exists else Layer({}, []),
              *map(read_json_file, map(Path, flags.config_files)), environment, flags.layer]
    naming = max((number for number, layer in enumerate(layers) if "preset" in layer.values), default=None)
    if naming is not None:
        names, where = layers[naming].values["preset"]
        preset = read_preset(names, where) if isinstance(names, str) else Layer({}, [])
        # A preset on the command line is above `.env`; one that `.env` names is below it.
        layers.insert(min(naming, 1), preset)
    return layers


def peek(argv: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the settings that are given, and the environment with `.env`'s exports; nothing is validated."""
    layers = read_layers(read_flags(argv), os.environ, read_environment(os.environ)[0])
    values = {name: str(value) for layer in layers for name, (value, _) in layer.values.items()}
    return values, {**exported(layers), **os.environ}


def exported(layers: Iterable[Layer]) -> dict[str, str]:
    """Return the libraries' keys of all layers."""
    return {name: value for layer in layers for name, value in layer.exports.items()}


def load_config(argv: Sequence[str] = (), environ: Optional[Mapping[str, str]] = None, *,
                extra_flags: Sequence[str] = (), complete: bool = True) -> Loaded:
    """Read all layers and return the configuration.

    Args:
        argv: flags, without the program's name.
        environ: the process environment; None = os.environ.
        extra_flags: names of a script's own flags, returned in `rest`.
        complete: also check the rules between settings; scripts that need only a few settings pass False.
    """
    environ = os.environ if environ is None else environ
    flags = read_flags(argv, extra_flags)
    environment, warnings = read_environment(environ)
    layers = read_layers(flags, environ, environment)
    merged: dict[str, tuple[Any, str]] = {}
    for layer in layers:
        merged.update(layer.values)
    problems = [problem for layer in layers for problem in layer.problems]
    config, invalid = validate(merged)
    told = []
    if config.depth is not None:
        lowest, told = layer_of_depth(config, merged)
        merged = lowest | merged
        config, invalid = validate(merged)
    if config.micro_batch_size == 0:
        rows = max(1, config.rows_per_step // config.world_size)
        config = config.model_copy(update={"micro_batch_size": rows})
    if config.keep_layers is not None:
        config = config.model_copy(update={"n_layers": config.keep_layers})
    problems += invalid.values()
    # A plan for other GPUs or ranks needs neither data nor a tokenizer.
    is_plan = flags.check and "RANK" not in environ and (config.device_memory or config.world_size > 1)
    missing = [*input_rules(config)] if is_plan else []
    warnings += missing
    if complete:
        if "world_size" not in invalid:
            problems += launch_problems(config, environ, flags.check)
        if "distillation_enabled" not in invalid:
            problems += unused_teacher(config, layers)
        # A rule about a setting that is invalid in itself would only confuse.
        invalid_names = re.compile("|".join(rf"\b{name.upper()}\b" for name in invalid) or "(?!)")
        found = [message for message in rules(config)
                 if message not in missing and not invalid_names.search(message)]
        if merged.get("total_batch_size", ("", ""))[1] == f"DEPTH={config.depth}":  # which nobody set
            given = [name for name, (_, where) in merged.items() if where != f"DEPTH={config.depth}"]
            found = [unequal_shares(config, given) if message.startswith("TOTAL_BATCH_SIZE=") else message
                     for message in found]
        problems += found
    if problems:
        raise SettingsError(*problems)
    sources = {name: where for name, (_, where) in merged.items()}
    told += notes(layers, merged, environ)
    return Loaded(config, sources, told, warnings, flags.check, bool(is_plan), flags.rest, exported(layers))


def layer_of_depth(config: Config, given: Container[str]) -> tuple[dict[str, tuple[Any, str]], list[str]]:
    """Return what DEPTH sets, as a layer below all others, and the sentence that tells it."""
    where, chosen = f"DEPTH={config.depth}", settings_of_depth(config, given)
    values = ", ".join(f"{name.upper()}={value}" for name, value in chosen.items())
    kept = [name.upper() for name in settings_of_depth(config, ()) if name not in chosen]
    others = f"; not {', '.join(kept)}, which are set elsewhere" if kept else ""
    told = f"{where} sets {values or 'nothing'}{others}"
    return {name: (value, where) for name, value in chosen.items()}, [told]


def notes(layers: Sequence[Layer], merged: Mapping[str, tuple[Any, str]],
          environ: Mapping[str, str]) -> Iterator[str]:
    """Yield what may surprise: what a preset overrides, what the environment sets, and what libraries get."""
    overridden = [f"{name.upper()}={value}" for name, (value, where) in merged.items()
                  if where.startswith(str(PRESETS_DIR)) and layers[0].values.get(name, (value,))[0] != value]
    if overridden:
        yield f"From the preset, which overrides .env: {', '.join(overridden)}"
    given = [f"{name.upper()}={shortened(without_passwords(value))}"
             for name, (value, where) in merged.items()
             if where == "environment" and name not in (*SECRETS, "world_size")]  # torchrun sets the latter
    if given:
        yield f"From the environment: {', '.join(given)}"
    for where, same in ((".env", True), ("the environment, which overrides .env", False)):
        names = [name for name, value in exported(layers).items()
                 if (environ.get(name, value) == value) is same]
        if names:
            yield f"For the libraries, from {where}: {', '.join(names)}"


def unused_teacher(config: Config, layers: Sequence[Layer]) -> Iterator[str]:
    """Yield a message if TEACHER_MODEL would be ignored, and nobody who knew of it wrote so."""
    if config.teacher_model is None or config.distillation_enabled:
        return
    named, off = (max((number for number, layer in enumerate(layers) if name in layer.values), default=-1)
                  for name in ("teacher_model", "distillation_enabled"))
    where = layers[named].values["teacher_model"][1]
    # A preset that switches distillation off knows only of the layers below it.
    by_preset = off >= 0 and layers[off].values["distillation_enabled"][1].startswith(str(PRESETS_DIR))
    if off < 0 or (by_preset and off < named):
        yield (f"{where}: TEACHER_MODEL={shortened(config.teacher_model)} has no effect without "
               "DISTILLATION_ENABLED=true; set that too, or DISTILLATION_ENABLED=false to train without it")


def launch_problems(config: Config, environ: Mapping[str, str], check: bool) -> Iterator[str]:
    """Yield conflicts between WORLD_SIZE and the launcher that started this process."""
    if "RANK" not in environ:
        if config.world_size > 1 and not check:
            yield (f"WORLD_SIZE={config.world_size}, but no launcher started this process; use "
                   f"{command('scripts/launch.py', '--nproc-per-node', str(config.world_size))} (or torchrun)"
                   ", or leave it out")
    elif not all(environ.get(name, "0").isdecimal() for name in ("RANK", "LOCAL_RANK")):
        yield "environment: RANK and LOCAL_RANK must be whole numbers; torchrun sets them"
    elif str(config.world_size) != (started := environ.get("WORLD_SIZE") or "1").strip():
        yield f"WORLD_SIZE={config.world_size}, but the launcher started {started} processes; remove it"


def validate(merged: Mapping[str, tuple[Any, str]]) -> tuple[Config, dict[str, str]]:
    """Return the configuration, with defaults in place of invalid values, and a message for each of those."""
    nothing = ("", "none", "null")
    values = {name: None if name in OPTIONAL and isinstance(value, str) and value.strip().lower() in nothing
              else value for name, (value, _) in merged.items()}
    invalid = {}
    for name, value in values.items():
        if isinstance(value, list):
            invalid[name] = "expected one value, not a list"
        elif isinstance(value, bool) and name not in SWITCHES:  # JSON's true, which Python counts as 1
            invalid[name] = "expected a number or text"
        elif isinstance(value, str) and not is_valid_text(value):
            invalid[name] = "contains a NUL or an invalid character; remove it"
    try:
        Config(**values)
    except ValidationError as error:
        for detail in error.errors():
            invalid.setdefault(str(detail["loc"][0]), detail["msg"][0].lower() + detail["msg"][1:])
    messages = {}
    for name, message in invalid.items():
        value, where = merged[name]
        shown = "***" if name in SECRETS else shortened(str(value))
        messages[name] = f"{where}: {name.upper()}={shown}: {message}"
    return Config(**{name: value for name, value in values.items() if name not in invalid}), messages


def is_valid_text(text: str) -> bool:
    """Whether a text could be a file name: without NUL, and of surrogates only undecodable bytes."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def find_run(name: str) -> Path:
    """Return the folder of the run that a script's argument names.

    By its path, by its name in OUTPUT_DIR, or by one of its checkpoints; by its path if there is none.
    """
    path = Path(name).expanduser()
    if not os.path.exists(path):
        inside = Path(load_config(complete=False).config.output_dir) / path
        path = inside if os.path.exists(inside) else path
    if re.fullmatch(r"step-\d+", path.name):
        path = path.parent
    return path.parent if path.name == "checkpoints" else path


def load_or_exit(argv: Sequence[str], usage: str) -> Loaded:
    """Return the configuration with `.env`'s exports exported; exits after --help, --version or mistakes."""
    if {"--help", "-h", "--version"} & set(argv):
        with first_on_machine() as first, exit_if_unread():
            if first:
                show(*(VERSION if "--version" in argv else help_text(usage)).split("\n"))
        raise SystemExit(0)
    try:
        loaded = load_config(argv)
    except SettingsError as error:
        exit_with(error)
    export(loaded)
    return loaded


def exit_with(error: SettingsError) -> NoReturn:
    """Print the mistakes, once on each machine, and exit with code 2."""
    lines = str(error).splitlines()
    with first_on_machine() as first:
        if first:
            title = f"{len(lines)} error{'s' if len(lines) > 1 else ''} in the settings:"
            print_safely("\n  ".join([title, *lines]), sys.stderr)
    raise SystemExit(error.exit_code)


def export(loaded: Loaded) -> None:
    """Put `.env`'s secrets and libraries' keys into the environment, before the libraries are imported."""
    for name, value in loaded.exports.items():
        os.environ.setdefault(name, value)
    configure_allocator()
    for name in SECRETS:
        secret = getattr(loaded.config, name)
        if secret is not None:
            os.environ[name.upper()] = secret.get_secret_value()
