"""The model card of each checkpoint, README.md.

The card's text is in card.md.jinja. Absolute paths are cut to their last name, because they reveal details of
a machine and its users.
"""

import hashlib
import math
import re
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, Optional

import torch
import yaml
from jinja2 import Environment, StrictUndefined, Template

from checkpoint.manifest import CARD
from checkpoint.model_json import name_of_download
from checkpoint.schema import VALIDATION
from common import __version__
from common.files import commit, read_json, read_plain
from common.remote import HUB_NAME
from common.text import counted, printable
from config import EXTENSION_SECTIONS, LOCAL_PATHS, NAMES_OR_PATHS, CheckpointConfig, LogConfig
from data_pipeline.prepare import JOURNAL
from data_pipeline.shards import MANIFEST as DATA_MANIFEST
from extensions.cost import parameter_count
from extensions.report.console import trained_count
from extensions.report.data import LogFile, segments, setting_lines
from extensions.report.numbers import metric_title, number_text, result_text
from model_utils import device_name
from run.extensions import Extension
from run.log import EVALUATED
from run.run import Run

FILES_LISTED = 5
COMPUTE_OPTIMAL = 20  # tokens per parameter. Source: Hoffmann et al. 2022, arxiv.org/abs/2203.15556
# Settings that do not affect training, or differ between machines.
UNTRAINED = (LogConfig, CheckpointConfig,
             *(section for name, section in EXTENSION_SECTIONS.items() if name not in ("guards", "online")))
NOT_IN_RECIPE = {*(name.upper() for section in UNTRAINED for name in section.model_fields), "PRESET",
                 "OUTPUT_DIR", "RUN_NAME", "RESUME", "CACHE_DIR", "WORLD_SIZE", "DEVICE_MEMORY", "EXTENSIONS",
                 "ALLOW_RESUME_MISMATCH", "DISTRIBUTED_TIMEOUT", "PREPARATION_WORKERS", "PREPARE_AHEAD",
                 "VERIFY_DATA"}
STAGES = {"pretrain": "pretraining on text", "sft": "fine-tuning on chats (SFT)",
          "dpo": "training on preference pairs", "grpo": "training on the model's own answers (GRPO)"}
INHERITED = ("Training data", "Training", "Scores", "Energy", "Limits", "Make it again")


class Card(Extension):
    """Writes the card of each checkpoint."""

    history: Optional["History"] = None

    def checkpoint_texts(self, run: Run) -> dict[str, str]:
        try:
            if not run.ranks.is_rank0:
                return {}
            self.history = self.history or History(run.config.total_batch_size)
            self.history.read(run.folder, run.progress.step)
            return {CARD: run_card(run, self.history)}
        except Exception as error:  # of any kind: a card must not prevent saving weights
            run.log.warn(f"the checkpoint has no model card: {type(error).__name__}: {error}")
            return {}


EXTENSION = Card


class History:
    """What the lines of ledger.jsonl, metrics.jsonl and evaluations.jsonl add up to."""

    def __init__(self, tokens_per_step: int):  # TOTAL_BATCH_SIZE
        self.tokens_per_step = tokens_per_step
        self.ledger, self.metrics, self.evaluations = (
            LogFile(Path(f"{name}.jsonl")) for name in ("ledger", "metrics", "evaluations"))
        self.validated: dict[int, int] = {}  # step and number of items of the newest validation
        self.lines: list[tuple[int, bytes]] = []  # of the ledger, that are not in the digest yet
        self.digest, self.last = hashlib.sha256(), 0
        self.logged_step: Optional[int] = None  # of the newest metrics; first, the step before the ledger
        self.scores: dict[str, tuple[int, float]] = {}  # the newest of each evaluation, with its step
        self.joules, self.measured_tokens, self.all_tokens = 0.0, 0, 0

    def read(self, folder: Path, step: int) -> None:
        """Read the new lines in a run's folder; a bad step after `step` may have a line in the ledger."""
        for log in (self.ledger, self.metrics, self.evaluations):
            log.path = folder / log.path.name
        self.lines += [(entry.step, line) for line, entry in self.ledger.new_lines() if entry]
        if self.lines and self.logged_step is None:
            self.logged_step = self.lines[0][0] - 1
        while self.lines and self.lines[0][0] <= step:
            self.last, line = self.lines.pop(0)
            self.digest.update(line)
        for _, entry in self.metrics.new_lines():
            if entry:
                self._add_metrics(entry.step, entry.model_extra)
        for _, entry in self.evaluations.new_lines():
            if entry and entry.name == VALIDATION:
                self.validated = {entry.step: entry.n}

    def _add_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.scores |= {name: (step, math.nan if value is None else value) for name, value in metrics.items()
                        if EVALUATED.match(name) and isinstance(value, (int, float, type(None)))}
        if "train_loss" in metrics:
            steps = step - self.logged_step if self.logged_step is not None else 0
            tokens = max(0, steps) * self.tokens_per_step
            self.logged_step, self.all_tokens = step, self.all_tokens + tokens
            if isinstance(joules := metrics.get("joules_per_token"), float):
                self.joules += joules * tokens
                self.measured_tokens += tokens

    def ledger_sha256(self, step: int) -> str:
        """Return the SHA-256 of the ledger's lines up to a step; empty if they are not known."""
        return self.digest.hexdigest() if self.last == step else ""


