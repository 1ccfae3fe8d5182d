"""Attention computes the same by every kernel, and on each architecture the best one that works is taken."""

import sys
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest
import torch
from factories import new_model
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from common.errors import SettingsError
from config import Config
from extensions import cpu_kernels as blocks
from model_kernels import attention
from model_kernels.attention import (
    KERNELS,
    ORDERS,
    Spans,
    attend,
    choose_kernel,
    kernel_order,
    trial,
    varlen_function,
)
from model_utils import compile_model

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
AMPERE, TURING, HOPPER = (8, 0), (7, 5), (9, 0)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def by_document(q: Tensor, k: Tensor, v: Tensor, borders: Tensor, left: int = -1) -> Tensor:
    """What a kernel for documents of unequal length computes, one document after another; -1 = all keys to the left."""
    out = torch.empty_like(q)
    for begin, end in zip(borders.tolist(), borders.tolist()[1:]):
        heads = (x[begin:end].transpose(0, 1) for x in (q, k, v))
        mask = torch.ones(end - begin, end - begin, dtype=torch.bool).tril()
        mask = mask if left < 0 else mask.triu(-left)
        out[begin:end] = F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True).transpose(0, 1)
    return out


# The real signatures, by the versions' sources.
def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
                           causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                           return_attn_probs=False, block_table=None):
    assert causal and cu_seqlens_q is cu_seqlens_k and cu_seqlens_q.dtype == torch.int32 and window_size[1] == 0
    assert max_seqlen_q == max_seqlen_k == cu_seqlens_q.diff().max(), "more launches blocks that have nothing to do"
    return by_document(q, k, v, cu_seqlens_q, window_size[0])


def varlen_attn_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
    assert window_size[1] == 0 and max_q == max_k == cu_seq_q.diff().max()
    return by_document(query, key, value, cu_seq_q, window_size[0])


def varlen_attn_2_12(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
                     enable_gqa=False, seqused_k=None, block_table=None, num_splits=None):
    assert enable_gqa or query.shape[1] == key.shape[1]
    return varlen_attn_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size=window_size)


def flash_3(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False):
    assert int(cu_seq_q.diff().min()) > 0, "its backward would hang (flash-attention issue 1254)"
    return varlen_attn_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size=window_size)


@pytest.fixture(autouse=True)
def nothing_remembered():
    def forget():
        attention.VARLEN.clear()
        attention._choose.cache_clear()
        attention.CHOSEN.clear()

    forget()
    yield
    forget()


def install(monkeypatch, name: str) -> str:
    """Put a stub in the place of a kernel for documents; returns the kernel's name."""
    if name == "flash-2":
        monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func))
        attention.VARLEN[name] = varlen_function(name)
        return name
    import torch.nn.attention.varlen as varlen

    functions = {"torch 2.11": varlen_attn_2_11, "torch 2.12": varlen_attn_2_12, "flash-3": flash_3}
    monkeypatch.setattr(varlen, "varlen_attn", functions[name])
    monkeypatch.setattr(attention, "activate_flash_3", lambda on: None)
    kernel = name if name == "flash-3" else "varlen"
    attention.VARLEN[kernel] = varlen_function(kernel)
    return kernel


