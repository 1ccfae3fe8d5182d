"""Text for people: escaped control characters, closed streams, durations, commands, likely meanings."""

import os
import re
import select
import shlex
import shutil
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from difflib import get_close_matches
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Optional, TextIO

ROOT = Path(__file__).resolve().parent.parent
TYPED = os.environ.get("PADDOCK_COMMAND")  # how the user called the program, and its command
PROGRAM = shlex.quote(shlex.split(TYPED or "./paddock")[0])
# Its commands, by the script that each one runs.
COMMANDS = {
    "scripts/at_step.py": "at-step", "scripts/diff_runs.py": "diff", "scripts/without.py": "without",
    "scripts/chat.py": "chat", "scripts/convert_to_gguf.py": "export --to gguf",
    "scripts/doctor.py": "doctor", "scripts/evaluate.py": "eval", "scripts/generate.py": "generate",
    "scripts/import_checkpoint.py": "import", "scripts/inspect_data.py": "inspect",
    "scripts/export.py": "export", "scripts/launch.py": "train",
    "scripts/load_dpo_dataset.py": "prepare pairs", "scripts/load_prompts_dataset.py": "prepare prompts",
    "scripts/load_hellaswag_dataset.py": "prepare hellaswag",
    "scripts/load_instruct_dataset.py": "prepare chats", "scripts/load_pretrain_dataset.py": "prepare text",
    "scripts/make_sample.py": "prepare sample", "scripts/merge_lora.py": "export --to merged",
    "scripts/pipeline.py": "pipeline", "scripts/replay_step.py": "replay", "scripts/report.py": "report",
    "scripts/sweep.py": "sweep", "scripts/run.py": "train", "scripts/runs.py": "runs",
    "scripts/train_tokenizer.py": "prepare tokenizer", "scripts/verify_checkpoint.py": "verify"}

EXIT_UNREAD = 141  # what a shell reports for a process that SIGPIPE ended
# What changes how a terminal shows text: control characters except the tab, line ends, direction marks.
CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
                      r"\ud800-\udfff]")

STATUS_SECONDS = 0.5  # between updates of the status line
QUIET_SECONDS = 20  # without a line, after which a log or a pipe gets one
_written = 0.0  # when a line was written
WIDTH = 79  # columns of a logged step on a terminal
DIM, RED, GREEN, YELLOW = 2, 31, 32, 33
LABEL = re.compile(r"(\[\w+\] )?( *(ok|warn|FAIL) +| *)")  # how a line begins; what follows is below its end
ESCAPES = re.compile(r"\x1b\[\d*m")
STARTERS = r"(?:paddock|python[\d.]*|bash|torchrun)"
COMMAND = re.compile(rf"(?:NPROC=\d+ )?(?:'[^']*{STARTERS}'|\S*{STARTERS}) [^ ].*$")  # perhaps quoted
SIMILAR, SIMILAR_SHORT = 0.85, 0.8  # for difflib; one typo in a short name changes more of it
ALARM = re.compile(r"^(?:\[\w+\] | *)(?:(warning:|warn )|error:|FAIL |NON-FINITE|\d+ (?:error|problem)s? )")


def without_passwords(text: str) -> str:
    """Return the text with user, password and query of every URL in it replaced by ***."""
    # One slash is enough: normalising a URL as a path leaves only one.
    text = re.sub(r"(:/{1,2})[^\s/?#'\"]*@", r"\1***@", text)
    return re.sub(r"(:/{1,2}[^\s?'\"]*\?)[^\s'\"]+", r"\1***", text)


