"""The recipes of docs/recipes.md fit the code: each is applied to a copy of it, and its effect is compared with a reference."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import python
from recipes import ROOT, apply, changes_of

IMPORTED_FROM = (".", "tests", "tests/system", "tests/learn")  # of a copy


def prove(proof, changes: list[tuple[str, str, str]], prepared, folder: Path) -> subprocess.CompletedProcess:
    """Call one of the functions below in a copy of the code that has these changes."""
    copy = folder / "copy"
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    for name in (*packages, "tests", "docs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.glob("*.py"):
        shutil.copy(path, copy)
    apply(changes, copy)
    (folder / "out").mkdir()
    (copy / "call.py").write_text("import sys, test_recipes\nif __name__ == '__main__':\n"
                                  f"    test_recipes.{proof.__name__}(*map(test_recipes.Path, sys.argv[1:]))\n")
    return python(copy / "call.py", *prepared, folder / "out", cwd=copy, prepare=forget_our_modules,
                  env=os.environ | {"PYTHONPATH": os.pathsep.join(str(copy / name) for name in IMPORTED_FROM)})


def forget_our_modules() -> None:
    """In the process of a copy: import it, and nothing of the original."""
    def is_ours(path: str) -> bool:
        return Path(path).is_relative_to(ROOT) and "site-packages" not in path

    for name in [name for name, module in sys.modules.items() if is_ours(getattr(module, "__file__", None) or "")]:
        del sys.modules[name]
    sys.path[:] = os.environ["PYTHONPATH"].split(os.pathsep) + [path for path in sys.path if not is_ours(path)]


def prove_biases(shards: Path, tokenizer: Path, items: Path, out: Path) -> None:
    """transformers' Llama computes our logits from a run's checkpoint; torch allocates the forecast."""
    import torch
    import transformers
    from factories import UNMEASURED, Prepared, TinyRun

    from checkpoint.huggingface import load_model_weights
    from checkpoint.model_json import read_model_config
    from extensions.cost import parameter_count
    from extensions.inference.weights import model_from_tensors

    run = TinyRun(Prepared(shards, tokenizer, items), out, MLP_BIAS="true", LEARNING_RATE=0.1, **UNMEASURED).trained()
    folder = run.checkpoint(6)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    vocab_size, config = theirs.config.vocab_size, read_model_config(folder)
    model = model_from_tensors(load_model_weights(folder), config, vocab_size)
    assert type(theirs) is transformers.LlamaForCausalLM and config.mlp_bias
    assert sum(weight.numel() for weight in theirs.parameters()) == parameter_count(config, vocab_size)
    tokens_BT = torch.randint(0, vocab_size, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours_BTV = model(tokens_BT, mode="hidden") @ model.head_matrix.weight[:vocab_size].T
        torch.testing.assert_close(ours_BTV, theirs(tokens_BT).logits, rtol=1e-4, atol=1e-5)

    assert_forecast(mlp_bias=True)


def assert_forecast(**settings) -> None:
    """torch allocates what the forecast says."""
    import torch
    from memory_trace import trace

    from config import Config
    from extensions.cost import estimate_memory

    config = Config(dim=512, n_layers=3, n_heads=8, n_kv_heads=2, ffn_dim=1536, micro_batch_size=4, compile=False, attention_backend="sdpa", **settings)
    forecast, traced = estimate_memory(config, 1000, 2, "cpu"), trace(config, 1000, torch.bfloat16)
    assert forecast.optimizer == pytest.approx(traced.optimizer, rel=0.01) and forecast.total == pytest.approx(traced.peak, rel=0.05)


def prove_lion(shards: Path, tokenizer: Path, items: Path, out: Path) -> None:
    """bitsandbytes' Lion makes the same updates; an interrupted run has the bits of an uninterrupted one; the forecast is true."""
    import bitsandbytes
    import torch
    from factories import UNMEASURED, Prepared, TinyRun, assert_same_run, new_model, stop_at

    from config import Config
    from learn.optim import Optimizer

    config = Config(dim=32, n_layers=2, n_heads=4, optimizer="lion", weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.99)
    model, other, generator = new_model(config, 128), new_model(config, 128), torch.Generator().manual_seed(0)
    ours, weights = Optimizer(model, config), [*other.parameters()]
    theirs = bitsandbytes.optim.Lion([{"params": [p for p in weights if p.ndim > 1], "weight_decay": 0.1},
                                      {"params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0}], lr=0.01, betas=(0.9, 0.99))
    for _ in range(4):
        for weight, its in zip(weights, model.parameters()):
            weight.grad = torch.randn(weight.shape, generator=generator)
            its.grad = 2 * weight.grad
        theirs.step()
        ours.step(0.01, torch.tensor(2.0), torch.tensor(0.0))
    torch.testing.assert_close([*model.parameters()], weights)
    before = [value.clone() for value in (*model.parameters(), *ours.state_tensors().values())]
    ours.step(0.01, None, torch.tensor(1.0))
    assert all(map(torch.equal, before, (*model.parameters(), *ours.state_tensors().values())))

    settings = {"OPTIMIZER": "lion", "LEARNING_RATE": 0.003, **UNMEASURED}
    whole, cut = (TinyRun(Prepared(shards, tokenizer, items), out / name, **settings) for name in ("whole", "cut"))
    assert whole.train() == 0
    with stop_at(3):
        assert cut.train() == 143
    assert cut.train() == 0
    assert_same_run(whole, cut, 6)
    assert whole.column("train_loss")[6] < whole.column("train_loss")[1] - 0.2

    assert_forecast(optimizer="lion")


def prove_number(shards: Path, tokenizer: Path, items: Path, out: Path) -> None:
    """The norm is that of the weights in each checkpoint, and the same in two shards."""
    import torch
    from factories import Prepared, TinyRun
    from safetensors.torch import load_file

    run = TinyRun(Prepared(shards, tokenizer, items), out).trained()
    norms = run.column("weight_norm")
    assert [*norms] == [1, 2, 3, 4, 5, 6]
    for step in (2, 4, 6):
        weights = load_file(run.checkpoint(step) / "model.safetensors").values()
        assert norms[step] == pytest.approx(float(torch.cat([weight.flatten() for weight in weights]).norm()), rel=1e-6)
    sharded = TinyRun(Prepared(shards, tokenizer, items), out / "sharded", SHARDING="full")
    assert sharded.start(2, MAX_STEPS=2).wait() == [0, 0]
    assert sharded.column("weight_norm")[2] == pytest.approx(norms[2], rel=1e-5)


def prove_spectral(shards: Path, tokenizer: Path, items: Path, out: Path) -> None:
    """The norms of matrices in two shards are the largest singular values of those in the checkpoint."""
    import torch
    from factories import Prepared, TinyRun
    from safetensors.torch import load_file

    run = TinyRun(Prepared(shards, tokenizer, items), out, EXTENSIONS="default,spectral", SPECTRAL_EVERY=2, LOG_EVERY=0, SHARDING="full")
    assert run.start(2, MAX_STEPS=2).wait() == [0, 0]
    norms = [line for line in run.lines("metrics") if "spectral_norm_layers_0_attention_wo" in line]
    assert [line["step"] for line in norms] == [0, 2]
    weight = load_file(run.checkpoint(2) / "model.safetensors")["model.layers.0.self_attn.o_proj.weight"]
    assert norms[1]["spectral_norm_layers_0_attention_wo"] == pytest.approx(float(torch.linalg.svdvals(weight)[0]), rel=1e-5)


def prove_slic(*paths: Path) -> None:
    """TRL's hinge loss, whose margin is 1, is the loss of each pair."""
    from types import SimpleNamespace

    import torch
    from test_objectives import model_of, naive_logprobs, pair_rows
    from trl.experimental.cpo.cpo_trainer import CPOTrainer

    import extensions.preferences  # noqa: F401 (registers its objectives)
    from learn.objectives import PREFERENCE_OBJECTIVES
    from plan.make import make_plan

    config = make_plan(["--preference-objective", "slic", "--slic-margin", "4"], {}, complete=False).config
    batch, model, expected = pair_rows(11), model_of(0), 0.0
    theirs = SimpleNamespace(loss_type="hinge", beta=1 / 4, label_smoothing=0.0, alpha=0.0, accelerator=SimpleNamespace(device="cpu"))
    for documents in naive_logprobs(model, batch):
        for chosen, rejected in zip(documents[::2], documents[1::2]):
            expected += 4 * float(CPOTrainer.cpo_loss(theirs, *(torch.tensor([value]) for value, _ in (chosen, rejected)))[0])
    objective = PREFERENCE_OBJECTIVES[config.preference_objective](config)
    assert float(objective.loss_sum(model, batch).total.detach()) == pytest.approx(expected, rel=1e-4)


def prove_psv(shards: Path, tokenizer: Path, items: Path, out: Path) -> None:
    """Python's csv reads the same rows; the tokens are those of the same records as JSON lines; a short row is refused by its line."""
    from common.errors import DataError
    from data_pipeline.source_files import Source
    from data_pipeline.sources import Reading, read_records
    from data_preparation_utils import PreparationOptions, prepare_set

    table, lines = out / "chats.psv", out / "chats.jsonl"
    rows = [{"prompt": f"{number} and {number}?", "completion": f" {2 * number}, \"of course\" é"} for number in range(40)]
    table.write_text("".join("|".join(row) + "\n" for row in ([*rows[0]], *(row.values() for row in rows))), encoding="utf-8")
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with open(table, encoding="utf-8", newline="") as file:
        expected = [*csv.DictReader(file, delimiter="|", quoting=csv.QUOTE_NONE)]
    assert [record for _, record in read_records(Source(str(table)), Reading())] == expected == rows
    options = PreparationOptions(str(tokenizer), "auto", 100_000, 0.1, workers=1)
    sets = [prepare_set("chats", str(path), out / path.suffix, options) for path in (table, lines)]
    ours, theirs = ([path.read_bytes() for path in sorted(folder.glob("*.bin"))] for folder in sets)
    assert ours == theirs != []
    table.write_text(table.read_text(encoding="utf-8") + "alone\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"chats\.psv:42: expected 2 cells, got 1"):
        [*read_records(Source(str(table)), Reading())]


RECIPES = {"biases": prove_biases, "Lion": prove_lion, "norm of the weights": prove_number, "spectral": prove_spectral,
           "SLiC": prove_slic, "PSV": prove_psv}


@pytest.mark.parametrize("title", [pytest.param(title, marks=pytest.mark.slow if title in ("biases", "Lion", "SLiC") else [])
                                   for title in RECIPES])
def test_a_recipe_does_what_its_reference_does(title, prepared, tmp_path):
    pytest.importorskip({"biases": "transformers", "Lion": "bitsandbytes", "SLiC": "trl"}.get(title, "torch"))
    ended = prove(RECIPES[title], changes_of(title), prepared, tmp_path)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]


def test_every_recipe_is_proved():
    headings = re.findall(r"^## (.*)", (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert [title in heading for title, heading in zip(RECIPES, headings, strict=True)] == [True] * len(RECIPES)
