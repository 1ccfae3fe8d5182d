"""Continuous batching: a request gets the tokens that it gets alone, drawn from the distributions of transformers."""

import dataclasses
from functools import cache
from typing import ClassVar

import pytest
import torch
from factories import prepare
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from checkpoint import huggingface
from config import ModelConfig
from extensions.inference import engine as engine_module
from extensions.inference.engine import (
    TOP_CANDIDATES,
    Engine,
    Request,
    Sampling,
    SamplingTensors,
    choose,
    generate,
    never_sample,
    penalize,
)
from model import Transformer
from model_utils import model_on_meta
from tokenizer import load_tokenizer

VOCAB = 61
DRAWN = Sampling(temperature=1.0, top_p=0.9, top_k=20, min_p=0.01, repetition_penalty=1.2, seed=5)


def random_prompts(*lengths: int, vocabulary: int = VOCAB) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]


PROMPTS = random_prompts(7, 1, 30, 4, 12, 2)


@pytest.fixture(scope="module")
def model() -> Transformer:
    """Random weights, wide enough that the likeliest token changes from step to step."""
    model = Transformer(ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, multiple_of=16, init_std=0.15,
                                    tie_embeddings=False), VOCAB)
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def run(engine: Engine, *requests: Request) -> list[list[int]]:
    for request in requests:
        engine.add(request)
    while not engine.idle:
        engine.step()
    return [request.output_ids for request in requests]


def alone(model: Transformer, prompt: list[int], count: int, sampling: Sampling = Sampling()) -> list[int]:
    """What an engine of one row writes, which is what a model writes that reads everything for each token."""
    written, = run(Engine(model, 1, 100), Request(prompt, count, sampling))
    draws, tokens = torch.rand(count, generator=torch.Generator().manual_seed(sampling.seed)), [*prompt]
    penalty, seen_1V = torch.tensor(sampling.repetition_penalty), torch.zeros(1, model.vocab_size, dtype=torch.bool)
    with torch.no_grad():
        for draw_1 in draws.split(1):
            logits_1V, seen_1V[0, tokens] = model(torch.tensor([tokens]), mode="logits")[:, -1], True
            tokens.append(int(choose(penalize(logits_1V, seen_1V, penalty), draw_1, SamplingTensors([sampling]))))
    assert tokens[len(prompt):] == written
    return written


@pytest.fixture(scope="module")
def expected(model):
    return cache(lambda sampling: [alone(model, prompt, 9 + 4 * index, sampling) for index, prompt in enumerate(PROMPTS)])


@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("rows, prefill_tokens, multiple", [(6, 256, 1), (3, 256, 16), (2, 5, 1), (2, 5, 16), (1, 1, 16)])
def test_a_request_gets_what_it_gets_alone(model, expected, sampling, rows, prefill_tokens, multiple, monkeypatch):
    """All at once or waiting for rows, with prompts that are read whole or in pieces; some end sooner.

    With a multiple above 1, as on a GPU, attention reads beyond the tokens that are used.
    """
    monkeypatch.setitem(engine_module.LENGTH_MULTIPLE, "cpu", multiple)
    requests = [Request(prompt, 9 + 4 * index, sampling) for index, prompt in enumerate(PROMPTS)]
    written = run(Engine(model, rows, 60, prefill_tokens), *requests)
    assert written == expected(sampling)
    assert {request.finish_reason for request in requests} == {"length"}
    assert len({token for row in written for token in row}) > 15, "a model that repeats itself would prove little"


class Tape(TorchDispatchMode):
    """Records a function's operations as a CUDA graph does: with the tensors that it used, and without their effects.

    All graphs of a thread share memory, so a replay overwrites the results of other graphs.
    """

    tapes: ClassVar[list["Tape"]] = []

    def __init__(self, compute):
        super().__init__()
        Tape.tapes.append(self)
        self.operations, before, self.replays = [], [], 0
        self.before = before
        with self:
            compute()
        for tensor, values in reversed(before):
            tensor.copy_(values)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), "it waits for the device"
        assert func is not torch.ops.aten.lift_fresh.default, "it copies from the host"
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                tensor = args[place] if place < len(args) else kwargs[argument.name]
                self.before.append((tensor, tensor.clone()))
        results = func(*args, **kwargs)
        inputs = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        new = [each for each in tree_leaves(results) if each.untyped_storage().data_ptr() not in inputs]
        self.operations.append((func, args, kwargs, new))
        return results

    def replay(self) -> None:
        self.replays += 1
        for other in {*Tape.tapes} - {self}:
            for *_, new in other.operations:
                for tensor in new:
                    tensor.fill_(1)
        for func, args, kwargs, new in self.operations:
            again = tree_leaves(func(*args, **kwargs))
            for old, result in zip(new, again[-len(new):] if new else ()):
                old.copy_(result)