def printable(text: str) -> str:
    """Return the text on one line, with control characters replaced by their escapes, such as `\\x1b`."""
    return CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def is_url(text: str) -> bool:
    """Whether a path is a URL and not a file; one slash after the colon is enough, as in a mistyped one."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text) is not None and not os.path.lexists(text)


def obeys_escapes(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def paint(text: str, color: int, stream: TextIO) -> str:
    """Return a printable text in a color, if the stream shows colors and NO_COLOR is not set."""
    plain = os.environ.get("NO_COLOR") or not obeys_escapes(stream)
    return text if plain else f"\x1b[{color}m{text}\x1b[0m"


def decorated(line: str, stream: TextIO) -> str:
    """Return a printable line as the stream shows it: on a terminal, with line breaks and colors."""
    if stream.isatty():
        line = wrapped(line, shutil.get_terminal_size().columns)
    return ALARM.sub(lambda found: paint(found[0], YELLOW if found[1] else RED, stream), line)


def wrapped(line: str, width: int) -> str:
    """Return the line broken between words. A command at its end stays whole, so that it can be copied."""
    found = COMMAND.search(line)
    prose, typed = (line[:found.start()], found[0]) if found else (line, "")
    if len(ESCAPES.sub("", line)) <= width or typed and len(ESCAPES.sub("", prose)) < 12:
        return line
    indent = " " * LABEL.match(line).end()
    lines = textwrap.wrap(prose, width, subsequent_indent=indent, break_long_words=False,
                          break_on_hyphens=False)
    if typed and len(lines[-1]) + 1 + len(typed) <= width:
        lines[-1] += f" {typed}"
    elif typed:
        lines.append(indent + typed)
    return "\n".join(lines)


def above_status(stream: TextIO):
    """Return a `with` block that prints above the progress bars and the status line of a terminal."""
    global _written
    _written = time.monotonic()
    progress = sys.modules.get("tqdm")
    return progress.tqdm.external_write_mode(stream) if progress else nullcontext()


@contextmanager
def status_line(describe: Callable[[], str]) -> Iterator[None]:
    """A `with` block that a terminal's last line describes, and a log after silences of 20, 40, 80 s ..."""
    from tqdm import tqdm

    is_first, ended = os.environ.get("LOCAL_RANK", "0") == "0", threading.Event()
    is_seen = is_first and all(map(obeys_escapes, (sys.stdout, sys.stderr)))
    with tqdm(desc=printable(describe()) if is_seen else None, bar_format="  {desc}  {elapsed}", leave=False,
              dynamic_ncols=True, disable=not is_seen) as bar:
        def follow() -> None:
            started, patience = time.monotonic(), QUIET_SECONDS
            while not ended.wait(STATUS_SECONDS):
                now = time.monotonic()
                if is_seen:
                    bar.set_description_str(printable(describe()))
                elif is_first and now - max(started, _written) > patience:
                    print_safely(f"  {describe()}, {duration(now - started)} since the start", sys.stderr)
                    patience *= 2

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def print_safely(text: str, stream: TextIO, is_printable: bool = False) -> Optional[OSError]:
    """Write lines in a single write, with control characters escaped; return the error, if any.

    After an error (a full disk, a pipe without a reader) the stream leads to /dev/null: no later write fails.
    """
    try:
        # One write, because print() writes the line end separately and lines of several ranks would mix.
        lines = text.split("\n") if is_printable else map(printable, text.split("\n"))
        with above_status(stream):
            stream.write("".join(f"{decorated(line, stream)}\n" for line in lines))
            stream.flush()
    except OSError as error:
        _redirect_to_devnull(stream)
        return error
    return None


def print_traceback(*failure) -> None:
    print_safely("".join(traceback.format_exception(*failure)).rstrip("\n"), sys.stderr)


def report_uncaught(kind: type, error: BaseException, trace) -> None:
    """Print a traceback, or if a package is missing, the remedy; a `sys.excepthook`."""
    script, name = os.path.abspath(sys.argv[0]), getattr(error, "name", None) or "."
    is_package = "." not in name and not any(ROOT.glob(f"{name}*"))
    environment, advice = ROOT / ".venv", f"set up the environment with: {command('scripts/setup.sh')}"
    if not (isinstance(error, ModuleNotFoundError) and is_package and os.path.isfile(script)):
        return print_traceback(kind, error, trace)
    if (environment / "bin/python").exists() and Path(sys.prefix) != environment:
        advice = f"run {command(script, *sys.argv[1:], python=environment / 'bin/python')}"
    print_safely(f"error: {sys.executable} lacks the package {name}; {advice}", sys.stderr)
    raise SystemExit(2)


def command(script: str, *arguments: str | Path, python: str | Path = "") -> str:
    """Return the command that runs a script, given by its path from ROOT, in the shell of the user.

    It begins as the user called ./paddock or an installed paddock. After `python train.py`, it is ./paddock
    where that finds the Python of this process; otherwise it names the Python.
    """
    folder, active = Path.cwd(), os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX")
    known = [os.path.realpath(place) for place in (active, ROOT / ".venv") if place]
    is_found = TYPED or folder == ROOT and os.path.realpath(sys.prefix) in known

    def typed(path: str | Path) -> str:
        path = Path(os.path.abspath(path))
        return str(path.relative_to(folder) if path.is_relative_to(folder) else path)

    if is_found and not python and script in COMMANDS:
        start = f"{PROGRAM} {COMMANDS[script]}"
    else:
        interpreter = "bash" if script.endswith(".sh") else typed(python or sys.executable)
        start = shlex.join([interpreter, typed(ROOT / script)])
    words = [typed(argument) if isinstance(argument, Path) else argument for argument in arguments]
    return " ".join([start, *map(shlex.quote, words)])


