"""grow_checkpoint.py: a larger model computes the same, and its run goes on exactly."""

import shlex
from pathlib import Path

import pytest
import torch
from factories import UNMEASURED, TinyRun, assert_same_run

from checkpoint import huggingface, store
from common.errors import CheckpointError, SettingsError
from config import Config, rules
from model_utils import read_model_config
from run.adapters import load_model
from scripts.grow_checkpoint import grow, main
from settings.load import load_config


@pytest.mark.parametrize("layers, ffn_dim, allowed", ((3, None, 0.0), (7, None, 0.0), (None, 160, 1e-6), (4, 112, 1e-6)))
def test_the_logits_stay(layers, ffn_dim, allowed, whole, tmp_path):
    source = whole.checkpoint(4)
    grow(source, layers, ffn_dim, tmp_path / "grown")
    store.verify(tmp_path / "grown")
    (before, _), (after, _) = (load_model(folder, torch.device("cpu"), torch.float32) for folder in (source, tmp_path / "grown"))
    assert (len(after.layers), after.config.hidden_dim) == (layers or 2, ffn_dim or before.config.hidden_dim)
    tokens = torch.arange(64).reshape(2, 32)
    assert (before.logits(tokens) - after.logits(tokens)).abs().max() <= allowed
    # Every new parameter gets a gradient now or, behind a zero matrix, after the first update.
    (-after(tokens, tokens, reduction="sum")).backward()
    assert all(block.attention.wo.weight.grad.any() and block.feed_forward.w2.weight.grad.any(dim=0).all() for block in after.layers)
    with pytest.raises(CheckpointError, match="already exists"):
        grow(source, 3, None, tmp_path / "grown")
    with pytest.raises(SettingsError, match="has 2 layers and feed-forwards of"):
        grow(source, 1, None, tmp_path / "smaller")


def test_it_ends_with_the_command_that_trains_the_grown_model(whole, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["grow_checkpoint.py", str(whole.checkpoint(4)), "--layers", "3", "--output", "a b"])
    main()
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert "train.py" in words[words.index("--run-name") - 1]
    loaded = load_config(words[words.index("--run-name"):], {})
    recorded = store.read_state(Path("a b"))["settings"]
    assert (loaded.config.max_steps, loaded.config.data_path) == (8, recorded["PRETRAIN_DATA_PATH"])
    assert (loaded.config.run_name, loaded.config.resume) == ("a-b", "a b")


@pytest.mark.parametrize("optimizer", ("adamw", "muon"))
def test_a_run_goes_on_and_resumes_exactly(optimizer, prepared, tmp_path, capsys):
    """By the script's folder, or by settings."""
    settings = {**UNMEASURED, "MAX_STEPS": 8, "OPTIMIZER": optimizer}
    base = TinyRun(prepared, tmp_path / "base", **settings)
    assert base.train(STOP_STEP=4) == 0
    grow(base.checkpoint(4), 4, 128, tmp_path / "grown")
    width = read_model_config(base.checkpoint(4)).hidden_dim
    kept, moved = (store.read_optimizer(folder) for folder in (base.checkpoint(4), tmp_path / "grown"))
    for name, tensor in kept.items():  # of 2 layers, each is followed by a new one
        layer = int(name.split(".")[1]) if name.startswith("layers.") else 0
        there = moved[name.replace(f"layers.{layer}.", f"layers.{2 * layer}.")].whole()
        assert torch.equal(there[tuple(map(slice, tensor.shape))], tensor.whole())
    new = [tensor.whole() for name, tensor in moved.items() if name.startswith(("layers.1.", "layers.3."))]
    assert len(new) >= 2 * 9 and not any(tensor.any() for tensor in new), "a new layer has no past, not that of another"
    by_setting = {"PRETRAIN_CHECKPOINT": base.checkpoint(4), "GROW_LAYERS": "2:4", "GROW_FFN_DIM": f"{width}:128"}
    run, parted = (TinyRun(prepared, tmp_path / name, **settings, **growth) for name, growth in (
        ("whole", {"PRETRAIN_CHECKPOINT": tmp_path / "grown"}), ("parted", by_setting)))
    for each in (run, parted):
        each.settings.pop("N_LAYERS")
        each.settings.pop("MULTIPLE_OF")
    assert run.train() == parted.train(STOP_STEP=6) == 0
    assert f"growing N_LAYERS from 2 to 4, and FFN_DIM from {width} to 128" in capsys.readouterr().out
    assert parted.train() == 0
    assert_same_run(run, parted, 8, logs=("ledger",))
    assert parted.train(MAX_STEPS=9, **dict.fromkeys(by_setting, "none")) == 0
    assert min(run.column("train_loss")) == 5 and len(run.hashes(8))


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ("none", "full"))
def test_two_ranks_grow_like_one_process(sharding, prepared, tmp_path):
    settings = {**UNMEASURED, "MAX_STEPS": 6, "OPTIMIZER": "muon", "REPRODUCIBLE": "true"}
    base = TinyRun(prepared, tmp_path / "base", **settings)
    assert base.train(STOP_STEP=4) == 0
    width = read_model_config(base.checkpoint(4)).hidden_dim
    growth = {"PRETRAIN_CHECKPOINT": base.checkpoint(4), "GROW_LAYERS": "2:3", "GROW_FFN_DIM": f"{width}:112"}
    alone, together = (TinyRun(prepared, tmp_path / name, **settings, **growth) for name in ("alone", "together"))
    for each in (alone, together):
        each.settings.pop("N_LAYERS")
        each.settings.pop("MULTIPLE_OF")
    assert alone.train() == 0
    together.ends([0, 0], SHARDING=sharding)
    assert alone.hashes(6) == together.hashes(6)