@pytest.mark.parametrize("sampling", [Sampling(), dataclasses.replace(DRAWN, presence_penalty=0.3), Sampling(1.0, by_id=True)],
                         ids=["greedy", "drawn", "by id"])
def test_a_batch_that_lasts_becomes_a_graph_that_writes_the_same(model, sampling, monkeypatch):
    """As on CUDA, where positions are data. A graph serves until attention reads more keys; a new batch begins without one."""
    monkeypatch.setattr(Tape, "tapes", tapes := [])
    monkeypatch.setitem(engine_module.LENGTH_MULTIPLE, "cpu", 16)
    monkeypatch.setattr(engine_module, "capture", lambda compute: Tape(compute).replay)
    found = []
    for static in (False, True):
        engine = Engine(model, 3, 90)
        engine.cache.static = static
        requests = [Request(prompt, 36 + index, dataclasses.replace(sampling, seed=index), top_logprobs=2 if index else None)
                    for index, prompt in enumerate(PROMPTS[:4])]
        found.append((run(engine, *requests), [request.scores for request in requests]))
        assert bool(tapes) == static
    assert found[0] == found[1]
    replays = [tape.replays for tape in tapes]
    assert max(replays) == 16 and sum(replays) > 20, replays


def test_a_long_prompt_is_read_in_pieces_while_others_are_written(model):
    engine, short, long = Engine(model, 2, 60, prefill_tokens=4), Request([1, 2], 30), Request(PROMPTS[2], 3)
    engine.add(short)
    engine.step()
    engine.add(long)
    for written in range(2, 9):
        assert engine.step() == [short] and len(short.output_ids) == written
    assert engine.step() == [long, short]
    run(engine)
    assert (short.output_ids, long.output_ids) == (alone(model, [1, 2], 30), alone(model, PROMPTS[2], 3))


def test_what_a_row_has_read_is_not_read_again(model):
    """The next turn of a chat goes on in its row, also beside others; a prompt that begins alike takes over what is there."""
    engine, read = Engine(model, 3, 100), []
    forward = model.forward

    def read_tokens(tokens_BT, **options):
        read.append(tokens_BT.numel())
        return forward(tokens_BT, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "forward", read_tokens)
        first, = run(engine, Request(PROMPTS[2], 10))
        other, = run(engine, Request(PROMPTS[4], 10))
        read.clear()
        turn = [*PROMPTS[2], *first, 4, 5]
        second, = run(engine, Request(turn, 5))  # all but the last token of the answer is in the row
        assert read == [3, 1, 1, 1, 1]
        read.clear()
        edited = [*turn[:35], 9]
        third, = run(engine, Request(edited, 2))
        assert read == [1, 1]
        read.clear()
        both = run(engine, Request([*PROMPTS[4], *other, 8], 4), Request(turn, 4))
        assert read == [2, 1, 2, 2, 2]
    assert (second, third) == (alone(model, turn, 5), alone(model, edited, 2))
    assert both == [alone(model, [*PROMPTS[4], *other, 8], 4), second[:4]]


def test_a_cancelled_request_ends_and_leaves_no_trace(model):
    engine = Engine(model, 2, 60, prefill_tokens=8)
    requests = [Request(prompt, 20) for prompt in PROMPTS[:4]]
    for request in requests:
        engine.add(request)
    engine.step()
    reading, waiting = requests[0], requests[3]
    so_far = [*reading.output_ids]
    for request in (reading, waiting):
        engine.cancel(request)
    changed = [request for _ in range(60) for request in engine.step()]
    assert engine.idle and reading not in changed and waiting not in changed
    assert reading.finish_reason == waiting.finish_reason == "cancelled" and reading.output_ids == so_far
    assert [request.output_ids for request in requests[1:3]] == [alone(model, prompt, 20) for prompt in PROMPTS[1:3]]
    engine.cancel(requests[1])
    assert requests[1].finish_reason == "length", "it was done before"


def test_generate_continues_each_prompt_as_alone_up_to_a_stop_token(model):
    free = [alone(model, prompt, 20) for prompt in PROMPTS]
    assert generate(model, PROMPTS, 20) == free
    stop = free[0][4]
    assert generate(model, PROMPTS, 20, stop_ids={stop}) == [row[:row.index(stop)] if stop in row else row for row in free]
    assert generate(model, [], 5) == [] and generate(model, PROMPTS, 0) == [[]] * len(PROMPTS)


