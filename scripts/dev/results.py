"""Measure a row of docs/results.md: a real model on real data, and another program on the same batches.

    python scripts/dev/results.py hellaswag --model models/smollm2 \\
        --items ~/data/hellaswag.jsonl
    python scripts/dev/results.py sft --model models/smollm2 \\
        --gsm8k ~/data/gsm8k --steps 100

Rows: hellaswag, sft, lora, dpo, orpo, simpo, kto, grpo, pretrain, distill, gguf. The preference rows and grpo
start from the run of sft with the same seed, if there is one. Runs are in --work; its results.jsonl gets a
line per row and seed. --gsm8k has train.jsonl, test.jsonl and model_solutions.jsonl of
openai/grade-school-math; --text is WikiText-2. Two CPU cores take hours: reduce --steps and --problems.
"""

import json
import os
import re
import resource
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.command_line import CommandParser  # noqa: E402
from common.errors import PaddockError, SettingsError, local_path, run_script  # noqa: E402

SPLITS = {"train": 7473, "test": 1319}  # problems of GSM8K
ENDS_WITH_NUMBER = r"\d\W*$"  # for --reward regex
EVALUATED: dict[Path | str, dict[str, Any]] = {}
PREFERENCES = ("dpo", "orpo", "simpo", "kto")
FP32 = ("--device", "cpu", "--precision", "fp32")  # as the other programs; some CPUs would choose bf16
SIZES = {"2 layers of 64": (2, 64), "4 layers of 128": (4, 128), "6 layers of 192": (6, 192)}


def run(*command: object) -> float:
    """Run a Python script of Paddock; return its CPU seconds."""
    def seconds() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    started, (script, *arguments) = seconds(), map(str, command)
    print("+", script, *arguments, file=sys.stderr, flush=True)
    if code := subprocess.run([sys.executable, str(ROOT / script), *arguments], stdout=sys.stderr).returncode:
        raise PaddockError(f"{script} failed with exit code {code}; see its output above")
    return seconds() - started


def train(args: Namespace, name: str, steps: int, *flags: object) -> float:
    """Train a run without weight decay, at a constant rate; return its CPU seconds."""
    return run("scripts/main.py", "train", "--output-dir", args.work / "runs", "--run-name", name,
               "--max-steps", steps, "--lr-schedule", "constant", "--warmup-steps", 0, "--weight-decay", 0,
               "--save-every", steps, "--sample-every", 0, "--hellaswag-every", 0, "--report", "false",
               *FP32, *(["--compile", "false"] if args.eager else []), *flags)


def lines(args: Namespace, name: str, file: str) -> list[dict[str, Any]]:
    return read(args.work / "runs" / name / f"{file}.jsonl")


def read(file: Path) -> list[dict[str, Any]]:
    with open(file, encoding="utf-8") as text:
        return [json.loads(line) for line in text]


def evaluate(args: Namespace, model: Path | str) -> dict[str, Any]:
    """Return the metrics of a model on the held-out problems: those of the start only once."""
    if model not in EVALUATED:
        file = args.work / "eval.json"
        run("scripts/evaluate.py", model, *held_out(args), *FP32, "--json", file)
        EVALUATED[model] = json.loads(file.read_text())["metrics"]
    return EVALUATED[model]


def prepared(args: Namespace, kind: str, name: str, records: Iterator[dict], fraction: float) -> Path:
    """Write records to a file and prepare it, unless that has been done; return the set."""
    file = args.work / "data" / f"{name}.jsonl"
    output = args.work / "data" / kind
    if not (output / name).exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        run("scripts/prepare.py", kind, file, "--tokenizer-path", args.model, "--output", output,
            "--validation-fraction", fraction)
    return output / name


# ------------------------------------------------------------------------------------------ GSM8K


def plain(text: str) -> str:
    """Return a solution without the marks of the calculator."""
    return re.sub(r"<<.*?>>", "", text)


def chats(args: Namespace, split: str, held_out: int = 75) -> Path:
    records = ({"prompt": each["question"], "completion": plain(each["answer"])}
               for each in read(args.gsm8k / f"{split}.jsonl"))
    return prepared(args, "chats", f"gsm8k-{split}-{held_out}", records, held_out / SPLITS[split])


