"""The checks before a run (`--check`): inputs, start, memory, disk space and speed."""

import glob
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional

import numpy as np
import torch

import lora
import model_utils
from checkpoint.model_json import context_length, hub_model, read_model_config, read_model_json
from checkpoint.schema import Progress
from common.errors import CheckpointError, DataError, PaddockError, SettingsError, requires_package
from common.files import existing_parent, free_bytes, free_host_memory
from common.text import command, counted, duration, print_safely, show, status_line
from config import SAMPLE, Config, rules
from dataloaders import Rows, cache_of
from extensions import cost
from extensions.cautions import cautions
from extensions.evaluate import check_metric, function_of, read_held_out
from extensions.online import Rewards, Rollouts
from extensions.profile import PEAK_TFLOPS, peak_flops
from extensions.report import console
from extensions.settings import prompts_to_answer, reward_terms
from extensions.waiting import watch
from hellaswag_utils import read_choice_set, read_items
from learn import objectives
from learn.optim import Optimizer, make_reducer
from model import Transformer
from model_kernels.head import IGNORE_INDEX
from parallel.process import ERROR_FILE, cores
from parallel.ranks import Ranks, RunContext, StopSignals
from plan.derived import TOKENS_PER_PARAMETER
from plan.layers import PRESETS_DIR
from plan.make import Plan, complete, make_plan
from plan.starts import Known, Start
from run.build import adapted_on_meta
from run.extensions import Extension, find, load_extensions
from run.facts import (
    Remake,
    count_rows,
    find_files,
    lacks_sample,
    prepare_device,
    read_inputs,
    with_identities,
    with_tokens,
)
from run.folder import RunFolder, has_run
from run.run import Inputs, Run, trained_bytes
from tokenizer import load_tokenizer
from train import train_step

GIB = 2**30
PROCESS_BYTES = int(0.4 * GIB)  # of Python, torch, this program and code for matmuls
PROBE_SECONDS, PROBES = 2.0, 3  # time of the measured micro-batches, and how often they are measured
TOO_LONG_SECONDS = 10  # time of a micro-batch that --check does not measure
LLAMA_3_IDS = 128_256  # vocabulary of the tokenizer that the presets are made for
PLANNED_ROWS = 64  # rows of the first step, whose padding and targets represent the whole run
LOST = 0.02  # share of examples that do not fit into a row, from which on it is a warning
TRIAL_STEPS = 100  # a shorter run is not meant to learn
UNDERTRAINED = 2  # tokens per weight in the blocks' matrices: a tenth of TOKENS_PER_PARAMETER
# Passes, and those times the trained parameters for each target. Measured with 35k and 427k parameters on
# 1k to 16k tokens of English: from both on, 31 to 100 % of rows are continued word for word, else at most 4.
RECITING_PASSES, RECITING = 8, 1000
# The share of a GPU's memory that a forecast may fill. The rest is for CUDA's context, NCCL's buffers and
# memory that torch reserves. This is an assumption; the part `memory` of the GPU suite measures it.
USABLE = 0.94
NOTED_VALIDATION = 0.1  # of the steps' time
MUCH_VALIDATION = 0.5
SAME_MEMORY = 0.08  # another GPU differs by more: one of 80 GB has 80e9 to 85.9e9 bytes
TIGHT = 0.08  # a smaller share of the memory is too little to leave free, as forecasts are good to 5 %
# The GPU that a plan assumes by its GB, and the share of its dense bf16 that the run reaches.
USUAL_GPUS = {24: "RTX 4090", 32: "RTX 5090", 48: "L40S", 80: "H100", 141: "H200", 180: "B200"}
ASSUMED_SHARE = 0.45


def host_text(offloaded: int, to_save: int = 0) -> str:
    sizes = ((offloaded, "per rank"), (to_save, "on the first machine, to save"))
    return "".join(f" and {size / GIB:.2f} GiB of host memory {place}" for size, place in sizes if size)


def forecast_memory(config: Config, *known) -> cost.MemoryEstimate:
    """Return `estimate_memory` of these arguments; on a CPU, the resident memory, which includes copies."""
    forecast = cost.estimate_memory(config, *known)
    if "cpu" not in known:
        return forecast
    copies = forecast.offloaded + (forecast.host if config.save_every or config.keep_every else 0)
    return forecast._replace(working=forecast.working + copies, host=0, offloaded=0, process=PROCESS_BYTES)


def timed(device: torch.device, work: Callable) -> float:
    """Call a function; return the seconds until the device has finished its work."""
    started = time.perf_counter()
    work()
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
    return time.perf_counter() - started


