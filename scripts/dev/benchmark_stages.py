"""Compare the speed of every stage of Paddock with itself, TRL and PEFT: same weights, data and optimizer.

    python scripts/dev/benchmark_stages.py             # on a CPU, 10 minutes
    python scripts/dev/benchmark_stages.py --groups sft,dpo --json out.json

All contenders of a group share one process and take turns, one training step each, in the order A B B A. The
result is the median ratio of neighbours with its bootstrap interval of 95 %, in CPU time per token of the
data, without padding. TRL's trainers run their own `train()` in a thread that is paused after each step.
Before the first step each contender computes the loss of the same few examples; if these differ, it is not
compared. Everything is fp32 and eager, with random tokens in chats and pairs of log-normal lengths, in rows
of 1,024 tokens.
"""

import os

# Before torch reads them.
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")

# ruff: noqa: E402
import json
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import common  # noqa: F401  # isort: skip (reports a package that is missing)

import numpy as np
import torch

from common.command_line import CommandParser
from common.errors import run_script
from common.files import write_json
from config import Config
from data_pipeline.shards import MANIFEST, Cache, SplitWriter, TokenizerFacts, Tokens, open_token_set
from dataloaders import Batch, ExampleRows, RowOrder, TokenRows, open_example_set
from fused.head import IGNORE_INDEX
from learn.objectives import DPO, Distillation, NextToken, frozen_logprobs, stored_reference
from learn.optim import Optimizer
from learn.stored import OutputStore, with_reference, with_teacher
from learn.teacher import LlamaTeacher
from lora import add_adapters
from model_utils import build_model, clip_scale, gradient_norm
from parallel.ranks import Ranks, RunContext, StopSignals
from scripts.dev.paired import bootstrap, huggingface_model, in_turns

VOCAB, ROW_TOKENS, ROWS_PER_STEP, EXAMPLES_PER_MICRO_BATCH = 4096, 1024, 2, 8
PADDING, END, START, WORD = 0, 1, 2, "<{}>"  # ids with a meaning, and how an id is written as text
CHATS, PAIRS, DOCUMENTS, PROBED = 1200, 120, 400, 8
STORED_STEPS = 20  # for which the teacher's outputs are stored
TOLERANCE = 1e-3  # of first losses
CONFIG = Config(dim=256, n_layers=6, n_heads=8, n_kv_heads=4, ffn_dim=768, init_std=0.06, learning_rate=1e-4,
                max_seq_len=ROW_TOKENS, micro_batch_size=ROWS_PER_STEP, lora_rank=8, lora_alpha=16.0,
                total_batch_size=ROWS_PER_STEP * ROW_TOKENS, distillation_top_k=32)
FACTS = TokenizerFacts(VOCAB)
Example = list[list[int]]  # the tokens of a prompt and of its answers
Steps = Iterator[tuple[list[Batch], int]]  # the micro-batches of each step, and its tokens


info = partial(print, file=sys.stderr, flush=True)  # a line of progress


class Contender(NamedTuple):
    """One way to train."""

    first_loss: float  # of the probed examples
    step: Callable[[], int]  # takes one step and returns the tokens of its examples


class Comparison(NamedTuple):
    """The CPU seconds per token of one contender divided by those of another."""

    what: str
    slower: str
    faster: str
    target: float | None = None
    at_most: bool = False  # the target is an upper limit


Group = tuple[dict[str, Contender], list[Comparison]]


def draw_tokens(rng: np.random.Generator, median: float, longest: int) -> list[int]:
    """Random tokens of a log-normal length: half of the lengths are 0.58 to 1.72 times the median."""
    length = int(np.clip(rng.lognormal(np.log(median), 0.8), 4, longest))
    return rng.integers(START + 1, VOCAB, length).tolist()


def draw_examples(seed: int, examples: int, answers: int, longest: int) -> list[Example]:
    """Prompts with one or more answers each; a prompt and an answer have about 160 tokens together."""
    rng = np.random.default_rng(seed)
    return [[[START, *draw_tokens(rng, 50, longest)],
             *([*draw_tokens(rng, 70, longest), END] for _ in range(answers))] for _ in range(examples)]


