"""Hold every stage of Paddock against itself and against TRL and PEFT: same weights, same chats and pairs, same optimizer.

    python scripts/benchmark_stages.py                               # on a CPU, one thread, about 10 minutes
    python scripts/benchmark_stages.py --groups sft,dpo --blocks 4 --json out.json

All contenders of a group live in one process and take turns, a training step each, in the order A B B A; what counts is the
process's CPU time by the token of the data, padding not counted. The result is the median ratio of neighbours and its bootstrap
interval of 95 %. TRL's trainers run their own `train()`, in a thread that is held after each step. Before the first step all tell
the loss of the same few examples; where it is not the same, nothing is compared. Everything is fp32, eager, and made up: random
tokens in chats and pairs whose lengths are log-normal, in rows of 1,024 tokens.
"""

import os

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")  # before torch is there to read it

# ruff: noqa: E402
import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmark import bootstrap

from checkpoint.hf_format import huggingface_config, to_huggingface
from common.errors import run_script
from common.files import write_json
from common.verified_files import Cache
from config import Config
from data_pipeline.batch import Batch
from data_pipeline.packed_rows import ExampleRows, open_example_set
from data_pipeline.row_order import rows_of_step
from data_pipeline.shard_reader import MANIFEST, TokenizerFacts, open_token_set
from data_pipeline.shard_writer import SplitWriter, Tokens
from dataloaders import TokenRows
from fused.chunked_head import IGNORE_INDEX
from lora import add_adapters
from model_utils import build_model, clip_scale, gradient_norm
from objectives.base import NextToken
from objectives.distillation import Distillation
from objectives.precompute import ReferenceOutputs, TeacherOutputs
from objectives.preference import DPO, frozen_logprobs, stored_reference
from objectives.stored_outputs import ComputeOnce
from objectives.teacher import LlamaTeacher
from parallel.collectives import Ranks, RunContext, StopSignals
from training.optim import Optimizer

VOCABULARY, ROW_TOKENS, ROWS_A_STEP, EXAMPLES_A_MICRO_BATCH = 4096, 1024, 2, 8
PADDING, END, START, WORD = 0, 1, 2, "<{}>"  # ids with a meaning, and how any is written
CHATS, PAIRS, DOCUMENTS, PROBED = 1200, 120, 400, 8
STORED_STEPS = 20  # those for which the teacher is asked beforehand
TOLERANCE = 1e-3  # of first losses
CONFIG = Config(dim=256, n_layers=6, n_heads=8, n_kv_heads=4, ffn_dim=768, init_std=0.06, max_seq_len=ROW_TOKENS,
                micro_batch_size=ROWS_A_STEP, total_batch_size=ROWS_A_STEP * ROW_TOKENS, learning_rate=1e-4, lora_rank=8,
                lora_alpha=16.0, distillation_top_k=32)
FACTS = TokenizerFacts(VOCABULARY)
LORA_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Contender(NamedTuple):
    """One way to do a step of training."""

    first_loss: float  # of the examples that all are asked for
    step: Callable[[], int]  # takes one step; the tokens of the examples in it


class Comparison(NamedTuple):
    """The CPU seconds by the token of one contender over those of another."""

    what: str
    slower: str
    faster: str
    target: float | None = None
    at_most: bool = False  # the target is an upper limit


Group = tuple[dict[str, Contender], list[Comparison]]  # those that take turns, and what is said of them


def draw_words(dice: np.random.Generator, median: float, longest: int) -> list[int]:
    """Random tokens, of a log-normal length: half of them lie between 0.58 and 1.72 times the median."""
    return dice.integers(START + 1, VOCABULARY, int(np.clip(dice.lognormal(np.log(median), 0.8), 4, longest))).tolist()


def draw_examples(seed: int, count: int, answers: int, longest: int) -> list[list[list[int]]]:
    """What is asked, and one or more answers to it; question and answer have about 160 tokens together."""
    dice = np.random.default_rng(seed)
    return [[[START, *draw_words(dice, 50, longest)], *([*draw_words(dice, 70, longest), END] for _ in range(answers))]
            for _ in range(count)]


