"""EXCLUDE_DATA leaves out exactly what it names, and nothing else changes."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from factories import UNMEASURED, Stages, TinyRun
from torch.nn import functional as F

import extensions.preferences  # noqa: F401 (registers its objectives)
from dataloaders import Mixing, RowOrder, open_rows
from extensions.debug.replay import replay
from extensions.exclude import Examples, digest_of, exclude
from extensions.online import training_batch
from extensions.settings import Selector
from learn.objectives import PREFERENCE_OBJECTIVES, NextToken
from learn.optim import Optimizer, clip_scale, gradient_norm, learning_rate
from model_kernels.head import IGNORE_INDEX
from model_utils import build_model
from parallel.ranks import Ranks
from plan.layers import read_flags
from plan.make import make_plan
from tokenizer import load_tokenizer

WIDE = {"MAX_SEQ_LEN": 256, "TOTAL_BATCH_SIZE": 1024, "MICRO_BATCH_SIZE": 4}  # several pairs in a row


def opened(stages: Stages, mode: str, **changes):
    """The settings, rows and tokenizer of a run of this mode."""
    settings = stages.settings(mode) if mode != "pretrain" else stages.prepared.settings()
    run = TinyRun(stages.prepared, stages.prepared.shards.parent, **settings | changes)
    config = make_plan(run.argv()).config
    tokenizer = load_tokenizer(config.tokenizer_path, "auto")
    return config, open_rows(config, "train", tokenizer, "never"), tokenizer


def excluded_file(folder: Path, *lines: str) -> Path:
    path = folder / "excluded.txt"
    path.write_text("# what is left out\n\n" + "".join(f"{line}\n" for line in lines))
    return path


def hit(rows, tokenizer, *lines: str) -> list[bool]:
    (source,) = exclude(rows, tokenizer, [Selector(*line.split(" ", 1)) for line in lines]).rows.sources
    return source.out_E.tolist()


WORDS = {"pretrain": "^The cow", "sft": "bird dog", "simpo": r"(?m)^[a-h]\?", "kto": "cat", "grpo": "[aeiou]at"}


@pytest.mark.parametrize("mode", WORDS)
def test_examples_are_named_by_pattern_hash_and_line(mode, stages):
    _, rows, tokenizer = opened(stages, mode)
    examples = Examples(rows.sources[0], "", tokenizer)
    texts = [examples.text(number) for number in range(len(examples))]
    expected = [re.search(WORDS[mode], text) is not None for text in texts]
    assert 0 < sum(expected) < len(texts) and hit(rows, tokenizer, f"find {WORDS[mode]}") == expected
    digest = digest_of(examples.ids(3))
    assert hit(rows, tokenizer, f"hash {digest}") == [digest_of(examples.ids(number)) == digest for number in range(len(examples))]
    assert hit(rows, tokenizer, "find nothing like it", "hash 0123456789abcdef") == [False] * len(texts)


@pytest.mark.parametrize(("mode", "name"), [("pretrain", "text"), ("sft", "chats"), ("simpo", "pairs"), ("grpo", "prompts")])
def test_a_line_of_the_source_names_the_example_that_it_became(mode, name, stages):
    _, rows, tokenizer = opened(stages, mode)
    path = (stages.prepared.shards if mode == "pretrain" else stages.chats).parents[1] / f"{name}.jsonl"
    examples, records = Examples(rows.sources[0], "", tokenizer), [json.loads(line) for line in path.read_text().splitlines()]
    texts, found = [examples.text(number) for number in range(len(examples))], 0

    def words(record) -> str:
        parts = [message["content"] for message in record["messages"]] if "messages" in record else [*record.values()][:1 if mode == "grpo" else None]
        return "".join(parts)

    for number in range(0, len(records), 17):
        out = hit(rows, tokenizer, f"line {path}:{number + 1}")
        found += any(out)
        for text, is_out in zip(texts, out):
            words_of_text = re.sub(r"(?m)^(user|assistant)$|\n", "", text)
            assert not is_out or words_of_text == words(records[number]).replace("\n", "")
    assert found >= 3, "most records are in the training split"
    assert hit(rows, tokenizer, f"source {path}") == [True] * len(texts)


# --------------------------------------------------------------------------------------------- in a batch


def masked_by_hand(rows, tokenizer, pattern: str, row: int) -> tuple[list[int], list[int]]:
    """A row's tokens and targets, where each token of an excluded document is neither a target nor has one."""
    (rows,) = rows.sources
    flat, is_out, document = rows.token_set.read(0, rows.token_set.tokens).tolist(), [], []
    for token in [*flat, rows.document_start_id]:
        if token == rows.document_start_id and document:
            is_out += [re.search(pattern, tokenizer.decode(document)) is not None] * len(document)
            document = []
        document.append(token)
    first = row * rows.row_tokens
    return flat[first:first + rows.row_tokens], [
        IGNORE_INDEX if is_out[place] or is_out[place + 1] else flat[place + 1] for place in range(first, first + rows.row_tokens)]


