"""Generate text with a checkpoint or any Llama model: continue prompts, or answer a chat.

    ./paddock generate runs/first --prompt "Once upon a time" "A fox"
    ./paddock generate runs/chat --chat --prompt "Who are you?" "And I?"
    ./paddock generate runs/first --prompts in.jsonl --output out.jsonl
    shuf -n 5 prompts.txt | ./paddock generate runs/first --prompts -

For a run, the newest valid checkpoint is used. Adapters are applied to the base model they were trained on.
A prompt file has one text per line; a .jsonl file has {"prompt": TEXT} or {"messages": [...]} per line. With
--chat, each line of a prompt file starts a separate chat. Results are in the order of the input.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # noqa: F401  # isort: skip (reports a package that is missing)

from tqdm import tqdm

from common.command_line import CommandParser
from common.errors import DataError, local_path, run_script
from common.files import disk_errors, plain
from common.text import counted, print_safely, show_part
from data_pipeline.templates import load_chat_format
from extensions.inference import SEED, add_loading_flags, add_sampling_flags
from extensions.inference.engine import Sampling
from extensions.inference.text import (
    FilePrompt,
    Prompt,
    TextChunk,
    TextGenerator,
    note_of_controls,
    read_prompts,
    text_prompt,
)
from extensions.inference.weights import find_model, load_to_generate


def encode_prompts(tokenizer: Any, contents: Sequence[FilePrompt], special: bool = False) -> list[Prompt]:
    prompts = []
    has_chats = any(not isinstance(each.content, str) for each in contents)
    chat_format = load_chat_format(tokenizer) if has_chats else None
    texts = [each.content if isinstance(each.content, str) else each.content[-1]["content"]
             for each in contents if not (special and isinstance(each.content, str))]
    advice = "" if has_chats else "; --parse-special makes it one"
    controls = chat_format.tokenizer if chat_format else tokenizer
    if note := note_of_controls(controls, texts, advice):
        print_safely(note, sys.stderr)
    for each in contents:
        if isinstance(each.content, str):
            prompts.append(text_prompt(tokenizer, each.content, special))
            continue
        try:
            prompts.append(Prompt(chat_format.encode_prompt(each.content), frozenset(chat_format.stop_ids)))
        except DataError as error:
            raise DataError(f"{each.where}: {error}" if each.where else str(error)) from error
    return prompts


def answers(generator: TextGenerator, turns: Sequence[str], system_prompt: str = "") -> Iterator[TextChunk]:
    """Yield the model's answer to each user turn of one chat."""
    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    for index, turn in enumerate(turns):
        messages.append({"role": "user", "content": turn})
        answer = ""
        for chunk in generator.stream(encode_prompts(generator.tokenizer, [FilePrompt("", 0, messages)])):
            answer += chunk.text
            yield chunk._replace(index=index)
        messages.append({"role": "assistant", "content": answer})


def emit_in_order(chunks: Iterable[TextChunk], count: int, emit: Callable[[TextChunk], None]) -> None:
    """Pass on the chunks of `count` texts in order, as early as possible; finished ones also after Ctrl-C."""
    waiting: list[list[TextChunk]] = [[] for _ in range(count)]
    current = 0

    def flush(index: int) -> bool:
        """Pass on the waiting chunks of a text; return True if the text is finished."""
        ready, waiting[index] = waiting[index], []
        for chunk in ready:
            emit(chunk)
        return bool(ready and ready[-1].finish_reason)

    try:
        for chunk in chunks:
            waiting[chunk.index].append(chunk)
            while current < count and flush(current):
                current += 1
    except (KeyboardInterrupt, SystemExit):
        for index, ready in enumerate(waiting):
            if ready and ready[-1].finish_reason:
                flush(index)
        raise


def printer(heads: Sequence[str]) -> Callable[[TextChunk], None]:
    """Return a function that prints chunks, and each text's head before its first chunk."""
    current = -1

    def emit(chunk: TextChunk) -> None:
        nonlocal current
        if chunk.index != current:
            show_part(("\n\n" if current >= 0 else "") + heads[chunk.index])
            current = chunk.index
        show_part(chunk.text)

    return emit


def json_writer(prompts: Sequence[FilePrompt], file: TextIO) -> Callable[[TextChunk], None]:
    """Return a function that writes each finished text as a line of JSON."""
    texts = [""] * len(prompts)

    def emit(chunk: TextChunk) -> None:
        texts[chunk.index] += chunk.text
        if chunk.finish_reason:
            _, line, content = prompts[chunk.index]
            name = "prompt" if isinstance(content, str) else "messages"
            file.write(json.dumps({"line": line, name: content, "text": texts[chunk.index],
                                   "tokens": chunk.tokens, "finish_reason": chunk.finish_reason}) + "\n")
            file.flush()

    return emit


