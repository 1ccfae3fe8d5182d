"""merge_checkpoints.py: each number is the exact weighted mean, rounded once."""

from fractions import Fraction
from shutil import copytree

import pytest
import torch
from factories import flip_bit

from checkpoint import store
from checkpoint.huggingface import load_model_weights
from common.errors import CheckpointError
from extensions.inference.weights import load_model
from scripts.merge_checkpoints import merge


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


def test_other_models_and_damaged_ones_are_refused(whole, tmp_path):
    other = copytree(whole.checkpoint(6), tmp_path / "step-00000009")
    flip_bit(other / "model.safetensors")
    with pytest.raises(CheckpointError, match="model.safetensors"):
        merge([whole.checkpoint(6), other], (1, 1), tmp_path / "mean")
    (other / "MANIFEST.json").unlink()
    (other / "config.json").write_text((other / "config.json").read_text().replace('"rope_theta": 500000.0', '"rope_theta": 10000.0'))
    with pytest.raises(CheckpointError, match="different models"):
        merge([whole.checkpoint(6), other], (1, 1), tmp_path / "mean")
    assert not (tmp_path / "mean").exists()
