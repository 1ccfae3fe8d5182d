"""resize_checkpoint.py: a larger model computes the same, a smaller one is some of its layers; and merged ones.

Runs that start from them continue exactly.
"""

from fractions import Fraction

import pytest
import torch
from factories import UNMEASURED, TinyRun, assert_same_run

from checkpoint import huggingface, store
from checkpoint.huggingface import load_model_weights
from checkpoint.model_json import read_model_config
from checkpoint.tensors import read_optimizer
from common.errors import CheckpointError, SettingsError
from extensions.inference.weights import load_model
from scripts.merge_checkpoints import merge
from scripts.resize_checkpoint import resize


@pytest.mark.parametrize("layers, ffn_dim, allowed", ((7, None, 0.0), (4, 112, 1e-6)))
def test_the_logits_stay(layers, ffn_dim, allowed, whole, tmp_path):
    source = whole.checkpoint(4)
    resize(source, layers, ffn_dim, tmp_path / "grown")
    store.verify(tmp_path / "grown")
    (before, _), (after, _) = (load_model(folder, torch.device("cpu"), torch.float32) for folder in (source, tmp_path / "grown"))
    assert (len(after.layers), after.config.hidden_dim) == (layers or 2, ffn_dim or before.config.hidden_dim)
    tokens = torch.arange(64).reshape(2, 32)
    assert (before(tokens, mode="logits") - after(tokens, mode="logits")).abs().max() <= allowed
    # Every new parameter gets a gradient now or, behind a zero matrix, after the first update.
    (-after(tokens, tokens, mode="sum")).backward()
    assert all(block.attention.wo.weight.grad.any() and block.feed_forward.w2.weight.grad.any(dim=0).all() for block in after.layers)
    with pytest.raises(CheckpointError, match="already exists"):
        resize(source, 3, None, tmp_path / "grown")
    with pytest.raises(SettingsError, match="has 2 layers and feed-forwards of"):
        resize(source, None, 80, tmp_path / "narrower")


def test_fewer_layers_are_the_first_ones_without_a_trainer_state(whole, tmp_path):
    source = whole.checkpoint(4)
    assert resize(source, 1, None, tmp_path / "cut") == []
    before, after = (huggingface.load_model_weights(folder) for folder in (source, tmp_path / "cut"))
    assert after.keys() == {name for name in before if not name.startswith("model.layers.1.")}
    assert all(torch.equal(after[name].full(), before[name].full()) for name in after)
    assert store.read_state(tmp_path / "cut") == {} and read_model_config(tmp_path / "cut").n_layers == 1


def test_every_second_layer_of_a_grown_model_is_the_model_again(whole, tmp_path):
    resize(whole.checkpoint(4), 4, None, tmp_path / "grown")
    resize(tmp_path / "grown", 2, None, tmp_path / "half", evenly=True)
    before, after = (huggingface.load_model_weights(folder) for folder in (whole.checkpoint(4), tmp_path / "half"))
    assert before.keys() == after.keys() and all(torch.equal(after[name].full(), before[name].full()) for name in before)


@pytest.mark.parametrize("optimizer, dim, changes", [
    ("adamw", 128, {}), ("muon", 128, {}), ("adamw", None, {"TRAIN_ONLY": "1,3"})])
def test_a_run_goes_on_and_resumes_exactly(optimizer, dim, changes, prepared, tmp_path):
    settings = {**UNMEASURED, "MAX_STEPS": 8, "OPTIMIZER": optimizer}
    base = TinyRun(prepared, tmp_path / "base", **settings)
    assert base.train(STOP_STEP=4) == 0
    assert resize(base.checkpoint(4), 4, dim, tmp_path / "grown") == [1, 3]
    kept, moved = (read_optimizer(folder) for folder in (base.checkpoint(4), tmp_path / "grown"))
    for name, tensor in kept.items():  # of 2 layers, each is followed by a new one
        layer = int(name.split(".")[1]) if name.startswith("layers.") else 0
        there = moved[name.replace(f"layers.{layer}.", f"layers.{2 * layer}.")].full()
        assert torch.equal(there[tuple(map(slice, tensor.shape))], tensor.full())
    new = [tensor.full() for name, tensor in moved.items() if name.startswith(("layers.1.", "layers.3."))]
    assert len(new) >= 2 * 9 and not any(tensor.any() for tensor in new), "a new layer has no past of another"
    settings |= changes | {"PRETRAIN_CHECKPOINT": tmp_path / "grown"}
    run, parted = (TinyRun(prepared, tmp_path / name, **settings) for name in ("whole", "parted"))
    for each in (run, parted):
        each.settings.pop("N_LAYERS")
        each.settings.pop("MULTIPLE_OF")
    assert run.train() == parted.train(STOP_STEP=6) == 0
    assert parted.train() == 0
    assert_same_run(run, parted, 8, logs=("ledger",))
    if changes:  # only the new layers are trained
        folders = (tmp_path / "grown", run.checkpoint(8))
        before, after = map(huggingface.load_model_weights, folders)
        changed = {name for name in before if not torch.equal(before[name].full(), after[name].full())}
        assert changed == {name for name in before if name.startswith(("model.layers.1.", "model.layers.3."))}
        assert {name.split(".")[1] for name in read_optimizer(run.checkpoint(8))} == {"1", "3"}
    assert parted.train(MAX_STEPS=9, PRETRAIN_CHECKPOINT="none") == 0
    assert min(run.column("train_loss")) == 5 and len(run.hashes(8))


def test_numbers_are_exact_weighted_means(whole, tmp_path):
    folders, weights = [whole.checkpoint(step) for step in (2, 4, 6)], (1.0, 2.0, 0.5)
    merge(folders, weights, tmp_path / "mean")
    store.verify_model(tmp_path / "mean")
    values, found = [*map(load_model_weights, folders)], load_model_weights(tmp_path / "mean")
    assert found.keys() == values[0].keys() and load_model(tmp_path / "mean")[1].vocab_size
    for name, tensor in found.items():
        columns = [each[name].full().flatten() for each in values]
        for index in range(0, len(columns[0]), 97):  # rounded from the exact fraction
            exact = sum(Fraction(weight) * Fraction(float(column[index])) for weight, column in zip(weights, columns)) / Fraction(sum(weights))
            assert float(tensor.full().flatten()[index]) == torch.tensor(float(exact), dtype=torch.float64).float()
    assert "checkpoints/step-00000004, weight 2" in (tmp_path / "mean" / "README.md").read_text()
    with pytest.raises(CheckpointError, match="already exists"):
        merge(folders, weights, tmp_path / "mean")