def held_out(args: Namespace) -> list[object]:
    """Return flags that evaluate about --problems of GSM8K's test problems, with greedy answers.

    A problem is held out by its hash: it is so among the pairs too, which are made of test problems.
    """
    flags = ["--data", chats(args, "test", args.problems), "--validation-rows", 10**6,
             "--max-seq-len", 1024, "--total-batch-size", 1024, "--micro-batch-size", 1]
    answers = ["--metric", "extensions.rewards:numeric", "--generation-eval-examples", 10**6,
               "--generation-eval-tokens", 200]
    return flags + answers * args.answers


def solutions(args: Namespace) -> Iterator[dict[str, Any]]:
    """Yield the shortest --pairs pairs of a right and a wrong solution; for KTO, yield the two separately."""
    pairs = []
    for problem in read(args.gsm8k / "model_solutions.jsonl"):
        answers = {True: [], False: []}
        for each in problem.values():
            if isinstance(each, dict):
                answers[each["is_correct"]].append(plain(each["solution"]).replace("\nA: ", "\n#### "))
        if all(answers.values()):
            pairs.append((problem["question"], answers[True][0], answers[False][0]))
    for prompt, chosen, rejected in sorted(pairs, key=lambda texts: sum(map(len, texts)))[:args.pairs]:
        if args.row != "kto":
            yield {"prompt": prompt, "chosen": chosen, "rejected": rejected}
            continue
        yield {"prompt": prompt, "completion": chosen, "label": True}
        yield {"prompt": prompt, "completion": rejected, "label": False}


def shape(args: Namespace) -> list[object]:
    return ["--max-seq-len", args.row_tokens, "--total-batch-size", args.rows * args.row_tokens,
            "--micro-batch-size", args.rows]


def adapters(args: Namespace) -> list[object]:
    return ["--lora-enabled", args.lora, "--learning-rate", args.rate or (1e-4 if args.lora else 1e-5)]


def sft(args: Namespace, seed: int) -> dict[str, Any]:
    """SFT or LoRA on GSM8K, beside TRL on the same batches."""
    name, is_lora = f"{args.row}-{seed}", args.row == "lora"
    cpu = train(args, name, args.steps, "--training-stage", "sft", "--pretrain-checkpoint", args.model,
                "--sft-data-path", chats(args, "train"), "--seed", seed, "--validate-every", 0,
                "--learning-rate", args.rate or (1e-3 if is_lora else 1e-4), "--lora-enabled", is_lora,
                *shape(args))
    result = peer(args, name, "trl", cpu)
    if args.problems:
        result |= changes(evaluate(args, args.model), evaluate(args, checkpoint(args, name)))
    return result


def preference(args: Namespace, seed: int) -> dict[str, Any]:
    """Preferences between right and wrong solutions; from the model of SFT if there is one."""
    name, fraction = f"{args.row}-{seed}", args.problems / SPLITS["test"]
    kind = "rated" if args.row == "kto" else "pairs"
    pairs = prepared(args, "pairs", f"{kind}-{args.pairs}-{args.problems}", solutions(args), fraction)
    cpu = train(args, name, args.steps, "--training-stage", "dpo", "--preference-objective", args.row,
                "--instruct-checkpoint", start(args, seed), "--dpo-data-path", pairs, "--seed", seed,
                "--validate-every", args.steps, "--validation-rows", 10**6, *adapters(args), *shape(args))
    known = [line for line in lines(args, name, "metrics") if "val_reward_accuracy" in line]
    result = {"cpu": cpu} | changes(known[0], known[-1])
    if args.answers:
        solved = changes(evaluate(args, start(args, seed)), evaluate(args, checkpoint(args, name)))
        result |= {f"GSM8K: {name}": value for name, value in solved.items()}
    return result


