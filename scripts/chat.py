"""Chat with a model in the terminal.

    ./paddock chat runs/chat
    ./paddock chat runs/chat --system "You answer in one sentence."

For a run, the newest valid checkpoint is used. Adapters are applied to the base model they were trained on. A
model without chat training continues your text. Without a terminal, each line of stdin is a message, and the
answers go to stdout, with an empty line between them. Nothing is written to disk except by /save.
"""

import argparse
import json
import os
import secrets
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import interrupts
from common.command_line import CommandParser, number
from common.errors import PaddockError, SettingsError, requires_package, run_script
from common.files import disk_errors
from common.text import DIM, counted, obeys_escapes, paint, print_safely, printable, show_part
from extensions.http_server import KEY_VARIABLE
from extensions.inference import SEED, TEMPERATURE, add_loading_flags, add_sampling_flags

ANSWER_SHARE = 4  # a quarter of the context is reserved for an answer
SEEDS = 2**32
SERVE_HELP = """Serve a chat page and an OpenAI-compatible API for one model, or two side by side.

    ./paddock serve runs/chat
    ./paddock serve runs/chat runs/preferred    two models side by side
    ./paddock serve runs/chat --port 0          any free port

The address is printed; Ctrl-C stops the server. For a run, the newest valid checkpoint is used. Adapters are
applied to the base model they were trained on. A model without chat training continues your text.
"""
HELP = """\
/retry            answer again
/undo             remove your last message
/reset            start a new chat
/system [TEXT]    set or clear the system prompt
/temperature [T]  show or set it (0 = most likely)
/seed [N]         show or set the next seed
/save FILE        save the chat as .jsonl
/help             show this list
/quit             quit (or press Ctrl-D)
Ctrl-C stops an answer. End a line with
\\ to continue your message on the next."""


def parse_args() -> argparse.Namespace:
    serves = "--serve" in sys.argv
    parser = CommandParser(SERVE_HELP if serves else __doc__)
    parser.add_argument("model", help="a run, a checkpoint, or a Hugging Face folder or name of a Llama")
    second = "a second model, shown side by side" if serves else argparse.SUPPRESS
    parser.add_argument("second", nargs="?", help=second)
    add_loading_flags(parser)
    # Limited by default, because the KV cache of some models' full context would not fit in memory.
    parser.add_argument("--context-length", default=8192, metavar="N",
                        type=number(int, "of at least 16", lambda value: value >= 16),
                        help="maximum tokens in a chat, within the model's own limit (default: %(default)s)")
    answers = parser.add_argument_group("terminal")
    answers.add_argument("--system", default="", metavar="TEXT",
                         help="system prompt (default: the chat template's, if any)")
    add_sampling_flags(answers)
    answers.add_argument("--max-new-tokens", default=512, metavar="N",
                         type=number(int, "of at least 1", lambda value: value > 0),
                         help="maximum tokens in an answer (default: %(default)s)")
    answers.add_argument("--seed", type=SEED, metavar="S",
                         help="seed of the first answer; each later answer adds 1 (default: random)")
    answers.add_argument("--stop", nargs="+", default=[], metavar="TEXT",
                         help="end an answer before any of these texts")
    server = parser.add_argument_group("server")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS if serves else
                        "serve a chat page and an API: ./paddock serve")
    server.add_argument("--host", default="127.0.0.1", metavar="ADDRESS",
                        help="address to listen on; other than loopback requires an API key in "
                             f"{KEY_VARIABLE} (default: %(default)s)")
    server.add_argument("--port", default=8000, metavar="N",
                        help="port to listen on; 0 = any free port (default: %(default)s)",
                        type=number(int, "from 0 to 65535", lambda value: 0 <= value < 2**16))
    server.add_argument("--api-key", action="store_true",
                        help=f"require the API key in the environment variable {KEY_VARIABLE}")
    server.add_argument("--concurrency", default=8, metavar="N",
                        type=number(int, "of at least 1", lambda value: value > 0),
                        help="number of answers a model generates at the same time (default: %(default)s)")
    for action in (answers if serves else server)._group_actions:  # the help lists the flags that apply
        action.help = argparse.SUPPRESS
    args = parser.parse_args()
    if not all(args.stop):
        parser.error("--stop must not be empty: it would end every answer immediately")
    if args.second and not args.serve:
        parser.error("a second model requires --serve")
    if args.second == args.model:
        parser.error("the two models must be different")
    for action in (answers if args.serve else server)._group_actions:
        if getattr(args, action.dest) != action.default:
            flag = action.option_strings[0]
            parser.error(f"{flag} applies only in the terminal; with --serve, clients send it with each "
                         "request" if args.serve else f"{flag} requires --serve")
    if args.api_key and not os.environ.get(KEY_VARIABLE):
        parser.error(f"--api-key requires the key in the environment variable {KEY_VARIABLE}")
    return args


