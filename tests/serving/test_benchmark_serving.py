"""scripts/dev/benchmark_serving.py: requests at once against one after another."""

import re
import sys

import pytest
from factories import free_port
from tiny_server import serving, tiny_model

from common.errors import PaddockError

pytest.importorskip("uvicorn")
benchmark = pytest.importorskip("scripts.dev.benchmark_serving")


def run(monkeypatch, *flags) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark_serving.py", *map(str, flags)])
    benchmark.main()


def test_the_ratio_is_printed_with_its_spread(prepared, monkeypatch, capsys):
    monkeypatch.setenv("PADDOCK_API_KEY", "key")
    with serving([tiny_model(prepared.tokenizer)], api_key="key") as (url, _):
        run(monkeypatch, url, "--requests", 4, "--max-tokens", 5, "--rounds", 2, "--at-once", 4)
        one, four, ratio = capsys.readouterr().out.splitlines()
        assert one.startswith("  1 at once: ") and four.startswith("  4 at once: ")
        assert re.fullmatch(r"ratio: \d+\.\d\d \[\d+\.\d\d, \d+\.\d\d\] \(2 rounds\)", ratio)
        monkeypatch.setenv("PADDOCK_API_KEY", "another")
        with pytest.raises(PaddockError, match="answered 401: .*API key"):
            run(monkeypatch, url)


def test_a_server_that_is_not_there_is_told(monkeypatch):
    with pytest.raises(PaddockError, match="cannot reach .*refused"):
        run(monkeypatch, f"http://127.0.0.1:{free_port()}")
