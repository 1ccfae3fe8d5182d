"""Evaluates a saved model: a checkpoint with the settings of its run, or any Llama model."""

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Optional

import torch

from checkpoint import peft, store
from common.errors import DataError, SettingsError, requires_package
from common.heartbeat import HEARTBEAT
from config import STAGE_OF_KIND, Config, evaluation_rules
from data_pipeline.mixture import is_mixture, read_mixture
from data_pipeline.shards import prepared_folder, read_manifest
from dataloaders import open_rows
from evaluation.during_run import Row
from extensions import evaluate, online  # noqa: F401, whose evaluations are registered
from model_utils import choose_dtype
from parallel.ranks import Ranks, RunContext, collective
from run.adapters import load_for_use, merge
from run.folder import RunFolder
from run.life import Inputs, Progress, Run
from run.start import choose_objective, find_base, open_evaluation_inputs
from settings.load import Layer, validate
from tokenizer import load_tokenizer


def settings_for(folder: Path, flags: Layer, data: Optional[str]) -> Config:
    """Return a checkpoint's settings, or the defaults for other models, changed by flags and other data."""
    saved = store.read_state(folder).get("settings", {})
    merged = {name.lower(): (value, str(folder)) for name, value in saved.items()
              if name.lower() in Config.model_fields}
    merged |= {"device": ("auto", ""), "compile": (False, ""), "sharding": ("none", ""),
               "cpu_offload": (False, ""), "world_size": (os.environ.get("WORLD_SIZE", "1"), "environment")}
    if not saved:
        merged["tokenizer_path"] = (str(folder), "")
    if data is not None:
        first_set = read_mixture(Path(data)).sources[0].set if is_mixture(data) else data
        prepared = prepared_folder(Path(first_set))
        stage = STAGE_OF_KIND[read_manifest(prepared).kind] if prepared else "pretrain"
        saved_stage = saved.get("TRAINING_STAGE")
        if stage == "dpo" != saved_stage:
            raise SettingsError(f"--data {data} contains preference pairs, whose loss depends on the "
                                "settings of a DPO run; use a DPO checkpoint, or text or chats")
        merged |= {"training_stage": (stage, ""), f"{stage}_data_path": (data, "--data"),
                   "validate_every": (1, "")}
        if stage != saved_stage:  # cross-entropy on text or chats
            merged |= {"distillation_enabled": (False, ""), "generation_eval_every": (0, "")}
    # Flags that name a set enable it, even if the run did not evaluate it.
    if {"hellaswag_path", "eval_tasks"} & flags.values.keys():
        merged["hellaswag_every"] = (1, "")
    config, invalid = validate(merged | flags.values)
    if problems := [*invalid.values()] or [*evaluation_rules(config)]:
        raise SettingsError(*problems)
    return config.model_copy(update={"micro_batch_size": config.micro_batch_size or config.rows_per_step})


@collective
def open_model(folder: Path, config: Config, base: Optional[str], context: RunContext,
               objective_of: Optional[Path] = None) -> Run:
    """Return a model with its evaluation data, and the objective of a checkpoint, as a run without steps."""
    ranks = context.ranks
    dtype = choose_dtype(config, ranks.device.type)
    tokenizer = ranks.raise_on_all(lambda: load_tokenizer(config.tokenizer_path, config.tokenizer_backend))
    model, _ = ranks.raise_on_all(lambda: load_for_use(folder, base, ranks.device, dtype, tokenizer))
    if tokenizer.vocab_size > model.vocab_size:
        raise DataError(f"TOKENIZER_PATH={config.tokenizer_path} has {tokenizer.vocab_size:,} ids, but the "
                        f"model has {model.vocab_size:,}; use the model's tokenizer")
    if config.data_path is None:
        config = config.model_copy(update={"validate_every": 0, "generation_eval_every": 0})
    needs_rows = config.validate_every and config.training_stage == "dpo"

    def read(verify: str) -> Inputs:
        rows = open_rows(config, "train", tokenizer, verify) if needs_rows else None
        measured = open_evaluation_inputs(config, tokenizer, verify)
        return Inputs(tokenizer, rows, **measured, fingerprint="", description="")

    verified = ranks.on_rank0(lambda: read(config.verify_data))
    inputs = ranks.raise_on_all(lambda: verified or read("never"))
    for unused in filter(None, (choices.unused for choices in inputs.choice_sets)):
        context.log.info(unused)
    progress = Progress(**store.read_state(folder).get("progress", {"step": 0}))
    origin, objective = objective_of or folder, None
    if inputs.validation_rows is not None:
        known = store.read_state(origin).get("progress", {})
        base = partial(find_base, config, known, origin.resolve().parents[1], context.log.warn)
        objective, inputs = choose_objective(config, inputs, model, base, known.get("base_sha256"), context)
    run_dir = folder.resolve().parents[1]
    return Run(config, context, inputs, RunFolder(run_dir), model.eval(), None, None, progress, objective,
               folder)