def write_set(folder: Path, kind: str, examples: list[list[list[int]]]) -> Path:
    """A prepared set with a train split, as the scripts of preparation would leave it."""
    folder.mkdir(parents=True)
    writer = SplitWriter(folder, "train", 10**8, "uint16", kind != "documents")
    for example in examples:
        segments = [len(part) << 2 | (number == len(example)) << 1 | (number > 1) for number, part in enumerate(example, 1)]
        writer.write(Tokens(np.array([token for part in example for token in part], np.uint16), 1, np.array(segments, np.uint32),
                            sum(map(len, example[1:]))))
    split = writer.sync(finish=True)
    writer.close()
    named = {} if kind == "documents" else {"kind": kind}
    write_json(folder / MANIFEST, {"format": 1, **named, "dtype": "uint16", "vocab_size": VOCABULARY, "tokenizer_sha256": "",
                                      "document_start_id": START, "splits": {"train": split}})
    return folder


def example_rows(folder: Path, kind: str, examples: list[list[list[int]]]) -> ExampleRows:
    """Prepared examples, packed into rows."""
    return ExampleRows(open_example_set(write_set(folder, kind, examples), "train", kind, FACTS), ROW_TOKENS)


def padded_batch(chats: list[list[list[int]]]) -> Batch:
    """One chat a row, padded to the longest."""
    shape = len(chats), max(len(asked) + len(answered) for asked, answered in chats) - 1
    tokens_BT, targets_BT = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORE_INDEX)
    for row, (asked, answered) in enumerate(chats):
        ids = torch.tensor(asked + answered)
        tokens_BT[row, :len(ids) - 1] = ids[:-1]
        targets_BT[row, len(asked) - 1:len(ids) - 1] = ids[len(asked):]
    return Batch(tokens_BT, targets_BT, target_index_M=(targets_BT.flatten() != IGNORE_INDEX).nonzero()[:, 0])


def pretraining_rows(folder: Path) -> TokenRows:
    """Rows of documents, full to the last slot."""
    dice = np.random.default_rng(5)
    write_set(folder, "documents", [[[START, *draw_words(dice, 300, 1000), END]] for _ in range(DOCUMENTS)])
    return TokenRows(open_token_set(folder, "train", FACTS), ROW_TOKENS, START)


def tokens_in(rows: ExampleRows | TokenRows, indices: np.ndarray) -> int:
    """Tokens in some rows, of examples as a padded batch would hold them: a pair's prompt counts twice."""
    if isinstance(rows, TokenRows):
        return len(indices) * ROW_TOKENS
    examples = np.concatenate([rows.examples_in(index) for index in indices.tolist()])
    lengths = np.diff(rows.example_set.starts)[examples]
    prompts = rows.example_set.first_targets[examples] if rows.example_set.kind == "pairs" else 0
    return int((lengths + prompts).sum())


def new_model(seed: int = 1):
    """A model that follows from the seed."""
    return build_model(CONFIG.model_copy(update={"seed": seed}), VOCABULARY, Ranks(), torch.float32)


def packed_batches(rows: ExampleRows | TokenRows, read=None) -> Iterator[tuple[list[Batch], int]]:
    """Steps without end, each with its tokens, in the order of a run; `read` gives the rows with what is stored of them."""
    for step in range(10**9):
        indices = rows_of_step(step, ROWS_A_STEP, len(rows), CONFIG.seed)
        yield [(read or rows)(indices)], tokens_in(rows, indices)


def padded_batches(chats: list[list[list[int]]], micro_batches: int) -> Iterator[tuple[list[Batch], int]]:
    """The same with one chat a row."""
    size = EXAMPLES_A_MICRO_BATCH * micro_batches
    for step in range(10**9):
        taken = [chats[number] for number in rows_of_step(step, size, len(chats), CONFIG.seed)]
        parts = [taken[first:first + EXAMPLES_A_MICRO_BATCH] for first in range(0, size, EXAMPLES_A_MICRO_BATCH)]
        yield [padded_batch(part) for part in parts], sum(len(asked) + len(answered) for asked, answered in taken)


def paddock(model, objective, batches: Iterator[tuple[list[Batch], int]], probe: Batch, reported: str = "") -> Contender:
    """Our own step, as train.py takes it: the exact mean over all micro-batches, a look at the norm, clipping, AdamW.

    Args:
        reported: the metric to be told as first loss, where the loss itself is another than others'.
    """
    optimizer = Optimizer(model, CONFIG)
    model.train()
    loss = objective.loss_sum(model, probe)
    first = float((loss.metrics[reported] if reported else loss.total).detach() / objective.count(probe))

    def step() -> int:
        step_batches, tokens = next(batches)
        optimizer.zero_grad()
        count = sum(int(objective.count(batch)) for batch in step_batches)
        for batch in step_batches:
            (objective.loss_sum(model, batch).total / count).backward()
        norm = gradient_norm(model)
        optimizer.step(CONFIG.learning_rate, clip_scale(norm, CONFIG.max_grad_norm))
        assert torch.isfinite(norm)
        return tokens

    return Contender(first, step)


