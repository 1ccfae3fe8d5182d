"""Time the generation of a GRPO step in pairs with that of TRL's GRPOTrainer (transformers' generate).

Both have huge pages. With --bf16, transformers' model is cast once.

    python scripts/dev/benchmark_rollouts.py --shape sample --pairs 7
"""

import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).resolve().parents[2]))

# ruff: noqa: E402
import torch

from common.command_line import CommandParser
from common.errors import run_script
from config import Config, extension_module
from extensions.online import Rollouts
from model import Transformer
from parallel.process import configure_allocator
from parallel.ranks import Ranks, RunContext
from scripts.dev.benchmark_generate import SHAPES, huggingface_model
from scripts.dev.paired import ratio
from tokenizer import load_tokenizer


def main() -> None:
    """Print the CPU seconds per pair, and the median of their ratios with its 95 % interval."""
    parser = CommandParser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="sample", metavar="SHAPE",
                        help=f"{', '.join(SHAPES)} [sample]")
    parser.add_argument("--tokenizer", default="data/sample/tokenizer.model")
    for name, default in (("prompts", 8), ("group", 8), ("new-tokens", 64), ("pairs", 7), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--stop-share", type=float, default=0.0, help="share of the ids that end an answer")
    parser.add_argument("--bf16", action="store_true", help="bf16 instead of fp32")
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    torch.set_num_threads(args.threads)
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    vocab, shape = SHAPES[args.shape]
    config = Config(**shape, init_std=0.04, max_seq_len=32 + args.new_tokens, grpo_max_tokens=args.new_tokens,
                    grpo_group=args.group, training_stage="grpo", device="cpu")
    extension_module("cpu_kernels")
    model, tokenizer = Transformer(config, vocab, dtype), load_tokenizer(args.tokenizer)
    model.init_weights(torch.Generator().manual_seed(0))
    rollouts = Rollouts(model, config, tokenizer, RunContext(Ranks(device=torch.device("cpu")), None, None))
    rng = random.Random(0)
    prompts = [[rng.randrange(vocab) for _ in range(rng.randint(8, 32))] for _ in range(args.prompts)]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_huggingface(Path(folder))
        theirs = AutoTokenizer.from_pretrained(folder)
        theirs.pad_token_id = theirs.pad_token_id or 0
        trainer = GRPOTrainer(
            huggingface_model(model, config, vocab, config.max_seq_len).to(dtype),
            lambda completions, **_: [0.0] * len(completions),
            GRPOConfig(folder, per_device_train_batch_size=args.group * args.prompts,
                       num_generations=args.group, max_completion_length=args.new_tokens, use_cpu=True,
                       bf16=False, report_to=[]),
            Dataset.from_list([{"prompt": "a"}] * 64), processing_class=theirs)
        stops = list(range(round(vocab * args.stop_share)))
        trainer.generation_config.eos_token_id = trainer.eos_token_ids = stops or [vocab]
        rollouts.chat_format = SimpleNamespace(stop_ids={*stops})
        repeated = [ids for ids in prompts for _ in range(args.group)]

        def measure(generate) -> tuple[float, int]:
            start = time.process_time()
            answers = generate()
            return time.process_time() - start, sum(map(len, answers))

        ratios = []
        for pair in range(-1, args.pairs):
            keys = [(0, pair + 1, place) for place in range(args.prompts)]
            ours, n = measure(partial(rollouts.generate, prompts, args.group, keys))
            their, m = measure(
                lambda: trainer._generate_single_turn(repeated, None, {}, args.group)[0])
            if pair >= 0:  # the first pair warms up
                ratios.append((their / m) / (ours / n))
                print(f"Paddock {ours:.3f} s for {n} tokens, TRL {their:.3f} s for {m}: "
                      f"{ratios[-1]:.2f} x a token", flush=True)
    print(f"{args.shape}, {dtype}: median {ratio(ratios)} x, {args.pairs} pairs, {args.prompts} x "
          f"{args.group} answers of at most {args.new_tokens} tokens, {args.stop_share:.1%} of ids end one, "
          f"threads {args.threads}")


if __name__ == "__main__":
    configure_allocator()
    run_script(main)
