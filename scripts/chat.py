"""Talk to a model in the terminal, or serve a chat page and an OpenAI-compatible API.

    ./paddock chat runs/chat
    ./paddock chat runs/chat --system "You answer in one sentence."
    ./paddock chat runs/chat runs/preferred --serve    two, side by side

For a run, the newest good checkpoint is used. Adapters are applied to the base that they were trained on. A
model without chat training continues your text. Without a terminal, each line of stdin is a message, and the
answers go to stdout. Only /save writes to the disk.
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

from common.command_line import SEED, TEMPERATURE, CommandParser, add_sampling_flags, number
from common.errors import PaddockError, SettingsError, requires_package, run_script
from common.files import disk_errors
from common.http_server import KEY_VARIABLE
from common.text import DIM, obeys_escapes, paint, print_safely, printable, show_part

ANSWER_SHARE = 4  # of the context at least this part is left for an answer
SEEDS = 2**32
OF_TERMINAL = ("system", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens",
               "seed", "stop")
OF_SERVER = ("host", "port", "api_key", "concurrency")
HELP = """\
/retry            answer again
/undo             remove your last message
/reset            start a new chat
/system [TEXT]    the system prompt
/temperature [T]  0 = most likely
/seed [N]         seed of the next answer
/save FILE        save as .jsonl
/help             this list
/quit             leave, or Ctrl-D
Ctrl-C stops an answer. A line that
ends in \\ goes on in the next one."""


def parse_args() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_argument("model", help="a run, a checkpoint, or a Hugging Face folder or name of a Llama")
    parser.add_argument("second", nargs="?", help="a second model, side by side on the page (with --serve)")
    parser.add_argument("--base", metavar="MODEL", help="base of the adapters (default: as in training)")
    # A cache for all that some models allow would fill the memory.
    parser.add_argument("--context-length", default=8192, metavar="N",
                        type=number(int, "from 16 on", lambda value: value >= 16),
                        help="maximum tokens of a chat, if the model allows as many (default: %(default)s)")
    answers = parser.add_argument_group("answers in the terminal")
    answers.add_argument("--system", default="", metavar="TEXT", help="the system prompt (default: none)")
    add_sampling_flags(answers)
    answers.add_argument("--max-new-tokens", default=512, metavar="N",
                         type=number(int, "from 1 on", lambda value: value > 0),
                         help="maximum tokens of an answer (default: %(default)s)")
    answers.add_argument("--seed", type=SEED, metavar="S",
                         help="seed of the first answer; later answers count up from it (default: random)")
    answers.add_argument("--stop", nargs="+", default=[], metavar="TEXT",
                         help="end an answer before any of these texts")
    server = parser.add_argument_group("the server")
    server.add_argument("--serve", action="store_true", help="serve a chat page and an API")
    server.add_argument("--host", default="127.0.0.1", metavar="ADDRESS",
                        help=f"other than loopback needs a key in {KEY_VARIABLE} (default: %(default)s)")
    server.add_argument("--port", default=8000, help="0 = any free port (default: %(default)s)",
                        type=number(int, "from 0 to 65535", lambda value: 0 <= value < 2**16))
    server.add_argument("--api-key", action="store_true",
                        help=f"require the API key in the environment variable {KEY_VARIABLE}")
    server.add_argument("--concurrency", default=8, metavar="N",
                        type=number(int, "from 1 on", lambda value: value > 0),
                        help="answers that a model generates at the same time (default: %(default)s)")
    args = parser.parse_args()
    if not all(args.stop):
        parser.error("an empty --stop would end every answer at once")
    if args.second and not args.serve:
        parser.error("a second model needs --serve, which shows both side by side")
    if args.second == args.model:
        parser.error("name two different models")
    for name in OF_TERMINAL if args.serve else OF_SERVER:
        if getattr(args, name) != parser.get_default(name):
            flag = "--" + name.replace("_", "-")
            parser.error(f"{flag} is for the terminal; with --serve each request names its own" if args.serve
                         else f"{flag} goes with --serve")
    if args.api_key and not os.environ.get(KEY_VARIABLE):
        parser.error(f"--api-key needs the key in the environment variable {KEY_VARIABLE}")
    return args


def styled(text: str) -> str:
    """Return lines as they are shown on stderr: dim, if it is a terminal that can show that."""
    return paint("\n".join(map(printable, text.split("\n"))), DIM, sys.stderr)


def note(text: str) -> None:
    print(styled(text), file=sys.stderr, flush=True)


@contextmanager
def interrupts_noted() -> Iterator[list[int]]:
    """A `with` block in which Ctrl-C only adds to the list, so that no step of the model is torn apart."""
    pressed: list[int] = []
    earlier = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, earlier)


class Chat:
    """A conversation in a terminal, or between stdin and stdout."""

    def __init__(self, model: Any, args: argparse.Namespace):
        from inference.engine import Engine, Sampling
        from inference.text import Conversation

        self.model = replace(model, context_length=min(model.context_length, args.context_length))
        self.conversation = Conversation(self.model)
        self.stop, self.max_new_tokens = args.stop, args.max_new_tokens
        self.engine = Engine(self.model.model, 1, self.model.context_length)
        seed = secrets.randbelow(SEEDS) if args.seed is None else args.seed
        self.sampling = Sampling(args.temperature, args.top_p, args.top_k, args.min_p,
                                 args.repetition_penalty, seed)
        self.interactive = sys.stdin.isatty()
        self.in_terminal = self.interactive and sys.stdout.isatty()
        self.said_full = False
        self.commands = {"/retry": self.retry, "/undo": self.undo, "/reset": self.reset,
                         "/system": self.system, "/temperature": self.temperature, "/seed": self.seed,
                         "/save": self.save, "/help": lambda _: note(HELP), "/quit": self.quit}
        if args.system:
            self.system(args.system)

    def run(self) -> None:
        """Answer messages and obey commands up to the end of the input or /quit."""
        interrupted = False
        while True:
            try:
                if interrupted:  # told here and not below, where a second Ctrl-C would end the program
                    interrupted = False
                    note("\nCtrl-D or /quit leaves.")
                words = self.read()
                if words.startswith("/"):
                    self.obey(words)
                elif words.strip() or self.in_terminal and self.model.why_no_chat:
                    self.ask(words)
            except EOFError:
                if self.in_terminal:
                    print()
                return
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                interrupted = True
            except PaddockError as error:
                if not self.interactive:
                    raise
                print_safely(str(error), sys.stderr)

    def read(self) -> str:
        """Return the next message or command. Raises EOFError at the end of the input."""
        lines = [input("> " if self.in_terminal else "")]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            try:
                lines.append(input("... " if self.in_terminal else ""))
            except EOFError:
                break
        return "\n".join(lines)

    def obey(self, line: str) -> None:
        """Obey a command. Raises SettingsError if it is unknown, or cannot be obeyed."""
        name, *value = line.split(maxsplit=1)
        if name not in self.commands:
            raise SettingsError(f"there is no {name}; the commands are {' '.join(self.commands)} (a message "
                                "that starts with / needs a space in front)")
        try:
            self.commands[name](value[0].strip() if value else "")
        except argparse.ArgumentTypeError as error:
            raise SettingsError(f"{name}: {error}") from error

    def ask(self, words: str) -> None:
        """Answer a message. Raises DataError, and forgets the message, if that is impossible."""
        from inference.text import Turn

        self.conversation.turns.append(Turn(words))
        try:
            self.answer()
        except PaddockError:
            self.conversation.turns.pop()
            raise

    def answer(self) -> None:
        """Write an answer to the last turn, as its tokens come; Ctrl-C ends it."""
        from inference.engine import Request
        from inference.text import TextStream

        length, turn = self.model.context_length, self.conversation.turns[-1]
        pieces, times = [], []
        with interrupts_noted() as pressed:
            prompt = self.conversation.prompt(min(self.max_new_tokens, length // ANSWER_SHARE))
            if self.conversation.left_out and not self.said_full:
                self.said_full = True
                note(f"The context of {length:,} tokens is full: the oldest messages are now left out.")
            room = length - len(prompt.ids)
            request = Request(prompt.ids, min(self.max_new_tokens, room), self.sampling, prompt.stop_ids)
            self.sampling = replace(self.sampling, seed=(self.sampling.seed + 1) % SEEDS)
            stream = TextStream(self.model.tokenizer, self.stop, prompt.after)
            self.engine.add(request)
            while request.finish_reason is None:
                self.engine.step()
                for token in request.written[len(times):]:
                    times.append(time.perf_counter())
                    pieces.append(stream.add(token))
                    show_part(pieces[-1])
                if pressed or stream.stopped:
                    self.engine.cancel(request)
            pieces.append(stream.finish())
            turn.answer, turn.ended = "".join(pieces), request.finish_reason == "stop"
            show_part(pieces[-1] if turn.answer.endswith("\n") else pieces[-1] + "\n")
        if pressed and not self.interactive:
            raise KeyboardInterrupt
        if self.in_terminal:
            note(self.figures(request, times, room))

    def figures(self, request: Any, times: list[float], room: int) -> str:
        """Return a line about an answer: its tokens, their speed, its seed, and what cut it."""
        parts = [f"{len(times):,} token{'s' * (len(times) != 1)}"]
        if len(times) > 1 and times[-1] > times[0]:
            parts.append(f"{(len(times) - 1) / (times[-1] - times[0]):,.1f} tokens/s")
        if request.sampling.temperature:
            parts.append(f"seed {request.sampling.seed}")
        if request.finish_reason == "length":
            parts.append("cut: the context is full" if request.max_new_tokens == room
                         else "cut by --max-new-tokens")
        return f"({', '.join(parts)})"

    def retry(self, _: str) -> None:
        """Answer the last message again."""
        if not self.conversation.turns:
            raise SettingsError("there is no message to answer again")
        turn = self.conversation.turns[-1]
        turn.answer, turn.ended = "", False
        self.answer()

    def undo(self, _: str) -> None:
        if not self.conversation.turns:
            raise SettingsError("there is no message to remove")
        note(f"Removed: {textwrap.shorten(self.conversation.turns.pop().words, 60)}")

    def reset(self, _: str) -> None:
        self.conversation.turns.clear()
        self.said_full = False
        note("A new conversation.")

    def system(self, value: str) -> None:
        """Set the system prompt, for what follows. Raises SettingsError if there can be none."""
        if self.model.why_no_chat:
            raise SettingsError(f"{self.model.name} does not accept a system prompt: "
                                f"{self.model.why_no_chat}")
        self.conversation.system = value
        note(f"System prompt: {value or 'none'}")

    def temperature(self, value: str) -> None:
        if value:
            self.sampling = replace(self.sampling, temperature=TEMPERATURE(value))
        note(f"Temperature {self.sampling.temperature:g}.")

    def seed(self, value: str) -> None:
        if value:
            self.sampling = replace(self.sampling, seed=SEED(value))
        note(f"The next answer has seed {self.sampling.seed}.")

    def save(self, value: str) -> None:
        """Write the conversation to a new file. Raises SettingsError if that is impossible."""
        if not value:
            raise SettingsError("/save needs the name of a file, such as /save chat.jsonl")
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


def talk(model: Any, args: argparse.Namespace) -> None:
    """Talk to a model at the terminal, or answer the lines of stdin."""
    if sys.stdin is None:
        raise SettingsError("stdin is closed; run it in a terminal, or pipe in one message per line")
    for stream in filter(None, (sys.stdin, sys.stdout, sys.stderr)):
        stream.reconfigure(errors="replace")
    chat = Chat(model, args)
    if chat.interactive:
        with suppress(ImportError):  # of a Python without it: then lines cannot be edited
            import readline

            # Off in Python by default: with it, several lines that are pasted are one message.
            on = "on" if obeys_escapes(sys.stdout) else "off"
            readline.parse_and_bind(f"set enable-bracketed-paste {on}")
        note("/help lists the commands, Ctrl-D leaves.")
    if model.why_no_chat:
        note(f"{model.name} continues what you write: {model.why_no_chat}.")
    chat.run()


def main() -> None:
    args = parse_args()
    names = list(filter(None, (args.model, args.second)))
    if sys.stderr.isatty():
        note(f"Loading {' and '.join(names)} ...")
    from serving.models import open_model  # only now: torch takes seconds

    models = (open_model(name, args.base) for name in names)
    if not args.serve:
        return talk(next(models), args)
    with requires_package("starlette", "--serve"):
        import starlette  # noqa: F401
    with requires_package("uvicorn", "--serve"):
        from serving.app import ServeOptions, serve

    serve(models, ServeOptions(args.host, args.port, os.environ.get(KEY_VARIABLE) or None, args.concurrency,
                               context_length=args.context_length))


if __name__ == "__main__":
    run_script(main)