@collective
def gather_metrics(metrics: dict[str, dict[tuple[str, str], list]], ranks: Ranks) -> list[dict[str, dict]]:
    """Return all ranks' scores by task, metric and filter."""
    lines = [[task, key, scores] for task, each in metrics.items() for key, scores in each.items()]
    plain = json.loads(json.dumps(lines, default=lambda number: number.item()))
    gathered: list[dict[str, dict]] = [{task: {} for task in metrics} for _ in range(ranks.world_size)]
    for found, its_lines in zip(gathered, ranks.all_gather_json(plain)):
        for task, key, scores in its_lines:
            found[task][tuple(key)] = scores
    return gathered


@dataclass
class Harness:
    """Tasks of lm-evaluation-harness and their options."""

    tasks: Sequence[str]
    include_path: Optional[str] = None  # folder of additional tasks
    num_fewshot: Optional[int] = None  # None: the task's default
    limit: Optional[int] = None  # items per task; None: all
    use_model_tokenizer: bool = True  # False: TOKENIZER_PATH

    def evaluate(self, folder: Path, base: Optional[str], config: Config,
                 ranks: Ranks) -> tuple[dict[str, float], list[Row]]:
        """Return the metrics `<task>_<metric>` and table rows on rank 0. Adapters are merged into their base.

        The ranks share each task's items, by the harness's own division.
        """
        manager, simple_evaluate, model_class = self.task_classes
        from transformers import AutoModelForCausalLM
        is_checkpoint = bool(store.read_state(folder))
        with tempfile.TemporaryDirectory() as temporary:
            if (folder / peft.CONFIG_FILE).exists():
                merge(folder, Path(temporary) / "merged", base)
                folder = Path(temporary) / "merged"
            tokenizer = None
            if not self.use_model_tokenizer:
                tokenizer = tempfile.mkdtemp(dir=temporary)
                load_tokenizer(config.tokenizer_path, config.tokenizer_backend).save_huggingface(tokenizer)
            loaded = AutoModelForCausalLM.from_pretrained(
                folder, dtype=choose_dtype(config, ranks.device.type), use_safetensors=True)
            model = model_class(loaded.to(ranks.device), tokenizer=tokenizer or str(folder),
                                batch_size=config.micro_batch_size,
                                max_length=config.max_seq_len if is_checkpoint else None)
            # With a loaded model, it leaves the ranks to us; otherwise it needs accelerate and GPUs.
            model._rank, model._world_size, model.barrier = ranks.rank, ranks.world_size, ranks.barrier
            model.all_gather = lambda count: torch.tensor(ranks.all_gather_json(int(count)))
            model.gather_object = lambda metrics, dst=0: gather_metrics(metrics, ranks)
            try:
                with HEARTBEAT.beat_in_background():  # the harness does not beat
                    output = simple_evaluate(model, tasks=[*self.tasks], num_fewshot=self.num_fewshot,
                                             limit=self.limit, task_manager=manager, log_samples=False)
            except (OSError, ValueError) as error:  # what `datasets` raises
                raise DataError(f"--tasks {','.join(self.tasks)}: {error}; the first use downloads "
                                "their data from the hub") from error
        metrics, rows = {}, []
        for task, results in output["results"].items() if output else ():
            for key, value in results.items():
                metric, _, filter_name = key.partition(",")
                if not filter_name or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                    continue
                name = metric if filter_name == "none" else f"{metric} ({filter_name})"
                stderr = results.get(f"{metric}_stderr,{filter_name}")
                stderr = stderr if isinstance(stderr, (int, float)) else None
                n = output["n-samples"].get(task, {}).get("effective")
                metrics |= {f"{task}_{name}": value, f"{task}_{name}_stderr": stderr, f"{task}_n": n}
                rows.append(Row(task, name, value, stderr, None, n))
        return metrics, rows

    @cached_property
    def task_classes(self) -> tuple[Any, Any, Any]:
        """lm_eval's task manager, evaluation function and model class. Unknown tasks raise SettingsError."""
        with requires_package("lm_eval", "--tasks"):
            from lm_eval import simple_evaluate
            from lm_eval.models.huggingface import HFLM
            from lm_eval.tasks import TaskManager
        # Scanning the thousands of built-in tasks is slow.
        for include_defaults in (False, True) if self.include_path else (True,):
            manager = TaskManager(include_path=self.include_path, include_defaults=include_defaults)
            unknown = [task for task in self.tasks if not manager.match_tasks([task])]
            if not unknown:
                return manager, simple_evaluate, HFLM
        raise SettingsError(f"--tasks: lm-evaluation-harness has no task {', '.join(unknown)}; `lm_eval ls "
                            "tasks` lists its tasks, and --include-path adds a folder of tasks")