def grpo(args: Namespace, seed: int) -> dict[str, Any]:
    """GRPO with --reward, from the model of SFT if there is one."""
    name, group = f"grpo-{seed}", 8
    records = ({"prompt": each["question"], "pattern": ENDS_WITH_NUMBER, **each}
               for each in read(args.gsm8k / "train.jsonl"))
    prompts = prepared(args, "prompts", "gsm8k", records, 0.01)
    rows, tokens = args.rows * group, args.row_tokens
    cpu = train(args, name, args.steps, "--training-stage", "grpo", "--seed", seed, "--validate-every", 0,
                "--instruct-checkpoint", start(args, seed), "--grpo-data-path", prompts,
                "--reward", args.reward, "--grpo-group", group, "--grpo-max-tokens", tokens // 2,
                "--max-seq-len", tokens, "--total-batch-size", rows * tokens, "--micro-batch-size", rows,
                *adapters(args))
    rewards = [line["reward"] for line in lines(args, name, "metrics") if "reward" in line]
    third = max(1, len(rewards) // 3)
    return {"cpu": cpu, "reward before": fmean(rewards[:third]), "reward after": fmean(rewards[-third:])}


def start(args: Namespace, seed: int) -> Path | str:
    return checkpoint(args, f"sft-{seed}") if (args.work / "runs" / f"sft-{seed}").exists() else args.model


def checkpoint(args: Namespace, name: str) -> Path:
    return max((args.work / "runs" / name / "checkpoints").glob("step-*"))


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    names = {"loss": "val_loss", "accuracy": "val_reward_accuracy", "exact": "generation_numeric",
             "problems": "generation_n"}
    return {f"{name} {when}": metrics[metric] for name, metric in names.items() if metric in after
            for when, metrics in (("before", before), ("after", after))}


# ------------------------------------------------------------------------------------- WikiText-2


def pretrain(args: Namespace, seed: int) -> dict[str, Any]:
    """Pretraining at three sizes, beside transformers' Llama with the same initial weights and batches."""
    result, tokenizer = {}, args.work / "wikitext.model"
    if not tokenizer.exists():
        run("scripts/train_tokenizer.py", args.text, "--vocab-size", 2304, "--output", tokenizer)
    for size, (layers, dim) in [*SIZES.items()][:args.sizes]:
        name = f"pretrain-{layers}x{dim}-{seed}"
        cpu = train(args, name, args.steps, "--pretrain-data-path", args.text, "--tokenizer-path", tokenizer,
                    "--n-layers", layers, "--dim", dim, "--n-heads", dim // 32, "--n-kv-heads", dim // 64,
                    "--seed", seed, "--learning-rate", args.rate or 3e-3, "--validate-every", args.steps,
                    "--validation-rows", 64, "--cache-dir", args.work / "data", *shape(args))
        found = peer(args, name, "transformers", cpu)
        found["loss after"] = lines(args, name, "metrics")[-1]["val_loss"]
        result |= {f"{size}: {key}": value for key, value in found.items()}
    return result


def distill(args: Namespace, seed: int) -> dict[str, Any]:
    """Distillation into every second layer: the loss of the half, alone, and with its teacher."""
    half, result = args.work / "half", {}
    if not half.exists():
        from checkpoint.model_json import read_model_config

        layers = read_model_config(Path(args.model)).n_layers // 2
        run("scripts/resize_checkpoint.py", args.model, "--layers", layers, "--evenly", "--output", half)
    teacher = ["--distillation-enabled", True, "--teacher-model", args.model]
    for name, flags in (("alone", []), ("taught", teacher)):
        result[f"cpu {name}"] = train(
            args, f"{name}-{seed}", args.steps, "--pretrain-data-path", args.text, "--seed", seed,
            "--pretrain-checkpoint", half, "--learning-rate", args.rate or 3e-4,
            "--validate-every", args.steps, "--validation-rows", args.problems,
            "--cache-dir", args.work / "data", *shape(args), *flags)
        losses = [line.get("val_cross_entropy", line["val_loss"])  # without the teacher's part
                  for line in lines(args, f"{name}-{seed}", "metrics") if "val_loss" in line]
        result |= {"loss before": losses[0], f"loss {name}": losses[-1]}
    return result


def gguf(args: Namespace, seed: int) -> dict[str, Any]:
    """Perplexity of WikiText-2 in Paddock, and in llama.cpp from a file of f32 and one of q8_0."""
    import math

    import numpy as np
    import torch
    from cyllama.llama import llama_cpp

    from extensions.inference.weights import load_for_use

    model, tokenizer = load_for_use(Path(args.model))
    class Weights(llama_cpp.LlamaModel):
        n_vocab = model.vocab_size  # LlamaContext of cyllama 0.2.18 reads it, but LlamaModel has none

    llama_cpp.disable_logging()
    ids = np.array(tokenizer.encode(args.text.read_text(encoding="utf-8")))
    rows = ids[:len(ids) // args.row_tokens * args.row_tokens].reshape(-1, args.row_tokens)[:args.problems]

    def perplexity(logits_of) -> float:
        losses = [torch.nn.functional.cross_entropy(torch.as_tensor(logits_of(row)).float()[:-1],
                                                    torch.as_tensor(row[1:])).item() for row in rows]
        return math.exp(fmean(losses))

    with torch.no_grad():
        found = {"Paddock": perplexity(lambda row: model(torch.as_tensor(row)[None], mode="logits")[0])}
    for kind in ("f32", "q8_0"):
        file = args.work / f"{Path(args.model).name}-{kind}.gguf"
        if not file.exists():
            run("scripts/export.py", args.model, "--to", "gguf", "--type", kind, "--output", file)
        settings = llama_cpp.LlamaContextParams()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = args.row_tokens
        settings.n_threads = settings.n_threads_batch = 1
        context = llama_cpp.LlamaContext(Weights(str(file)), settings)
        batch = llama_cpp.LlamaBatch(n_tokens=args.row_tokens, embd=0, n_seq_max=1)

        def logits(row, context=context, batch=batch) -> np.ndarray:
            context.kv_cache_clear()
            batch.set_batch(row.tolist(), 0, True)
            context.decode(batch)
            return np.array([context.get_logits_ith(place) for place in range(len(row))])

        found[f"llama.cpp {kind}"] = perplexity(logits)
    return found | {"tokens": rows.size}


# -------------------------------------------------------------------------------------- HellaSwag


def hellaswag(args: Namespace, seed: int) -> dict[str, Any]:
    """--problems items by Paddock's evaluation, and --compared of them by lm-evaluation-harness's task."""
    import lm_eval
    import torch
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from extensions.inference.weights import load_for_use
    from hellaswag_utils import evaluate_batches, prepare_task, read_items
    from run.extensions import extension_module

    items = spread(read_items(args.items), args.problems)
    compared = spread(range(len(items)), args.compared)
    extension_module("cpu_kernels")
    model, tokenizer = load_for_use(Path(args.model), dtype=torch.float32)
    started, ours = time.process_time(), {}
    tasks = [prepare_task(item, tokenizer, 1024) for item in items]
    for indices, correct_B2 in evaluate_batches(model, tasks, device=torch.device("cpu"), batch_tokens=4096):
        ours |= {index: [*map(bool, correct)] for index, correct in zip(indices, correct_B2.tolist())}
    our_cpu = time.process_time() - started
    del model

    folder = args.work / "task"
    folder.mkdir(parents=True, exist_ok=True)
    records = spread([json.loads(line) for line in opened(args.items)], args.problems)
    file = folder / "items.jsonl"
    file.write_text("".join(json.dumps({"ctx_a": records[index]["ctx"], "ctx_b": "", **records[index]}) + "\n"
                            for index in compared))
    (folder / "items.yaml").write_text(json.dumps({
        "include": str(Path(lm_eval.__file__).parent / "tasks" / "hellaswag" / "hellaswag.yaml"),
        "task": "hellaswag_items", "dataset_path": "json", "training_split": None,
        "dataset_kwargs": {"data_files": {"validation": str(file)}, "cache_dir": str(folder / "cache")}}))
    harness = HFLM(args.model, device="cpu", dtype=torch.float32, batch_size=4, max_length=1024)
    started = time.process_time()
    output = lm_eval.simple_evaluate(
        harness, tasks=["hellaswag_items"], log_samples=True, bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False))
    their_cpu = time.process_time() - started
    theirs = {compared[sample["doc_id"]]: [bool(sample["acc"]), bool(sample["acc_norm"])]
              for sample in output["samples"]["hellaswag_items"]}
    equal = sum(ours[index] == theirs[index] for index in compared)
    return {"n": len(items), "compared": len(compared), "equal items": equal,
            "acc": share(ours, 0), "acc_norm": share(ours, 1),
            "harness: acc": share(theirs, 0), "harness: acc_norm": share(theirs, 1),
            "cpu": our_cpu, "harness: cpu": their_cpu}


def spread(values: Sequence, count: int) -> Sequence:
    """Return `count` of the values, evenly spaced: HellaSwag begins with the items of ActivityNet."""
    count = min(count, len(values))
    return [values[number * len(values) // count] for number in range(count)]


def share(answers: dict[int, list[bool]], column: int) -> float:
    return fmean(right[column] for right in answers.values())


def opened(file: Path):
    import gzip

    return gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8")


# ------------------------------------------------------------- another program on the same batches


def peer(args: Namespace, name: str, program: str, cpu: float) -> dict[str, Any]:
    """Train another program on the batches of a run; compare the losses of all steps."""
    ours = [line["loss"] for line in lines(args, name, "ledger")]
    file = args.work / f"{name}-{program}.json"
    their_cpu = run("scripts/dev/results.py", "peer", "--work", args.work, "--model", args.model or "",
                    "--name", name, "--program", program, "--output", file)
    theirs = json.loads(file.read_text())
    difference = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    return {"cpu": cpu, "their cpu": their_cpu, "first loss": ours[0], "last loss": ours[-1],
            "their last loss": theirs[-1], "largest difference": difference}


def examples_of(config, rows, indices) -> list[tuple[list[int], list[int]]]:
    """Return the documents of rows as token ids and labels, as transformers wants them."""
    from model_kernels.head import IGNORE_INDEX

    batch, examples = rows(indices), []
    for tokens_T, targets_T, documents_T in zip(batch.tokens_BT, batch.targets_BT, batch.document_ids_BT):
        for document in documents_T.unique_consecutive().tolist():
            tokens, targets = tokens_T[documents_T == document], targets_T[documents_T == document]
            if (targets != IGNORE_INDEX).any():
                last = targets[-1:][targets[-1:] != IGNORE_INDEX].tolist()
                labels = [IGNORE_INDEX, *targets.tolist()]
                examples.append((tokens.tolist() + last, labels[:len(tokens) + len(last)]))
    return examples


def padded_batch(examples: list) -> dict[str, Any]:
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids, labels = ([*map(torch.tensor, column)] for column in zip(*examples))
    pad = partial(pad_sequence, batch_first=True)
    return {"input_ids": pad(ids), "labels": pad(labels, padding_value=-100),
            "attention_mask": pad([torch.ones_like(each) for each in ids])}


def train_peer(args: Namespace) -> None:
    """Train TRL's SFTTrainer, or transformers' Llama in a plain loop; write the losses of all steps."""
    import numpy as np

    from dataloaders import open_rows, rows_at
    from extensions.evaluate import settings_for
    from plan.layers import read_flags
    from run.step_log import rows_crc32
    from tokenizer import load_tokenizer

    config = settings_for(checkpoint(args, args.name), read_flags([]), None)
    tokenizer = load_tokenizer(config.tokenizer_path, config.tokenizer_backend)
    rows, steps = open_rows(config, "train", tokenizer, "never"), lines(args, args.name, "ledger")
    batches = []
    for number, line in enumerate(steps):
        positions = np.arange(number * config.rows_read, (number + 1) * config.rows_read)
        indices = rows_at(positions, len(rows), config.row_seed)
        assert rows_crc32(indices) == line["rows_crc32"], "these are not the rows of the run"
        batches.append(examples_of(config, rows, indices))
    losses = (train_trl if args.program == "trl" else train_transformers)(args, config, tokenizer, batches)
    args.output.write_text(json.dumps(losses))


def train_transformers(args: Namespace, config, tokenizer, batches: list) -> list[float]:
    import torch

    from model_utils import build_model
    from parallel.ranks import Ranks
    from scripts.dev.paired import huggingface_model

    ours = build_model(config, tokenizer.vocab_size, Ranks(), torch.float32)
    model, losses = huggingface_model(ours, config, tokenizer.vocab_size, config.max_seq_len), []
    betas = config.adam_beta1, config.adam_beta2
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, betas, config.adam_eps, 0.0)
    for batch in map(padded_batch, batches):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_trl(args: Namespace, config, tokenizer, batches: list) -> list[float]:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    from config import LINEAR_LAYERS
    from model_utils import model_on_meta

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, use_safetensors=True)
    arguments = SFTConfig(
        str(args.work / "trl"), use_cpu=True, bf16=False, max_steps=len(batches),
        per_device_train_batch_size=1, learning_rate=config.learning_rate, lr_scheduler_type="constant",
        weight_decay=0.0, logging_steps=1, adam_beta1=config.adam_beta1, adam_beta2=config.adam_beta2,
        adam_epsilon=config.adam_eps, max_grad_norm=config.max_grad_norm, save_strategy="no",
        report_to="none", disable_tqdm=True, remove_unused_columns=False, gradient_checkpointing=False,
        max_length=None, train_sampling_strategy="sequential", dataset_kwargs={"skip_prepare_dataset": True})
    adapters = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules="all-linear",
                          task_type="CAUSAL_LM") if config.lora_enabled else None
    numbers = Dataset.from_list([{"input_ids": [number]} for number in range(len(batches))])
    trainer = SFTTrainer(  # an item of the dataset is a step
        model, arguments, train_dataset=numbers,
        data_collator=lambda items: padded_batch(batches[items[0]["input_ids"][0]]), peft_config=adapters,
        processing_class=AutoTokenizer.from_pretrained(args.model))
    if adapters:  # start from the random matrices of the run
        generator = torch.Generator().manual_seed(config.seed)
        for name, _ in model_on_meta(config, tokenizer.vocab_size, torch.float32).named_modules():
            _, number, layer = f"{name}..".split(".", 2)
            if projection := LINEAR_LAYERS.get(layer.rstrip(".")):
                place = f"base_model.model.model.layers.{number}.{projection}.lora_A.default"
                weight = trainer.model.get_submodule(place).weight.data
                torch.nn.init.kaiming_uniform_(weight, a=5 ** 0.5, generator=generator)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


