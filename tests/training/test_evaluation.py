"""What is measured of the validation rows, compared with a direct computation over the logits."""

import math

import pytest
import torch
from factories import TinyRun
from torch.nn import functional as F

from data_pipeline.batch import Batch
from dataloaders import open_rows, validation_batches
from fused.chunked_head import IGNORE_INDEX
from model_utils import load_model
from objectives.base import NextToken
from parallel.collectives import Ranks, RunContext, StopSignals
from settings.load import load_config
from tokenizer import load_tokenizer
from training.evaluation import validation_loss

ROWS = 5


@pytest.fixture
def measured(whole):
    """A trained model, its tokenizer and its validation rows."""
    config = load_config(whole.argv()).config
    model, tokenizer = load_model(whole.checkpoint(6))[0], load_tokenizer(config.tokenizer_path)
    return model, tokenizer, open_rows(config, "validation", tokenizer, "never")


def measure(model, tokenizer, rows) -> tuple[float, dict[str, float]]:
    batches, context = validation_batches(rows, ROWS, 2, torch.device("cpu")), RunContext(Ranks(), StopSignals(), None)
    return validation_loss(model, NextToken(), batches, context, tokenizer.byte_lengths)


def test_perplexity_and_bits_per_byte_are_those_of_the_logits_and_the_bytes_of_the_text(measured, whole: TinyRun):
    model, tokenizer, rows = measured
    nats, targets, text = 0.0, 0, b""
    for batch in validation_batches(rows, ROWS, 1, torch.device("cpu")):
        with torch.no_grad():
            logits_BTV = model.logits(batch.tokens_BT, batch.document_ids_BT)
        nats += float(F.cross_entropy(logits_BTV[0], batch.targets_BT[0], reduction="sum"))
        targets += batch.targets_BT.numel()
        for token in batch.targets_BT[0].tolist():
            if token not in tokenizer.special_ids.values():
                text += tokenizer._encoding.decode_single_token_bytes(token)
    loss, others, _ = measure(*measured)
    assert b"The " in text and loss == pytest.approx(nats / targets, rel=1e-5)
    assert others == {"perplexity": pytest.approx(math.exp(nats / targets), rel=1e-5),
                      "bits_per_byte": pytest.approx(nats / math.log(2) / len(text), rel=1e-5)}
    logged = {name: whole.column(f"val_{name}")[6] for name in ("loss", *others)}
    assert logged == pytest.approx({"loss": loss, **others}, rel=1e-5)


def test_a_tokenizer_that_is_not_byte_level_gives_no_bits_per_byte_and_a_hopeless_model_infinite_perplexity():
    class Hopeless(NextToken):
        def loss_sum(self, model, batch):
            summed = super().loss_sum(model, batch)
            return summed._replace(total=summed.total + 10_000)

    batch = Batch(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[1, IGNORE_INDEX]]))
    no_model = type("Model", (torch.nn.Module,), {"forward": lambda self, *_, **__: torch.zeros(())})()
    context = RunContext(Ranks(), StopSignals(), None)
    assert validation_loss(no_model, NextToken(), [batch], context)[:2] == (0, {"perplexity": 1})
    assert validation_loss(no_model, Hopeless(), [batch], context)[1] == {"perplexity": math.inf}