def test_the_steps_that_are_affected_are_those_whose_targets_change(stages):
    """Also by a document of which a row has only the first token, as its last target."""
    _, rows, tokenizer = opened(stages, "pretrain", MAX_SEQ_LEN=16)
    excluded = exclude(rows, tokenizer, [Selector("find", "cow met")])
    batches, first = [], excluded.rows.sources[0].source.starts_E
    for row in range(len(rows)):
        before, after = (each(np.array([row])).targets_BT[0] for each in (rows, excluded.rows))
        assert excluded.affects(np.array([row])) == (not torch.equal(before, after))
        batches.append([*np.flatnonzero(before != after)])
    assert [15] in batches and [] in batches and any((first % 16 == 0)[excluded.rows.sources[0].out_E.nonzero()])


def test_a_run_without_documents_is_a_loop_over_rows_masked_by_hand(stages, tmp_path):
    """Losses and weights of an own loop over cross-entropies of all logits."""
    settings = {**UNMEASURED, "MAX_STEPS": 4, "KEEP_LAST": 1}
    run = TinyRun(stages.prepared, tmp_path, **settings, EXCLUDE_DATA=excluded_file(tmp_path, "find cow met", "find fed the dog")).trained()
    config, rows, tokenizer = opened(stages, "pretrain", **settings)
    order = RowOrder(Mixing((len(rows),)), config.rows_read, config.rows_read, config.row_seed)
    model = build_model(config, tokenizer.vocab_size, Ranks(), torch.float32)
    optimizer, masked = Optimizer(model, config), 0
    counted = [line["counted"] for line in run.metrics() if "counted" in line]
    for step, line in enumerate(run.lines("ledger")):
        losses, units = 0, 0
        for row in order.all_rows(step).tolist():
            tokens, targets = masked_by_hand(rows, tokenizer, "cow met|fed the dog", row)
            documents = np.cumsum([place == 0 or token == rows.sources[0].document_start_id for place, token in enumerate(tokens)])
            logits_BTV = model(torch.tensor([tokens]), None, torch.from_numpy(documents[None].astype(np.int32)), mode="logits")
            losses = losses + F.cross_entropy(logits_BTV[0].float(), torch.tensor(targets), ignore_index=IGNORE_INDEX, reduction="sum")
            units, masked = units + sum(target != IGNORE_INDEX for target in targets), masked + targets.count(IGNORE_INDEX)
        assert units == counted[step]
        optimizer.zero_grad()
        (losses / units).backward()
        norm = gradient_norm(model)
        optimizer.step(learning_rate(step, config), clip_scale(norm, config.max_grad_norm), torch.zeros(()))
        assert float(losses.detach()) / units == pytest.approx(line["loss"], rel=2e-6) and float(norm) == pytest.approx(line["grad_norm"], rel=1e-4)
    assert masked > 100