def huggingface(seed: int = 1):
    """transformers' Llama with the weights of `new_model`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**huggingface_config(CONFIG, VOCABULARY, ROW_TOKENS, START, END, torch.float32)))
    missing = model.load_state_dict(to_huggingface(new_model(seed).state_dict(), CONFIG, VOCABULARY), strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    return model


def word_tokenizer():
    """A tokenizer that has a word for each id."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {WORD.format(token): token for token in range(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token=WORD.format(PADDING)))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=WORD.format(PADDING), eos_token=WORD.format(END))


def dataset(examples: list[list[list[int]]], *columns: str):
    """The examples as texts, as TRL wants them."""
    from datasets import Dataset

    return Dataset.from_list([{column: " ".join(["", *map(WORD.format, part)]) for column, part in zip(columns, example)}
                              for example in examples])


def trl_arguments(kind, folder: Path, micro_batches: int, **changes: Any):
    """A TRL configuration: its defaults but for the device, the dtype and the optimizer, which are as ours; and `changes`."""
    return kind(output_dir=str(folder), use_cpu=True, bf16=False, max_length=ROW_TOKENS, max_steps=10**6, report_to="none",
                disable_tqdm=True, logging_strategy="no", save_strategy="no", optim="adamw_torch_fused",
                learning_rate=CONFIG.learning_rate, lr_scheduler_type="constant", adam_beta1=CONFIG.adam_beta1,
                adam_beta2=CONFIG.adam_beta2, adam_epsilon=CONFIG.adam_eps, weight_decay=CONFIG.weight_decay,
                max_grad_norm=CONFIG.max_grad_norm, gradient_accumulation_steps=micro_batches,
                **{"per_device_train_batch_size": EXAMPLES_A_MICRO_BATCH, **changes})


