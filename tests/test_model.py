"""The model against transformers' Llama, and against itself: every way to compute the same thing gives the same thing. Dropout."""

import math

import pytest
import torch
from factories import in_transformers, new_model
from torch import Tensor, nn
from torch.nn import functional as F

from checkpoint.huggingface import to_huggingface
from checkpoint.tensors import read_all
from config import ModelConfig
from extensions.inference.engine import RowCache
from model import Dropout, RMSNorm, Transformer, choose_masks, padded
from model_kernels import matmul
from model_kernels.attention import SHARED_PREFIX
from model_kernels.head import IGNORE_INDEX, HeadGradients, float_logits
from model_kernels.matmul import linear

SMALL = {"dim": 48, "n_layers": 2, "n_heads": 6, "n_kv_heads": 2, "ffn_dim": 80, "rope_theta": 10_000.0}
LLAMA31 = {"rope_scaling_factor": 8.0, "rope_original_max_len": 32}
YARN = {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "rope_high_freq_factor": 32.0, "rope_original_max_len": 256}
SHAPES = {
    "grouped queries, tied": {**SMALL},
    "one head each, untied": {**SMALL, "n_kv_heads": 6, "tie_embeddings": False},
    "one key head for all": {**SMALL, "n_kv_heads": 1, "norm_eps": 1e-3},
    "Llama 3.1 scaling": {**SMALL, **LLAMA31, "rope_theta": 500_000.0, "dim": 96, "n_heads": 3, "n_kv_heads": 1},
    "Llama 3.1 scaling, other factors": {**SMALL, **LLAMA31, "rope_low_freq_factor": 0.5, "rope_high_freq_factor": 2.0},
    "Qwen 2": {**SMALL, "model_type": "qwen2"},
    "Qwen 2, untied, one key head for all": {**SMALL, "model_type": "qwen2", "n_kv_heads": 1, "tie_embeddings": False},
    "Qwen 3, wide heads": {**SMALL, "model_type": "qwen3", "head_width": 20},
    "Qwen 3, untied": {**SMALL, "model_type": "qwen3", "tie_embeddings": False, "n_layers": 3},
    "Mistral, window, narrow heads": {**SMALL, "model_type": "mistral", "head_width": 6, "sliding_window": 7},
    "SmolLM 3": {**SMALL, "model_type": "smollm3", "n_layers": 3, "no_rope_every": 2},
    "Qwen 3, some windows": {**SMALL, "model_type": "qwen3", "n_layers": 4, "sliding_window": 9, "sliding_every": 2},
    "linear scaling": {**SMALL, "rope_scaling_type": "linear", "rope_scaling_factor": 3.0},
    "YaRN": {**SMALL, **YARN, "model_type": "qwen2"},
    "YaRN, short original length": {**SMALL, **YARN, "rope_original_max_len": 8, "rope_high_freq_factor": 2.0},
    "Llama, wide heads": {**SMALL, "dim": 42, "head_width": 16},
    "odd sizes": {**SMALL, "dim": 42, "n_heads": 3, "n_kv_heads": 3, "ffn_dim": 53, "n_layers": 3, "tie_embeddings": False},
}
VOCAB = 173  # padded to 256 inside


def make(vocab_size: int = VOCAB, dtype: torch.dtype = torch.float32, **settings) -> Transformer:
    """A model with weights so large that all parts matter to the logits, norms included."""
    model = new_model(ModelConfig(**{**SMALL, **settings}), vocab_size, seed=1, dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.mul_(6)
    return model


def random_ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def gradients(model: Transformer) -> dict[str, Tensor]:
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return grads


def assert_all_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-4) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.abs().max() > 0, f"{name} is zero, which proves nothing"
        error = float((got[name] - tensor).abs().max() / tensor.abs().max())
        assert error < tolerance, f"{name}: {error:.2e}"


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_all_gradients_equal_transformers(shape):
    actual = make(**SHAPES[shape])
    reference = in_transformers(actual)
    tokens, targets = random_ids(3, 70), random_ids(3, 70, seed=1)
    logits = reference(tokens).logits
    assert 0.3 < logits.std() < 30
    assert (actual(tokens, mode="logits") - logits).abs().max() < 1e-5 * logits.abs().max()

    F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    (-actual(tokens, targets, mode="sum")).backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    # The change of pairs for halves is a reordering of rows, so it maps gradients as it maps weights.
    assert_all_close(read_all(to_huggingface(gradients(actual), actual.config, VOCAB)), expected, 1e-5)