def seconds_per_step(config: Config, inputs: Inputs, device: torch.device, dtype: torch.dtype
                     ) -> tuple[float, float]:
    """Return the least and most seconds of a rank for a step, without teacher and communication."""
    watch()
    ranks, config = Ranks(device=device), config.model_copy(update={"sharding": "none", "cpu_offload": False})
    model = model_utils.build_model(config, inputs.tokenizer.vocab_size, ranks, dtype)
    if config.lora_enabled:
        lora.add_adapters(model, config, torch.Generator().manual_seed(config.seed))
        lora.cast_base(model, dtype)
    objective = probe_objective(config, model)
    is_compiled = config.compile and model_utils.compile_where_possible(model, config, device.type) is None
    run = Run(config, RunContext(ranks, StopSignals(), None), inputs, RunFolder(Path()), model,
              Optimizer(model, config), None, Progress(0), objective, None)
    reducer = make_reducer(model, ranks, config, run.optimizer)
    batches = [inputs.rows(each).to(device) for each in inputs.order(config, ranks).micro_batches(0)[:8]]

    def step(number: int) -> None:
        count = sum(int(objective.count(batch)) for batch in batches[:number])
        train_step(run, reducer, batches[:number], max(count, 1), config.learning_rate)

    number, seconds = 1, [timed(device, lambda: step(1))]
    if is_compiled or seconds[0] <= PROBE_SECONDS:  # the first micro-batch compiles and allocates memory
        number = max(1, min(len(batches), int(PROBE_SECONDS / seconds.pop())))
        while len(seconds) < PROBES and sum(seconds) < PROBES * PROBE_SECONDS:
            seconds.append(timed(device, lambda: step(number)))
    return tuple(config.accumulation_steps * each / number for each in (min(seconds), max(seconds)))


def probe_objective(config: Config, model: Transformer) -> objectives.Objective:
    """Return an objective as expensive as the run's, without a teacher."""
    if config.training_stage != "dpo":  # GRPO's is not needed, because its steps are not measured
        return objectives.NextToken()
    reference = partial(objectives.frozen_logprobs, model)
    if objectives.reference_is_stored(config):
        reference = lambda batch: torch.zeros_like(objectives.answer_lengths(batch))
    return objectives.PREFERENCE_OBJECTIVES[config.preference_objective](config, reference)


def check(planned: Plan | PaddockError, argv: Sequence[str]) -> int:
    """Print everything that can be checked before the run; return 0, or the first problem's exit code."""
    if os.environ.get("RANK", "0") != "0" and ERROR_FILE in os.environ:  # one rank reports for all
        return 0
    if isinstance(planned, PaddockError):
        raise planned
    if lacks_sample(planned.config):
        raise DataError(f"the sample data is not in {SAMPLE} yet; start the run, which creates it, or run "
                        f"{command('scripts/make_sample.py', '--folder', SAMPLE)}")
    checked = Check(planned)
    with checked.entry("extensions"):
        load_extensions(planned.config, partial(checked.line, "extensions", mark="warn"))
    checked.complete(partial(make_plan, argv, None))
    plan = checked.planned
    given = planned.sources.items() - {("world_size", "environment")}  # by ./paddock check
    sources = [where for name, where in given if name != "check"]
    implied = sum(where.startswith(("DEPTH=", str(PRESETS_DIR))) for where in sources)
    by_others = f", {implied} by DEPTH or a preset" if implied else ""
    checked.line("settings", f"{len(sources) - implied} set{by_others}, all valid")
    checked.messages("settings", plan.notes, plan.warnings)
    checked.check_inputs()
    checked.check_start()
    checked.check_hardware()
    checked.check_plan()
    # The verdict first, then what needs attention.
    if failures := len(checked.exit_codes):
        print_safely(f"{counted(failures, 'problem')} found.", sys.stderr)
    else:
        how = {mark: "memory" in dict(checked.lines[mark]) for mark in ("ok", "warn")}
        fits = "fits" if how["ok"] else "barely fits" if how["warn"] else "is complete"
        if checked.is_finished:
            show(f"Nothing to do: the run has finished step {checked.start.step:,} of "
                 f"MAX_STEPS={plan.config.max_steps}.")
        else:
            problem = "data or a tokenizer is missing"
            if any("needs a start checkpoint" in warning for warning in plan.warnings):
                problem = "the model to start from is missing, so that the default model is planned"
            show("Ready to train." if checked.inputs is not None else f"The plan {fits}, but {problem}.")
    for mark in ("FAIL", "warn", "ok"):
        for name, text in checked.lines[mark]:
            show(f"  {mark:<4}  {name}: {text}")
    return checked.exit_codes[0] if failures else 0


class StepPlan(NamedTuple):
    """The cost of a step of all ranks, and the size of a checkpoint."""

    parameters: int
    trained: int  # of them, or of adapters
    targets: float
    needed: float  # FLOPs, without padding and recomputation
    computed: float  # FLOPs
    checkpoint_bytes: int  # weights or adapters, and their optimizer state
    exchange: float  # seconds of communication between planned GPUs