def code(text: Any) -> str:
    """Return a text as inline code in Markdown, with enough backticks for those inside."""
    line = printable(str(text))
    ticks = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    space = " " if not line.strip(" ") or line[0] in "` " or line[-1] in "` " else ""
    return f"{ticks}{space}{line}{space}{ticks}"


def fenced(lines: Sequence[str]) -> str:
    """Return lines as a code block in Markdown, with enough backticks for those inside."""
    lines = [*map(printable, lines)]
    ticks = "`" * max(3, *(1 + len(run) for line in ("", *lines) for run in re.findall("`+", line) or [""]))
    return "\n".join([ticks, *lines, ticks])


def cell(text: Any) -> str:
    return code(text).replace("|", r"\|")


@cache
def template() -> Template:
    """Return the template of all cards. A backslash at the end of a line joins it with the next one."""
    environment = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters |= {
        "code": code, "cell": cell, "fenced": fenced, "count": "{:,}".format,
        "counted": counted, "percent": partial(number_text, is_share=True),
        "fixed": lambda value, format: "" if value is None else f"{value:{format}}",
        "title": metric_title, "result": lambda score: result_text(score.metric, score.value, score.stderr),
        "model": model_name, "download": lambda base: name_of_download(base) or ""}
    source = Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8")
    return environment.from_string(source.replace("\\\n", ""))


def card_text(metadata: Mapping[str, Any], title: str, **values: Any) -> str:
    """Return a card with Hugging Face's metadata (without empty fields) and these values in the template."""
    filled = {name: value for name, value in metadata.items() if value not in ("", [], None)}
    block = yaml.safe_dump(filled, sort_keys=False, width=float("inf"))
    values = {"run": None, "adapts": None, "inherited": {}, "digest": ""} | values
    return template().render(metadata=block, title=title, **values).rstrip("\n") + "\n"


def write_card(folder: Path, card: str) -> None:
    (folder / CARD).write_text(card, encoding="utf-8")


def read_card(folder: Path) -> str:
    with suppress(OSError):
        return read_plain(folder / CARD).decode(errors="replace")
    return ""


def card_metadata(card: str) -> dict[str, str]:
    """Return the texts and numbers in a card's metadata, including those under `paddock`."""
    block = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    try:
        metadata = yaml.safe_load(block[1]) if block else {}
    except (yaml.YAMLError, ValueError, RecursionError):  # not written by Paddock
        metadata = {}
    metadata = metadata if isinstance(metadata, dict) else {}
    details = metadata.get("paddock")
    metadata |= details if isinstance(details, dict) else {}
    return {name: str(value) for name, value in metadata.items() if isinstance(value, (str, int, float))}


def sections_of(card: str) -> dict[str, str]:
    pieces = re.split(r"^## (.+)\n", card, flags=re.MULTILINE)
    return {heading: text.strip() for heading, text in zip(pieces[1::2], pieces[2::2])}


# ---------------------------------------------------------------------------------- the text of cards