def test_padded_ids_are_never_predicted_and_never_learn():
    model = make(tie_embeddings=False)
    tokens, targets = random_ids(2, 9), random_ids(2, 9, seed=1)
    assert model.output.weight.shape[0] == padded(VOCAB) == 256 and padded(256) == 256
    with torch.no_grad():  # as loud as they can be
        model.output.weight[VOCAB:] = 100 * model.output.weight[:256 - VOCAB]
    assert model(tokens, mode="logits").shape == (2, 9, VOCAB)
    padded_logits = linear(model(tokens, mode="hidden"), model.output.weight).flatten(0, 1)
    assert (float_logits(padded_logits, VOCAB)[:, VOCAB:] == -torch.inf).all()
    expected = model(tokens, mode="logits").log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    for mode in ("logprobs", "sum"):
        logprob = model(tokens, targets, mode=mode)
        torch.testing.assert_close(logprob.sum(), expected.sum(), atol=1e-3, rtol=0)
        logprob.sum().backward()
        grads = gradients(model)
        for name in ("output.weight", "tok_embeddings.weight"):
            assert (grads[name][VOCAB:] == 0).all() and grads[name][:VOCAB].abs().max() > 0


def test_documents_in_a_row_equal_rows_of_their_own():
    """Logits and gradients; one document fills a row, one is a single token, numbers need not be in order."""
    model = make(**LLAMA31)
    lengths = [[5, 1, 17, 9], [32], [20, 12]]
    tokens, targets = random_ids(3, 32), random_ids(3, 32, seed=1)
    documents = torch.tensor([[5] * 5 + [1] * 1 + [7] * 17 + [2] * 9, [1] * 32, [1] * 20 + [2] * 12], dtype=torch.int32)
    logits = model(tokens, document_ids_BT=documents, mode="logits")
    model(tokens, targets, documents, mode="sum").backward()
    together = gradients(model)
    for row, parts in enumerate(lengths):
        start = 0
        for length in parts:
            part = (slice(row, row + 1), slice(start, start + length))
            torch.testing.assert_close(model(tokens[part], mode="logits"), logits[part], atol=1e-4, rtol=0)
            model(tokens[part], targets[part], mode="sum").backward()
            start += length
    assert_all_close(together, gradients(model))


@pytest.mark.parametrize("with_gradients", [True, False])
def test_shared_prefixes_equal_rows_that_repeat_them(with_gradients):
    """In blocks and with a mask: values and gradients; the second row has two prefixes, and none has the same."""
    model, groups = make(), [[(6, [3, 1, 8])], [(70, [5, 60]), (1, [2, 3])]]
    tokens, documents = random_ids(2, 160), torch.full((2, 160), 9, dtype=torch.int32)
    alone, places = [], []
    for row, rows in enumerate(groups):
        start, number = 0, 1
        for prefix, answers in rows:
            documents[row, start:start + prefix] = SHARED_PREFIX
            shared, start = tokens[row, start:start + prefix], start + prefix
            for length in answers:
                documents[row, start:start + length], number = number, number + 1
                alone.append(torch.cat([shared, tokens[row, start:start + length]])[None])
                places.append((row, slice(start, start + length), prefix))
                start += length
    with torch.set_grad_enabled(with_gradients):
        together = model(tokens, document_ids_BT=documents, mode="logits")
        found = [together[row, place] for row, place, _ in places]
        expected = [model(ids, mode="logits")[0, prefix:] for ids, (_, _, prefix) in zip(alone, places)]
    for actual, reference in zip(found, expected):
        torch.testing.assert_close(actual, reference, atol=1e-4, rtol=0)
    if with_gradients:
        sums = (sum((each.float() * (number + 1)).square().mean() for number, each in enumerate(one)) for one in (found, expected))
        actual, reference = (torch.autograd.grad(each, list(model.parameters())) for each in sums)
        for one, other in zip(actual, reference):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk", [0, 1, 7, 64])