class Check:
    """The lines that --check prints. The optional attributes stay None if their check fails."""

    def __init__(self, planned: Plan):
        self.planned, self.config = planned, planned.config
        self.exit_codes: list[int] = []  # of the failed checks
        self.lines: dict[str, list[tuple[str, str]]] = {"FAIL": [], "warn": [], "ok": []}  # (name, text)
        self.device: Optional[torch.device] = None
        self.dtype: Optional[torch.dtype] = None  # for computation
        self.tokenizer: Any = None
        self.inputs: Optional[Inputs] = None
        self.teacher: Optional[Path] = None
        self.start: Optional[Start] = None
        self.plan: Optional[StepPlan] = None

    @property
    def is_finished(self) -> bool:
        """Whether the run's own checkpoint is at its last step."""
        start = self.start
        return start is not None and start.kind == "continue" and start.is_own and (
            start.step >= self.config.max_steps)

    def line(self, name: str, text: str, mark: str = "ok") -> None:
        self.lines[mark] += [(name, each) for each in text.splitlines()]

    def messages(self, name: str, notes: Sequence[str], warnings: Sequence[str]) -> None:
        for mark, texts in (("ok", notes), ("warn", warnings)):
            for text in texts:
                self.line(name, text, mark)

    def complete(self, remake: Remake) -> None:
        """Complete the plan as a start does: with the start's files, the number of rows and the hardware."""
        with self.entry("start"):
            plan, name = self.planned, self.planned.start.download
            if name and plan.for_other_hardware:  # its config.json has the shape
                plan = remake(Known(hub={name: str(hub_model(name, only_config=True))}))
            elif not plan.for_other_hardware:
                plan, _ = find_files(plan, remake)
            self.planned = plan
        with suppress(PaddockError):  # check_inputs reports it
            device = "cuda" if self.config.device_memory else model_utils.choose_device(self.planned.config)
            self.planned = complete(self.planned, device, count_rows(self.planned))
        self.config = self.planned.config

    @contextmanager
    def entry(self, name: str, optional: bool = False) -> Iterator[None]:
        """Print a PaddockError in the `with` block as a failed check, or as a warning if `optional`."""
        try:
            with status_line(lambda: f"checking: {name}"):
                yield
        except PaddockError as error:
            self.exit_codes += [] if optional else [error.exit_code]
            self.line(name, str(error), "warn" if optional else "FAIL")

    def check_inputs(self) -> None:
        """Check tokenizer, data and evaluations. A plan for another machine does not need them."""
        config, path = self.config, self.config.data_path

        def is_missing(path: Optional[str]) -> bool:
            exists = path and (os.path.exists(path) or glob.glob(path, recursive=True))
            return self.planned.for_other_hardware and not exists

        if config.tokenizer_path:
            with self.entry("tokenizer", is_missing(config.tokenizer_path)):
                self.tokenizer = load_tokenizer(config.tokenizer_path, config.tokenizer_backend)
                text = f"{self.tokenizer.vocab_size:,} ids from {config.tokenizer_path}"
                if self.tokenizer.byte_lengths is None:
                    text += "; not byte-level, so bits per byte are not measured"
                self.line("tokenizer", text)
        if path and not self.tokenizer and not (os.path.exists(path) or glob.glob(path, recursive=True)):
            with self.entry("data", is_missing(path)):
                raise DataError(f"{config.training_stage.upper()}_DATA_PATH={path}: no such file or folder")
        if self.tokenizer and path:
            with self.entry("data", is_missing(path)):
                self.inputs = read_inputs(config.model_copy(update={"hellaswag_every": 0}), verify=True)
                if prompts_to_answer(config):
                    held_out = read_held_out(config, self.tokenizer, config.verify_data)
                    if config.metric:
                        check_metric(config, self.tokenizer, held_out)
                described, *table = console.describe_data(config, self.inputs)
                verified = "the shards of the first step" if config.prepare_ahead else "all shards"
                described += f"; {verified} verified, all ids within the vocabulary"
                self.line("data", "\n".join([described, *table]))
                self.report_lost(self.inputs.rows)
                batch = self.inputs.rows(np.array([0]))
                tokens, targets = batch.tokens_BT[0].tolist(), batch.targets_BT[0].tolist()
                # The last target of a document, such as the end of an answer, is not an input: add it.
                shown = [[token] if target in (IGNORE_INDEX, after) else [token, target]
                         for token, target, after in zip(tokens, targets, [*tokens[1:], None])]
                text = self.tokenizer.decode(sum(shown, []))
                self.line("example", repr(text if len(text) <= 300 else text[:300] + "..."))
        if config.training_stage == "grpo" and (config.validate_every or not config.distillation_enabled):
            with self.entry("reward"):
                notes = [f"REWARD={config.reward}: all functions can be imported"]
                rewards = Rewards(f"REWARD={config.reward}", reward_terms(config))
                rewards.start()
                if self.inputs:
                    context = SimpleNamespace(log=SimpleNamespace(info=notes.append), ranks=Ranks())
                    rollouts = Rollouts(None, config, self.tokenizer, context)
                    rollouts.rewards = rewards
                    rollouts.check(self.inputs)
                self.line("reward", "\n".join(notes))
        if prompts_to_answer(config) and config.metric:
            with self.entry("metric"):
                function_of(config.metric).start()  # also without data
                self.line("metric", f"METRIC={config.metric} can be imported")
        for named in config.choice_sets:
            with self.entry("evaluation"):
                choices = self.tokenizer and read_choice_set(named, self.tokenizer, config)
                items = choices.tasks if choices else read_items(named.path, named.setting)
                when = (f"evaluated every {counted(config.hellaswag_every, 'step')}"
                        if config.hellaswag_every else "never evaluated (HELLASWAG_EVERY=0)")
                notes = "".join(f"\n{note}" for note in choices.notes) if choices else ""
                questions = f"{counted(len(items), 'question')} ({named.title})"
                self.line("evaluation", f"{questions} from {named.path}, {when}{notes}")

        if self.inputs and objectives.reference_is_stored(config):
            with self.entry("cache"):
                for rows in self.inputs.rows.sources:
                    folder, why = cache_of(config).folder_to_write(rows.token_set.folder, rows.fingerprint)
                reason = f" ({why})" if why else ""
                self.line("cache", "the reference's log-probabilities are computed once and stored in "
                          f"{folder}{reason}")
        if config.distillation_enabled and self.tokenizer:
            with self.entry("teacher"):
                self.teacher = find("distillation", "TEACHER_MODEL").find_teacher(config, self.tokenizer)
                self.line("teacher", f"{self.teacher}, same vocabulary as the student")

    def check_start(self) -> None:
        """Check what the run starts from."""
        config, plan = self.config, self.planned
        with self.entry("start"):
            run_dir = Path(config.output_dir) / (config.run_name or f"{config.training_stage}-<date-time>")
            if self.inputs and not (plan.for_other_hardware and plan.start.kind != "continue"):
                told = len(plan.notes), len(plan.warnings)
                plan = with_tokens(with_identities(plan, self.inputs, run_dir), self.inputs)
                self.messages("start", plan.notes[told[0]:], plan.warnings[told[1]:])
                if plan.start.kind == "from":
                    self.messages("start", (), [*cautions(plan)])
            start = plan.start
            if config.resume == "never" and has_run(run_dir):
                self.line("start", f"RESUME=never moves the existing run in {run_dir} aside", "warn")
            text = f"random weights; the run's folder is {run_dir}"
            if start.kind == "new" and (config.training_stage != "pretrain" or config.lora_enabled):
                text = "initial weights: the settings name no checkpoint"
            if start.kind == "continue":
                step = start.step if start.is_own or config.start_step is None else config.start_step
                left = f"{max(0, config.max_steps - step):,} of {counted(config.max_steps, 'step')} left"
                text = f"from {start.folder}, {left}"
            elif start.folder:
                text = f"the run's folder is {run_dir}"  # the notes name the weights
            self.line("run" if start.kind == "from" else "start", text)
            self.planned, self.start = plan, start

    def check_hardware(self) -> None:
        """Check the device. A start's shape decides whether a small model is compiled, so it comes first."""
        config = self.config
        with self.entry("hardware"):
            if config.device_memory:  # for a GPU that may not be here
                device, dtype = torch.device("cuda"), model_utils.DTYPES.get(config.precision, torch.bfloat16)
                text = (f"planning for {counted(config.world_size, 'GPU')} of {config.device_memory:g} GB "
                        f"(DEVICE_MEMORY) instead of this machine; {str(dtype).removeprefix('torch.')} with "
                        f"{'bf16 weights' if config.weight_dtype == 'bf16' else 'fp32 master weights'}; "
                        f"{'eager' if not config.compile or config.debug else 'compiled'}")
            else:
                device = prepare_device(config)
                dtype = model_utils.choose_dtype(config, device.type)
                text = console.describe_hardware(config, device, dtype)
            self.device, self.dtype = device, dtype
            self.line("hardware", text)
        self.line("batch", console.describe_batch(config))

    def report_lost(self, rows: Rows) -> None:
        """Warn if many examples do not fit into a row."""
        packed = [source for source in rows.sources if source and source.example_set]
        counts = {name: sum(getattr(source, field) for source in packed)
                  for name, field in (("cut", "truncated"), ("left out", "left_out"))}
        lost = sum(counts.values())
        if not packed or lost <= LOST * sum(source.left_out + source.examples for source in packed):
            return
        start, length, longest = self.planned.start, self.config.max_seq_len, math.inf
        if (model := Path(start.base or start.folder or "", "config.json")).exists():
            longest = context_length(read_model_json(model))
        advice = ", unless you raise it" if length < longest else (
            ", as the model was not trained for longer ones")
        lists = ", ".join(f"{number:,} {name}" for name, number in counts.items() if number)
        self.line("data", f"{counted(lost, 'example')} do not fit into MAX_SEQ_LEN={length}: {lists}{advice}",
                  "warn")

    def check_plan(self) -> None:
        """Forecast the run's length, memory, disk space and speed."""
        config, start, vocab_size = self.config, self.start, 0
        if self.tokenizer:
            vocab_size = self.tokenizer.vocab_size
        elif self.planned.for_other_hardware:  # the vocabulary of the start, or of Llama 3's tokenizer
            folder = start and start.folder and Path(start.base or start.folder)
            model_config = read_model_json(folder / "config.json") if folder else {}
            vocab_size = int(model_config.get("vocab_size", LLAMA_3_IDS))
            whose = "config.json's" if "vocab_size" in model_config else "Llama 3's"
            self.line("model", f"no tokenizer: planned with {whose} vocabulary of {vocab_size:,} ids")
        if not vocab_size or start is None and config.start_settings:  # the model's shape is unknown
            return
        with self.entry("model"):
            self.plan, text = plan_steps(self.planned, config, self.inputs, vocab_size, self.teacher)
            self.line("model", text)
        if self.plan:
            self.report_length(self.plan)
        if self.device:
            is_planned = config.device_memory and not config.debug
            if config.compile and not is_planned and model_utils.why_not_compile(config, self.device.type):
                config = config.model_copy(update={"compile": False})
            if self.inputs and config.training_stage == "dpo":  # rows may be longer, for pairs that need it
                length = self.inputs.rows.sources[0].row_tokens
                config = config.model_copy(update={"max_seq_len": length,
                                                   "total_batch_size": config.rows_per_step * length})
            with self.entry("memory"):
                self.report_memory(config, vocab_size)
        if self.plan:
            with self.entry("disk"):
                self.line("disk", describe_disk(config, self.plan.checkpoint_bytes))
        if self.plan and self.device and (self.inputs or config.device_memory):
            self.report_speed(config, self.plan)
            if config.device_memory and config.sharding == "full" and config.world_size > cost.MACHINE:
                self.compare_with_hybrid(config.model_copy(update={"sharding": "hybrid"}), vocab_size)

    def compare_with_hybrid(self, config: Config, vocab_size: int) -> None:
        """Name SHARDING=hybrid, which these settings have, if it fits and exchanges less between machines."""
        exchange = sum(each.seconds for each in cost.exchanged(config, vocab_size))
        known = (vocab_size, self.dtype.itemsize, self.device.type, teacher_bytes(config, self.teacher))
        room = (1 - TIGHT) * memory_of(config, self.device)[1]
        if exchange < self.plan.exchange and forecast_memory(config, *known).total <= room:
            self.line("speed", f"SHARDING=hybrid also fits: communication takes {exchange:.2f} s of a step "
                               f"instead of {self.plan.exchange:.2f} s")

    def report_length(self, plan: StepPlan) -> None:
        """Print the tokens and FLOPs of the run, and warn if the tokens are few or repeated too often.

        Sources: Hoffmann et al. 2022 (arXiv:2203.15556): tokens per parameter; Muennighoff et al. 2023
        (arXiv:2305.16264): up to four passes over text are worth nearly as much as new text.
        """
        config, start, inputs = self.config, self.start, self.inputs
        tokens, optimal, ratio = config.max_steps * config.total_batch_size, 0, ""
        has_weights = start is not None and start.folder is not None and not (
            start.kind == "continue" and start.state["progress"].get("begun_from") is None)
        if config.training_stage == "pretrain" and not (config.lora_enabled or has_weights):
            ratio = (f", {tokens / plan.parameters:,.2f} per parameter (about {TOKENS_PER_PARAMETER} is "
                     "compute-optimal according to Chinchilla)")
            optimal = math.ceil(TOKENS_PER_PARAMETER * plan.parameters / config.total_batch_size)
        of_steps = ""
        if config.epochs and inputs is None:
            of_steps = (f" in {counted(config.max_steps, 'step')}, as the steps of EPOCHS={config.epochs:g} "
                        "depend on data that is not here")
        self.line("length", f"{tokens:,} tokens{ratio}{of_steps}; {config.max_steps * plan.needed:.2e} FLOPs")
        if config.max_steps < TRIAL_STEPS or self.is_finished:  # no advice is needed
            return
        most_passes, passes, source = console.MOST_PASSES[config.training_stage], 0.0, ""
        if table := inputs and inputs.rows.source_table(config.max_steps * config.rows_read):
            passes, source = max((fact["passes"], f" of {fact['source']}") for fact in table)
        elif inputs and inputs.rows.mixing.is_complete:
            passes = config.max_steps * config.rows_read / len(inputs.rows)
        most_steps = int(config.max_steps * most_passes / passes) if passes else optimal
        if optimal and tokens < UNDERTRAINED * config.matrix_count:
            advice = f"{TOKENS_PER_PARAMETER} per parameter need MAX_STEPS={optimal}"
            if optimal > most_steps:
                advice = "use more data, or a smaller model (DEPTH)"
            self.line("length", f"few tokens for a model of this size: {advice}", "warn")
        if passes > most_passes:
            remedy = f"set MAX_STEPS={max(1, most_steps)} or a smaller TOTAL_BATCH_SIZE"
            places = [f"{name.upper()} ({where})" for name in ("max_steps", "epochs", "total_batch_size")
                      if (where := self.planned.sources.get(name))]
            if config.training_stage != "pretrain" and places:  # the number of rows is a better guide
                remedy = f"remove {' and '.join(places)} to use values that suit the data"
            self.line("length", f"the run reads the data{source} {passes:,.2f} times, but more than about "
                                f"{most_passes} passes help little: use more data, or {remedy}", "warn")
        per_target = plan.trained * passes / (config.max_steps * plan.targets)  # of the different targets
        if config.training_stage in ("pretrain", "sft") and passes >= RECITING_PASSES and (
                per_target * passes >= RECITING):
            self.line("length", f"expect it to recite: it trains {per_target:,.0f} parameters for each target"
                                f", and sees that {passes:,.0f} times", "warn")

    def report_memory(self, config: Config, vocab_size: int) -> None:
        """Print the memory forecast. If it exceeds the device's memory, raise SettingsError."""
        on_machine, room, owner = memory_of(config, self.device)
        known = (vocab_size, self.dtype.itemsize, self.device.type, teacher_bytes(config, self.teacher))
        forecast = forecast_memory(config, *known)
        on_device = forecast._replace(host=0, offloaded=0)
        items = ", ".join(f"{name} {value / GIB:.2f}" for name, value in on_device._asdict().items()
                          if value or name not in ("frozen", "host", "offloaded", "process"))
        where = "of resident memory per process" if forecast.process else "per device"
        if forecast.process and config.training_stage != "pretrain":  # shapes vary
            where += ", and up to half more after tens of steps"
        text = (f"about {forecast.total / GIB:.2f} GiB {where} ({items})"
                f"{host_text(forecast.offloaded, forecast.host)}; {owner} has "
                f"{room / GIB:.1f} GiB")
        in_turn = config.model_copy(update={"async_save": False})
        if forecast_memory(in_turn, *known).total > room:  # without room for the copy, saves are synchronous
            raise SettingsError(f"{text}. {memory_advice(config, room, *known)}")
        offloaded = cost.estimate_memory(in_turn, *known).offloaded
        local_ranks = min(config.world_size, torch.cuda.device_count() or config.world_size)
        if not config.device_memory and offloaded * local_ranks > on_machine:
            raise SettingsError(f"CPU_OFFLOAD=true: {text}, and this machine has {on_machine / GIB:.1f} GiB "
                                f"of host memory for {counted(local_ranks, 'rank')}; use more machines, or a "
                                "smaller model")
        if forecast.total <= (1 - TIGHT) * room:
            return self.line("memory", text)
        text = f"tight: {text}. Forecasts are good to 5 %, so leave {100 * TIGHT:.0f} % free"
        if found := fitting(config, (1 - TIGHT) * room, *known):
            text += f", for example with {found}"
        self.line("memory", text, "warn")

    def validation_share(self, steps: int) -> float:
        """Return the time of the validations of so many steps, in times of these: a row has no backward."""
        rows, config = self.inputs and self.inputs.validation_rows, self.config
        if not rows or not config.validate_every:
            return 0.0
        each = min(config.validation_rows, len(rows))
        return (steps // config.validate_every + 1) * each / (3 * steps * config.rows_per_step)

    def report_speed(self, config: Config, plan: StepPlan) -> None:
        """Print the run's speed and duration: measured within seconds, or from FLOPs for planned GPUs."""
        done = self.start.step if self.start is not None and self.start.kind == "continue" else 0
        if self.exit_codes or (steps := config.max_steps - done) <= 0:
            return
        if config.training_stage == "grpo":
            return self.line("speed", "not known, because it depends on the length of the answers")

        def line(seconds: Sequence[float], assumption: str, uncounted: str = "") -> None:
            def span(form: Callable[[float], str], values: Iterator[float]) -> str:
                return " to ".join(dict.fromkeys(map(form, values)))  # once, if they are printed alike

            speeds = span("{:,.0f}".format, (config.total_batch_size / each for each in reversed(seconds)))
            times = span(duration, (steps * each for each in seconds))
            hours = span("{:,.1f}".format, (steps * each * config.world_size / 3600
                                            for each in seconds))
            hours = f" ({hours} GPU hours)" * (self.device.type == "cuda")
            left = f"{counted(steps, 'step')}{' left' * bool(done)}"
            share, validations = self.validation_share(steps), ""
            if share > NOTED_VALIDATION:
                longer = span(duration, (steps * each * share for each in seconds))
                validations = f", and at least {longer} for validation"
                if share > MUCH_VALIDATION and steps // 3 > self.config.validate_every:
                    validations += f" (much less with VALIDATE_EVERY={steps // 3})"
            other = "other " * bool(validations)
            self.line("speed", f"{speeds} tokens/s{assumption}: about {times} for {left}{hours}"
                               f"{validations}, not counting {uncounted}{other}evaluation and saving")

        if config.device_memory:
            peak, source = planned_peak(config)
            if peak is None:
                return self.line("speed", source)
            if self.dtype == torch.float32:
                peak /= 2 if config.tf32 else 16
            seconds = plan.computed / (config.world_size * ASSUMED_SHARE * peak * 1e12)
            assumption = f" if each GPU reaches {100 * ASSUMED_SHARE:.0f} % of {peak:g} TFLOP/s ({source})"
            if plan.exchange:
                assumption += ", and all or none of the communication is hidden (docs/gpus.md)"
            offload = "what CPU_OFFLOAD moves and computes, " * config.cpu_offload
            return line((max(seconds, plan.exchange), seconds + plan.exchange), assumption, offload)

        alone = config.model_copy(update={"sharding": "none", "cpu_offload": False})
        vocab_size, why = self.inputs.tokenizer.vocab_size, ""
        forecast = cost.estimate_memory(alone, vocab_size, self.dtype.itemsize, self.device.type).total
        # The FLOP/s of square matmuls are close to an upper limit for a model.
        load = os.getloadavg()[0] if self.device.type == "cpu" else 0.0
        busy = f" beside other programs (load {load:.0f})" * (load > cores() + 1)
        matrix = torch.ones(1024, 1024, device=self.device, dtype=self.dtype)
        matmul_flops = 2 * 1024**3 / min(timed(self.device, lambda: matrix @ matrix) for _ in range(5))
        at_best = plan.computed / config.world_size / matmul_flops
        free = free_host_memory()
        if self.device.type == "mps":
            free = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        elif self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0]
        if forecast > free:
            why = f"the model needs about {forecast / GIB:.1f} GiB, but only {free / GIB:.1f} GiB is free"
        elif (seconds := at_best / config.accumulation_steps) > TOO_LONG_SECONDS:
            why = f"a micro-batch takes about {seconds:.0f} s"
            if seconds <= TOO_LONG_SECONDS * config.micro_batch_size:
                why += " (with MICRO_BATCH_SIZE=1, the speed would be measured)"
        if why:
            least = "" if busy else "at least "
            return self.line("speed", f"not measured, because {why}; at the speed of plain matmuls{busy}, "
                                      f"{config.total_batch_size / at_best:,.0f} tokens/s, the run takes "
                                      f"{least}about {duration(steps * at_best)}", "warn")
        with self.entry("speed"):
            seconds = seconds_per_step(self.config, self.inputs, self.device, self.dtype)
            linear = f" if {config.world_size} ranks scale linearly" if config.world_size > 1 else ""
            line(seconds, linear + busy, "the teacher, " if config.distillation_enabled else "")


