"""The text of a model card: Hugging Face's metadata block and Markdown, safe for any text, and read back.

The model card of a checkpoint, README.md: what it is, what it was trained on, and how to make it again.

Absolute paths, which tell of a machine and its users, are cut to their last name.


The report of a run, written by another process; until the end at the lowest priority, so no step waits."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
import yaml

from checkpoint.huggingface import name_of_download
from checkpoint.schema import CARD, SavedProgress
from common import __version__
from common.files import read_json, read_plain
from common.heartbeat import HEARTBEAT
from common.remote import HUB_NAME
from common.text import command, last_line, printable
from config import LOCAL_PATHS, NAMES_OR_PATHS, CheckpointConfig, Config, LogConfig
from data_pipeline.shards import MANIFEST as DATA_MANIFEST
from dataloaders import MixedRows, parts_of
from learn.cost import parameter_count
from parallel.process import STOP_SIGNALS
from report.data import segments, setting_lines
from run.log import REPORT, RunHistory


def code(text: Any) -> str:
    """Return a text as Markdown's inline code, which nothing in it can end."""
    line = printable(str(text))
    ticks = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    space = " " if not line.strip(" ") or line[0] in "` " or line[-1] in "` " else ""
    return f"{ticks}{space}{line}{space}{ticks}"


def fenced(language: str, *lines: str) -> str:
    """Return lines as Markdown's block of code, which none of them can end."""
    lines = [printable(line) for line in lines]
    ticks = "`" * max(3, *(1 + len(run) for line in ("", *lines) for run in re.findall("`+", line) or [""]))
    return "\n".join([ticks + language, *lines, ticks])


def table(*rows: Sequence[str]) -> str:
    """Return rows of cells, the first of them the header, as a Markdown table."""
    lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def card_text(metadata: Mapping[str, Any], title: str, sections: Mapping[str, str]) -> str:
    """Return a card.

    Args:
        sections: Markdown by its heading; an empty heading follows the title. Empty sections are left out.
    """
    body = [f"## {heading}\n\n{text}" if heading else text for heading, text in sections.items() if text]
    stated = {name: value for name, value in metadata.items() if value not in ("", [], None)}
    block = yaml.safe_dump(stated, sort_keys=False, width=float("inf"))
    return "\n\n".join([f"---\n{block}---", f"# {code(title)}", *body]) + "\n"


def read_card(folder: Path) -> str:
    """Return the card in a folder; empty if there is none that can be read."""
    try:
        return read_plain(folder / CARD).decode(errors="replace")
    except OSError:
        return ""


def facts_of(card: str) -> dict[str, str]:
    """Return the texts and numbers in a card's metadata, those under `paddock` among them."""
    block = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    try:
        metadata = yaml.safe_load(block[1]) if block else {}
    except (yaml.YAMLError, ValueError, RecursionError):  # somebody else's card
        metadata = {}
    metadata = metadata if isinstance(metadata, dict) else {}
    own = metadata.get("paddock")
    return {name: str(value) for name, value in {**metadata, **(own if isinstance(own, dict) else {})}.items()
            if isinstance(value, (str, int, float))}


def sections_of(card: str) -> dict[str, str]:
    """Return the sections of a card by their headings."""
    parts = re.split(r"^## (.+)\n", card, flags=re.MULTILINE)
    return {heading: text.strip() for heading, text in zip(parts[1::2], parts[2::2])}


ROOT = Path(__file__).resolve().parent.parent
FILES_LISTED = 5
COMPUTE_OPTIMAL = 20  # tokens per parameter. Source: Hoffmann et al. 2022, arxiv.org/abs/2203.15556
# Settings that do not change what is trained, or that another machine has otherwise.
NOT_TOLD = {name.upper() for section in (LogConfig, CheckpointConfig) for name in section.model_fields} | {
    "PRESET", "OUTPUT_DIR", "RUN_NAME", "RESUME", "CACHE_DIR", "WORLD_SIZE", "DEVICE_MEMORY",
    "ALLOW_RESUME_MISMATCH", "DISTRIBUTED_TIMEOUT", "PREPARATION_WORKERS", "VERIFY_DATA"} - {
    "MODEL_LICENSE", "MODEL_LANGUAGE"}
STAGES = {"pretrain": "pretraining on text", "sft": "fine-tuning on chats (SFT)",
          "dpo": "training on preference pairs"}