@pytest.mark.parametrize("mode", ["logprobs", "sum"])
def test_chunks_and_sums_change_neither_value_nor_gradient(tied, chunk, mode, monkeypatch):
    monkeypatch.setattr("model_kernels.head.CACHED_LOGITS", 1000)  # a chunk has several parts
    tokens, targets = random_ids(2, 15), random_ids(2, 15, seed=1)
    targets[0, 3:9] = targets[1, -1] = IGNORE_INDEX
    model = make(tie_embeddings=tied, head_chunk_tokens=chunk)
    logprobs = model(tokens, mode="logits").log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    expected = logprobs.where(targets != IGNORE_INDEX, 0)
    (expected.sum() * -0.25).backward()
    expected_gradients = gradients(model)

    logprob = model(tokens, targets, mode=mode)
    assert logprob.dtype == torch.float32
    if mode == "logprobs":
        torch.testing.assert_close(logprob, expected, atol=1e-4, rtol=0)
        assert (logprob[targets == IGNORE_INDEX] == 0).all()
    torch.testing.assert_close(logprob.sum(), expected.sum(), atol=1e-3, rtol=1e-5)
    (logprob.sum() * -0.25).backward()
    assert_all_close(gradients(model), expected_gradients)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, targets, mode=mode), logprob, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("backend", ["auto", "math"])
def test_recomputed_activations_give_the_same_bits(backend):
    """The backward attends by the same kernel again, outside of whatever the forward ran in."""
    tokens, targets = random_ids(2, 16), random_ids(2, 16, seed=1)
    documents = torch.tensor([[1] * 10 + [2] * 6, [1] * 16], dtype=torch.int32)
    results = []
    for how in ("none", "block"):
        model = make(activation_checkpointing=how, attention_backend=backend, dropout=0.3)
        choose_masks(model, 1, 2, 0, 2)
        total = model(tokens, targets, documents, mode="sum")
        total.backward()
        results.append({"total": total.detach(), **gradients(model)})
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("steps", [[1] * 12, [7, 1, 3, 1]])
def test_a_cache_changes_nothing(steps):
    model = make(**LLAMA31)
    tokens = random_ids(3, sum(steps))
    cache = RowCache(model.config, 3, sum(steps), torch.device("cpu"), torch.float32)
    with torch.no_grad():
        expected = model(tokens, mode="logits")
        parts = [model(part, cache=cache, mode="logits") for part in tokens.split(steps, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=1e-4, rtol=0)
        some = torch.tensor([3, 11, 0])
        torch.testing.assert_close(model(tokens, target_index_M=12 * torch.arange(3) + some, mode="logits"), expected[range(3), some], atol=1e-4, rtol=0)
    assert cache.used == [sum(steps)] * 3


def test_a_compiled_norm_has_the_bits_of_an_eager_one(monkeypatch):
    """Which is computed in float32 and rounded once; the compiler would fuse the autograd function less well."""
    norm = RMSNorm(48, 1e-5)
    norm.weight.data.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(0))
    x = 30 * torch.randn(64, 48, generator=torch.Generator().manual_seed(1)).bfloat16()
    eager, exact = norm(x), F.rms_norm(x.double(), (48,), norm.weight.double(), 1e-5).bfloat16()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(norm(x), eager) and torch.equal(eager, exact)


@pytest.mark.parametrize("mode", ["logprobs", "sum"])
def test_bf16_is_close_to_fp32_and_its_gradients_are_fp32(mode):
    tokens, targets = random_ids(4, 32), random_ids(4, 32, seed=1)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        model = make(dtype=dtype)
        assert model(tokens, mode="hidden").dtype == dtype and all(p.dtype == torch.float32 for p in model.parameters())
        logprob = model(tokens, targets, mode=mode)
        assert logprob.dtype == torch.float32
        logprob.sum().backward()
        results.append((logprob.sum().detach() / targets.numel(), gradients(model)))
    (exact, exact_gradients), (rough, rough_gradients) = results
    assert rough == pytest.approx(float(exact), rel=0.01)
    for name, gradient in exact_gradients.items():
        assert rough_gradients[name].dtype == torch.float32
        assert F.cosine_similarity(rough_gradients[name].flatten(), gradient.flatten(), dim=0) > 0.99, name