# ------------------------------------------------------------------------------------------- main

ROWS = {"hellaswag": hellaswag, "sft": sft, "lora": sft, **dict.fromkeys(PREFERENCES, preference),
        "grpo": grpo, "pretrain": pretrain, "distill": distill, "gguf": gguf}


def summary(results: list[dict[str, Any]]) -> Iterator[str]:
    """Yield each value as its mean and standard deviation over the seeds."""
    for name in results[0]:
        values = [result[name] for result in results]
        spread = f" ± {stdev(values):.4g}" if len(values) > 1 else " (one run)"
        yield f"{name:28} {fmean(values):.6g}{spread}"


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("row", choices=[*ROWS, "peer"], metavar="ROW")
    parser.add_argument("--model", help="folder of SmolLM2-135M-Instruct, or of another Llama")
    for name, what in (("items", "HellaSwag, .jsonl or .jsonl.gz"), ("gsm8k", "folder of GSM8K"),
                       ("text", "WikiText-2"), ("output", "(internal)")):
        parser.add_argument(f"--{name}", type=local_path, help=what)
    parser.add_argument("--work", type=Path, default=Path("results"), help="folder of runs [%(default)s]")
    for name, default, what in (
            ("seeds", 3, "number of seeds"), ("first-seed", 1, "first seed"),
            ("steps", 100, "steps of a run"), ("problems", 200, "items, or held-out problems or rows"),
            ("rows", 4, "rows of a step"), ("row-tokens", 512, "tokens of a row"),
            ("compared", 1000, "items of HellaSwag for the harness"),
            ("pairs", 731, "pairs, the shortest first"), ("sizes", 3, "sizes of pretraining")):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what} [%(default)s]")
    parser.add_argument("--rate", type=float, help="learning rate")
    parser.add_argument("--eager", action="store_true", help="do not compile: for a few steps")
    parser.add_argument("--lora", action="store_true", help="adapters for preferences and GRPO")
    parser.add_argument("--no-answers", dest="answers", action="store_false",
                        help="do not answer the held-out problems")
    parser.add_argument("--reward", default="math", help="reward; regex: ends with a number [%(default)s]")
    parser.add_argument("--name", help="(internal)")
    parser.add_argument("--program", help="(internal)")
    args = parser.parse_args()
    args.work = args.work.absolute()
    args.work.mkdir(parents=True, exist_ok=True)
    args.model = args.model and str(Path(args.model).expanduser())
    if args.row == "peer":
        train_peer(args)
        return
    texts = dict.fromkeys(("pretrain", "distill", "gguf"), "text")
    needed = ({"hellaswag": "items"} | texts).get(args.row, "gsm8k")
    if getattr(args, needed) is None or args.model is None and args.row != "pretrain":
        raise SettingsError(f"{args.row} needs --{needed}{'' if args.row == 'pretrain' else ' and --model'}")
    results = []
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        results.append(ROWS[args.row](args, seed))
        with open(args.work / "results.jsonl", "a", encoding="utf-8") as file:
            print(json.dumps({"row": args.row, "seed": seed, "steps": args.steps, **results[-1]}), file=file)
    print(f"{args.row}: {len(results)} seeds, {args.steps} steps", *summary(results), sep="\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    run_script(main)