def test_only_the_new_layers_are_trained_and_exactly_after_a_resume(prepared, tmp_path):
    settings = {**UNMEASURED, "MAX_STEPS": 8}
    base = TinyRun(prepared, tmp_path / "base", **settings)
    assert base.train(STOP_STEP=4) == 0
    new = grow(base.checkpoint(4), 4, None, tmp_path / "grown")
    run = TinyRun(prepared, tmp_path / "whole", **settings, PRETRAIN_CHECKPOINT=tmp_path / "grown", TRAIN_ONLY="1,3", N_LAYERS=4)
    parted = TinyRun(prepared, tmp_path / "parted", **settings, PRETRAIN_CHECKPOINT=base.checkpoint(4), TRAIN_ONLY="new",
                     GROW_LAYERS="2:4")
    assert new == [1, 3] and run.train() == parted.train(STOP_STEP=6) == 0 and parted.train() == 0
    assert_same_run(run, parted, 8, logs=("ledger",))
    before, after = (huggingface.load_model_weights(folder) for folder in (tmp_path / "grown", run.checkpoint(8)))
    changed = {name for name in before if not torch.equal(before[name].whole(), after[name].whole())}
    assert changed == {name for name in before if name.startswith(("model.layers.1.", "model.layers.3."))}
    assert {name.split(".")[1] for name in store.read_optimizer(run.checkpoint(8))} == {"1", "3"}


@pytest.mark.parametrize("changes, words", (
    ({"train_only": "1,12"}, "TRAIN_ONLY=1,12 must be layers from 0 to 11"),
    ({"train_only": "new"}, "TRAIN_ONLY=new must be layers from 0 to 11, such as 0,1, or new with GROW_LAYERS"),
    ({"grow_layers": "2:4"}, "GROW_LAYERS=2:4 needs a checkpoint"),
    ({"grow_ffn_dim": "2:4", "pretrain_checkpoint": "a", "lora_enabled": True}, "GROW_FFN_DIM=2:4 conflicts with LORA_ENABLED=true"),
    ({"grow_layers": "2:4", "pretrain_checkpoint": "a", "keep_layers": 1}, "KEEP_LAYERS=1 conflicts with GROW_LAYERS"),
    ({"train_only": "1", "sharding": "full"}, "TRAIN_ONLY=1 does not work with SHARDING=full")))
def test_what_cannot_be_trained_alone_is_refused(changes, words):
    assert any(words in conflict for conflict in rules(Config(**changes)))


def test_what_cannot_grow_is_named(whole, prepared, tmp_path, capsys):
    start = TinyRun(prepared, tmp_path / "run", PRETRAIN_CHECKPOINT=whole.checkpoint(4), MAX_STEPS=5)
    for changes, words in (({"GROW_LAYERS": "4:2"}, "GROW_LAYERS"), ({"GROW_LAYERS": "many"}, "GROW_LAYERS"),
                           ({"GROW_LAYERS": "3:4"}, "GROW_LAYERS=3:4, but the model in"), ({"DIM": 96}, "DIM was 32, is 96"),
                           ({"GROW_FFN_DIM": "9:400"}, "GROW_FFN_DIM=9:400, but the model in")):
        assert start.train(**changes) in (2, 4, 5) and words in (error := capsys.readouterr().err), error
    config = Config(n_layers=4, no_rope_every=2, model_type="smollm3")
    with pytest.raises(SettingsError, match="would shift which layers have a window or no rotary embedding"):
        huggingface.grown({}, config, config.model_copy(update={"n_layers": 6}))
    windows = config.model_copy(update={"no_rope_every": None, "sliding_window": 8})  # every layer has one
    assert huggingface.grown({}, windows, windows.model_copy(update={"n_layers": 6})) == {}