def tiny(**settings) -> Config:
    return Config(**{"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 16, **settings})


@pytest.mark.parametrize(("purpose", "capability", "dtype", "head", "order"), [
    ("causal", HOPPER, BF16, 64, ("flash-3", "cudnn", "cudnn-expanded", "flash", "efficient", "math")),
    ("causal", AMPERE, BF16, 64, ("flash", "efficient", "math")),
    ("causal", HOPPER, FP32, 64, ("efficient", "math")),
    ("causal", HOPPER, BF16, 512, ("efficient", "math")),
    ("documents", HOPPER, BF16, 64, ("flash-3", "flash-2", "varlen", "efficient", "math")),
    ("documents", TURING, FP16, 64, ("efficient", "math")),
    ("window", (8, 9), BF16, 64, ("flash-2", "varlen", "efficient", "math")),
    ("window", None, FP32, 64, ("grouped",)),
    ("causal", None, BF16, 64, ("blocks",)),
    ("documents", None, FP32, 64, ("blocks",))])
def test_the_order_follows_from_device_dtype_and_head(purpose, capability, dtype, head, order):
    assert kernel_order(purpose, capability, dtype, head) == order


def test_what_is_not_deterministic_is_left_out_where_it_must_be():
    assert kernel_order("causal", HOPPER, BF16, 64, True) == ("flash-3", "flash", "efficient", "math")
    assert kernel_order("causal", HOPPER, BF16, 64, True, "cudnn") == ()


def on_hopper(monkeypatch, works) -> list[tuple[str, str]]:
    """Pretend to have an H100 on which some kernels work; returns what is tried."""
    tried = []

    def outcome(kernel, purpose, *_):
        tried.append((purpose, kernel))
        return None if kernel in works else "No available kernel"

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    monkeypatch.setattr(attention, "trial", outcome)
    return tried


def test_the_first_that_works_is_taken_and_tried_only_once(monkeypatch):
    tried = on_hopper(monkeypatch, {"cudnn-expanded", "varlen", "efficient", "math"})
    for _ in range(2):
        assert choose_kernel("causal", tiny(), CUDA, BF16) == "cudnn-expanded"
        assert choose_kernel("documents", tiny(), CUDA, BF16) == "varlen"
        assert choose_kernel("mask", tiny(attention_backend="flash"), CUDA, BF16) == "efficient"
    assert tried == [("causal", "flash-3"), ("causal", "cudnn"), ("causal", "cudnn-expanded"), ("documents", "flash-3"),
                     ("documents", "flash-2"), ("documents", "varlen"), ("mask", "efficient")]


@pytest.mark.parametrize(("settings", "dtype", "words"), [
    ({"attention_backend": "flash"}, FP32, "documents attention in float32.*; set ATTENTION_BACKEND=auto"),
    ({"attention_backend": "flash"}, BF16, "flash-3: No available kernel; flash-2: No available kernel; varlen: No available"),
    ({"attention_backend": "cudnn"}, BF16, "cudnn: No available kernel")])
def test_a_named_backend_that_does_not_run_is_an_error_with_its_reason(settings, dtype, words, monkeypatch):
    on_hopper(monkeypatch, {"efficient", "math"})
    with pytest.raises(SettingsError, match=f"ATTENTION_BACKEND={settings['attention_backend']} has no kernel that runs here.*{words}"):
        choose_kernel("documents", tiny(**settings), CUDA, dtype)
    assert choose_kernel("documents", tiny(), CUDA, dtype) == "efficient", "which is what auto takes"


@pytest.mark.parametrize("purpose", ORDERS)
@pytest.mark.parametrize("heads", [(4, 2, 8), (4, 4, 16)])
@pytest.mark.parametrize("kernel", ["math", "sdpa"])
def test_what_works_passes_its_trial(kernel, heads, purpose):
    with torch.no_grad():  # as in an evaluation
        assert trial(kernel, purpose, heads, CPU, FP32) is None and trial(kernel, purpose, heads, CPU, BF16) is None


def test_a_kernel_whose_documents_see_each_other_fails_its_trial(monkeypatch):
    def wrong(q, k, v, borders, *rest, **options):
        return by_document(q, k, v, torch.tensor([0, len(q)]))

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=wrong))
    assert "its result is off by" in trial("flash-2", "documents", (4, 2, 8), CPU, FP32)


def test_keys_and_values_are_repeated_for_a_kernel_that_takes_no_groups(monkeypatch):
    monkeypatch.setitem(KERNELS, "efficient", KERNELS["efficient"]._replace(backend=None))
    original, groups = F.scaled_dot_product_attention, []

    def noting(q, k, v, **options):
        groups.append((q.shape[1], k.shape[1], options["enable_gqa"]))
        return original(q, k, v, **options)

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 9, heads, 8, generator=generator) for heads in (6, 2, 2))
    mask = torch.rand(2, 1, 9, 9, generator=generator) < 0.5
    mask |= torch.eye(9, dtype=torch.bool)
    expected = attend("math", q, k, v, mask)
    monkeypatch.setattr(F, "scaled_dot_product_attention", noting)
    torch.testing.assert_close(attend("efficient", q, k, v, mask), expected)
    assert groups == [(6, 6, False)]


def test_cudnn_never_gets_a_mask(monkeypatch):
    """Its backward may give NaN, and its forward wrong values; other kernels are named, whatever torch would prefer."""
    backends = []
    monkeypatch.setattr(attention, "sdpa_kernel", lambda chosen: backends.append(chosen) or nullcontext())
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (torch.empty(1, 9, heads, 8, device="cuda", dtype=BF16) for heads in (4, 2, 2))
        mask = torch.ones(1, 1, 9, 9, dtype=torch.bool, device="cuda")
        with suppress(Exception):  # which kernel runs is decided before
            attend("sdpa", q, k, v, mask)
    assert len(backends) == 1 and attention.SDPBackend.CUDNN_ATTENTION not in backends[0]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", ["flash-3", "flash-2", "torch 2.11", "torch 2.12"])
def test_a_model_that_takes_documents_as_borders_equals_one_with_a_mask(name, window, monkeypatch):
    config = tiny(**({"model_type": "mistral", "sliding_window": window} if window else {}))
    model, generator = new_model(config, 128), torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(0, 128, (2, 2, 40), generator=generator)
    documents = torch.tensor([[1] * 7 + [2] * 33, [5] * 40], dtype=torch.int32)

    def results(documents=documents):
        total = model(tokens, targets, documents, mode="sum")
        return [total, *torch.autograd.grad(total, [*model.parameters()])]

    expected = results()
    kernel, purposes = install(monkeypatch, name), []
    monkeypatch.setattr(attention, "choose_kernel",
                        lambda purpose, **_: purposes.append(purpose) or (kernel if purpose in ("documents", "window") else "sdpa"))
    for found, requested in zip(results(), expected):
        torch.testing.assert_close(found, requested, atol=1e-4, rtol=1e-4)
    shared = torch.tensor([[0] * 20 + [1] * 10 + [2] * 10] * 2, dtype=torch.int32)
    with torch.no_grad():
        model(tokens, document_ids_BT=shared, mode="logits"), model(tokens, mode="logits")
    seen = [["documents"], ["mask"], ["causal"]]
    if window:
        seen = [["documents", "window"], ["mask", "mask"], ["causal", "window"]]
        monkeypatch.setattr(attention, "window_mask", None)  # not even computed
        results(documents), results(None)
    assert purposes[:len(sum(seen, []))] == sum(seen, []), "a shared prefix cannot be told by borders"