def plan_steps(plan: Plan, config: Config, inputs: Optional[Inputs], vocab_size: int, teacher: Optional[Path]
               ) -> tuple[StepPlan, str]:
    """Return the plan of a step, from a model on the meta device and the first rows; describe the model."""
    described, generator = console.describe_model(config, vocab_size), torch.Generator()
    config = config.model_copy(update={"lora_base_quantization": "none"})  # has no effect on FLOPs or files
    model = model_utils.model_on_meta(config, vocab_size, torch.float32)
    if config.lora_enabled and inputs:
        unquantized = plan.changed(lora_base_quantization="none")
        model, _ = adapted_on_meta(unquantized, vocab_size, torch.float32, generator)
        described += f"\nLoRA: {console.describe_adapters(model, inputs.tokenizer)}"
    elif config.lora_enabled:
        lora.add_adapters(model, config, generator)  # without LORA_TRAIN_TOKENS, which needs the data

    # Count FLOPs with the padding and targets of a few real rows.
    objective = probe_objective(config, model)
    if teacher:
        objective = SimpleNamespace(teacher=SimpleNamespace(model=teacher_on_meta(teacher)))
    flops, size = cost.StepFlops(config, model, objective, vocab_size, "cpu"), config.micro_batch_size
    tokens = size * config.max_seq_len
    work, rows = cost.Work(tokens, 0, tokens, tokens if tokens > flops.chunk else 0), size
    if inputs and config.training_stage != "grpo":  # whose rows are not full, either
        indices = inputs.order(config, Ranks()).all_rows(0)[:max(PLANNED_ROWS // size, 1) * size]
        batches = map(inputs.rows, indices.reshape(-1, size))
        if hasattr(objective, "only"):  # a step's batches have the own answers
            batches = (objective.only(batch, 1) for batch in batches)
        work, rows = flops.read(batches), len(indices)
    needed, computed = (sum(each) * config.rows_per_step / rows for each in flops.of(work))

    trained = trained_bytes(model) // cost.FLOAT32
    stored = cost.weight_bytes(config) * trained
    stored += cost.state_bytes(config) * cost.moment_count(config, trained)
    exchange = sum(each.seconds for each in cost.exchanged(config, vocab_size))
    parameters, targets = cost.parameter_count(config, vocab_size), work.targets * config.rows_per_step / rows
    return StepPlan(parameters, trained, targets, needed, computed, stored, exchange), described


def planned_peak(config: Config) -> tuple[Optional[float], str]:
    """Return the dense bf16 TFLOP/s of a plan's GPUs, None if they are unknown, and where they are from.

    They are set, or those of this machine's GPU if it has as much memory, or of a usual GPU that has.
    """
    if config.peak_tflops:
        return config.peak_tflops, "PEAK_TFLOPS"
    memory, remedy = config.device_memory, "set PEAK_TFLOPS for another GPU"
    if torch.cuda.is_available() and (peak := peak_flops(torch.device("cuda"))):
        if abs(torch.cuda.get_device_properties(0).total_memory / 1e9 / memory - 1) < SAME_MEMORY:
            return peak / 1e12, f"{torch.cuda.get_device_name()}, as in this machine; {remedy}"
    name = next((name for size, name in USUAL_GPUS.items() if abs(size / memory - 1) < SAME_MEMORY), None)
    if name is None:
        return None, f"not known; set PEAK_TFLOPS to the dense bf16 TFLOP/s of a GPU of {memory:g} GB"
    return PEAK_TFLOPS[name], f"{name}, a guess from {memory:g} GB; {remedy}"


def teacher_bytes(config: Config, folder: Optional[Path]) -> int:
    """Return the bytes of a teacher's weights."""
    if folder is None:
        return 0
    model_config = read_model_json(folder / "config.json")
    stored = "fp32" if "32" in str(model_config.get("dtype", model_config.get("torch_dtype"))) else "bf16"
    precision = stored if config.teacher_precision == "auto" else config.teacher_precision
    with suppress(CheckpointError):  # it is not a Llama
        count = cost.parameter_count(read_model_config(folder), model_config["vocab_size"])
        return count * model_utils.DTYPES[precision].itemsize
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def memory_of(config: Config, device: torch.device) -> tuple[int, int, str]:
    """Return the machine's memory, what a rank may use on its device, and whose memory that is."""
    on_machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if config.device_memory:
        return on_machine, int(config.device_memory * 1e9), f"a GPU of {config.device_memory:g} GB"
    if device.type == "cuda":
        return on_machine, int(USABLE * torch.cuda.get_device_properties(device).total_memory), "this GPU"
    owner = f"this machine{f' for each of {config.world_size} ranks' * (config.world_size > 1)}"
    return on_machine, on_machine // config.world_size, owner


class Forecast(Extension):
    """Writes the memory forecast into config.json, and warns if it exceeds the device's memory."""

    def run_start(self, run: Run) -> None:
        config, device = run.config, run.ranks.device
        if not run.ranks.is_rank0:
            return
        teacher = run.plan.identities.get("teacher") if run.plan else None
        known = (run.inputs.tokenizer.vocab_size, model_utils.choose_dtype(config, device.type).itemsize,
                 device.type, teacher_bytes(config, teacher and Path(teacher["folder"])))
        _, room, owner = memory_of(config, device)
        needed = forecast_memory(config.model_copy(update={"async_save": False}), *known).total
        run.facts["memory_forecast_gib"] = round(needed / GIB, 2)
        if needed > room:
            run.log.warn(f"the run needs about {needed / GIB:.2f} GiB, but {owner} has {room / GIB:.1f} GiB. "
                         f"{memory_advice(config, room, *known)}")


EXTENSION = Forecast


def fitting(config: Config, room: float, *known) -> str:
    """Return the settings that make the forecast fit into `room` bytes with the same global batch, or "".

    The cheapest come first. `known` are the remaining arguments of estimate_memory.
    """
    rows_per_rank = config.rows_per_step // config.world_size
    smaller = [rows for rows in range(config.micro_batch_size, 0, -1) if rows_per_rank % rows == 0]
    recompute = dict.fromkeys((config.activation_checkpointing, "selective", "block"))
    layouts = [{"sharding": config.sharding}]
    if config.sharding == "none" and config.world_size > 8:
        layouts.append({"sharding": "hybrid", "shard_degree": 8})
    if config.world_size > 1:
        layouts.append({"sharding": "full"})
    layouts += [{**layout, "cpu_offload": True} for layout in (*layouts, {"sharding": "full"})]
    if not config.lora_enabled:  # last, because it rounds what is trained
        layouts += [{**layout, "weight_dtype": "bf16", "optimizer_dtype": "bf16"} for layout in layouts]
    broken = {*rules(config)}
    for layout, rows, how in product(layouts, smaller, recompute):
        changes = {**layout, "micro_batch_size": rows, "activation_checkpointing": how}
        changed = config.model_copy(update=changes)
        needed = forecast_memory(changed, *known)
        if needed.total <= room and {*rules(changed)} <= broken:
            settings = " ".join(f"{name.upper()}={str(value).lower()}" for name, value in changes.items()
                                if value != getattr(config, name))
            return f"{settings} (about {needed.total / GIB:.2f} GiB{host_text(needed.offloaded)})"
    return ""


def memory_advice(config: Config, room: int, *known) -> str:
    """Return how the forecast fits into `room` bytes, and how it fits with room to spare."""
    ways = [way for share in (1, 1 - TIGHT) if (way := fitting(config, share * room, *known))]
    if ways:
        spare = f", which is tight. At least {100 * TIGHT:.0f} % stays free with "
        return f"With the same global batch, it would fit with {spare.join(dict.fromkeys(ways))}"
    dtypes = "" if config.lora_enabled else ", WEIGHT_DTYPE=bf16 and OPTIMIZER_DTYPE=bf16"
    adapters = "" if config.lora_enabled else "LORA_ENABLED=true, "
    return ("It would not fit even with MICRO_BATCH_SIZE=1, ACTIVATION_CHECKPOINTING=block, SHARDING=full, "
            f"CPU_OFFLOAD=true{dtypes}: use {adapters}more ranks, shorter rows (MAX_SEQ_LEN) or a smaller "
            "model")


def most_checkpoints(config: Config) -> int:
    """Return how many checkpoints a run has at most at one time, with the one that is being written."""
    best = config.validate_every if config.keep_best > 0 < config.save_every else 0
    every = (config.save_every, config.keep_every, best, config.max_steps)
    saved = len({step for each in every if each for step in range(each, config.max_steps + 1, each)})
    regular = config.max_steps // config.keep_every if config.keep_every else 0
    return min(saved, config.keep_last + config.keep_best + regular + 1) if config.keep_last else saved


def describe_disk(config: Config, size: int) -> str:
    """Return the disk space for checkpoints of `size` bytes; raise an error if they do not fit."""
    most = most_checkpoints(config)
    each, together = (f"{number / GIB:,.1f} GiB" if number >= GIB else f"{number / 2**20:,.1f} MiB"
                      for number in (size, most * size))
    text = f"up to {counted(most, 'checkpoint')} at a time, {each} each, need{'s' * (most == 1)} {together}"
    if config.device_memory:  # the disk belongs to another machine, too
        return text
    folder = existing_parent((Path(config.output_dir) / (config.run_name or "") / "checkpoints").absolute())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise CheckpointError(f"OUTPUT_DIR={config.output_dir}: {folder} is not writable; set another folder")
    free = free_bytes(folder)
    earlier = sum(file.stat().st_size for file in folder.glob("step-*/*.safetensors"))
    text += f"; {free / GIB:.1f} GiB is free"
    if 2 * size > free:
        raise CheckpointError(f"OUTPUT_DIR={config.output_dir}: {text}; free up space, or use another disk")
    if most * size > free + earlier:  # those of this run give way to newer ones
        raise SettingsError(f"OUTPUT_DIR={config.output_dir}: {text}; free up space, keep fewer (KEEP_LAST="
                            f"{config.keep_last}, KEEP_EVERY={config.keep_every}), or use another disk")
    return text


def teacher_on_meta(folder: Path) -> torch.nn.Module:
    """Return the model of a teacher in a folder of `find_teacher` without its weights."""
    try:
        shape = read_model_config(folder)
    except CheckpointError:
        with requires_package("transformers", f"TEACHER_MODEL={folder}"):
            from transformers import AutoConfig, AutoModelForCausalLM
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))
    ids = read_model_json(folder / "config.json")["vocab_size"]
    return model_utils.model_on_meta(shape, ids, torch.bfloat16)
