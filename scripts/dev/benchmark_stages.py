"""Compare the speed of SFT, LoRA and DPO with pretraining and TRL: same weights, examples and optimizer.

    python scripts/dev/benchmark_stages.py --stages sft,dpo --blocks 8

All contenders of a stage share a process and take turns of two steps. The result is the median of paired
ratios of CPU seconds per token without padding. TRL runs its own `train()`, paused by a callback; tuned, it
does not recompute activations, and packs chats or stores references. First losses are printed: compare them.
"""

import os
import sys
import threading
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

# ruff: noqa: E402
import numpy as np
import torch

from common.command_line import CommandParser
from common.errors import run_script
from config import Config, extension_module
from data_pipeline.examples import LAST, LENGTH_SHIFT, TARGET, ExampleSet
from dataloaders import ExampleRows, TokenRows, rows_at
from learn.objectives import DPO, NextToken, frozen_logprobs, stored_reference
from learn.optim import Optimizer, clip_scale, gradient_norm
from learn.reference_cache import ReferencedRows
from lora import add_adapters, cast_base
from model_utils import bf16_is_fast, build_model
from parallel.ranks import Ranks
from scripts.dev.paired import huggingface_model, in_turns, ratio

VOCAB, START, LENGTH, ROWS, PEER_ROWS = 4096, 2, 1024, 2, 8
PROBE, BF16 = np.arange(1), bf16_is_fast("cpu")  # the row of the first examples, whose loss is compared
CONFIG = Config(dim=256, n_layers=6, n_heads=8, n_kv_heads=4, ffn_dim=768, init_std=0.06, learning_rate=1e-4,
                max_seq_len=LENGTH, micro_batch_size=ROWS, total_batch_size=ROWS * LENGTH, lora_rank=8)


def new_model(seed: int = 1):
    config = CONFIG.model_copy(update={"seed": seed})
    extension_module("cpu_kernels")
    return build_model(config, VOCAB, Ranks(), torch.bfloat16 if BF16 else torch.float32)


def example_rows(kind: str, examples: list[list[list[int]]]) -> ExampleRows | TokenRows:
    """Return prompts with their answers, packed into rows; or rows of documents."""
    ids = np.concatenate([part for example in examples for part in example]).astype(np.uint16)
    tokens = SimpleNamespace(tokens=len(ids), fingerprint="", read=lambda start, n: ids[start:start + n])
    if kind == "documents":
        return TokenRows(tokens, LENGTH, START)
    lengths = np.array([[len(part) for part in example] for example in examples], np.uint32)
    flags = np.array([0] + [TARGET] * (lengths.shape[1] - 2) + [TARGET | LAST], np.uint32)
    starts = np.append(0, lengths.sum(1).cumsum()).astype(np.int64)
    segments, firsts = (lengths << LENGTH_SHIFT | flags).flatten(), lengths[:, 0].astype(np.int32)
    segment_starts = np.arange(len(lengths) + 1) * lengths.shape[1]
    return ExampleRows(ExampleSet(Path(), kind, tokens, segments, "", starts, segment_starts, firsts), LENGTH)


def paddock(objective, rows, tokens_of, probe, lora: bool = False) -> tuple:
    """Return the loss of the probe, and a function that takes a step and returns its tokens."""
    model, positions = new_model(), count()
    if lora:
        add_adapters(model, CONFIG, torch.Generator().manual_seed(0))
        cast_base(model, model.compute_dtype)
    optimizer = Optimizer(model, CONFIG)

    def step() -> int:
        indices = rows_at(next(positions) * ROWS + np.arange(ROWS), len(rows), CONFIG.seed)
        batch = rows(indices)
        optimizer.zero_grad()
        (objective.loss_sum(model, batch).total / objective.count(batch)).backward()
        norm = gradient_norm(model)
        optimizer.step(1e-4, clip_scale(norm, 1.0), (~norm.isfinite()).float())
        return tokens_of(indices)

    with torch.no_grad():
        return float(objective.loss_sum(model, probe(PROBE)).total / objective.count(probe(PROBE))), step