def run_card(run: Run, history: History) -> str:
    """Return the card of a run's next checkpoint. Called on rank 0 only."""
    config, progress, vocab_size = run.config, run.progress, run.inputs.tokenizer.vocab_size
    data, scores = [*data_sets(run)], [*newest_scores(run, history)]
    digest = history.ledger_sha256(progress.step)
    task = config.training_stage if config.training_stage != "dpo" else config.preference_objective
    results = [{"task": {"type": "text-generation"}, "dataset": {"name": score.data, "type": score.data},
                "metrics": [{"type": score.metric, "value": score.value}]} for score in scores
               if math.isfinite(score.value)]
    metadata = origin(Path(progress.base) if progress.base else None, config.model_license)
    relation = "adapter" if config.lora_enabled else "finetune"
    metadata |= {
        "base_model_relation": relation if metadata["base_model"] else "",
        "datasets": [*dict.fromkeys(entry["hub_name"] for entry in data if entry["hub_name"])],
        "library_name": "peft" if config.lora_enabled else "transformers", "pipeline_tag": "text-generation",
        "tags": [config.model_type, "paddock", task, *["lora"] * config.lora_enabled,
                 *["distillation"] * config.distillation_enabled],
        "model-index": [{"name": run.folder.name, "results": results}] if results else [],
        "paddock": {"version": __version__, "step": progress.step, "tokens": progress.tokens_seen,
                    "ledger_sha256": digest}}

    # Settings that changed during the run, by the first step, and the settings that reproduce the model.
    changes = [(segment["step"], [f"{change['name']}={code(without_paths(change['name'], change['after']))}"
                                  for change in segment["changes"] if change["name"] not in NOT_IN_RECIPE])
               for segment in [*segments(run.folder)][1:] if segment["step"] <= progress.step]
    settings = [f"{line['name']}={env_value(without_paths(line['name'], line['value']))}"
                for line in setting_lines(config.public())
                if line["changed"] and line["name"] not in NOT_IN_RECIPE
                and not (line["name"] == "MAX_STEPS" and config.epochs)]  # which follows from EPOCHS
    return card_text(
        metadata, run.folder.name, run=run, config=config, progress=progress, history=history,
        vocab_size=vocab_size, parameters=parameter_count(config, vocab_size),
        trained=trained_count(run.model, vocab_size), stage=STAGES[config.training_stage],
        adapts=progress.base if config.lora_enabled else None,
        is_chat=config.training_stage != "pretrain", data=data, scores=scores,
        compute_optimal=COMPUTE_OPTIMAL, device=device_name(run.ranks.device), torch=torch.__version__,
        paddock=__version__, commit=commit(), changes=[entry for entry in changes if entry[1]],
        settings=settings, tokenizer=run.inputs.identity(config).get("TOKENIZER_PATH", ""), digest=digest)


