"""Time HellaSwag in pairs with lm-evaluation-harness: the same model, tokenizer and items, CPU seconds.

    python scripts/dev/benchmark_hellaswag.py ITEMS --tokenizer FILE

The model is random: 17 layers of dim 128, as in docs/results.md.
"""

import logging
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

# ruff: noqa: E402
import torch

from checkpoint.huggingface import save_model_folder
from common.command_line import CommandParser
from common.errors import run_script
from config import Config, extension_module
from hellaswag_utils import evaluate_batches, prepare_task, read_items
from model import Transformer
from parallel.process import configure_allocator
from scripts.dev.paired import in_turns, ratio
from tokenizer import load_tokenizer

CPU, LENGTH = torch.device("cpu"), 1024


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("items")
    parser.add_argument("--tokenizer", required=True)
    for name, default in (("examples", 40), ("pairs", 8), ("threads", 1), ("peer-batch", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--bf16", action="store_true", help="bf16 instead of fp32")
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    torch.set_num_threads(args.threads)
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    logging.disable(logging.WARNING)
    config = Config(dim=128, n_layers=17, n_heads=2, n_kv_heads=2, ffn_dim=352, max_seq_len=LENGTH)
    tokenizer = load_tokenizer(args.tokenizer)
    extension_module("cpu_kernels")
    model = Transformer(config, tokenizer.vocab_size, dtype).eval()
    model.init_weights(torch.Generator().manual_seed(0))
    every = read_items(args.items)
    items = every[::len(every) // args.examples][:args.examples]
    with tempfile.TemporaryDirectory() as folder:
        save_model_folder(Path(folder), model.state_dict(), config, tokenizer, LENGTH)
        harness = HFLM(folder, device="cpu", dtype=dtype, batch_size=args.peer_batch, max_length=LENGTH)

    def paddock() -> list[bool]:
        tasks, right = [prepare_task(item, tokenizer, LENGTH) for item in items], [False] * len(items)
        for indices, correct_B2 in evaluate_batches(model, tasks, device=CPU, batch_tokens=4096):
            for index, is_right in zip(indices, correct_B2[:, 0]):
                right[index] = bool(is_right)
        return right

    def lm_eval() -> list[bool]:
        requests = [Instance("loglikelihood", {}, (item.context, f" {ending}"), 0)
                    for item in items for ending in item.endings]
        scores = torch.tensor([score for score, _ in harness.loglikelihood(requests, disable_tqdm=True)])
        return [best == item.label for best, item in zip(scores.view(-1, 4).argmax(dim=1).tolist(), items)]

    answers, seconds = {}, {"paddock": [], "lm_eval": []}
    for turn, name in in_turns(seconds, args.pairs + 1):
        started = time.process_time()
        answers[name] = {"paddock": paddock, "lm_eval": lm_eval}[name]()
        seconds[name] += [time.process_time() - started] * (turn > 0)  # the first turn is for warming up
    same = sum(a == b for a, b in zip(*answers.values()))
    pairs = [*zip(*seconds.values())]
    print(*(f"{ours:.2f} {theirs:.2f} CPU s" for ours, theirs in pairs), sep="\n")
    print(f"{same} of {len(items)} items judged the same; lm-evaluation-harness takes "
          f"{ratio([theirs / ours for ours, theirs in pairs])} times as long")


if __name__ == "__main__":
    configure_allocator()
    run_script(main)
