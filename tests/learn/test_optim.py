from types import SimpleNamespace

import pytest
import torch
from factories import new_model

from common.errors import CheckpointError, SettingsError
from config import ModelConfig, OptimConfig
from learn.optim import Muon, Optimizer
from model import Transformer
from parallel.ranks import Ranks

VOCAB = 100


def make_model() -> Transformer:
    return new_model(ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, multiple_of=16), VOCAB)


def test_the_minimum_is_a_tenth_of_the_peak_unless_it_is_set():
    assert OptimConfig(learning_rate=1e-3).final_learning_rate == pytest.approx(1e-4)
    assert OptimConfig(learning_rate=1e-3, min_learning_rate=0).final_learning_rate == 0


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_matrices_decay_and_norms_do_not(kind):
    model = make_model()
    optimizer = Optimizer(model, OptimConfig(optimizer=kind, weight_decay=0.5))
    decays = {optimizer.names[parameter]: group["weight_decay"] for part in optimizer.optimizers
              for group in part.param_groups for parameter in group["params"]}
    assert decays == {name: 0.5 if parameter.ndim == 2 else 0.0 for name, parameter in model.named_parameters()}


def test_the_state_of_other_parameters_is_not_taken():
    optimizer = Optimizer(make_model(), OptimConfig())
    source = Optimizer(other := make_model(), OptimConfig())
    (-other(torch.arange(9)[None], torch.arange(9)[None], mode="sum")).backward()
    source.step(0.01)
    state = source.state_tensors()
    bad = {"layers.9.wq.weight.exp_avg": torch.zeros(1), "norm.weight.exp_avg": torch.zeros(1), "norm.weight.exp_avg_sq": None,
           "norm.weight.step": torch.tensor(1)}
    for name, tensor in bad.items():
        spoiled = {key: value for key, value in {**state, name: tensor}.items() if value is not None}
        with pytest.raises(CheckpointError, match=f"does not belong to this model: {name} is "):
            optimizer.load_state_tensors(spoiled)
    assert optimizer.state_tensors() == {}
    optimizer.load_state_tensors({})  # of a checkpoint from before the first update
    assert optimizer.state_tensors() == {}


def test_muon_is_torchs_muon_in_float32():
    torch.manual_seed(0)
    shapes = [(8, 24), (24, 8), (8, 8), (8, 24)]
    actual, other = ([torch.nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    config = OptimConfig(learning_rate=0.1, muon_momentum=0.95)
    muon = Muon([{"params": actual, "weight_decay": 0.1}], config, SimpleNamespace(sharded={}, ranks=Ranks()))
    reference = torch.optim.Muon(other, lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for a, b in zip(actual, other):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        muon.step()
        reference.step()
    for a, b in zip(actual, other):
        assert torch.allclose(a, b, atol=0.02), (a - b).abs().max()  # theirs iterates in bf16
        assert not torch.allclose(b, torch.ones_like(b), atol=0.1)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_factors_are_the_rates_of_torchs_parameter_groups(kind):
    """One update of all from the same gradients; torch's Muon iterates in bf16."""
    factors = {"tok_embeddings.weight": 0.2, "layers.1.attention.wq.weight": 3.0, "norm.weight": 0.5}
    model, theirs = make_model(), dict(make_model().named_parameters())
    setting = "tok_embeddings*:0.2,layers.1.*.wq.weight:3,norm.*:0.5"
    optimizer = Optimizer(model, OptimConfig(optimizer=kind, learning_rate_factors=setting, weight_decay=0.5))

    def groups(is_chosen):
        return [{"params": [parameter], "lr": 0.01 * factors.get(name, 1), "weight_decay": 0.5 if parameter.ndim > 1 else 0}
                for name, parameter in theirs.items() if is_chosen(name, parameter)]

    def is_matrix(name, parameter):
        return kind == "muon" and name.startswith("layers.") and parameter.ndim > 1

    references = [torch.optim.AdamW(groups(lambda *of: not is_matrix(*of)), betas=(0.9, 0.95))]
    if kind == "muon":
        references.append(torch.optim.Muon(groups(is_matrix), adjust_lr_fn="match_rms_adamw"))
    before = {name: parameter.detach().clone() for name, parameter in theirs.items()}
    for (name, parameter), seed in zip(model.named_parameters(), range(100)):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        theirs[name].grad = parameter.grad.clone()
    optimizer.step(0.01)
    for reference in references:
        reference.step()
    for name, parameter in model.named_parameters():
        change, expected = parameter.detach() - before[name], theirs[name].detach() - before[name]
        coarse = is_matrix(name, parameter)
        torch.testing.assert_close(change, expected, rtol=0, atol=float(expected.abs().max()) * (0.1 if coarse else 1e-4))
        if coarse:  # its rounding hides no factor
            assert float(change.norm() / expected.norm()) == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("factors, message", [
    ("wq*:2", r"no trained parameter matches wq\*; the names are tok_embeddings.weight, layers.0"),
    ("tok_embeddings*:0.2,output*:0.004", r"no trained parameter matches output\*.* With TIE_EMBEDDINGS, the head is"),
    ("*norm*:2,layers.0.*:3", r"\*norm\* and layers.0.\* match layers.0.attention_norm.weight; remove one")])
def test_factors_without_one_meaning_are_refused(factors, message):
    with pytest.raises(SettingsError, match=message):
        Optimizer(make_model(), OptimConfig(learning_rate_factors=factors))