def write_set(folder: Path, kind: str, examples: list[Example]) -> Path:
    """Write a prepared set with a train split, as the preparation scripts would."""
    folder.mkdir(parents=True)
    writer = SplitWriter(folder, "train", 10**8, "uint16", kind != "documents")
    for example in examples:
        segments = [len(part) << 2 | (number == len(example)) << 1 | (number > 1)
                    for number, part in enumerate(example, 1)]
        tokens = np.concatenate([np.array(part, np.uint16) for part in example])
        writer.write(Tokens(tokens, 1, np.array(segments, np.uint32), sum(map(len, example[1:]))))
    split = writer.sync(finish=True)
    writer.close()
    manifest = {"format": 1, "dtype": "uint16", "vocab_size": VOCAB, "tokenizer_sha256": "",
                "document_start_id": START, "splits": {"train": split}}
    write_json(folder / MANIFEST, manifest if kind == "documents" else manifest | {"kind": kind})
    return folder


def example_rows(folder: Path, kind: str, examples: list[Example]) -> tuple[ExampleRows, ExampleRows]:
    """Prepared examples packed into rows, and the first ones of them, which are probed."""
    rows = []
    for name, part in (("all", examples), ("probed", examples[:PROBED])):
        example_set = open_example_set(write_set(folder / name, kind, part), "train", kind, FACTS)
        rows.append(ExampleRows(example_set, ROW_TOKENS))
    return rows[0], rows[1]


def document_rows(folder: Path) -> TokenRows:
    """Rows of documents, without padding."""
    rng = np.random.default_rng(5)
    write_set(folder, "documents", [[[START, *draw_tokens(rng, 300, 1000), END]] for _ in range(DOCUMENTS)])
    return TokenRows(open_token_set(folder, "train", FACTS), ROW_TOKENS, START)


def token_count(rows: ExampleRows | TokenRows, indices: np.ndarray) -> int:
    """The tokens in some rows, counted as in a padded batch, where a pair's prompt counts twice."""
    if isinstance(rows, TokenRows):
        return len(indices) * ROW_TOKENS
    examples = np.concatenate([rows.examples_in(index) for index in indices.tolist()])
    lengths = np.diff(rows.example_set.starts)[examples]
    prompts = rows.example_set.first_targets[examples] if rows.example_set.kind == "pairs" else 0
    return int((lengths + prompts).sum())


def packed_steps(rows: ExampleRows | TokenRows, read=None) -> Steps:
    """Steps of packed rows in the order of a run; `read` returns the rows with what is stored about them."""
    for step in count():
        indices = RowOrder(len(rows), ROWS_PER_STEP, 1, CONFIG.seed).all_rows(step)
        yield [(read or rows)(indices)], token_count(rows, indices)


def padded_steps(chats: list[Example], micro_batches: int) -> Steps:
    """Steps of padded batches, with one chat a row."""
    size = EXAMPLES_PER_MICRO_BATCH
    for step in count():
        order = RowOrder(len(chats), size * micro_batches, 1, CONFIG.seed).all_rows(step)
        drawn = [chats[number] for number in order]
        batches = [padded_batch(drawn[first:first + size]) for first in range(0, len(drawn), size)]
        yield batches, sum(len(prompt) + len(answer) for prompt, answer in drawn)


def padded_batch(chats: list[Example]) -> Batch:
    """One chat a row, padded to the longest."""
    shape = len(chats), max(len(prompt) + len(answer) for prompt, answer in chats) - 1
    tokens_BT, targets_BT = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORE_INDEX)
    for row, (prompt, answer) in enumerate(chats):
        ids = torch.tensor(prompt + answer)
        tokens_BT[row, :len(ids) - 1] = ids[:-1]
        targets_BT[row, len(prompt) - 1:len(ids) - 1] = ids[len(prompt):]
    return Batch(tokens_BT, targets_BT, target_index_M=(targets_BT.flatten() != IGNORE_INDEX).nonzero()[:, 0])


# ----------------------------------------------------------------------------------------------- contenders


def new_model(seed: int = 1):
    """A model whose weights follow from the seed."""
    return build_model(CONFIG.model_copy(update={"seed": seed}), VOCAB, Ranks(), torch.float32)


def paddock(model, objective, steps: Steps, probe: Batch, reported: str = "") -> Contender:
    """Our own step, as train.py takes it: the exact mean over all micro-batches, norm, clipping, AdamW.

    Args:
        reported: the metric to report as first loss if the loss itself is not comparable.
    """
    optimizer = Optimizer(model, CONFIG)
    model.train()
    loss = objective.loss_sum(model, probe)
    first_loss = float((loss.metrics[reported] if reported else loss.total).detach() / objective.count(probe))

    def step() -> int:
        batches, tokens = next(steps)
        optimizer.zero_grad()
        units = sum(int(objective.count(batch)) for batch in batches)
        for batch in batches:
            (objective.loss_sum(model, batch).total / units).backward()
        norm = gradient_norm(model)
        optimizer.step(CONFIG.learning_rate, clip_scale(norm, CONFIG.max_grad_norm))
        assert torch.isfinite(norm)
        return tokens

    return Contender(first_loss, step)