class CardFacts(NamedTuple):
    """What the card of a run's checkpoint tells of."""

    name: str  # of the run
    folder: Path  # of the run
    config: Config
    progress: SavedProgress
    identity: Mapping[str, Any]
    history: RunHistory
    rows: Any  # of the training split
    titles: Mapping[str, str]  # of the multiple-choice sets, by the names of their metrics
    vocab_size: int
    trained: int  # parameters
    hardware: str


def write_card(folder: Path, make: Callable[[], str], warn: Callable[[str], None]) -> None:
    """Write the card that `make` returns into a checkpoint's folder; a failure is only warned of."""
    try:
        (folder / CARD).write_text(make(), encoding="utf-8")
    except Exception as error:  # whatever it is: a card must not keep weights from being saved
        with suppress(OSError):
            (folder / CARD).unlink(missing_ok=True)
        warn(f"the checkpoint has no model card: {type(error).__name__}: {error}")


# ------------------------------------------------------------------------------------- the cards


def run_card(facts: CardFacts) -> str:
    """The card of a run's checkpoint."""
    config, progress = facts.config, facts.progress
    relation = "adapter" if config.lora_enabled else "finetune"
    data, scores = [*data_sets(facts)], [*newest_scores(facts)]
    digest = facts.history.ledger_sha256(progress.step)
    task = config.training_stage if config.training_stage != "dpo" else config.preference_objective
    metadata = origin(Path(progress.base) if progress.base else None, config.model_license)
    metadata |= {
        "base_model_relation": relation if metadata["base_model"] else "",
        "language": languages(config),
        "datasets": [*dict.fromkeys(part.hub_name for part in data if part.hub_name)],
        "library_name": "peft" if config.lora_enabled else "transformers", "pipeline_tag": "text-generation",
        "tags": ["llama", "paddock", task, *["lora"] * config.lora_enabled,
                 *["distillation"] * config.distillation_enabled],
        "model-index": model_index(facts.name, scores),
        "paddock": {"version": __version__, "step": progress.step, "tokens": progress.tokens_seen,
                    "ledger_sha256": digest}}
    ledger = ("SHA-256 of the run's `ledger.jsonl` (rows, loss, gradient norm of each step) up to this step: "
              f"{code(digest)}. Runs with the same digest took the same steps.") if digest else ""
    return card_text(metadata, facts.name, {
        "": introduction(facts),
        "Use": usage(progress.base if config.lora_enabled else None, config.training_stage != "pretrain"),
        "Training data": table(SET_COLUMNS, *(part.cells for part in data)),
        "Training": "\n".join(f"- {line}" for line in training_lines(facts)),
        "Scores": scores_table(scores), "Energy": energy(facts.history),
        "Limits": "\n".join(f"- {line}" for line in limits(facts, scores)), "Make it again": recipe(facts),
        "Check a copy": f"{CHECK}\n\n{ledger}".strip()})


CHECK = ("`python scripts/verify_checkpoint.py FOLDER` compares every file with `MANIFEST.json`. This card "
         "is not listed there: edit it as you like.")
WHOLE_MODEL = {"library_name": "transformers", "pipeline_tag": "text-generation",
               "tags": ["llama", "paddock"]}
INHERITED = ("Training data", "Training", "Scores", "Energy", "Limits", "Make it again")
SET_COLUMNS = ("source", "of the run", "passes", "documents", "tokens", "fingerprint", "made from")


def merged_card(output: str, adapters: Path, base: Path, dtype: torch.dtype) -> str:
    """The card of adapters that were merged into their base, with what their own card tells."""
    own, kept = read_card(adapters), carried(adapters)
    metadata = origin(base) | license_of(facts_of(own)) | WHOLE_MODEL
    rest = "What follows is from their card." if kept else "They had no card."
    return card_text(metadata, output, {
        "": f"The model {named_base(str(base))} with the adapters {code(run_and_step(str(adapters)))} merged "
            f"into it, in {str(dtype).removeprefix('torch.')}. {rest}",
        "Use": usage(None, APPLY_TEMPLATE in own), **kept, "Check a copy": CHECK})


def imported_card(output: str, source: Path, weights_sha256: str, longest: int) -> str:
    """The card of a model from elsewhere."""
    name = base_name(str(source))
    where = f"[{name}](https://huggingface.co/{name})" if name else code(run_and_step(str(source)))
    kept = carried(source)
    rest = "What follows is from its card." if kept else "Its card tells what it was trained on."
    return card_text(origin(source) | WHOLE_MODEL, output, {
        "": f"The weights of {where}, imported unchanged. {rest}\n\n"
            f"- context length: {longest:,} tokens\n- SHA-256 of the weights: {code(weights_sha256)}",
        "Use": usage(None, APPLY_TEMPLATE in read_card(source)), **kept, "Check a copy": CHECK})


