"""Dropout: its statistics, its gradient, and on what its masks depend."""

import pytest
import torch
from factories import new_model
from torch import nn

from config import ModelConfig
from model import Dropout, choose_masks

ROWS, TOKENS, WIDTH = 8, 64, 96


class Places(nn.Module):
    """Some layers with dropout, as in a model."""

    def __init__(self, rate: float = 0.5, count: int = 3):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.drops = nn.ModuleList(Dropout(rate) for _ in range(count))


def kept(seed: int = 1, step: int = 2, first_row: int = 0, rows: int = ROWS, place: int = 0, rate: float = 0.5) -> torch.Tensor:
    """(B, T, D): where a place's mask keeps a number."""
    places = Places(rate)
    choose_masks(places, seed, step, first_row, rows)
    return places.drops[place](torch.ones(rows, TOKENS, WIDTH)) != 0


@pytest.mark.parametrize("rate", [1e-3, 0.1, 0.2, 0.5, 0.9])
def test_the_rate_and_the_scale_are_those_of_the_setting(rate):
    """Within four standard deviations: over all, over rows, tokens and columns."""
    is_dropped = ~kept(rate=rate, rows=32)
    assert abs(float(is_dropped.float().mean()) - rate) < 4 * (rate * (1 - rate) / is_dropped.numel())**0.5
    for axis in range(3):
        others = [each for each in range(3) if each != axis]
        counts, size = is_dropped.sum(dim=others), is_dropped.numel() // is_dropped.shape[axis]
        variances = (counts - rate * size).square() / (size * rate * (1 - rate))  # chi-square, each of mean 1
        assert abs(float(variances.mean()) - 1) < 4 * (2 / len(counts))**0.5
    places = Places(rate)
    choose_masks(places, 1, 2, 0, ROWS)
    x = torch.randn(ROWS, TOKENS, WIDTH)
    dropped = places.drops[0](x)
    torch.testing.assert_close(dropped, torch.where(dropped == 0, 0, x / (1 - rate)))


def test_masks_of_other_seeds_steps_rows_and_places_are_independent():
    mask = kept()
    others = [kept(seed=2), kept(step=3), kept(first_row=ROWS), kept(first_row=1), kept(place=1), kept(seed=2, step=1),
              mask.roll(1, 0), mask.roll(1, 1), mask.roll(1, 2), mask.roll((1, 1), (1, 2)), mask.roll((1, -1), (1, 2))]
    for other in others:
        correlation = float(torch.corrcoef(torch.stack([mask.flatten(), other.flatten()]).float())[0, 1])
        assert abs(correlation) * mask.numel()**0.5 < 4, "in standard deviations from 0"


def test_a_row_has_its_mask_in_any_micro_batch():
    whole = kept()
    for first, rows in ((0, 1), (1, 3), (4, 4)):
        assert torch.equal(kept(first_row=first, rows=rows), whole[first:first + rows])


def test_gradients_pass_the_mask_and_the_scale():
    """By finite differences."""
    places = Places(0.3)
    choose_masks(places, 1, 2, 0, 2)
    x = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(places.drops[1], x)
    gradient, = torch.autograd.grad(places.drops[1](x).sum(), x)
    torch.testing.assert_close(gradient, (places.drops[1](x) != 0).double() / 0.7)


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiler_gives_the_same_bits(dtype):
    places, x = Places(0.2), torch.randn(3, 16, 32).to(dtype)
    choose_masks(places, 1, 2, 0, 3)
    compiled = torch.compile(places.drops[0], fullgraph=True)
    try:
        assert torch.equal(compiled(x), places.drops[0](x))
        choose_masks(places, 1, 3, 0, 3)  # without another compilation
        with torch.compiler.set_stance("fail_on_recompile"):
            assert torch.equal(compiled(x), places.drops[0](x))
    finally:
        torch._dynamo.reset()


def tiny(**settings):
    return new_model(ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, multiple_of=16, init_std=0.2, **settings), 64)


def gradients(model, tokens_BT):
    model.zero_grad()
    choose_masks(model, 1, 2, 0, len(tokens_BT))
    (-model(tokens_BT[:, :-1], tokens_BT[:, 1:], mode="sum")).backward()
    return [parameter.grad for parameter in model.parameters()]


def test_a_recomputation_has_the_same_masks():
    tokens_BT = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))
    plain = gradients(tiny(dropout=0.3), tokens_BT)
    recomputed = gradients(tiny(dropout=0.3, activation_checkpointing="block"), tokens_BT)
    assert all(map(torch.equal, plain, recomputed))
    assert not torch.equal(plain[0], gradients(tiny(), tokens_BT)[0])


def test_embeddings_and_both_branches_of_a_block_have_dropout():
    """Those of GPT-2 in transformers: embd_pdrop and resid_pdrop. With nearly all dropped, only the rest remains."""
    model, tokens_BT, nearly_all = tiny(), torch.arange(16).view(2, 8), 1 - 1e-9
    block, seen = model.layers[0], []
    block.register_forward_hook(lambda _, given, output: seen.append((given, output)))

    def run(*dropped: Dropout):
        for module in (model.embedding_drop, block.attention_drop, block.ffn_drop):
            module.rate = nearly_all if module in dropped else 0.0
        choose_masks(model, 1, 2, 0, 2)
        model(tokens_BT, mode="hidden")
        return seen.pop()

    (x, plan), whole = run()
    attended = block.attention(block.attention_norm(x), plan)
    torch.testing.assert_close(run(block.attention_drop)[1], x + block.feed_forward(block.ffn_norm(x)))
    torch.testing.assert_close(run(block.ffn_drop)[1], x + attended)
    assert not run(model.embedding_drop)[0][0].any() and not torch.equal(whole, x)