def zeros(batch) -> torch.Tensor:
    return torch.zeros(len(batch.tokens_BT), int(batch.document_ids_BT.max()) // 2, 2)


def gradients(objective, model, batches) -> tuple[list[torch.Tensor], int]:
    """The gradients of the sum over units, and their number."""
    model.zero_grad()
    for batch in batches:
        objective.loss_sum(model, batch).total.backward()
    return [p.grad.clone() for p in model.parameters()], sum(int(objective.count(batch)) for batch in batches)


@pytest.mark.parametrize("mode", ["sft", "simpo", "dpo-live", "orpo"])
def test_what_is_left_out_has_no_gradient(mode, stages):
    """The gradients are those of the other examples, each in a row of its own."""
    config, rows, tokenizer = opened(stages, mode, **WIDE)
    model = build_model(config, tokenizer.vocab_size, Ranks(), torch.float32)
    objective = NextToken() if mode == "sft" else PREFERENCE_OBJECTIVES[config.preference_objective](config, zeros)
    word = "bird" if mode == "sft" else r"(?m)^[a-h]\?"
    excluded = exclude(rows, tokenizer, [Selector("find", word)])
    (source,), indices = excluded.rows.sources, np.arange(3)
    examples, per_example = [each.tolist() for each in source.source.in_rows(indices)], 1 if mode == "sft" else 2
    weights, count = gradients(objective, model, [excluded.rows(indices)])
    alone, places = [], [(row, place) for row, numbers in enumerate(examples) for place, example in enumerate(numbers)
                         if not source.out_E[example]]
    for row, place in places:
        whole, first, last = rows(np.array([row])), per_example * place + 1, per_example * (place + 1)
        inside = (whole.document_ids_BT[0] >= first) & (whole.document_ids_BT[0] <= last)
        ids = whole.document_ids_BT[:, inside] - first + 1
        targets_BT = whole.targets_BT[:, inside]
        alone.append(type(whole)(whole.tokens_BT[:, inside], targets_BT, ids,
                                 (targets_BT.flatten() != IGNORE_INDEX).nonzero().flatten()))
    others, other_count = gradients(objective, model, alone)
    assert 3 < len(places) < sum(map(len, examples)) and count == other_count == len(places) if mode != "sft" else count == other_count
    for one, other in zip(weights, others):
        assert float((one - other).abs().max()) <= 1e-5 * float(other.abs().max())


def test_left_out_prompts_have_no_targets_and_the_others_keep_their_answers(stages):
    _, rows, tokenizer = opened(stages, "grpo")
    excluded = exclude(rows, tokenizer, [Selector("find", "[a-m]at")])
    indices = np.arange(8)
    prompts, kept = rows(indices), excluded.rows(indices)
    is_out = [bool(excluded.rows.sources[0].out_E[each[0]]) for each in excluded.rows.sources[0].source.in_rows(indices)]
    answers, advantages_PG = [[5, 6, 7], [8, 9]] * 8, torch.ones(8, 2)
    one, other = (training_batch(each, answers, advantages_PG, 2, 1, 200) for each in (prompts, kept))
    for field in ("tokens_BT", "document_ids_BT"):
        assert torch.equal(getattr(one, field), getattr(other, field))
    assert 0 < sum(is_out) < 8
    for row, left_out in enumerate(is_out):
        targets_T = other.targets_BT[row]
        assert bool((targets_T == IGNORE_INDEX).all()) if left_out else torch.equal(targets_T, one.targets_BT[row])


# ------------------------------------------------------------------------------------------------ in a run

MODES = ["pretrain", "sft", "dpo-stored", "kto", "distilled", "lora-sft", "grpo", "gkd"]


def run_of(mode: str, stages: Stages, folder: Path, **changes) -> TinyRun:
    settings = stages.settings(mode) if mode != "pretrain" else {}
    return TinyRun(stages.prepared, folder, **settings | {"SAVE_EVERY": 1, "KEEP_LAST": 9, "MAX_STEPS": 3, "REPORT": "false"} | changes)


@pytest.mark.parametrize("mode, changes", [
    ("pretrain", {}),
    ("pretrain", {"WEIGHT_DTYPE": "bf16", "UPDATE_IN_BACKWARD": "true", "MAX_GRAD_NORM": 0, "MICRO_BATCH_SIZE": 8}),
    *(pytest.param(mode, {}, marks=pytest.mark.slow) for mode in MODES[1:])])
def test_a_step_without_targets_counts_and_changes_no_weight(mode, changes, stages, tmp_path, capsys):
    run = run_of(mode, stages, tmp_path, EXCLUDE_DATA=excluded_file(tmp_path, "find ."), VALIDATE_EVERY=0, **changes).trained()
    assert capsys.readouterr().err.count("step 1 has no targets: it counts, but changes no weight") == 1
    weights = [{name: digest for name, digest in run.hashes(step).items() if name != "optimizer.safetensors"} for step in (1, 3)]
    assert weights[0] == weights[1]
    assert [(line["loss"], line["updated"]) for line in run.lines("ledger")] == [(None, False)] * 3
    assert [line["counted"] for line in run.metrics() if "counted" in line] == [0] * 3
    rates = [line["learning_rate"] for line in run.metrics() if "learning_rate" in line]
    assert rates[0] < rates[1], "the schedule goes on"


def test_a_replayed_step_leaves_out_the_same(stages, tmp_path):
    run = run_of("pretrain", stages, tmp_path, EXCLUDE_DATA=excluded_file(tmp_path, "find cow"), **UNMEASURED).trained()
    lines: list[str] = []
    replay(run.folder, 3, read_flags([]), info=lines.append)
    assert "is finite" in lines[-1] and "not the recorded step" not in lines[-1], lines