def carried(folder: Path) -> dict[str, str]:
    """What the card of adapters or of a source tells that is true of what is made from it."""
    return {heading: text for heading, text in sections_of(read_card(folder)).items() if heading in INHERITED}


def languages(config: Config) -> list[str]:
    """MODEL_LANGUAGE."""
    return [part.strip() for part in config.model_language.split(",") if part.strip()]


def origin(base: Optional[Path], own_license: str = "") -> dict[str, Any]:
    """The fields of the metadata that depend on the base: its name on the hub, and its license.

    Args:
        own_license: what the user says that it is; empty: that of the base, if the base's card says so.
    """
    of_base = facts_of(read_card(base)) if base else {}
    name = base and (base_name(str(base)) or of_base.get("base_model", ""))
    known = {"base_model": name if name and HUB_NAME.fullmatch(name) else ""}
    if re.fullmatch(r"[a-z0-9][a-z0-9.-]*", own_license.lower()):
        return known | {"license": own_license.lower()}
    if own_license:  # the hub knows short identifiers; another license is `other`, with a name
        slug = re.sub(r"[^a-z0-9.-]+", "-", own_license.lower()).strip("-.")
        return known | {"license": "other", "license_name": slug or "own"}
    return known | (license_of(of_base) or {"license": "unknown"})


def license_of(facts: Mapping[str, str]) -> dict[str, str]:
    """What a card's metadata say of the license."""
    return {key: facts[key] for key in ("license", "license_name", "license_link") if facts.get(key)}


def base_name(path: Optional[str]) -> str:
    """The name on the hub of a model in its cache; empty for any other place."""
    return (name_of_download(path or "") or "").partition("@")[0]


def run_and_step(path: str) -> str:
    """A path without what it tells of the machine: of an absolute one the run and step, or the last name."""
    if not Path(path).is_absolute():
        return path
    parts = Path(path).parts
    return "/".join(parts[-3:] if "checkpoints" in parts[-2:-1] else parts[-1:])


def named_base(path: str) -> str:
    """A base model in a sentence."""
    return code(name_of_download(path) or run_and_step(path))


@cache
def commit() -> str:
    """The commit of the code, with -dirty if it was changed; empty if it is no git repository."""
    if not (ROOT / ".git").exists():
        return ""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL,
                              env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"})
        return done.stdout.strip()
    return ""


# ---------------------------------------------------------------------------------- its sections

APPLY_TEMPLATE = "apply_chat_template"


def introduction(facts: CardFacts) -> str:
    """What it is, in a sentence or two, and its shape."""
    config, progress = facts.config, facts.progress
    begun = f"from {named_base(progress.base)}" if progress.base else "from random weights"
    size = f"{parameter_count(config, facts.vocab_size):,} parameters"
    what, start = f"A Llama 3 model of {size}", f", {begun}"
    if config.lora_enabled:
        what, start = (f"LoRA adapters ({facts.trained:,} parameters) for {named_base(progress.base)}, a "
                       f"Llama 3 model of {size}"), ""
    tied = ", tied" if config.tie_embeddings else ""
    return (f"{what}: {STAGES[config.training_stage]}{start}, step {progress.step:,} of {config.max_steps:,}."
            f"\n\nShape: {config.n_layers} layers, width {config.dim}, feed-forward {config.hidden_dim}, "
            f"{config.n_heads} query and {config.n_kv_heads} key/value heads, vocabulary "
            f"{facts.vocab_size:,}{tied}.")


