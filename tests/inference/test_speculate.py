"""With a draft, a text is the one that the model writes alone, whatever the draft proposes."""

import pytest
import torch

from config import ModelConfig
from inference.engine import Engine, Request, Sampling
from inference.generate import add_all
from inference.speculate import PROPOSED, Speculator
from inference.text import Prompt
from model import Transformer

VOCAB = 61
DRAWN = Sampling(temperature=1.0, top_p=0.9, top_k=20, seed=5)
PROMPTS = [Prompt(ids, frozenset({3})) for ids in ([1, 2, 9], [60], [*range(4, 60)] * 6)]  # one is read in pieces


def new_model(layers: int, seed: int = 0) -> Transformer:
    model = Transformer(ModelConfig(dim=32, n_layers=layers, n_heads=4, n_kv_heads=2, multiple_of=16, init_std=0.15,
                                    tie_embeddings=False), VOCAB)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model.eval()


def texts(engine: Engine, sampling: Sampling, count: int) -> list[Request]:
    requests = add_all(engine, PROMPTS, count, sampling)
    while not engine.idle:
        engine.step()
    return requests


@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("count", [1, 2, 40])
@pytest.mark.parametrize("draft", ["itself", "another", "similar"])
def test_a_text_does_not_depend_on_the_draft(draft, count, sampling):
    model = new_model(2)
    other = {"itself": model, "another": new_model(1, seed=9)}.get(draft) or new_model(2)
    if draft == "similar":
        with torch.no_grad():
            for parameter in other.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    alone = texts(Engine(model, 1, 400), sampling, count)
    engine = Speculator(model, other, 400)
    together = texts(engine, sampling, count)
    assert [(each.output_ids, each.finish_reason) for each in together] == [
        (each.output_ids, each.finish_reason) for each in alone]
    assert engine.proposed == 0 if count == 1 else 0 <= engine.accepted <= engine.proposed
    if draft == "itself":
        assert engine.accepted == engine.proposed
    elif count == 40:
        assert 0 < engine.accepted < engine.proposed, "some proposals are accepted, others are not"


def test_a_cancelled_text_leaves_nothing_to_the_next():
    model = new_model(2)
    engine = Speculator(model, model, 400)
    first, second, _ = add_all(engine, PROMPTS, 40, Sampling())
    for _ in range(PROPOSED):  # one checked token is left
        engine.step()
    engine.cancel(first)
    while second.finish_reason is None:
        assert engine.step() == [second]
    alone = Engine(model, 1, 400)
    expected = add_all(alone, PROMPTS[1:2], 40, Sampling())[0]
    while not alone.idle:
        alone.step()
    assert second.output_ids == expected.output_ids
