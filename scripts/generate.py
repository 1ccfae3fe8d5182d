"""Continue texts, or chat, with a checkpoint or with any Llama in a Hugging Face folder.

    python scripts/generate.py runs/first --prompt "Once upon a time" "A fox"
    python scripts/generate.py runs/chat --chat --prompt "Who are you?" "And I?"

Of a run it takes the newest good checkpoint. Adapters are applied to the base that they were trained on.
"""

import argparse
import sys
from pathlib import Path
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.command_line import CommandParser
from common.errors import run_script
from common.text import show
from data_pipeline.chat_templates import load_chat_format
from model import Transformer
from model_utils import find_model
from training.adapters import load_for_use
from training.generate import Sampling, generate


def load(name: str, base: Optional[str] = None) -> tuple[Transformer, Any]:
    """Return the model that is named, with its adapters if it has any, and its tokenizer.

    Raises:
        CheckpointError: there is no such model, or its base was not found.
    """
    return load_for_use(find_model(name), base)


def continuations(model: Transformer, tokenizer: Any, prompts: list[str], max_new_tokens: int,
                  sampling: Sampling) -> list[str]:
    """Return what the model generates after each prompt."""
    prompt_ids = [[tokenizer.document_start_id, *tokenizer.encode(prompt)] for prompt in prompts]
    stop_ids = {tokenizer.eos_id, tokenizer.document_start_id}
    return [tokenizer.decode(ids) for ids in generate(model, prompt_ids, max_new_tokens, sampling, stop_ids)]


def answers(model: Transformer, tokenizer: Any, turns: list[str], max_new_tokens: int, sampling: Sampling,
            system_prompt: str = "") -> list[str]:
    """Return the model's answer to each user turn of one chat.

    Raises:
        DataError: its tokenizer has no chat template, or the template refuses the chat.
    """
    chat_format = load_chat_format(tokenizer)
    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        prompt_ids = chat_format.encode_prompt(messages)
        written, = generate(model, [prompt_ids], max_new_tokens, sampling, chat_format.stop_ids)
        messages.append({"role": "assistant", "content": tokenizer.decode(written)})
    return [message["content"] for message in messages if message["role"] == "assistant"]


def parse_args() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_argument("model", help="a run, a checkpoint, or a Hugging Face folder or name of a Llama")
    parser.add_argument("--base", metavar="MODEL", help="the base of adapters (default: where it was)")
    parser.add_argument("--prompt", nargs="+", default=[""], metavar="TEXT",
                        help="texts to continue (default: one empty text)")
    parser.add_argument("--chat", action="store_true", help="the prompts are the user's turns in one chat")
    parser.add_argument("--system", default="", metavar="TEXT", help="the system prompt (default: none)")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T",
                        help="0 = always the most likely token (default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=0.95, metavar="P",
                        help="sample from the most likely tokens of this probability (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="(default: %(default)s)")
    args = parser.parse_args()
    if not 0 <= args.max_new_tokens <= 1_000_000:
        parser.error("--max-new-tokens must be at least 0 and at most 1,000,000")
    if not 0 <= args.temperature < float("inf") or not 0 < args.top_p <= 1:
        parser.error("--temperature must be at least 0, and --top-p above 0 and at most 1")
    if not 0 <= args.seed < 2**32:
        parser.error("--seed must be at least 0 and below 2^32")
    if args.system and not args.chat:
        parser.error("--system goes with --chat")
    if args.chat and not all(prompt.strip() for prompt in args.prompt):
        parser.error("--chat needs a --prompt for each of the user's turns")
    return args


def main() -> None:
    args = parse_args()
    model = load(args.model, args.base)
    sampling = Sampling(args.temperature, args.top_p, seed=args.seed)
    if args.chat:
        replies = answers(*model, args.prompt, args.max_new_tokens, sampling, args.system)
        texts = [f"> {prompt}\n\n{reply}" for prompt, reply in zip(args.prompt, replies)]
    else:
        written = continuations(*model, args.prompt, args.max_new_tokens, sampling)
        texts = [prompt + text for prompt, text in zip(args.prompt, written)]
    show(*"\n\n".join(texts).split("\n"))


if __name__ == "__main__":
    run_script(main)