def usage(base: Optional[str], is_chat: bool) -> str:
    """How to load the folder and write text with it.

    Args:
        base: of adapters; None: it is a whole model.
    """
    prompt = ['inputs = tokenizer("Once", return_tensors="pt")']
    if is_chat:
        prompt = ['chat = [{"role": "user", "content": "..."}]',
                  f"inputs = tokenizer.{APPLY_TEMPLATE}(",
                  '    chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")']
    lines = ["from transformers import AutoModelForCausalLM, AutoTokenizer", "",
             'folder = "."  # where this file is', "tokenizer = AutoTokenizer.from_pretrained(folder)"]
    if base is None:
        lines.append("model = AutoModelForCausalLM.from_pretrained(folder)")
    else:
        name, _, revision = (name_of_download(base) or "").partition("@")
        where = f'"{name}", revision="{revision}"' if name else '"FOLDER"'
        lines[1:1] = ["from peft import PeftModel"]
        comment = "" if name else "  # of the base"
        lines += [f"base = AutoModelForCausalLM.from_pretrained({where}){comment}",
                  "model = PeftModel.from_pretrained(base, folder)"]
    lines += [*prompt, "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))"]
    return f"{fenced('python', *lines)}\n\nOr, in Paddock: `python scripts/chat.py FOLDER`."


class DataSet(NamedTuple):
    """A line of the table of training data."""

    cells: tuple[str, ...]
    hub_name: str


def data_sets(facts: CardFacts) -> Iterator[DataSet]:
    """Yield the prepared sets that the run has read so far."""
    config, rows = facts.config, facts.rows
    taken = facts.progress.step * config.rows_per_step
    path = str(getattr(config, f"{config.training_stage}_data_path"))
    shares = [{"source": run_and_step(path), "share": 1.0, "passes": taken / len(rows)}]
    if isinstance(rows, MixedRows):
        shares = rows.facts(taken)
    for part, fact in zip(parts_of(rows), shares):
        part = getattr(part, "rows", part)  # without what is stored beside them
        documents, source, hub_name = made_from(part.token_set.folder)
        yield DataSet((code(fact["source"]), f"{fact['share']:.2%}", f"{fact['passes']:.2f}", documents,
                       f"{part.token_set.tokens:,}", code(part.fingerprint), source), hub_name)


@cache
def made_from(folder: Path) -> tuple[str, str, str]:
    """The documents of a prepared set, what it was made from, and the name of that on the hub."""
    try:
        content = read_json(folder / DATA_MANIFEST)
        documents = f"{content['splits']['train']['documents']:,}"
        source = content["source"]["sources"][0]
        files = source.get("identity", {}).get("files") or []
    except (OSError, ValueError, KeyError, IndexError, TypeError):  # token files of others
        return "", "token files", ""
    if name := source.get("name"):
        version = source["identity"].get("revision") or source.get("revision") or ""
        facts = {"config": source.get("config"), "split": source.get("split"), "revision": version}
        told = [code(name), *(f"{label} {code(value)}" for label, value in facts.items() if value)]
        return documents, ", ".join(told), name
    hashes = [f"{'SHA-256' if re.fullmatch('[0-9a-f]{64}', str(content)) else 'version'} {code(content)}"
              for *_, content in files[:FILES_LISTED]]
    more = f" and {len(files) - FILES_LISTED:,} more files" if len(files) > FILES_LISTED else ""
    return documents, f"{code(run_and_step(source.get('path', '')))} ({', '.join(hashes)}{more})", ""


def training_lines(facts: CardFacts) -> Iterator[str]:
    """Yield how it was trained."""
    config, progress = facts.config, facts.progress
    skipped = f", {progress.skipped_steps:,} of them without an update" if progress.skipped_steps else ""
    yield (f"{progress.step:,} of {config.max_steps:,} steps{skipped}: {progress.tokens_seen:,} tokens, "
           f"{config.total_batch_size:,} a step, in rows of {config.max_seq_len:,}")
    if progress.base:
        digest = code(progress.base_sha256)
        yield f"begun from {named_base(progress.base)}, whose weights have SHA-256 {digest}"
    else:
        yield f"begun from random weights, SEED={config.seed}"
    if config.training_stage == "dpo":
        yield f"objective: {config.preference_objective.upper()}"
    if config.distillation_enabled:
        yield (f"distilled from {named_base(config.teacher_model)} with {config.distillation_loss}, weight "
               f"{config.distillation_weight:g}; the rest is cross-entropy")
    if config.lora_enabled:
        how = config.lora_base_quantization
        quantized = f"; the base was quantized ({how}) in training" if how != "none" else ""
        yield (f"LoRA of rank {config.lora_rank}, alpha {config.lora_alpha:g}, on "
               f"{config.lora_target_modules}{quantized}")
    yield (f"{'Muon and ' * (config.optimizer == 'muon')}AdamW, learning rate {config.learning_rate:g} to "
           f"{config.final_learning_rate:g} ({config.lr_schedule}, warm-up of {config.warmup_steps:,} "
           f"steps), weight decay {config.weight_decay:g}")
    version = f"{__version__} ({commit()})" if commit() else __version__
    yield f"{facts.hardware}; torch {torch.__version__}, Paddock {version}"
    for part in [*segments(facts.folder)][1:]:
        if part["step"] <= progress.step:
            changes = (f"{change['name']}={code(told_value(change['name'], change['after']))}"
                       for change in part["changes"] if is_told(change["name"]))
            if told := ", ".join(changes):
                yield f"from step {part['step']:,} on with {told}"