def pip_install(*packages: str) -> str:
    if PathFinder.find_spec("pip") is None:  # uv made the environment; hooks of setuptools would warn
        return shlex.join(["uv", "pip", "install", "--python", sys.executable, *packages])
    return shlex.join([sys.executable, "-m", "pip", "install", *packages])


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return rows of cells as lines, the first `left` columns aligned left and the others right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join((*map(str.ljust, row[:left], widths), *map(str.rjust, row[left:], widths[left:])))
            .rstrip() for row in rows]


def show(*lines: str) -> None:
    with above_status(sys.stdout):
        print("\n".join(decorated(printable(line), sys.stdout) for line in lines), flush=True)


def show_part(text: str) -> None:
    if sys.stdout.isatty():
        text = "\n".join(map(printable, text.split("\n")))
    print(text.encode(errors="replace").decode(), end="", flush=True)


def _redirect_to_devnull(stream: TextIO) -> None:
    with suppress(OSError, ValueError):  # a stream without a file descriptor
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, stream.fileno())
        os.close(devnull)


def silence_unread_streams() -> bool:
    """Redirect stdout and stderr to /dev/null if they are pipes without a reader; whether one was."""
    unread = []
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            poll = select.poll()
            poll.register(stream.fileno(), 0)
            if any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)):
                unread.append(stream)
    for stream in unread:
        _redirect_to_devnull(stream)
    return bool(unread)


@contextmanager
def exit_if_unread() -> Iterator[None]:
    """A `with` block that prints. Without a reader (`| head`) it exits with 141, or the code of a failure."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # here, where the error can still be caught
    except BrokenPipeError as error:
        if not silence_unread_streams():
            raise
        raise SystemExit(getattr(error.__context__, "code", None) or EXIT_UNREAD) from None


def once(warn: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that passes its first text on to `warn`, and drops the others."""
    waiting = [warn]
    return lambda text: waiting.pop()(text) if waiting else None


def last_line(text: str) -> str:
    return ([line for line in text.splitlines() if line.strip()] or ["it printed nothing"])[-1][:300]


def setting_text(value: Any) -> str:
    """Return a setting's value as in `.env`, such as 1e9 or true; empty for none."""
    if isinstance(value, float):
        short = f"{value:g}" if float(f"{value:g}") == value else repr(value)
        return re.sub(r"e([-+]?)0*(?=\d)", r"e\1", short).replace("e+", "e")
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def suggestion(name: str, known: Iterable[str], same: Mapping[str, str] = {}) -> Optional[str]:
    """Return the known name that a user probably meant, or None.

    It is the name that another one in `same` stands for, or a similar one. Another number or first letter
    makes another name: fp8 and fp16, dora and lora.
    """
    candidates = {standard: standard for standard in known}
    candidates |= {alias: standard for alias, standard in same.items() if standard in candidates}
    name = re.sub("[-.]", "_", name[:60].lower().strip("-"))
    similar = {re.sub("[-.]", "_", each.lower()): each for each in candidates}
    similar = {each: original for each, original in similar.items()
               if each[:1] == name[:1] and re.findall(r"\d+", each) == re.findall(r"\d+", name)}
    best = get_close_matches(name, similar, 1, SIMILAR if len(name) > 6 else SIMILAR_SHORT)
    return candidates[similar[best[0]]] if best else None


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{('es' if noun.endswith(('ch', 's')) else 's') * (number != 1)}"


def percent(share: float, places: int = 1) -> str:
    return f"{100 * share:.{places}f} %"


def duration(seconds: float) -> str:
    """Return seconds in at most two units: 25 s, 2 min 05 s, 3 h 10 min, 2 d 04 h."""
    hours, minutes, seconds = (round(seconds) // size for size in (3600, 60, 1))
    long = f"{hours} h {minutes % 60:02} min" if hours < 24 else f"{hours // 24} d {hours % 24:02} h"
    return long if hours else f"{minutes} min {seconds % 60:02} s" if minutes else f"{seconds} s"
