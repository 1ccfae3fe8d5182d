"""The distributions from which tokens are drawn, against transformers' logits processors in the order of its generate()."""

import pytest
import torch

from extensions.inference import engine as module
from extensions.inference.engine import Sampling, SamplingTensors, choose, penalize

WAYS = [
    {"temperature": 0.7},
    {"top_k": 7},
    {"top_p": 0.8, "temperature": 1.3},
    {"min_p": 0.08},
    {"top_k": 12, "top_p": 0.75, "temperature": 0.9},
    {"top_p": 0.9, "min_p": 0.15, "temperature": 1.5},
    {"top_k": 9, "top_p": 0.95, "min_p": 0.02, "temperature": 2.0, "repetition_penalty": 1.4},
    {"repetition_penalty": 0.6, "top_p": 0.7},
    {"top_k": 1000},  # more than there are
]
SEEN = [34, 47, 47, 22, 39, 6]  # likely ones and unlikely ones, one of them twice


def logits_of(vocabulary: int, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(vocabulary, generator=torch.Generator().manual_seed(4)) * spread


def by_transformers(logits_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The probabilities that transformers' generate() draws from."""
    process = pytest.importorskip("transformers.generation.logits_process")
    scores, ids = logits_V[None].clone(), torch.tensor([SEEN])
    processors = [process.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
                  process.TemperatureLogitsWarper(sampling.temperature),
                  *([process.TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []),
                  *([process.TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []),
                  *([process.MinPLogitsWarper(sampling.min_p)] if sampling.min_p else [])]
    for processor in processors:
        scores = processor(ids, scores)
    return scores.softmax(-1)[0]


def drawn_shares(logits_V: torch.Tensor, sampling: Sampling, draws: int = 20_000) -> torch.Tensor:
    """How often each id comes, over draws that are spread evenly."""
    if sampling.repetition_penalty != 1:
        seen_V = torch.zeros(len(logits_V), dtype=torch.bool).index_fill(0, torch.tensor(SEEN), True)
        logits_V = penalize(logits_V, seen_V, torch.tensor(sampling.repetition_penalty))
    draws_B = (torch.arange(draws) + 0.5) / draws
    ids_B = choose(logits_V.expand(draws, -1), draws_B, SamplingTensors([sampling] * draws))
    return torch.bincount(ids_B, minlength=len(logits_V)) / draws


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("looked_at_first", [4, 512])
def test_distributions_are_those_of_transformers(way, looked_at_first, monkeypatch):
    """Also where the most likely tokens, which are looked at first, do not suffice."""
    monkeypatch.setattr(module, "TOP_CANDIDATES", looked_at_first)
    sampling = Sampling(**{"temperature": 1.0, **way})
    logits_V = logits_of(61)
    torch.testing.assert_close(drawn_shares(logits_V, sampling), by_transformers(logits_V, sampling), atol=1.5e-4, rtol=0)


def test_each_row_is_sampled_in_its_own_way():
    logits_V = logits_of(61)
    samplings = [Sampling(), Sampling(1.0), Sampling(), Sampling(0.5, top_k=3), Sampling(2.0, top_p=0.5, min_p=0.1)]
    draws_B = torch.tensor([0.1, 0.99, 0.5, 0.8, 0.9])
    together = choose(logits_V.expand(5, -1), draws_B, SamplingTensors(samplings))
    alone = [choose(logits_V[None], draws_B[[row]], SamplingTensors([sampling])) for row, sampling in enumerate(samplings)]
    assert torch.equal(together, torch.cat(alone))
    assert together[0] == together[2] == logits_V.argmax() and len({*together.tolist()}) > 2


def test_extremes_take_the_most_likely_token():
    logits_V = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    for extreme in ({"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}):
        assert drawn_shares(logits_V, Sampling(1.0, **extreme))[1] == 1
    assert drawn_shares(torch.tensor([0.0, 100.0, 99.0, 0.0]), Sampling(1e-37))[1] == 1, "100 / 1e-37 is no float32"


def test_the_largest_draw_stays_in_the_nucleus():
    """Where a device adds in another order, the draw's product with the sum can reach the sum: as a draw of 1 does."""
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(1))
    ranked = logits.argsort(descending=True)
    nucleus = (logits.softmax(-1).gather(1, ranked).cumsum(-1) < 0.5).sum(-1) + 1
    ids = choose(logits, torch.ones(200), SamplingTensors([Sampling(1.0, top_p=0.5)] * 200))
    assert torch.equal(ids, ranked.gather(1, nucleus[:, None] - 1)[:, 0])
    assert torch.equal(choose(logits, torch.zeros(200), SamplingTensors([Sampling(1.0, top_p=0.5)] * 200)), ranked[:, 0])


def test_by_id_a_draw_inverts_the_sum_of_the_probabilities_in_the_order_of_ids():
    logits_BV = 3 * torch.randn(200, 700, generator=torch.Generator().manual_seed(0))
    logits_BV[:, ::7] = -torch.inf
    draws_B = torch.rand(200, generator=torch.Generator().manual_seed(1))
    samplings = [Sampling(temperature=0.7, by_id=True)] * 200
    found = choose(logits_BV, draws_B, SamplingTensors(samplings))
    cumulative_BV = (logits_BV.double() / 0.7).softmax(-1).cumsum(-1)
    assert torch.equal(found, (cumulative_BV <= draws_B[:, None].double()).sum(-1))
    assert not (found % 7 == 0).any()
    for draw in (0.0, 1 - 2**-24):
        ends = choose(logits_BV, torch.full((200,), draw), SamplingTensors(samplings))
        assert (ends % 7 > 0).all() and (draw or (ends == 1).all())
    nan = choose(torch.full((2, 9), torch.nan), torch.tensor([0.0, 0.9]), SamplingTensors(samplings[:2]))
    assert ((nan >= 0) & (nan < 9)).all()