class Score(NamedTuple):
    """The newest result of an evaluation."""

    data: str
    metric: str
    value: float
    step: int
    stderr: Optional[float] = None
    n: Optional[float] = None
    chance: Optional[float] = None


def newest_scores(facts: CardFacts) -> Iterator[Score]:
    """Yield the newest result of each evaluation."""
    scores = facts.history.scores

    def beside(*names: str) -> list[Optional[float]]:
        return [scores[name][1] if name in scores else None for name in names]

    for name, (step, value) in scores.items():
        task = name.removesuffix("_norm").removesuffix("_acc")
        if name in ("val_loss", "val_bits_per_byte", "val_reward_accuracy"):
            yield Score("validation split", name[4:], value, step, *beside(f"{name}_stderr"))
        elif name.startswith("generation_") and not name.endswith(("_n", "_stderr")):
            error_and_n = beside(f"{name}_stderr", "generation_n")
            yield Score("answers to held-out prompts", name[11:], value, step, *error_and_n)
        elif name in (f"{task}_acc", f"{task}_acc_norm"):
            stderr, n, chance = beside(*(f"{task}_{key}" for key in ("stderr", "n", "chance")))
            error = stderr if name.endswith("_acc") else None
            yield Score(facts.titles.get(task, task), name[len(task) + 1:], value, step, error, n, chance)


def scores_table(scores: Sequence[Score]) -> str:
    """The scores, each with its standard error."""
    if not scores:
        return "Nothing was measured."
    rows = [(code(score.data), score.metric.replace("_", " "),
             f"{score.value:.4f}" + ("" if score.stderr is None else f" +- {score.stderr:.4f}"),
             "" if score.n is None else f"{score.n:,.0f}",
             "" if score.chance is None else f"{score.chance:.4f}", f"{score.step:,}") for score in scores]
    return table(("data", "metric", "value", "items", "chance", "after step"), *rows) + (
        "\n\nAfter +- is the standard error, from these items alone.")


def model_index(name: str, scores: Sequence[Score]) -> list[dict[str, Any]]:
    """The scores as Hugging Face's model-index."""
    results = [{"task": {"type": "text-generation"}, "dataset": {"name": score.data, "type": score.data},
                "metrics": [{"type": score.metric, "value": score.value}]} for score in scores]
    return [{"name": name, "results": results}] if results else []


def energy(history: RunHistory) -> str:
    """The energy of the steps, over all parts of the run."""
    if not history.measured_tokens:
        return "Not measured."
    share = history.measured_tokens / history.all_tokens
    part = "" if share > 0.999 else f"; measured over {share:.1%} of the tokens"
    rate = history.joules / history.measured_tokens
    return (f"{history.joules / 3.6e6:.4g} kWh, {rate:.4g} joules a token: of the GPUs or CPUs alone, "
            f"without evaluations and saves{part}.")


def limits(facts: CardFacts, scores: Sequence[Score]) -> Iterator[str]:
    """Yield what is true of this model and may disappoint."""
    config, progress = facts.config, facts.progress
    yield "not evaluated for safety, bias or truth"
    if config.training_stage == "pretrain":
        yield "continues text: this stage does not train it to answer chats"
    yield f"trained on rows of {config.max_seq_len:,} tokens; what is longer was not trained here"
    spoken = ", ".join(languages(config))
    yield f"languages of the data: {code(spoken) if spoken else 'not stated'}"
    ratio = progress.tokens_seen / parameter_count(config, facts.vocab_size)
    if not progress.base and ratio < COMPUTE_OPTIMAL:
        yield f"{ratio:.3g} tokens per parameter; about {COMPUTE_OPTIMAL} make the best use of compute"
    if not any(score.metric == "loss" for score in scores):
        yield "no loss on held-out data is known"
    for score in scores:
        if score.stderr and score.chance and score.value - score.chance < 2 * score.stderr:
            yield f"{code(score.data)}: not better than chance, within two standard errors"


