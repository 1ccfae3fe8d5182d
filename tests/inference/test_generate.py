"""Sampling: the cache, the padding and the batch change nothing; seeds, stops and nuclei do what they say."""

import pytest
import torch

from config import ModelConfig
from inference.engine import Sampling, Samplings, choose
from inference.generate import generate
from model import Transformer

VOCAB = 61  # not a multiple of 128: the padded ids are there to be drawn by mistake
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9], [30, 8, 17], [5, 5, 5, 5]]


@pytest.fixture(scope="module")
def model() -> Transformer:
    """Random weights, wide enough that the likeliest token changes from step to step."""
    model = Transformer(ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, multiple_of=16, tie_embeddings=False), VOCAB)
    model.init_weights(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.ndim == 2 else 1)
    return model


def without_cache(model: Transformer, prompt: list[int], length: int) -> list[int]:
    """Greedy continuation that reads everything again for each token."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(length):
            tokens.append(int(model.logits(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt):]


def test_a_batch_with_cache_equals_each_prompt_alone_without(model):
    expected = [without_cache(model, prompt, 20) for prompt in PROMPTS]
    assert generate(model, PROMPTS, 20) == expected
    assert len({token for row in expected for token in row}) > 8, "a model that repeats itself would prove little"


def test_sampling_depends_on_the_seed_and_not_on_the_neighbours(model):
    def sampled(prompts: list[list[int]], seed: int) -> list[list[int]]:
        return generate(model, prompts, 12, Sampling(temperature=1.0, top_p=0.9, seed=seed))

    together = sampled(PROMPTS, 3)
    assert together == sampled(PROMPTS, 3)
    assert together != sampled(PROMPTS, 4)
    assert together[:1] == sampled(PROMPTS[:1], 3)
    assert together[0] == sampled([PROMPTS[0], [60] * 11], 3)[0]


def test_a_row_that_stops_early_ends_there_and_disturbs_nobody(model):
    free = generate(model, PROMPTS, 20)
    stop = free[0][4]
    stopped = generate(model, PROMPTS, 20, stop_ids={stop})
    assert stopped == [row[:row.index(stop)] if stop in row else row for row in free]
    assert len(stopped[0]) <= 4


def test_no_padded_id_is_ever_drawn(model):
    written = generate(model, PROMPTS, 50, Sampling(temperature=50.0))
    assert max(token for row in written for token in row) < VOCAB


def test_edges(model):
    assert generate(model, [], 5) == []
    assert generate(model, PROMPTS, 0) == [[]] * 4
    assert [len(row) for row in generate(model, PROMPTS, 1)] == [1] * 4


@pytest.mark.parametrize("training", [True, False])
def test_mode_and_gradients_are_left_as_they_were(model, training):
    model.train(training)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        logits = model.logits
        patch.setattr(model, "logits", lambda *args, **options: seen.append((model.training, torch.is_grad_enabled()))
                      or logits(*args, **options))
        generate(model, [[1]], 2)
    assert seen == [(False, False)] * 2
    assert model.training is training and model.layers[0].training is training and torch.is_grad_enabled()


def drawn_share(logits: list[float], **how) -> torch.Tensor:
    """How often each id comes, over draws that are spread evenly."""
    draws = (torch.arange(10_000) + 0.5) / 10_000
    samplings = Samplings([Sampling(**{"temperature": 1.0, **how})] * len(draws))
    ids = choose(torch.tensor(logits).expand(len(draws), -1), draws, samplings)
    return torch.bincount(ids, minlength=len(logits)) / len(draws)


def test_choices_follow_the_tempered_distribution():
    logits = [0.0, 2.0, -1.0, 1.0]
    for temperature in (0.5, 1.0, 3.0):
        expected = (torch.tensor(logits) / temperature).softmax(0)
        torch.testing.assert_close(drawn_share(logits, temperature=temperature), expected, atol=2e-4, rtol=0)


def test_nucleus_and_top_k_cut_the_tail_and_keep_the_proportions():
    probabilities = torch.tensor([0.1, 0.5, 0.15, 0.25])
    logits = probabilities.log().tolist()
    torch.testing.assert_close(drawn_share(logits, top_p=0.7), torch.tensor([0, 2 / 3, 0, 1 / 3]), atol=2e-4, rtol=0)
    torch.testing.assert_close(drawn_share(logits, top_k=3), torch.tensor([0, 5 / 9, 1.5 / 9, 2.5 / 9]), atol=2e-4, rtol=0)
    assert drawn_share(logits, top_p=1e-9)[1] == 1
    assert drawn_share(logits, top_k=1)[1] == 1
    assert drawn_share([0.0, 100.0, 99.0, 0.0], temperature=1e-37)[1] == 1, "100 / 1e-37 is no float32"


def test_the_largest_draw_stays_in_the_nucleus():
    """Where a device adds in another order, the draw's product with the sum can reach the sum: as a draw of 1 does."""
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(1))
    ranked = logits.argsort(descending=True)
    nucleus = (logits.softmax(-1).gather(1, ranked).cumsum(-1) < 0.5).sum(-1) + 1
    ids = choose(logits, torch.ones(200), Samplings([Sampling(1.0, top_p=0.5)] * 200))
    assert torch.equal(ids, ranked.gather(1, nucleus[:, None] - 1)[:, 0])
    assert torch.equal(choose(logits, torch.zeros(200), Samplings([Sampling(1.0, top_p=0.5)] * 200)), ranked[:, 0])