def noting_empty(chunks: Iterable[TextChunk], empty: list[int]) -> Iterator[TextChunk]:
    """Pass on chunks, and note the texts that the model ended at once."""
    for chunk in chunks:
        if chunk.finish_reason == "stop" and not chunk.tokens:
            empty.append(chunk.index)
        yield chunk


def with_progress(chunks: Iterable[TextChunk], count: int) -> Iterator[TextChunk]:
    with tqdm(total=count, unit=" prompts", disable=None) as bar:
        for chunk in chunks:
            bar.update(chunk.finish_reason is not None)
            yield chunk


def parse_args() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_argument("model", help="a run, a checkpoint, or a Hugging Face folder or name of a Llama")
    add_loading_flags(parser)
    group = parser.add_argument_group("prompts")
    group.add_argument("--prompt", nargs="+", metavar="TEXT",
                       help="texts to continue (default: one empty text)")
    group.add_argument("--prompts", metavar="FILE", help="file with one prompt per line; - = stdin")
    group.add_argument("--chat", action="store_true",
                       help="each --prompt is a user message in one chat; each line of --prompts is a chat")
    group.add_argument("--system", default="", metavar="TEXT",
                       help="system prompt (default: the chat template's, if any)")
    group.add_argument("--parse-special", action="store_true",
                       help="names of control tokens in texts to continue mean these tokens; in chats, they "
                            "always stay text")
    group = parser.add_argument_group("sampling")
    add_sampling_flags(group)
    group.add_argument("--seed", type=SEED, default=0, metavar="S", help="random seed (default: %(default)s)")
    group = parser.add_argument_group("length and output")
    group.add_argument("--max-new-tokens", type=int, default=128, metavar="N",
                       help="maximum tokens per text (default: %(default)s)")
    group.add_argument("--stop", nargs="+", default=[], metavar="TEXT",
                       help="end a text before any of these strings")
    group.add_argument("--batch-size", type=int, default=8, metavar="N",
                       help="number of prompts continued at the same time (default: %(default)s)")
    group.add_argument("--output", metavar="FILE.jsonl",
                       help="write the results of --prompts to this file, one JSON object per line")
    args = parser.parse_args()
    if not 0 <= args.max_new_tokens <= 1_000_000:
        parser.error("--max-new-tokens must be at least 0 and at most 1,000,000")
    if args.batch_size < 1 or not all(args.stop):
        parser.error("--batch-size must be at least 1, and --stop must not be empty")
    if args.prompts is not None and args.prompt:
        parser.error("--prompt and --prompts cannot be combined")
    if args.output and args.prompts is None:
        parser.error("--output requires --prompts")
    if args.system and not args.chat and args.prompts is None:
        parser.error("--system requires --chat")
    if args.parse_special and args.chat:
        parser.error("--parse-special and --chat cannot be combined: text in chats never becomes a control "
                     "token")
    args.prompt = args.prompt or [""]
    if args.chat and args.prompts is None and not all(prompt.strip() for prompt in args.prompt):
        parser.error("--chat requires a --prompt for each user message")
    return args


def main() -> None:
    args = parse_args()
    prompts = [] if args.prompts is None else read_prompts(args.prompts, args.chat, args.system)
    sampling = Sampling(args.temperature, args.top_p, args.top_k, args.min_p, args.repetition_penalty,
                        args.seed)
    model, tokenizer = load_to_generate(find_model(args.model), args.base, args.weights)
    generator = TextGenerator(model, tokenizer, args.max_new_tokens, sampling, args.stop, args.batch_size)
    if args.prompts is not None:
        chunks = generator.stream(encode_prompts(generator.tokenizer, prompts, args.parse_special))
        heads = [each.content if isinstance(each.content, str) else f"> {each.content[-1]['content']}\n\n"
                 for each in prompts]
    elif args.chat:
        chunks = answers(generator, args.prompt, args.system)
        heads = [f"> {turn}\n\n" for turn in args.prompt]
    else:
        texts = [FilePrompt("", 0, text) for text in args.prompt]
        chunks = generator.stream(encode_prompts(tokenizer, texts, args.parse_special))
        heads = args.prompt
    empty: list[int] = []
    chunks = noting_empty(chunks, empty)
    if args.prompts is not None and (args.output or not sys.stdout.isatty()):
        chunks = with_progress(chunks, len(heads))
    if not args.output:
        emit_in_order(chunks, len(heads), printer(heads))
        show_part("\n")
        if empty:
            advice = "; a chat model is asked with --chat" * (not args.chat)
            print_safely(f"note: the model ended {counted(len(empty), 'text')} at once{advice}", sys.stderr)
        return
    path = local_path(args.output)
    with (disk_errors(path, DataError, "choose another --output"),
          open(path, "w", encoding="utf-8", opener=plain) as file):
        emit_in_order(chunks, len(heads), json_writer(prompts, file))


if __name__ == "__main__":
    run_script(main)