@pytest.fixture
def traced_only(monkeypatch):
    """Compilation without the compiler: graphs are captured and guarded as ever, and run as they are."""
    import torch._dynamo  # here, because each worker of pytest imports all test files

    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled(function, **options, backend="eager"))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("default")
def test_any_number_of_documents_is_one_graph(traced_only, monkeypatch):
    kernel = install(monkeypatch, "flash-2")
    # Opaque to the compiler, as the real ones are.
    operator = torch.library.custom_op("paddock_test::by_document", by_document, mutates_args=())
    operator.register_fake(lambda q, k, v, borders: torch.empty_like(q))
    monkeypatch.setitem(attention.VARLEN, kernel, lambda q, k, v, borders, *_: operator(q, k, v, borders))
    monkeypatch.setattr(attention, "choose_kernel", lambda *_, **__: kernel)
    model = new_model(tiny(), 128)
    compile_model(model)
    tokens = torch.randint(0, 128, (2, 256), generator=torch.Generator().manual_seed(1))
    counters = torch._dynamo.utils.counters
    counters.clear()
    graphs = []
    with torch.no_grad():
        for length in (256, 7, 3, 2, 1):
            model(tokens, document_ids_BT=torch.arange(256)[None].repeat(2, 1).div(length, rounding_mode="floor").int() + 1, mode="hidden")
            graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[-1] == 2, "a block's and the norm's"


@pytest.fixture(params=[False, True], ids=["kept", "computed again"])
def probabilities_are(request, monkeypatch):
    monkeypatch.setattr(blocks, "KEPT_TOKENS", 0 if request.param else 512)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("shape", "lengths"), [
    ((2, 130, 6, 2, 8), None), ((1, 64, 2, 1, 4), None), ((2, 1, 4, 4, 8), None),
    ((3, 200, 4, 2, 8), (7, 1, 120, 72, 200, 64, 64, 71, 1)), ((2, 64, 4, 4, 8), (64, 3, 61)), ((1, 449, 2, 2, 8), (300, 149))])
def test_blocks_of_queries_attend_as_one_query_after_another(shape, lengths, compiled, probabilities_are):
    """Lengths that are no multiples of a block, documents that end within, at and beyond blocks; values and gradients."""
    rows, tokens, n_heads, n_kv_heads, head_dim = shape
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(rows, tokens, heads, head_dim, generator=generator, dtype=torch.float64).requires_grad_()
              for heads in (n_heads, n_kv_heads, n_kv_heads)]
    borders = torch.tensor([0, *(lengths or [tokens] * rows)]).cumsum(0)
    flat = (heads.flatten(0, 1) for heads in inputs)
    expected = by_document(*flat, borders).view(inputs[0].shape)
    cu_seqlens = None if lengths is None else F.pad(borders, (0, 3), value=rows * tokens).to(torch.int32)
    function = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    spans = None if cu_seqlens is None else Spans(cu_seqlens, torch.empty(max(lengths), 0))
    actual = function("blocks", *inputs, None, spans)
    torch.testing.assert_close(actual, expected)
    weights = torch.randn(actual.shape, generator=generator, dtype=torch.float64)
    for found, requested in zip(*(torch.autograd.grad((each * weights).sum(), inputs) for each in (actual, expected))):
        torch.testing.assert_close(found, requested)


@pytest.mark.parametrize("queries", [1, 5, attention.GROUPED_QUERIES + 1])
@pytest.mark.parametrize("dtype, bound", [(FP32, 1e-6), (BF16, 1e-2)])
def test_grouped_queries_attend_as_in_the_math_kernel_with_keys_in_either_layout(queries, dtype, bound):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, length, heads, 16, generator=generator).to(dtype) for length, heads in ((queries, 6), (40, 2), (40, 2)))
    seen_B1 = torch.tensor([[9], [40], [23]])  # each row ends elsewhere
    mask = (torch.arange(40) <= (seen_B1 - queries + torch.arange(queries))[..., None])[:, None]
    mask |= torch.arange(40) == 0  # or the last row would see nothing
    expected = attend("math", q.float(), k.float(), v.float(), mask)
    transposed = torch.empty_permuted(k.shape, (0, 2, 3, 1), dtype=dtype).copy_(k)
    assert transposed.stride(-1) != 1
    for keys in (k, transposed):
        found = attend("grouped", q, keys, v, mask)
        assert float((found.float() - expected).norm() / expected.norm()) < bound
    if queries == 1:
        torch.testing.assert_close(attend("grouped", q, k, v), attend("grouped", q, k, v, torch.ones_like(mask)))