def test_no_padded_id_is_ever_drawn(model):
    assert VOCAB % 128, "there are padded ids"
    written = generate(model, PROMPTS, 50, Sampling(temperature=50.0))
    assert max(token for row in written for token in row) < VOCAB


def test_greedy_tokens_are_those_of_transformers(tmp_path_factory, transformers):
    """A hundred tokens after each of ten prompts, by the folder that we save."""
    tokenizer = load_tokenizer(str(prepare(tmp_path_factory.mktemp("prepared")).tokenizer))
    config = ModelConfig(dim=48, n_layers=2, n_heads=6, n_kv_heads=2, ffn_dim=80, init_std=0.25, tie_embeddings=False,
                         rope_scaling_factor=8.0, rope_original_max_len=32)
    model = Transformer(config, tokenizer.vocab_size)
    model.init_weights(torch.Generator().manual_seed(2))
    folder = tmp_path_factory.mktemp("folder")
    huggingface.save_model_folder(folder, model.state_dict(), model.config, tokenizer, 256)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
    prompts = random_prompts(5, 1, 17, 40, 3, 9, 64, 2, 25, 11, vocabulary=tokenizer.vocab_size)
    actual = run(Engine(model, 4, 200, prefill_tokens=16), *[Request(prompt, 100) for prompt in prompts])
    assert len({token for written in actual for token in written}) > 100
    for prompt, written in zip(prompts, actual):
        ids = torch.tensor([prompt])
        expected = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=100, do_sample=False,
                                   eos_token_id=None, pad_token_id=0)[0, len(prompt):]
        assert written == expected.tolist()


@pytest.mark.parametrize("sampling", [Sampling(), DRAWN, Sampling(temperature=3.0), Sampling(temperature=1.0, by_id=True)])
def test_suppressed_ids_are_never_sampled(model, sampling):
    try:
        never_sample(model, [*range(0, VOCAB, 2), VOCAB + 5, -1])
        found = {token for answer in generate(model, PROMPTS, 20, sampling) for token in answer}
    finally:
        never_sample(model, ())
    assert found and all(token % 2 for token in found)
    assert any(token % 2 == 0 for answer in generate(model, PROMPTS, 20, sampling) for token in answer)


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
    monkeypatch.setattr(engine_module, "TOP_CANDIDATES", looked_at_first)
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


class HostTraffic(TorchDispatchMode):
    """Notes the operations that take data from the host to the device, here the meta device; reading from it is an error."""

    def __init__(self):
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        found = operation(*args, **(kwargs or {}))
        devices = {leaf.device.type for leaf in tree_leaves((args, kwargs, found))
                   if isinstance(leaf, torch.Tensor) and (leaf.ndim or leaf.is_meta)}
        if devices == {"cpu", "meta"}:
            self.operations.append(str(operation))
        return found


@pytest.mark.parametrize("sampling, prompts", [
    (Sampling(), [PROMPTS[0]] * 2), (DRAWN, PROMPTS[:2]), (Sampling(temperature=0.7), [PROMPTS[0]] * 2)],
    ids=["greedy, even", "drawn, uneven", "tempered, even"])
def test_a_step_that_writes_copies_nothing_from_the_host_and_reads_only_the_tokens(sampling, prompts, monkeypatch):
    """With some requests greedy, and a free row between those that are written."""
    vocabulary = TOP_CANDIDATES + 100  # on the device it cannot be asked whether the most likely tokens suffice
    model = model_on_meta(ModelConfig(dim=32, n_layers=1, n_heads=4, n_kv_heads=2, multiple_of=16), vocabulary, torch.bfloat16)
    engine, made, tensor, reads = Engine(model, 4, 400), [], torch.tensor, []
    monkeypatch.setattr(torch, "tensor", lambda *args, **options: made.append(args) or tensor(*args, **options))
    monkeypatch.setattr(engine_module, "same_on_all", lambda _, next_R: reads.append(next_R) or next_R)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda next_R: [len(reads)] * len(next_R))
    short = Request([1, 2, 3], 2)
    requests = [Request(prompts[0], 30, sampling), short, Request(prompts[1], 30, sampling), Request([5], 30)]
    for request in requests:
        engine.add(request)
    while short.finish_reason is None or len(requests[0].output_ids) < 4:
        engine.step()
    made.clear(), reads.clear()
    with HostTraffic() as traffic:
        for _ in range(20):
            assert len(engine.step()) == 3
    assert (made, traffic.operations, len(reads)) == ([], [], 20)
    assert requests[0].output_ids[-20:] == [*range(1, 21)]
    assert engine.cache.keys.is_meta