def word_tokenizer():
    """A tokenizer that has one word for each id."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {WORD.format(token): token for token in range(VOCAB)}
    backend = Tokenizer(models.WordLevel(words, unk_token=WORD.format(PADDING)))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=WORD.format(PADDING),
                                   eos_token=WORD.format(END))


def dataset(examples: list[Example], *columns: str):
    """The examples as texts, which is what TRL reads."""
    from datasets import Dataset

    return Dataset.from_list([{column: " ".join(["", *map(WORD.format, part)])
                               for column, part in zip(columns, example)} for example in examples])


def trl_arguments(kind, folder: Path, micro_batches: int, **changes: Any):
    """TRL's default configuration with our device, dtype and optimizer, and these changes."""
    changes = {"per_device_train_batch_size": EXAMPLES_PER_MICRO_BATCH, **changes}
    return kind(output_dir=str(folder), use_cpu=True, bf16=False, max_length=ROW_TOKENS, max_steps=10**6,
                report_to="none", disable_tqdm=True, logging_strategy="no", save_strategy="no",
                optim="adamw_torch_fused", learning_rate=CONFIG.learning_rate, lr_scheduler_type="constant",
                adam_beta1=CONFIG.adam_beta1, adam_beta2=CONFIG.adam_beta2, adam_epsilon=CONFIG.adam_eps,
                weight_decay=CONFIG.weight_decay, max_grad_norm=CONFIG.max_grad_norm,
                gradient_accumulation_steps=micro_batches, **changes)


