import hashlib
import re
from types import SimpleNamespace

import pytest
import torch
from factories import new_model, run_ranks

from common.errors import CheckpointError, SettingsError
from config import Config, ModelConfig, OptimConfig
from learn import optim
from learn.optim import Muon, Optimizer
from model import Transformer
from model_utils import build_model
from parallel.fsdp import is_divided, local_rows, put
from parallel.ranks import Ranks, start_ranks, stop_ranks

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


WIDE = {"dim": 32, "n_layers": 5, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 77, "max_seq_len": 32, "total_batch_size": 128,
        "optimizer": "muon", "learning_rate": 0.01, "compile": False}


def hash_of_updates(settings: dict) -> None:
    """Take three steps, of which one is left out, with the same gradients on every rank.

    Prints how many matrices this rank orthogonalised, and on rank 0 a hash of all weights and optimizer state.
    """
    from torch.distributed.tensor import DTensor  # takes a second, and only these processes need it

    ranks, computed = start_ranks("cpu", 60), []
    config = Config(**WIDE | settings)
    model = build_model(config, 300, ranks, torch.float32)
    optimizer, iterate = Optimizer(model, config, ranks), optim.newton_schulz
    optim.newton_schulz = lambda matrices_PRC: computed.append(len(matrices_PRC)) or iterate(matrices_PRC)
    rng = torch.Generator().manual_seed(5)
    for left_out in (0.0, 1.0, 0.0):
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=rng)
            parameter.grad = torch.zeros_like(parameter)
            put(parameter.grad, gradient)
        optimizer.step(0.01, torch.tensor(2.0), torch.tensor(left_out))
        optimizer.zero_grad()
    tensors = {name: (local_rows(parameter), parameter) for name, parameter in model.named_parameters()}
    parameters = dict(model.named_parameters())
    for name, value in optimizer.state_tensors().items():
        tensors[name] = value, parameters[name.rpartition(".")[0]] if value.ndim else value
    digest = hashlib.sha256()
    for name, (rows, like) in sorted(tensors.items()):
        whole = rows if not is_divided(like) else DTensor.from_local(
            rows, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()).full_tensor()
        digest.update(name.encode() + whole.detach().numpy().tobytes())
    print(f"{digest.hexdigest()} after {sum(computed)} matrices", flush=True)
    stop_ranks()


FULL, HYBRID = {"sharding": "full"}, {"sharding": "hybrid", "shard_degree": 2}


def test_ranks_divide_the_matrices_of_muon_and_get_the_bits_of_one_process(tmp_path):
    def run(ranks: int, changes: dict) -> list[tuple[str, int]]:
        text = run_ranks(hash_of_updates, changes | {"world_size": ranks}, world_size=ranks, folder=tmp_path)
        return [(found[1], int(found[2])) for found in re.finditer(r"(\w{64}) after (\d+) matrices", text)]

    [(whole, every)] = run(1, {})
    assert every == 3 * 7 * WIDE["n_layers"]
    for world_size, settings, share in ((4, {}, 4), (4, HYBRID, 2), (3, FULL, 3)):
        found = run(world_size, settings)
        assert {digest for digest, _ in found} == {whole} and len(found) == world_size, settings
        counts = [count for _, count in found]
        assert sum(counts) == every * world_size // share and max(counts) <= 1.25 * every / share, (settings, counts)