def note(text: str) -> None:
    print(paint("\n".join(map(printable, text.split("\n"))), DIM, sys.stderr), file=sys.stderr, flush=True)


@contextmanager
def deferred_interrupts() -> Iterator[list[int]]:
    """Collect Ctrl-C in a list during the `with` block, so that it never interrupts a step of the model."""
    pressed: list[int] = []
    earlier = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, earlier)


class Chat:
    """A conversation in a terminal, or between stdin and stdout."""

    def __init__(self, model: Any, args: argparse.Namespace):
        from extensions.inference.engine import Engine, Sampling
        from extensions.inference.text import Conversation

        self.model = replace(model, context_length=min(model.context_length, args.context_length))
        self.conversation = Conversation(self.model)
        self.stop, self.max_new_tokens = args.stop, args.max_new_tokens
        self.engine = Engine(self.model.model, 1, self.model.context_length)
        seed = secrets.randbelow(SEEDS) if args.seed is None else args.seed
        self.sampling = Sampling(args.temperature, args.top_p, args.top_k, args.min_p,
                                 args.repetition_penalty, seed)
        self.interactive = sys.stdin.isatty()
        self.in_terminal = self.interactive and sys.stdout.isatty()
        self.has_answered = False  # elsewhere than in a terminal
        self.has_noted_full = False
        self.commands = {"/retry": self.retry, "/undo": self.undo, "/reset": self.reset,
                         "/system": self.system, "/temperature": self.temperature, "/seed": self.seed,
                         "/save": self.save, "/help": lambda _: note(HELP), "/quit": self.quit}
        if args.system:
            self.system(args.system)

    def run(self) -> None:
        interrupted = False
        while True:
            try:
                if interrupted:  # printed here: in the handler, a second Ctrl-C would end the program
                    interrupted = False
                    note("\nPress Ctrl-D or type /quit to quit.")
                message = self.read()
                if message.startswith("/"):
                    self.run_command(message)
                elif message.strip() or self.in_terminal and self.model.no_chat_reason:
                    self.ask(message)
            except EOFError:
                if self.in_terminal:
                    print()
                return
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                interrupted = True
                interrupts.received.clear()
            except PaddockError as error:
                if not self.interactive:
                    raise
                print_safely(str(error), sys.stderr)

    def read(self) -> str:
        lines = [input("> " if self.in_terminal else "")]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            try:
                lines.append(input("... " if self.in_terminal else ""))
            except EOFError:
                break
        return "\n".join(lines)

    def run_command(self, line: str) -> None:
        name, *value = line.split(maxsplit=1)
        if name not in self.commands:
            raise SettingsError(f"unknown command {name}; the commands are {' '.join(self.commands)} (put a "
                                "space before a message that starts with /)")
        try:
            self.commands[name](value[0].strip() if value else "")
        except argparse.ArgumentTypeError as error:
            raise SettingsError(f"{name}: {error}") from error

    def ask(self, message: str) -> None:
        """Answer a message; if that fails, remove it from the conversation."""
        from extensions.inference.text import Turn, note_of_controls

        if text := note_of_controls(self.model.tokenizer, [message], ""):
            note(text)
        self.conversation.turns.append(Turn(message))
        try:
            self.answer()
        except PaddockError:
            self.conversation.turns.pop()
            raise

    def answer(self) -> None:
        """Stream an answer to the last turn; Ctrl-C ends it."""
        from extensions.inference.engine import Request
        from extensions.inference.text import TextStream

        length, turn = self.model.context_length, self.conversation.turns[-1]
        pieces, times = [], []
        with deferred_interrupts() as pressed:
            prompt = self.conversation.prompt(min(self.max_new_tokens, length // ANSWER_SHARE))
            if self.conversation.dropped and not self.has_noted_full:
                self.has_noted_full = True
                note(f"The context of {length:,} tokens is full; the oldest messages are dropped from it.")
            room = length - len(prompt.ids)
            show_part("\n" * self.has_answered)
            self.has_answered = not self.in_terminal
            request = Request(prompt.ids, min(self.max_new_tokens, room), self.sampling, prompt.stop_ids)
            self.sampling = replace(self.sampling, seed=(self.sampling.seed + 1) % SEEDS)
            stream = TextStream(self.model.tokenizer, self.stop, prompt.prefix)
            self.engine.add(request)
            while request.finish_reason is None:
                self.engine.step()
                for token in request.output_ids[len(times):]:
                    times.append(time.perf_counter())
                    pieces.append(stream.add(token))
                    show_part(pieces[-1])
                if pressed or stream.stopped:
                    self.engine.cancel(request)
            pieces.append(stream.finish())
            turn.answer, turn.is_complete = "".join(pieces), request.finish_reason == "stop"
            show_part(pieces[-1] if turn.answer.endswith("\n") else pieces[-1] + "\n")
        if pressed and not self.interactive:
            raise KeyboardInterrupt
        if self.in_terminal:
            note(self.statistics(request, times, room))

    def statistics(self, request: Any, times: list[float], room: int) -> str:
        """Return a line with the number of tokens, the speed, the seed, and why the answer was cut."""
        items = [counted(len(times), 'token')]
        if len(times) > 1 and times[-1] > times[0]:
            items.append(f"{(len(times) - 1) / (times[-1] - times[0]):,.1f} tokens/s")
        if request.sampling.temperature:
            items.append(f"seed {request.sampling.seed}")
        if request.finish_reason == "length":
            items.append("cut: the context is full" if request.max_new_tokens == room
                         else "cut by --max-new-tokens")
        return f"({', '.join(items)})"

    def retry(self, _: str) -> None:
        if not self.conversation.turns:
            raise SettingsError("there is no message to retry")
        turn = self.conversation.turns[-1]
        turn.answer, turn.is_complete = "", False
        self.answer()

    def undo(self, _: str) -> None:
        if not self.conversation.turns:
            raise SettingsError("there is no message to undo")
        note(f"Removed: {textwrap.shorten(self.conversation.turns.pop().user_text, 60)}")

    def reset(self, _: str) -> None:
        self.conversation.turns.clear()
        self.has_noted_full = False
        note("Started a new chat.")

    def system(self, value: str) -> None:
        if self.model.no_chat_reason:
            raise SettingsError(f"{self.model.name} does not accept a system prompt: "
                                f"{self.model.no_chat_reason}")
        self.conversation.system = value
        note(f"System prompt: {value or 'none'}")

    def temperature(self, value: str) -> None:
        if value:
            self.sampling = replace(self.sampling, temperature=TEMPERATURE(value))
        note(f"Temperature {self.sampling.temperature:g}.")

    def seed(self, value: str) -> None:
        if value:
            self.sampling = replace(self.sampling, seed=SEED(value))
        note(f"Seed of the next answer: {self.sampling.seed}.")

    def save(self, value: str) -> None:
        if not value:
            raise SettingsError("/save needs a file name, such as /save chat.jsonl")
        records = self.conversation.records()
        if not records:
            raise SettingsError("there is no answer to save yet")
        path = Path(value if value.endswith(".jsonl") else f"{value}.jsonl").expanduser()
        if os.path.lexists(path):
            raise SettingsError(f"{path} already exists; name another file")
        with disk_errors(path, SettingsError, "name another file"), open(path, "x", encoding="utf-8") as file:
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        note(f"Saved to {path}")

    def quit(self, _: str) -> None:
        raise EOFError


def chat_in_terminal(model: Any, args: argparse.Namespace) -> None:
    """Chat in the terminal, or answer the lines of stdin."""
    if sys.stdin is None:
        raise SettingsError("stdin is closed; run it in a terminal, or pipe in one message per line")
    for stream in filter(None, (sys.stdin, sys.stdout, sys.stderr)):
        stream.reconfigure(errors="replace")
    chat = Chat(model, args)
    if chat.interactive:
        with suppress(ImportError):  # some builds of Python lack readline, so lines cannot be edited
            import readline

            # Bracketed paste, off by default, makes several pasted lines one message.
            on = "on" if obeys_escapes(sys.stdout) else "off"
            readline.parse_and_bind(f"set enable-bracketed-paste {on}")
        note("/help lists the commands. Press Ctrl-D to quit.")
    if model.no_chat_reason:
        note(f"{model.name} continues your text instead of answering: {model.no_chat_reason}.")
    chat.run()


def main() -> None:
    args = parse_args()
    names = list(filter(None, (args.model, args.second)))
    if sys.stderr.isatty():
        note(f"Loading {' and '.join(names)} ...")
    from extensions.inference.weights import open_model  # imports torch, which takes seconds

    models = (open_model(name, args.base, args.weights) for name in names)
    if not args.serve:
        return chat_in_terminal(next(models), args)
    with requires_package("starlette", "--serve"):
        import starlette  # noqa: F401
    with requires_package("uvicorn", "--serve"):
        from extensions.serving.app import ServeOptions, serve

    serve(models, ServeOptions(args.host, args.port, os.environ.get(KEY_VARIABLE) or None, args.concurrency,
                               context_length=args.context_length))


if __name__ == "__main__":
    run_script(main)