def one_step_at_a_time(trainer, probe) -> Contender:
    """A trainer whose `train()` goes on by one step whenever it is told to."""
    from transformers import PrinterCallback, TrainerCallback

    go, done, ended, tokens = threading.Semaphore(0), threading.Semaphore(0), threading.Event(), [0]

    class Hold(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            done.release()
            go.acquire()

    def count(module, positional, inputs) -> None:
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
    trainer.add_callback(Hold())
    trainer.model.register_forward_pre_hook(count, with_kwargs=True)
    thread = threading.Thread(target=train, daemon=True)
    return Contender(first_loss, step)


def trl_sft(folder: Path, chats, micro_batches: int, lora: bool = False, **changes: Any) -> Contender:
    """TRL's SFTTrainer, with PEFT's adapters if wanted."""
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    peft_config = LoraConfig(r=CONFIG.lora_rank, lora_alpha=CONFIG.lora_alpha, target_modules=LORA_MODULES, lora_dropout=0.0,
                             task_type="CAUSAL_LM") if lora else None
    arguments, data = trl_arguments(SFTConfig, folder, micro_batches, **changes), dataset(chats, "prompt", "completion")
    trainer = SFTTrainer(huggingface(), arguments, train_dataset=data, processing_class=word_tokenizer(), peft_config=peft_config)
    return one_step_at_a_time(trainer, data.select(range(PROBED)))


def trl_dpo(folder: Path, pairs, micro_batches: int, **changes: Any) -> Contender:
    """TRL's DPOTrainer."""
    from trl import DPOConfig, DPOTrainer

    arguments = trl_arguments(DPOConfig, folder, micro_batches, beta=CONFIG.dpo_beta, **changes)
    data = dataset(pairs, "prompt", "chosen", "rejected")
    trainer = DPOTrainer(huggingface(), huggingface(seed=2), arguments, train_dataset=data, processing_class=word_tokenizer())
    return one_step_at_a_time(trainer, data.select(range(PROBED)))


def on_chats(folder: Path, lora_enabled: bool) -> dict[str, Contender]:
    """Ours packed, and the peers as they come and as well as they can; or all of them with adapters."""
    chats = draw_examples(3, CHATS, 1, 500)
    rows, probe_rows = (example_rows(folder / str(len(part)), "chats", part) for part in (chats, chats[:PROBED]))
    probe = probe_rows(np.arange(len(probe_rows)))
    micro_batches = round(len(chats) / len(rows) * ROWS_A_STEP / EXAMPLES_A_MICRO_BATCH)
    info(f"{rows.describe()}, {rows.tokens / len(chats):.0f} tokens a chat; the padded take {EXAMPLES_A_MICRO_BATCH} chats a "
        f"micro-batch, {micro_batches} a step")

    def ours(batches: Iterator[tuple[list[Batch], int]], adapters: bool = False) -> Contender:
        model = new_model()
        if adapters:
            add_adapters(model, CONFIG, torch.Generator().manual_seed(0))
        return paddock(model, NextToken(), batches, probe)

    peer = partial(trl_sft, folder, chats, lora=lora_enabled)
    contenders = {"packed": ours(packed_batches(rows))}
    if lora_enabled:
        contenders["lora"] = ours(packed_batches(rows), adapters=True)
    else:
        contenders["padded"] = ours(padded_batches(chats, micro_batches))
        contenders["pretraining"] = ours(packed_batches(pretraining_rows(folder / "documents")))
        contenders["trl, without recomputation"] = peer(micro_batches, gradient_checkpointing=False)
    return {**contenders, "trl": peer(micro_batches),
            "trl, tuned": peer(ROWS_A_STEP, gradient_checkpointing=False, packing=True, per_device_train_batch_size=1)}


def sft(folder: Path) -> Group:
    """Full fine-tuning on chats."""
    return on_chats(folder, lora_enabled=False), [
        Comparison("SFT, packed against padded", "padded", "packed"),
        Comparison("SFT against own pretraining", "pretraining", "packed", 0.97),
        Comparison("SFT against TRL as it comes", "trl", "packed", 3.0),
        Comparison("SFT against TRL without recomputation", "trl, without recomputation", "packed"),
        Comparison("SFT against TRL packed and without recomputation", "trl, tuned", "packed", 1.2)]


def lora(folder: Path) -> Group:
    """Adapters of rank 8 at all matrices, on the same chats."""
    return on_chats(folder, lora_enabled=True), [
        Comparison("LoRA against own full SFT", "packed", "lora", 1.45),
        Comparison("LoRA against TRL + PEFT as they come", "trl", "lora", 3.0),
        Comparison("LoRA against TRL + PEFT packed and without recomputation", "trl, tuned", "lora", 1.2)]


def dpo(folder: Path) -> Group:
    """Preferences, against another model than the one that learns, as the first loss would be ln 2 whatever is wrong."""
    pairs = draw_examples(4, PAIRS, 2, 250)
    rows, probe_rows = (example_rows(folder / str(len(part)), "pairs", part) for part in (pairs, pairs[:PROBED]))
    micro_batches = max(1, round(len(pairs) / len(rows) * ROWS_A_STEP / EXAMPLES_A_MICRO_BATCH))
    info(f"{rows.describe()}; the peer takes {EXAMPLES_A_MICRO_BATCH} pairs a micro-batch, {micro_batches} a step")
    reference = new_model(seed=2).requires_grad_(False).eval()

    def with_reference(part: ExampleRows):
        with StopSignals() as signals:
            facts = {"weights_sha256": "0" * 64, "compute_dtype": "float32"}
            once = ComputeOnce(Cache(), RunContext(Ranks(), signals, SimpleNamespace(info=info)))
            return once.load_or_compute(ReferenceOutputs(part, "train", facts, lambda: reference, ROWS_A_STEP))

    def contender(read, read_probe, asked: Callable[[Batch], torch.Tensor]) -> Contender:
        return paddock(new_model(), DPO(CONFIG, asked), packed_batches(rows, read), read_probe(np.arange(len(probe_rows))))

    peer = partial(trl_dpo, folder, pairs, micro_batches)
    return {
        "stored": contender(with_reference(rows), with_reference(probe_rows), stored_reference),
        "live": contender(rows, probe_rows, partial(frozen_logprobs, reference)),
        "trl": peer(),
        "trl, tuned": peer(gradient_checkpointing=False, precompute_ref_log_probs=True),
    }, [
        Comparison("DPO, stored against live reference", "live", "stored", 1.3),
        Comparison("DPO, stored, against TRL as it comes (live)", "trl", "stored", 2.0),
        Comparison("DPO, live, against TRL as it comes (live)", "trl", "live"),
        Comparison("DPO, stored, against TRL's best (precomputed, without recomputation)", "trl, tuned",
                   "stored", 1.3)]


def distillation(folder: Path) -> Group:
    """Pretraining rows alone, with a teacher of the same shape that runs along, and with what it said stored."""
    rows, teacher = pretraining_rows(folder / "documents"), LlamaTeacher(new_model(seed=2), VOCABULARY)
    asked = np.unique(np.concatenate([rows_of_step(step, ROWS_A_STEP, len(rows), CONFIG.seed) for step in range(STORED_STEPS)]))
    with StopSignals() as signals:
        once = ComputeOnce(Cache(), RunContext(Ranks(), signals, SimpleNamespace(info=info)))
        stored = once.load_or_compute(TeacherOutputs(rows, {}, lambda: teacher, CONFIG, VOCABULARY, asked))

    def contender(read, objective, reported: str = "") -> Contender:
        return paddock(new_model(), objective, packed_batches(rows, read), read(asked[:2]), reported)

    return {
        "plain": contender(rows, NextToken()),
        "stored": contender(stored, Distillation(CONFIG), "cross_entropy"),
        "live": contender(rows, Distillation(CONFIG, teacher), "cross_entropy"),
    }, [
        Comparison("Distillation, stored top 32, cost over plain training", "stored", "plain", 1.08, at_most=True),
        # The teacher's forward is a third of a step more; 90 % of that bound is 4 / 3 / 0.9.
        Comparison("Distillation, live teacher of the same size, cost over plain training", "live", "plain", 1.48, at_most=True)]


GROUPS = {"sft": sft, "lora": lora, "dpo": dpo, "distillation": distillation}


def info(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def measure(contenders: dict[str, Contender], blocks: int) -> dict[str, list[float]]:
    """CPU seconds a million tokens of each contender, block by block, after a step of warming up."""
    for contender in contenders.values():
        contender.step()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for block in range(blocks):
        for name in list(contenders)[::-1 if block % 2 else 1]:
            began = time.process_time()
            tokens = contenders[name].step()
            seconds[name].append((time.process_time() - began) / tokens * 1e6)
        info(f"block {block + 1}/{blocks}: " + ", ".join(f"{name} {figures[-1]:.0f}" for name, figures in seconds.items()))
    return seconds


def report(group: Group, seconds: dict[str, list[float]]) -> Iterator[str]:
    """A table row a comparison."""
    contenders, comparisons = group
    losses = {name: contender.first_loss for name, contender in contenders.items()}
    info("first losses: " + ", ".join(f"{name} {loss:.6f}" for name, loss in losses.items()))
    for what, slower, faster, target, at_most in comparisons:
        if abs(losses[slower] - losses[faster]) > TOLERANCE:
            yield f"| {what} | refused: the first losses are {losses[slower]:.4f} and {losses[faster]:.4f} | | |"
            continue
        median, low, high = bootstrap([one / other for one, other in zip(seconds[slower], seconds[faster])])
        met = target is None or (median <= target if at_most else median >= target)
        wanted = "-" if target is None else f"{'at most' if at_most else 'at least'} {target:g}: {'met' if met else 'missed'}"
        per_second = " and ".join(f"{1e6 / statistics.median(seconds[name]):,.0f}" for name in (faster, slower))
        yield f"| {what} | {median:.2f} [{low:.2f}, {high:.2f}] | {per_second} | {wanted} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default=",".join(GROUPS), help="which of them, with commas")
    parser.add_argument("--blocks", type=int, default=6, choices=range(1, STORED_STEPS), metavar="N", help="turns of each")
    parser.add_argument("--json", type=Path, help="write all figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    lines, figures = [], {}
    for name in arguments.groups.split(","):
        with tempfile.TemporaryDirectory() as folder:
            group = GROUPS[name](Path(folder))
            figures[name] = measure(group[0], arguments.blocks)
            lines += report(group, figures[name])
        if arguments.json:
            arguments.json.write_text(json.dumps(figures, indent=1))
    print(f"CPU, 1 thread, fp32, torch {torch.__version__}, transformers {transformers.__version__}, {arguments.blocks} blocks")
    print("| what | ratio [95 %] | tokens a CPU second, first and second | target |\n|---|---|---|---|\n" + "\n".join(lines))


if __name__ == "__main__":
    run_script(main)