def test_weights_are_initialized_by_the_settings():
    config = ModelConfig(dim=256, n_layers=8, n_heads=4, n_kv_heads=2, init_std=0.03, tie_embeddings=False)
    model, again = (new_model(config, 1000) for _ in range(2))
    for name, parameter in model.state_dict().items():
        if parameter.ndim == 1:
            assert (parameter == 1).all(), name
            continue
        expected = 0.03 / math.sqrt(2 * 8) if name.endswith(("wo.weight", "w2.weight")) else 0.03
        drawn = parameter[:1000] if parameter.shape[0] == padded(1000) else parameter
        assert float(drawn.std()) == pytest.approx(expected, rel=0.02), name
        assert abs(drawn.mean()) < 5 * expected / math.sqrt(drawn.numel()), name
    assert (model.output.weight[1000:] == 0).all() and (model.tok_embeddings.weight[1000:] == 0).all()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


def test_without_gradients_tiles_of_logits_give_torchs_log_softmax(monkeypatch):
    monkeypatch.setattr("model_kernels.head.CACHED_POSITIONS", 5)
    monkeypatch.setattr("model_kernels.head.CACHED_IDS", 60)  # the last tile of 200 ids is shorter
    model = new_model(ModelConfig(**SMALL), 200)
    hidden_MD, targets_M = 9 * torch.randn(12, SMALL["dim"]), torch.tensor([0, 59, 60, 199, IGNORE_INDEX] + [7] * 7)
    with torch.no_grad():
        logprob_M = model.logprobs(hidden_MD, targets_M)
    expected_M = -F.cross_entropy(hidden_MD.double() @ model.head_matrix.weight[:200].double().T, targets_M,
                                  ignore_index=IGNORE_INDEX, reduction="none")
    torch.testing.assert_close(logprob_M.double(), expected_M, rtol=1e-6, atol=1e-5)


def test_the_gradient_of_a_head_is_added_in_float32_over_chunks_and_slices_of_rows(monkeypatch):
    monkeypatch.setattr(matmul, "CPU_MULTIPLIES_BF16", True)
    monkeypatch.setattr("model_kernels.head.CACHED_ROWS", 60)  # the last slice of 200 rows is shorter
    gradient_MV, hidden_MD, weight_VD = (torch.randn(size).bfloat16() for size in ((9, 200), (9, 8), (200, 8)))
    gradients = HeadGradients(hidden_MD, weight_VD, None)
    for chunk in (slice(0, 5), slice(5, 9)):
        gradients.add(chunk, gradient_MV[chunk], hidden_MD[chunk], weight_VD)
    expected_VD = gradient_MV.double().T @ hidden_MD.double()
    torch.testing.assert_close(gradients.learned.double(), expected_VD, rtol=0, atol=0.05)  # each chunk's product is rounded to bf16
    assert gradients.learned.dtype == torch.float32


def test_with_init_copy_a_head_adds_a_multiple_of_what_it_attends_to():
    """WO WV is positive semi-definite for each query head, and its trace is that of random weights of INIT_STD."""
    config = ModelConfig(dim=256, n_layers=2, n_heads=4, n_kv_heads=2, init_std=0.05, init_copy=True)
    model, plain = (new_model(each, 1000) for each in (config, config.model_copy(update={"init_copy": False})))
    for block in model.layers:
        wv_KHD, wo_DNH = block.attention.wv.weight.unflatten(0, (2, 64)), block.attention.wo.weight.unflatten(1, (4, 64))
        for head in range(4):
            product_DD = (wo_DNH[:, head] @ wv_KHD[head // 2]).double()
            torch.testing.assert_close(product_DD, product_DD.T)
            assert torch.linalg.eigvalsh(product_DD).min() > -1e-6
            assert product_DD.trace().item() == pytest.approx(256 * 64 * 0.05 ** 2 / math.sqrt(2 * 2), rel=0.05)
        assert block.attention.wo.weight.std().item() == pytest.approx(0.05 / 2, rel=0.02)
    assert torch.equal(model.layers[0].attention.wv.weight, plain.layers[0].attention.wv.weight)


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


def tiny():
    return new_model(ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, multiple_of=16, init_std=0.2), 64)


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