def stepwise(trainer, probe) -> Contender:
    """A trainer whose `train()` takes one step each time it is asked to."""
    from transformers import PrinterCallback, TrainerCallback

    go, done, ended = threading.Semaphore(0), threading.Semaphore(0), threading.Event()
    tokens = [0]

    class Pause(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            done.release()
            go.acquire()

    def count_tokens(module, positional, inputs) -> None:
        mask = inputs.get("attention_mask")
        tokens[0] += inputs["input_ids"].numel() if mask is None else int(mask.sum())

    def train() -> None:
        try:
            trainer.train()
        finally:
            ended.set()
            done.release()

    def step() -> int:
        tokens[0] = 0
        go.release() if thread.ident else thread.start()
        done.acquire()
        assert not ended.is_set(), "the trainer has failed; see above"
        return tokens[0]

    trainer.remove_callback(PrinterCallback)
    first_loss = trainer.evaluate(eval_dataset=probe)["eval_loss"]
    trainer.add_callback(Pause())
    trainer.model.register_forward_pre_hook(count_tokens, with_kwargs=True)
    thread = threading.Thread(target=train, daemon=True)
    return Contender(first_loss, step)


def trl_sft(folder: Path, chats: list[Example], lora: bool, micro_batches: int, **changes: Any) -> Contender:
    """TRL's SFTTrainer, with PEFT's adapters if asked."""
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    peft_config = LoraConfig(r=CONFIG.lora_rank, lora_alpha=CONFIG.lora_alpha, target_modules=modules,
                             lora_dropout=0.0, task_type="CAUSAL_LM") if lora else None
    arguments = trl_arguments(SFTConfig, folder, micro_batches, **changes)
    data = dataset(chats, "prompt", "completion")
    trainer = SFTTrainer(huggingface_model(new_model(), CONFIG, VOCAB, ROW_TOKENS), arguments,
                         train_dataset=data, processing_class=word_tokenizer(), peft_config=peft_config)
    return stepwise(trainer, data.select(range(PROBED)))


def trl_dpo(folder: Path, pairs: list[Example], micro_batches: int, **changes: Any) -> Contender:
    """TRL's DPOTrainer."""
    from trl import DPOConfig, DPOTrainer

    arguments = trl_arguments(DPOConfig, folder, micro_batches, beta=CONFIG.dpo_beta, **changes)
    data = dataset(pairs, "prompt", "chosen", "rejected")
    models = [huggingface_model(new_model(seed), CONFIG, VOCAB, ROW_TOKENS) for seed in (1, 2)]
    trainer = DPOTrainer(*models, arguments, train_dataset=data, processing_class=word_tokenizer())
    return stepwise(trainer, data.select(range(PROBED)))


def chat_contenders(folder: Path, lora_enabled: bool) -> dict[str, Contender]:
    """Paddock on packed chats, and its peers by default and tuned; with adapters if asked."""
    chats = draw_examples(3, CHATS, 1, 500)
    rows, probed = example_rows(folder, "chats", chats)
    probe = probed(np.arange(len(probed)))
    micro_batches = round(len(chats) / len(rows) * ROWS_PER_STEP / EXAMPLES_PER_MICRO_BATCH)
    info(f"{rows.describe()}, {rows.tokens / len(chats):.0f} tokens a chat; padded, a micro-batch has "
         f"{EXAMPLES_PER_MICRO_BATCH} chats, and a step {micro_batches} micro-batches")

    def ours(steps: Steps, adapters: bool = False) -> Contender:
        model = new_model()
        if adapters:
            add_adapters(model, CONFIG, torch.Generator().manual_seed(0))
        return paddock(model, NextToken(), steps, probe)

    peer = partial(trl_sft, folder, chats, lora_enabled)
    contenders = {"packed": ours(packed_steps(rows))}
    if lora_enabled:
        contenders["lora"] = ours(packed_steps(rows), adapters=True)
    else:
        contenders["padded"] = ours(padded_steps(chats, micro_batches))
        contenders["pretraining"] = ours(packed_steps(document_rows(folder / "documents")))
        contenders["trl, without recomputation"] = peer(micro_batches, gradient_checkpointing=False)
    tuned = {"gradient_checkpointing": False, "packing": True, "per_device_train_batch_size": 1}
    return {**contenders, "trl": peer(micro_batches), "trl, tuned": peer(ROWS_PER_STEP, **tuned)}


def sft(folder: Path) -> Group:
    """Full fine-tuning on chats."""
    return chat_contenders(folder, lora_enabled=False), [
        Comparison("SFT, packed against padded", "padded", "packed"),
        Comparison("SFT against own pretraining", "pretraining", "packed", 0.97),
        Comparison("SFT against TRL by default", "trl", "packed", 3.0),
        Comparison("SFT against TRL without recomputation", "trl, without recomputation", "packed"),
        Comparison("SFT against TRL packed and without recomputation", "trl, tuned", "packed", 1.2)]


def lora(folder: Path) -> Group:
    """Adapters of rank 8 on all matrices, on the same chats."""
    return chat_contenders(folder, lora_enabled=True), [
        Comparison("LoRA against own full SFT", "packed", "lora", 1.45),
        Comparison("LoRA against TRL + PEFT by default", "trl", "lora", 3.0),
        Comparison("LoRA against TRL + PEFT packed and without recomputation", "trl, tuned", "lora", 1.2)]


def dpo(folder: Path) -> Group:
    """Preferences. The reference is another model than the start, or any first loss would be ln 2."""
    pairs = draw_examples(4, PAIRS, 2, 250)
    rows, probed = example_rows(folder, "pairs", pairs)
    micro_batches = max(1, round(len(pairs) / len(rows) * ROWS_PER_STEP / EXAMPLES_PER_MICRO_BATCH))
    info(f"{rows.describe()}; the peer's micro-batch has {EXAMPLES_PER_MICRO_BATCH} pairs, its step "
         f"{micro_batches} micro-batches")
    reference = new_model(seed=2).requires_grad_(False).eval()

    def referenced(part: ExampleRows):
        with StopSignals() as signals:
            facts = {"weights_sha256": "0" * 64, "compute_dtype": "float32"}
            outputs = OutputStore(Cache(), RunContext(Ranks(), signals, SimpleNamespace(info=info)))
            return with_reference(outputs, part, "train", facts, lambda: reference, ROWS_PER_STEP)

    def ours(read, read_probe, reference_logprobs: Callable[[Batch], torch.Tensor]) -> Contender:
        return paddock(new_model(), DPO(CONFIG, reference_logprobs), packed_steps(rows, read),
                       read_probe(np.arange(len(probed))))

    peer = partial(trl_dpo, folder, pairs, micro_batches)
    return {
        "stored": ours(referenced(rows), referenced(probed), stored_reference),
        "live": ours(rows, probed, partial(frozen_logprobs, reference)),
        "trl": peer(),
        "trl, tuned": peer(gradient_checkpointing=False, precompute_ref_log_probs=True),
    }, [
        Comparison("DPO, stored against live reference", "live", "stored", 1.3),
        Comparison("DPO, stored, against TRL by default (live)", "trl", "stored", 2.0),
        Comparison("DPO, live, against TRL by default (live)", "trl", "live"),
        Comparison("DPO, stored, against TRL's best (precomputed, without recomputation)", "trl, tuned",
                   "stored", 1.3)]


def distillation(folder: Path) -> Group:
    """Pretraining rows without a teacher, with a live one of the same shape, and with its stored outputs."""
    rows, teacher = document_rows(folder / "documents"), LlamaTeacher(new_model(seed=2), VOCAB)
    order = RowOrder(len(rows), ROWS_PER_STEP, 1, CONFIG.seed)
    orders = [order.all_rows(step) for step in range(STORED_STEPS)]
    wanted = np.unique(np.concatenate(orders))
    with StopSignals() as signals:
        outputs = OutputStore(Cache(), RunContext(Ranks(), signals, SimpleNamespace(info=info)))
        stored = with_teacher(outputs, rows, {"vocab_size": VOCAB}, lambda: teacher, CONFIG, wanted)

    def ours(read, objective, reported: str = "") -> Contender:
        return paddock(new_model(), objective, packed_steps(rows, read), read(wanted[:2]), reported)

    return {
        "plain": ours(rows, NextToken()),
        "stored": ours(stored, Distillation(CONFIG), "cross_entropy"),
        "live": ours(rows, Distillation(CONFIG, teacher), "cross_entropy"),
    }, [
        Comparison("Distillation, stored top 32, cost over plain training", "stored", "plain", 1.08, True),
        # A teacher's forward is a third of a step; the target is 90 % of that speed, so 4 / 3 / 0.9.
        Comparison("Distillation, live teacher of the same size, cost over plain training", "live", "plain",
                   1.48, True)]


GROUPS = {"sft": sft, "lora": lora, "dpo": dpo, "distillation": distillation}


def measure(contenders: dict[str, Contender], blocks: int) -> dict[str, list[float]]:
    """CPU seconds per million tokens of each contender in each block, after one step to warm up."""
    for contender in contenders.values():
        contender.step()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for block, name in in_turns(contenders, blocks):
        started = time.process_time()
        tokens = contenders[name].step()
        seconds[name].append((time.process_time() - started) / tokens * 1e6)
        info(f"block {block + 1}/{blocks}: {name} {seconds[name][-1]:.0f}")
    return seconds


def report(group: Group, seconds: dict[str, list[float]]) -> Iterator[str]:
    """A table row for each comparison."""
    contenders, comparisons = group
    losses = {name: contender.first_loss for name, contender in contenders.items()}
    info("first losses: " + ", ".join(f"{name} {loss:.6f}" for name, loss in losses.items()))
    for what, slower, faster, target, at_most in comparisons:
        if abs(losses[slower] - losses[faster]) > TOLERANCE:
            differing = f"{losses[slower]:.4f} and {losses[faster]:.4f}"
            yield f"| {what} | refused: the first losses are {differing} | | |"
            continue
        median, low, high = bootstrap([a / b for a, b in zip(seconds[slower], seconds[faster])])
        verdict = "-"
        if target is not None:
            met = median <= target if at_most else median >= target
            verdict = f"{'at most' if at_most else 'at least'} {target:g}: {'met' if met else 'missed'}"
        rates = " and ".join(f"{1e6 / statistics.median(seconds[name]):,.0f}" for name in (faster, slower))
        yield f"| {what} | {median:.2f} [{low:.2f}, {high:.2f}] | {rates} | {verdict} |"


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--groups", default=",".join(GROUPS), help="groups to run, separated by commas")
    parser.add_argument("--blocks", type=int, default=6, choices=range(1, STORED_STEPS), metavar="N",
                        help="steps of each contender")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    lines, figures = [], {}
    for name in args.groups.split(","):
        with tempfile.TemporaryDirectory() as folder:
            group = GROUPS[name](Path(folder))
            figures[name] = measure(group[0], args.blocks)
            lines += report(group, figures[name])
        if args.json:
            args.json.write_text(json.dumps(figures, indent=1))
    print(f"CPU, 1 thread, fp32, torch {torch.__version__}, transformers {transformers.__version__}, "
          f"{args.blocks} blocks")
    print("| what | ratio [95 %] | tokens a CPU second, first and second | target |\n|---|---|---|---|")
    print("\n".join(lines))


if __name__ == "__main__":
    run_script(main)
