"""What is measured of the validation rows, compared with a direct computation over the logits."""

import json
import math
import os
import signal

import numpy as np
import pytest
import torch
from factories import TinyRun, assert_same_run
from torch.nn import functional as F

import train
from checkpoint.schema import ratio_error
from config import Config, PreferenceConfig
from dataloaders import Batch, open_rows, validation_batches
from evaluation import during_run
from evaluation.during_run import validation_loss
from extensions import evaluate
from extensions.inference.weights import load_model
from extensions.preferences import ORPO
from extensions.report.items import read_item_scores
from learn.objectives import NextToken
from parallel.ranks import Ranks, RunContext, StopSignals
from plan.make import make_plan
from tokenizer import load_tokenizer

ROWS = 5


@pytest.fixture
def measured(whole):
    config = make_plan(whole.argv()).config
    model, tokenizer = load_model(whole.checkpoint(6), dtype=torch.float32)[0], load_tokenizer(config.tokenizer_path)
    return model, tokenizer, open_rows(config, "validation", tokenizer, "never")


def measure(model, tokenizer, rows) -> tuple[float, dict[str, float]]:
    batches, context = validation_batches(rows, ROWS, 2, torch.device("cpu")), RunContext(Ranks(), StopSignals(), None)
    return validation_loss(model, NextToken(), batches, context, tokenizer.byte_lengths)


def test_perplexity_and_bits_per_byte_are_those_of_the_logits_and_the_bytes_of_the_text(measured, whole: TinyRun):
    model, tokenizer, rows = measured
    nats, targets, text = 0.0, 0, b""
    for batch in validation_batches(rows, ROWS, 1, torch.device("cpu")):
        with torch.no_grad():
            logits_BTV = model(batch.tokens_BT, document_ids_BT=batch.document_ids_BT, mode="logits")
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


def test_the_perplexity_of_pairs_is_by_token_of_the_chosen_answers(measured):
    """Two pairs, of 3 + 2 and 4 + 5 tokens, each answer in a row of its own for the direct computation."""
    model, tokenizer, _ = measured
    lengths, rng = (3, 2, 4, 5), torch.Generator().manual_seed(0)
    answers = [torch.randint(97, 123, (2, length), generator=rng) for length in lengths]  # tokens and targets
    tokens_BT, targets_BT = torch.cat(answers, dim=1)[:, None]
    document_ids_BT = torch.repeat_interleave(torch.arange(1, 5), torch.tensor(lengths))[None].int()
    context = RunContext(Ranks(), StopSignals(), None)
    loss, others, _ = validation_loss(model, ORPO(PreferenceConfig()), [Batch(tokens_BT, targets_BT, document_ids_BT)],
                                      context, tokenizer.byte_lengths, "pairs")
    with torch.no_grad():
        nats = sum(float(F.cross_entropy(model(answer[None, 0], mode="logits")[0], answer[1], reduction="sum")) for answer in answers[::2])
    assert others["perplexity"] == pytest.approx(math.exp(nats / 7), rel=1e-5)
    assert others["bits_per_byte"] == pytest.approx(nats / 7 / math.log(2), rel=1e-5), "each of these tokens is a byte"


def test_samples_of_a_step_are_the_same_and_those_of_another_step_differ(measured):
    model, tokenizer, _ = measured
    config = Config(sample_prompts="The cat|The dog", sample_temperature=1.0, sample_tokens=24)
    first, again, later = (evaluate.samples(model, tokenizer, config, step) for step in (10, 10, 20))
    assert first == again and all(one != other for one, other in zip(first, later))
    greedy = config.model_copy(update={"sample_temperature": 0.0})
    assert evaluate.samples(model, tokenizer, greedy, 10) == evaluate.samples(model, tokenizer, greedy, 20)


def test_the_error_of_a_ratio_is_cochrans():
    """By his formula of variances and covariance; of equal blocks it is that of their mean."""
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 90, 40).astype(float)
    losses = 3 + rng.normal(size=40) / counts**0.5
    sums, ratio = losses * counts, (losses * counts).sum() / counts.sum()
    (sums_sums, sums_counts), (_, counts_counts) = np.cov(sums, counts, ddof=1)
    variance = (sums_sums - 2 * ratio * sums_counts + ratio**2 * counts_counts) / (40 * counts.mean()**2)
    assert ratio_error(losses, counts) == pytest.approx(math.sqrt(variance))
    assert ratio_error(losses, np.full(40, 7)) == pytest.approx(losses.std(ddof=1) / math.sqrt(40))
    assert ratio_error(losses[:1], counts[:1]) is None


def test_every_evaluation_is_recorded_item_by_item(whole: TinyRun):
    found = {(entry.step, entry.name): entry for entry in read_item_scores(whole.folder / "evaluations.jsonl")}
    assert [*found] == [(0, "validation"), (0, "hellaswag"), (2, "validation"), (3, "hellaswag"), (4, "validation"),
                        (6, "validation"), (6, "hellaswag")]
    assert len({entry.items for entry in found.values()}) == 2
    for (step, name), entry in found.items():
        if name == "hellaswag":
            assert entry.scores["correct"].shape == (10,) and entry.scores["correct"].dtype == bool
            assert entry.scores["correct"].mean() == whole.column("hellaswag_acc")[step]
            assert entry.scores["correct_norm"].mean() == whole.column("hellaswag_acc_norm")[step]
        else:
            losses, counts = entry.scores["loss"], entry.scores["count"]
            assert np.average(losses, weights=counts) == pytest.approx(whole.column("val_loss")[step], rel=1e-6)
            assert ratio_error(losses, counts) == pytest.approx(whole.column("val_loss_stderr")[step], rel=1e-4)
            assert entry.kind == "rows"


@pytest.fixture(scope="module")
def sets(prepared, tmp_path_factory) -> str:
    folder, items = tmp_path_factory.mktemp("sets"), [json.loads(line) for line in prepared.items.read_text().splitlines()]
    for name, counts in (("pairs", (2, 2)), ("mixed", (2, 3))):
        records = [{"ctx": item["ctx"], "endings": item["endings"][:counts[number % 2]], "label": item["label"] % 2}
                   for number, item in enumerate(items)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return f"pairs:{folder / 'pairs.jsonl'}, mixed:{folder / 'mixed.jsonl'}"


def test_an_evaluation_interrupted_between_two_sets_is_completed_once(sets, tiny_run):
    """The signal comes before `pairs`; and again, without a save after the resume, before the step ends."""
    whole, run = tiny_run(EVAL_TASKS=sets, RUN_NAME="whole"), tiny_run(EVAL_TASKS=sets, SAVE_EVERY=5)
    assert whole.train() == 0
    calls, original = [0], during_run.multiple_choice

    def multiple_choice(run, choices):
        calls[0] += 1
        if calls[0] == 5:  # three before the first step, and HellaSwag after the third
            os.kill(os.getpid(), signal.SIGTERM)
        return original(run, choices)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(during_run, "multiple_choice", multiple_choice)
        assert run.train() == train.EXIT_PREEMPTED
    assert [line["name"] for line in run.lines("evaluations") if line["step"] == 3] == ["hellaswag"]
    copy = run.copy(run.output_dir.with_name("again"))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(evaluate, "samples", None)
        patch.setattr(train, "learning_rate", lambda *_: 1 / 0)  # dies in the step after
        copy.train()
    assert [line["name"] for line in copy.lines("evaluations") if line["step"] == 3] == ["hellaswag", "pairs", "mixed"]
    for resumed in (run, copy):
        assert resumed.train() == 0
        assert_same_run(resumed, whole, 6)
