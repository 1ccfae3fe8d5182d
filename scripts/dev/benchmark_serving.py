"""Benchmark a server with OpenAI's API: simultaneous requests against requests one after another.

    ./paddock serve runs/chat &
    python scripts/dev/benchmark_serving.py
    python scripts/dev/benchmark_serving.py http://127.0.0.1:8001 --at-once 16

Each round streams greedy completions of the same number of prompts both ways, in the order A B B A. The
result is the median ratio of tokens per second, with the lowest and the highest round. The API key is read
from the environment variable PADDOCK_API_KEY.
"""

import argparse
import http.client
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import NamedTuple, Optional
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.command_line import CommandParser  # noqa: E402
from common.errors import PaddockError, run_script  # noqa: E402
from common.text import show  # noqa: E402
from extensions.http_server import KEY_VARIABLE  # noqa: E402
from scripts.dev.paired import extremes, in_turns, ratio  # noqa: E402

WORDS = "river stone lamp garden paper window silver morning".split()


class Measured(NamedTuple):
    """One request."""

    tokens: int
    first: float  # seconds until the first text


class Client:
    """Sends requests to a server."""

    def __init__(self, url: str, max_tokens: int, model: Optional[str] = None):
        self.place, self.max_tokens = urlsplit(url).netloc, max_tokens
        self.model = model or json.loads(b"".join(self.ask("GET", "/v1/models")))["data"][0]["id"]

    def ask(self, method: str, path: str, content: Optional[dict] = None) -> Iterator[bytes]:
        """Yield the lines of a response as they arrive."""
        headers = {"Content-Type": "application/json",
                   "Authorization": f"Bearer {os.environ.get(KEY_VARIABLE)}"}
        try:
            with closing(http.client.HTTPConnection(self.place, timeout=600)) as connection:
                connection.request(method, path, content and json.dumps(content), headers)
                with connection.getresponse() as response:
                    if response.status != 200:
                        said = response.read().decode(errors="replace")[:300]
                        raise PaddockError(f"{self.place} answered {response.status}: {said}")
                    yield from response
        except (OSError, http.client.HTTPException) as error:
            raise PaddockError(f"cannot reach {self.place}: {error}; is the server running?") from error

    def complete(self, prompt: str) -> Measured:
        began, first, tokens = time.perf_counter(), 0.0, 0
        for line in self.ask("POST", "/v1/completions", {
                "model": self.model, "prompt": prompt, "max_tokens": self.max_tokens, "temperature": 0,
                "stream": True, "stream_options": {"include_usage": True}}):
            first = first or time.perf_counter() - began
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise PaddockError(f"the server failed: {event['error']['message']}")
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        return Measured(tokens, first)


def parse_args() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000",
                        help="address of the server (default: %(default)s)")
    parser.add_argument("--model", help="name of the model (default: the server's first)")
    for flag, default, meaning in (("--at-once", 8, "simultaneous requests"),
                                   ("--requests", 16, "requests per round, each way"),
                                   ("--max-tokens", 128, "tokens per completion"), ("--rounds", 5, "rounds")):
        parser.add_argument(flag, type=int, default=default, metavar="N",
                            help=f"number of {meaning} (default: %(default)s)")
    args = parser.parse_args()
    if min(args.at_once - 1, args.requests, args.max_tokens, args.rounds) < 1:
        parser.error("--at-once must be at least 2, all other numbers at least 1")
    if not args.url.startswith("http://"):
        parser.error(f"{args.url!r} must start with http://")
    return args


def main() -> None:
    args = parse_args()
    client = Client(args.url, args.max_tokens, args.model)
    turn = iter(range(10**9))

    def measure(at_once: int) -> tuple[float, list[float]]:
        """Return the total tokens per second, and each request's seconds until its first text."""
        # Different prompts each time, so that the server's prefix cache does not help.
        prompts = [f"{next(turn)} " + " ".join(WORDS[(number + step) % len(WORDS)] for step in range(16))
                   for number in range(args.requests)]
        began = time.perf_counter()
        with ThreadPoolExecutor(at_once) as pool:
            measured = [*pool.map(client.complete, prompts)]
        seconds = time.perf_counter() - began
        return sum(each.tokens for each in measured) / seconds, [each.first for each in measured]

    measure(args.at_once)
    ways: dict[int, list] = {1: [], args.at_once: []}
    for _, at_once in in_turns(ways, args.rounds):
        ways[at_once].append(measure(at_once))
    for at_once, results in ways.items():
        speeds, first = [speed for speed, _ in results], [each for _, rounds in results for each in rounds]
        show(f"{at_once:3} at once: {statistics.median(speeds):8.1f} tokens/s ({min(speeds):.1f} to "
             f"{max(speeds):.1f}), first text after {1000 * statistics.median(first):.0f} ms (the slowest: "
             f"{1000 * max(first):.0f})")
    ratios = [many / one for (one, _), (many, _) in zip(*ways.values())]
    show(f"ratio: {ratio(ratios, extremes)} ({args.rounds} rounds)")


if __name__ == "__main__":
    run_script(main)