def derived_card(output: str, base: Path, source: Path, introduction: str) -> str:
    """Return the card of a whole model made from a base and the checkpoint `source`."""
    card = read_card(source)
    metadata = origin(base) | license_of(card_metadata(card)) | {
        "library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["llama", "paddock"]}
    return card_text(metadata, output, introduction=introduction, is_chat="apply_chat_template" in card,
                     inherited=inherited(source))


def write_merged_card(folder: Path, output: Path, base: Path, adapters: Path, dtype: torch.dtype) -> None:
    """Write the card of `output`, a model that was merged from a base and adapters, into a folder."""
    rest = "The sections below are from the adapters' card." if inherited(adapters) else "They had no card."
    write_card(folder, derived_card(output.name, base, adapters, (
        f"The model {model_name(str(base))} with the adapters {code(run_and_step(str(adapters)))} "
        f"merged into it, in {str(dtype).removeprefix('torch.')}. {rest}")))


def inherited(folder: Path) -> dict[str, str]:  # sections that also apply to models derived from it
    return {heading: text for heading, text in sections_of(read_card(folder)).items() if heading in INHERITED}


def origin(base: Optional[Path], user_license: str = "") -> dict[str, Any]:
    """Return the base's name on the hub, and the license: the user's if given, else the base's."""
    base_metadata = card_metadata(read_card(base)) if base else {}
    name = base and (hub_name_of(str(base)) or base_metadata.get("base_model", ""))
    known = {"base_model": name if name and HUB_NAME.fullmatch(name) else ""}
    if re.fullmatch(r"[a-z0-9][a-z0-9.-]*", user_license.lower()):
        return known | {"license": user_license.lower()}
    if user_license:  # the hub knows short identifiers; any other license is `other`, with a name
        slug = re.sub(r"[^a-z0-9.-]+", "-", user_license.lower()).strip("-.")
        return known | {"license": "other", "license_name": slug or "own"}
    return known | (license_of(base_metadata) or {"license": "unknown"})


def license_of(metadata: Mapping[str, str]) -> dict[str, str]:
    return {key: metadata[key] for key in ("license", "license_name", "license_link") if metadata.get(key)}


def hub_name_of(path: str) -> str:
    """Return the hub name of a model in the hub's cache; empty for any other path."""
    return (name_of_download(path) or "").partition("@")[0]


def run_and_step(path: str) -> str:
    """Shorten an absolute path to its run and step, or to its last name."""
    parts = Path(path).parts
    if not Path(path).is_absolute():
        return path
    return "/".join(parts[-3:] if "checkpoints" in parts[-2:-1] else parts[-1:])


def model_name(path: str) -> str:
    return code(name_of_download(path) or run_and_step(path))


# ----------------------------------------------------------------------------------- sections of a card


def data_sets(run: Run) -> Iterator[dict[str, Any]]:
    """Yield an entry for each prepared set that the run has read so far."""
    config, rows = run.config, run.inputs.rows
    taken = run.progress.step * config.rows_per_step
    path = str(config.data_path)
    shares = [{"source": run_and_step(path), "share": 1.0, "passes": taken / len(rows)}]
    for source, entry in zip(rows.sources, rows.source_table(taken) or shares):
        folder = source.token_set.folder
        manifest = folder / (DATA_MANIFEST if rows.mixing.is_complete else JOURNAL)
        documents, made, hub_name = made_from(manifest)
        if source.example_set:  # those that the run could not use
            lost = {"left out": source.left_out, "cut": source.truncated}
            documents += "".join(f", {number:,} {how}" for how, number in lost.items() if number)
        yield entry | {"documents": documents, "tokens": source.token_set.tokens, "made_from": made,
                       "fingerprint": source.fingerprint, "hub_name": hub_name}


@cache
def made_from(manifest: Path) -> tuple[str, str, str]:
    """Return a prepared set's number of documents, its source as Markdown, and the source's hub name."""
    try:
        content = read_json(manifest)
        is_complete = manifest.name == DATA_MANIFEST
        documents = f"{content['splits']['train']['documents']:,}" * is_complete
        source = content["source"]["sources"][0]
        files = source.get("identity", {}).get("files") or []
    except (OSError, ValueError, KeyError, IndexError, TypeError):  # not prepared by Paddock
        return "", "token files", ""
    if name := source.get("name"):
        version = source["identity"].get("revision") or source.get("revision") or ""
        known = {"config": source.get("config"), "split": source.get("split"), "revision": version}
        described = [code(name), *(f"{label} {code(value)}" for label, value in known.items() if value)]
        return documents, ", ".join(described), name
    hashes = [f"{'SHA-256' if re.fullmatch('[0-9a-f]{64}', str(content)) else 'version'} {code(content)}"
              for *_, content in files[:FILES_LISTED]]
    more = f" and {counted(len(files) - FILES_LISTED, 'more file')}" if len(files) > FILES_LISTED else ""
    return documents, f"{code(run_and_step(source.get('path', '')))} ({', '.join(hashes)}{more})", ""


# The newest result of an evaluation; unknown values are None.
Score = namedtuple("Score", "data metric value step stderr n chance", defaults=(None, None, None))


def newest_scores(run: Run, history: History) -> Iterator[Score]:
    """Yield the newest result of each evaluation."""
    scores = history.scores
    titles = {choices.name: choices.title for choices in run.inputs.choice_sets}

    def beside(*names: str) -> list[Optional[float]]:
        return [scores[name][1] if name in scores else None for name in names]

    for name, (step, value) in scores.items():
        task = name.removesuffix("_norm").removesuffix("_acc")
        if name in ("val_loss", "val_bits_per_byte", "val_reward", "val_reward_accuracy"):
            n = history.validated.get(step)
            yield Score("validation split", name[4:], value, step, *beside(f"{name}_stderr"), n)
        elif name.startswith("generation_") and not name.endswith(("_n", "_stderr")):
            error_and_n = beside(f"{name}_stderr", "generation_n")
            yield Score("answers to held-out prompts", name[11:], value, step, *error_and_n)
        elif name in (f"{task}_acc", f"{task}_acc_norm"):
            stderr, n, chance = beside(*(f"{task}_{key}" for key in ("stderr", "n", "chance")))
            error = stderr if name.endswith("_acc") else None
            yield Score(titles.get(task, task), name[len(task) + 1:], value, step, error, n, chance)


def without_paths(name: str, value: str) -> str:
    """Return a setting's value with shortened paths."""
    if name == "EVAL_TASKS":
        tasks = (entry.partition(":") for entry in value.split(","))
        return ",".join(f"{task}:{run_and_step(path)}" for task, _, path in tasks)
    return run_and_step(value) if name.lower() in (*LOCAL_PATHS, *NAMES_OR_PATHS) else value


def env_value(value: str) -> str:
    """Return a value as written in `.env`."""
    if re.fullmatch(r"[\w./:,+@%-]*", value):
        return value
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