def trl(stage: str, examples: list, probed: int, step_examples: float, tuned: bool) -> tuple:
    """Return the same of TRL's trainer, as it comes or tuned."""
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    is_dpo = stage == "dpo"
    words = Tokenizer(models.WordLevel({f"<{token}>": token for token in range(VOCAB)}, "<0>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    columns = ("prompt", "chosen", "rejected") if is_dpo else ("prompt", "completion")
    data = Dataset.from_list([{name: " ".join(["", *map("<{}>".format, part)])
                               for name, part in zip(columns, example)} for example in examples])
    rows = 1 if tuned and not is_dpo else PEER_ROWS  # packed rows are long
    changes = {"precompute_ref_log_probs" if is_dpo else "packing": True, "gradient_checkpointing": False}
    args = (DPOConfig if is_dpo else SFTConfig)(
        "/tmp", use_cpu=True, bf16=BF16, max_length=LENGTH, max_steps=10**6, report_to="none",
        disable_tqdm=True, logging_strategy="no", save_strategy="no", optim="adamw_torch_fused",
        learning_rate=1e-4, weight_decay=0.1, lr_scheduler_type="constant", per_device_train_batch_size=rows,
        gradient_accumulation_steps=ROWS if rows == 1 else max(1, round(step_examples / rows)),
        **(changes if tuned else {}))
    alpha, modules = CONFIG.lora_alpha, "all-linear"
    adapters = LoraConfig(r=8, lora_alpha=alpha, target_modules=modules, task_type="CAUSAL_LM")
    # Without another reference than the start, each first loss of DPO would be ln 2.
    seeds = (1, 2) if is_dpo else (1,)
    trainer = (DPOTrainer if is_dpo else SFTTrainer)(
        *(huggingface_model(new_model(seed), CONFIG, VOCAB, LENGTH) for seed in seeds), args=args,
        train_dataset=data, peft_config=adapters if stage == "lora" else None,
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<0>", eos_token="<1>"))
    go, done, tokens = threading.Semaphore(0), threading.Semaphore(0), [0]

    class Pause(TrainerCallback):
        def on_step_end(self, *_, **__):
            done.release()
            go.acquire()

    def count_tokens(module, _, inputs) -> None:
        mask = inputs.get("attention_mask")
        tokens[0] += inputs["input_ids"].numel() if mask is None else int(mask.sum())

    def step() -> int:
        tokens[0] = 0
        go.release() if thread.ident else thread.start()
        done.acquire()
        return tokens[0]

    trainer.remove_callback(PrinterCallback)
    loss = trainer.evaluate(eval_dataset=data.select(range(probed)))["eval_loss"]
    trainer.add_callback(Pause())
    trainer.model.register_forward_pre_hook(count_tokens, with_kwargs=True)
    thread = threading.Thread(target=trainer.train, daemon=True)
    return loss, step


def contenders_of(stage: str) -> dict[str, tuple]:
    """Return the contenders by name. Prompts and answers have log-normal lengths, 160 tokens together."""
    rng, medians, examples = np.random.default_rng(3), [50, 70, 70] if stage == "dpo" else [50, 70], []
    kind, probed = ("pairs", 2) if stage == "dpo" else ("chats", 4)
    for lengths in np.clip(rng.lognormal(np.log(medians), 0.8, (400, len(medians))), 4, 300).astype(int):
        prompt, *answers = (rng.integers(3, VOCAB, length).tolist() for length in lengths)
        examples.append([[START, *prompt], *([*answer, 1] for answer in answers)])
    rows, probe = example_rows(kind, examples), example_rows(kind, examples[:probed])
    counted = [sum(map(len, example)) + len(example[0]) * (stage == "dpo") for example in examples]

    def tokens_of(indices: np.ndarray) -> int:
        return sum(counted[example] for row in indices for example in rows.examples_in(row))

    if stage == "dpo":
        reference, stored = new_model(2), []
        for each in (rows, probe):
            logprob_E2 = torch.zeros(len(each.example_set), 2)
            for row in range(len(each)):
                inside = each.examples_in(row)
                logprob_E2[inside] = frozen_logprobs(reference, each(np.array([row])))[0, :len(inside)]
            stored.append(ReferencedRows(each, logprob_E2))
        found = {"DPO": paddock(DPO(CONFIG, stored_reference), stored[0], tokens_of, stored[1])}
    else:
        documents = example_rows("documents", [[[START, *rng.integers(3, VOCAB, 300)]] for _ in range(1000)])
        found = {"SFT": paddock(NextToken(), rows, tokens_of, probe),
                 "LoRA": paddock(NextToken(), rows, tokens_of, probe, lora=True),
                 "pretraining": paddock(NextToken(), documents, lambda indices: len(indices) * LENGTH, probe)}
    for peer in ("dpo",) if stage == "dpo" else ("sft", "lora"):
        for tuned in (False, True):
            name, step_examples = f"TRL {peer}{', tuned' * tuned}", len(examples) / len(rows) * ROWS
            found[name] = trl(peer, examples, probed, step_examples, tuned)
    return found


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--stages", default="sft,dpo", choices=("sft", "dpo", "sft,dpo"),
                        help="sft (with LoRA) or dpo (default: both)")
    parser.add_argument("--blocks", type=int, default=8, help="turns of each contender")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for stage in args.stages.split(","):
        contenders = contenders_of(stage)
        seconds = {name: [] for name in contenders}
        for name, (loss, step) in contenders.items():
            print(f"{name}: first loss {loss:.4f}, {step() + step()} tokens to warm up", flush=True)
        for _, name in in_turns(contenders, args.blocks):
            started, step = time.process_time(), contenders[name][1]
            tokens = step() + step()
            seconds[name].append((time.process_time() - started) / tokens * 1e6)
        for ours in seconds.keys() & {"SFT", "LoRA", "DPO"}:
            for name, values in seconds.items():
                print(f"{ours} against {name}: {ratio([b / a for a, b in zip(seconds[ours], values)])}, "
                      f"{1e6 / np.median(values):,.0f} tokens per CPU second", flush=True)


if __name__ == "__main__":
    run_script(main)
