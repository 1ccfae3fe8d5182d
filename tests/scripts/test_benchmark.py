"""Contenders of the benchmark get the largest number of rows that fits, and the same tokens a step."""

import json
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

import model_utils
from model import Transformer
from scripts.dev import benchmark


def contender(rows: int, name: str = "paddock-eager") -> Namespace:
    return Namespace(run=name, rows=rows, threads=1, device="cpu", eager=True, profile=2)


@pytest.mark.parametrize("fitting, tried, expected", [
    (32, [32], (32, 1)), (8, [32, 16, 8], (8, 4)), (1, [32, 16, 8, 4, 2, 1], (1, 32)), (0, [32, 16, 8, 4, 2, 1], None)])
def test_rows_are_halved_in_new_processes_until_they_fit(fitting, tried, expected, monkeypatch, tmp_path):
    started = []

    def run(command, **_):
        rows, name = int(command[command.index("--rows") + 1]), command[command.index("--run") + 1]
        assert command[command.index("--profile") + 1] == ("3" if name == "paddock" else "0")  # the first one only
        started.append((name, rows))
        result = {"contender": name, "out_of_memory": "CUDA out of memory. Tried to allocate 15.66 GiB."}
        if rows <= fitting or name == "paddock":
            numbers = ("tokens_per_second", "cpu_seconds_per_million_tokens", "first_loss", "first_step_seconds", "peak_memory_gib")
            result = {"contender": name, "rows": rows, "accumulation": 32 // rows, "dtype": "torch.bfloat16",
                      **dict.fromkeys(numbers, 1.0)}
        return SimpleNamespace(returncode=0, stdout=json.dumps(result), stderr="")

    monkeypatch.setattr(benchmark.subprocess, "run", run)
    results = tmp_path / "results.json"
    monkeypatch.setattr("sys.argv", ["benchmark.py", "--model", "174m", "--contenders", "paddock,hf", "--blocks", "2",
                                     "--profile", "3", "--json", str(results)])
    benchmark.main()
    again = tried if expected is None else tried[-1:]  # a later block begins with the rows that fitted
    assert [rows for name, rows in started if name == "hf"] == tried + again
    assert [rows for name, rows in started if name == "paddock"] == [32, 32]
    for block in json.loads(results.read_text()):
        peer = next(entry for entry in block if entry["contender"] == "hf")
        assert (peer["rows"], peer["accumulation"]) == expected if expected else "one row: CUDA out of memory" in peer["error"]


@pytest.mark.parametrize("name", ["paddock-eager", "hf"])
def test_fewer_rows_at_a_time_train_the_same(name, monkeypatch):
    monkeypatch.setattr(model_utils, "bf16_is_fast", lambda device_type: False)
    work = benchmark.MODELS["tiny"]._replace(rows=4, steps=3)
    whole, halves = (benchmark.run_or_report_memory(work, contender(rows, name)) for rows in (4, 1))
    assert (whole["rows"], whole["accumulation"], halves["rows"], halves["accumulation"]) == (4, 1, 1, 4)
    for loss in ("first_loss", "last_loss"):
        assert halves[loss] == pytest.approx(whole[loss], rel=1e-5)
    assert whole["last_loss"] < whole["first_loss"] and len(whole["profile"]) == 2


def test_memory_that_runs_out_is_reported_and_other_errors_are_not(monkeypatch):
    forward, work = Transformer.forward, benchmark.MODELS["tiny"]

    def limited(self, tokens_BT, *arguments, **settings):
        if len(tokens_BT) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 15.66 GiB.\nGPU 0 has ...")
        return forward(self, tokens_BT, *arguments, **settings)

    monkeypatch.setattr(Transformer, "forward", limited)
    assert benchmark.run_or_report_memory(work, contender(2)) == {
        "contender": "paddock-eager", "out_of_memory": "CUDA out of memory. Tried to allocate 15.66 GiB."}
    assert benchmark.run_or_report_memory(work, contender(1))["accumulation"] == 2
    monkeypatch.setattr(Transformer, "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        benchmark.run_or_report_memory(work, contender(2))