def recipe(facts: CardFacts) -> str:
    """The settings and commands that make the model again."""
    lines = [f"{line['name']}={env_value(told_value(line['name'], line['value']))}"
             for line in setting_lines(facts.config.public())
             if line["changed"] and is_told(line["name"])]
    ranks = facts.config.world_size
    command = "python train.py" if ranks == 1 else f"python scripts/launch.py --nproc-per-node {ranks}"
    checkout = [f"git checkout {commit().removesuffix('-dirty')}"] if commit() else []
    changed = " The code had changes that are not in this commit." if commit().endswith("-dirty") else ""
    tokenizer = facts.identity.get("TOKENIZER_PATH", "")
    return ("The settings that differ from the defaults, as `.env`, for the data above and a tokenizer with "
            f"SHA-256 {code(tokenizer)}. Of absolute paths the last names are left.{changed}\n\n"
            f"{fenced('', *lines)}\n\n{fenced('bash', *checkout, command)}")


def is_told(name: str) -> bool:
    """Whether a setting belongs to what makes the model again."""
    return name not in NOT_TOLD and not name.startswith("SAMPLE_")


def told_value(name: str, value: str) -> str:
    """A setting's value without what it tells of the machine."""
    if name == "EVAL_TASKS":
        parts = (entry.partition(":") for entry in value.split(","))
        return ",".join(f"{task}:{run_and_step(path)}" for task, _, path in parts)
    return run_and_step(value) if name.lower() in (*LOCAL_PATHS, *NAMES_OR_PATHS) else value


def env_value(value: str) -> str:
    """A value as `.env` spells it."""
    if re.fullmatch(r"[\w./:,+@%-]*", value):
        return value
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "report.py"
LOWEST_PRIORITY = 19


class BackgroundReport:
    """At most one process that writes a run's report. A failure causes a warning, and at the end another."""

    def __init__(self) -> None:
        self.process: Optional[subprocess.Popen] = None
        self.warned = False

    def start(self, folder: Path, warn: Callable[[str], None], is_final: bool = False) -> None:
        """Begin to write the report in a run's folder, unless one is being written; returns at once."""
        if self.process and self.process.poll() is None:
            return  # the next save or the end of the run writes what is new
        self._check(folder, warn)
        try:
            # In a session of its own: Ctrl-C at the terminal is for the run.
            self.process = subprocess.Popen(
                [sys.executable, SCRIPT, folder.absolute(), "--in-background"], start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            if is_final:
                return
            with suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, self.process.pid, LOWEST_PRIORITY)
            with suppress(OSError):  # Linux shares the cores among sessions first, whatever their priorities
                Path(f"/proc/{self.process.pid}/autogroup").write_text(str(LOWEST_PRIORITY))
        except OSError as error:
            self._warn(folder, f"{type(error).__name__}: {error}", warn)

    def finish(self, folder: Path, seconds: float, warn: Callable[[str], None]) -> bool:
        """Write the final report, and wait for it for at most so long; returns whether it was written."""
        self._stop(folder)  # it does not know the end
        self.warned = False
        self.start(folder, warn, is_final=True)
        if self.process:
            with suppress(subprocess.TimeoutExpired), HEARTBEAT.beat_in_background():
                self.process.wait(seconds)
            if self.process.poll() is None:
                self._stop(folder)
                self._warn(folder, f"it takes longer than {seconds:.0f} s", warn)
            was_written = self.process is not None and self.process.returncode == 0
            self._check(folder, warn)
            return was_written
        return False

    def _stop(self, folder: Path) -> None:
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
            (folder / f"{REPORT}.tmp-{self.process.pid}").unlink(missing_ok=True)
        self._close()

    def _check(self, folder: Path, warn: Callable[[str], None]) -> None:
        """Warn if the process has failed, but not if a stop signal to the whole job has ended it."""
        if self.process and self.process.poll() not in (0, *(-number for number in STOP_SIGNALS)):
            self._warn(folder, last_line(self.process.stderr.read().decode(errors="replace")), warn)
        self._close()

    def _close(self) -> None:
        if self.process:
            self.process.stderr.close()
            self.process = None

    def _warn(self, folder: Path, why: str, warn: Callable[[str], None]) -> None:
        if not self.warned:
            self.warned = True
            warn(f"the report was not written: {why}. The run does not need it. To write it later: "
                 f"{command('scripts/report.py', folder)}")
