"""Teachers compared with documents run separately and with transformers, divergences with torch's KL, TRL and autograd."""

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from factories import new_model
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from checkpoint import huggingface, store
from common.errors import CheckpointError, SettingsError
from config import Config
from data_pipeline.vocabulary import train_bpe
from dataloaders import Batch
from extensions import distillation
from extensions.distillation import Distillation, LlamaTeacher, divergence, find_teacher, load_teacher
from extensions.hf_teacher import HFTeacher
from model import Transformer
from model_kernels.head import IGNORE_INDEX
from parallel.ranks import Ranks
from tokenizer import Tokenizer, load_tokenizer

TEXTS = ["The cat saw the dog. The hen lost the fox. A bird fed the cow and the cat met the hen by the barn."] * 3
SHAPE = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 16, "init_std": 0.2}
ROW_TOKENS = 12


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(train_bpe(TEXTS, 270))


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory, tokenizer) -> Path:
    """A checkpoint of ours, with its manifest."""
    folder = tmp_path_factory.mktemp("runs") / "parent" / "checkpoints" / "step-00000010"

    def write(into: Path) -> None:
        huggingface.save_model_folder(into, llama(0, tokenizer.vocab_size).state_dict(), Config(**SHAPE), tokenizer, ROW_TOKENS)

    store.publish(folder, write, {"step": 10, "world_size": 1, "val_loss": None})
    return folder


@pytest.fixture
def copied(llama_folder, tmp_path) -> Path:
    """The same as a plain model folder, which a test may damage."""
    shutil.copytree(llama_folder, tmp_path / "copied")
    (tmp_path / "copied" / store.MANIFEST).unlink()
    return tmp_path / "copied"


def llama(seed: int, vocab_size: int, **shape) -> Transformer:
    return new_model(Config(**SHAPE, **shape), vocab_size, seed)


def settings(teacher_model="teacher", **changes) -> Config:
    return Config(**{"teacher_model": str(teacher_model), "max_seq_len": ROW_TOKENS, "micro_batch_size": 2, "compile": False,
                     "distillation_enabled": True} | changes)


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def a_batch(vocab_size: int, with_positions: bool = True) -> Batch:
    """Rows of documents of unequal length, the last of each row padding without a target."""
    generator, places = torch.Generator().manual_seed(0), torch.arange(16)
    tokens_BT, targets_BT = torch.randint(0, vocab_size, (2, 3, 16), generator=generator)
    ends_B3 = torch.tensor([[3, 8, 13], [4, 10, 14], [5, 12, 15]])
    document_ids_BT = 1 + (places >= ends_B3[..., None]).sum(1).int()
    targets_BT[(torch.rand(3, 16, generator=generator) < 0.3) | (document_ids_BT == 4)] = IGNORE_INDEX
    target_index_M = (targets_BT.flatten() != IGNORE_INDEX).nonzero().flatten() if with_positions else None
    return Batch(tokens_BT, targets_BT, document_ids_BT, target_index_M)


def transformers_model(kind: str, tokenizer, folder: Path) -> Path:
    """Save a tiny random model of another architecture with the student's tokenizer."""
    transformers = pytest.importorskip("transformers")
    small = {"GPT2": dict(n_embd=32, n_layer=2, n_head=2, n_positions=32), "Bert": dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, max_position_embeddings=32)}[kind]
    torch.manual_seed(0)
    shape = {"vocab_size": tokenizer.vocab_size, "initializer_range": 0.5} | small
    config = getattr(transformers, f"{kind}Config")(**shape)
    model = getattr(transformers, f"{kind}LMHeadModel")(config)
    model.save_pretrained(folder)
    tokenizer.save_huggingface(folder)
    return folder


def test_a_paddock_teacher_scores_packed_rows_as_separate_documents(llama_folder, tokenizer):
    teacher = load_teacher(llama_folder, settings(llama_folder), tokenizer.vocab_size, Ranks())
    assert isinstance(teacher, LlamaTeacher) and teacher.model.config.attention_backend == "auto"
    held_against_documents_alone(teacher, lambda tokens: teacher.model(tokens, mode="logits"), tokenizer.vocab_size)


def test_a_transformers_teacher_scores_packed_rows_as_separate_documents(tmp_path, tokenizer):
    folder = transformers_model("GPT2", tokenizer, tmp_path / "gpt2")
    teacher = load_teacher(folder, settings(folder, max_seq_len=16), tokenizer.vocab_size, Ranks())
    assert isinstance(teacher, HFTeacher) and not teacher.model.training and teacher.model.dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in teacher.model.parameters())
    in_bf16 = load_teacher(folder, settings(folder, teacher_precision="bf16"), tokenizer.vocab_size, Ranks())
    assert in_bf16.model.dtype == torch.bfloat16
    held_against_documents_alone(teacher, lambda tokens: teacher.model(tokens).logits, tokenizer.vocab_size)


def held_against_documents_alone(teacher, alone, vocab_size: int) -> None:
    for with_positions in (True, False):
        batch = a_batch(vocab_size, with_positions)
        logits_of = teacher.logits(batch)
        places = (torch.arange(batch.tokens_BT.numel()) if batch.target_index_M is None else batch.target_index_M).tolist()
        teacher_logits = torch.cat([logits_of(slice(0, 5)), logits_of(slice(5, len(places)))])
        assert teacher_logits.shape == (len(places), vocab_size) and teacher_logits.dtype == torch.float32 and not teacher_logits.requires_grad
        checked = 0
        for row in range(len(batch.tokens_BT)):
            for document in batch.document_ids_BT[row].unique().tolist():
                inside = (batch.document_ids_BT[row] == document).nonzero().flatten()
                if not (batch.targets_BT[row, inside] != IGNORE_INDEX).any():
                    continue
                expected = alone(batch.tokens_BT[row, inside][None])[0]
                for position, logits in zip(inside.tolist(), expected):
                    place = row * batch.tokens_BT.shape[1] + position
                    if place in places:
                        torch.testing.assert_close(teacher_logits[places.index(place)], logits, rtol=1e-4, atol=1e-4)
                        checked += 1
        assert checked > 20


@pytest.mark.parametrize("stored, requested, expected", [
    (torch.bfloat16, "auto", torch.bfloat16), (torch.bfloat16, "fp32", torch.float32), (torch.float32, "auto", torch.float32),
    (torch.float32, "bf16", torch.bfloat16), (torch.float16, "auto", torch.float32)])  # a CPU has no kernels for float16
def test_teacher_precision_is_the_files_own_or_the_one_asked_for(copied, tokenizer, stored, requested, expected):
    tensors = {name: tensor.to(stored) for name, tensor in load_file(copied / "model.safetensors").items()}
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    teacher = load_teacher(copied, settings(copied, teacher_precision=requested), tokenizer.vocab_size, Ranks())
    assert teacher.model.compute_dtype == expected and {parameter.dtype for parameter in teacher.model.parameters()} == {expected}
    assert not teacher.model.training and not any(parameter.requires_grad for parameter in teacher.model.parameters())
    assert teacher.logits(a_batch(tokenizer.vocab_size))(slice(None)).dtype == torch.float32


def test_another_vocabulary_is_refused_and_the_same_one_accepted_through_either_backend(copied, tokenizer):
    assert find_teacher(settings(copied), tokenizer) == copied
    assert find_teacher(settings(copied), load_tokenizer(str(copied), "huggingface")) == copied
    same_size = Tokenizer(train_bpe(["Quite other words are found here, over and over: otters, rivers, mills."] * 3, 270))
    assert same_size.vocab_size == tokenizer.vocab_size
    with pytest.raises(SettingsError, match="the id 2[56][0-9] is '.*' to it, '.*' to the student"):
        find_teacher(settings(copied), same_size)
    larger = Tokenizer(train_bpe(TEXTS, 280))
    for spoil in (lambda: None, (copied / "tokenizer.json").unlink):
        spoil()
        with pytest.raises(SettingsError, match=f"{tokenizer.vocab_size} ids, and the student's tokenizer has {larger.vocab_size}"):
            find_teacher(settings(copied), larger)
    assert find_teacher(settings(copied), tokenizer)


def test_rows_that_only_pad_the_teachers_matrices_are_left_out(copied, tokenizer):
    vocab_size = tokenizer.vocab_size
    plain = load_teacher(copied, settings(copied), vocab_size, Ranks())
    tensors = load_file(copied / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = torch.cat([embedding, embedding.mean(0, keepdim=True).expand(38, -1)])
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    edit_json(copied / "config.json", vocab_size=vocab_size + 38)
    wider = load_teacher(find_teacher(settings(copied), tokenizer), settings(copied), vocab_size, Ranks())
    batch = a_batch(vocab_size)
    torch.testing.assert_close(wider.logits(batch)(slice(None)), plain.logits(batch)(slice(None)))


def refused(folder: Path, tokenizer, match: str, error=SettingsError, **changes) -> None:
    with pytest.raises(error, match=match), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_teacher(folder, settings(folder, **changes), tokenizer.vocab_size, Ranks())


def test_code_that_comes_with_a_model_is_never_run(tmp_path, tokenizer):
    folder = transformers_model("GPT2", tokenizer, tmp_path / "gpt2")
    (folder / "evil.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n")
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    edit_json(folder / "config.json", model_type="evil", auto_map=auto_map)
    refused(folder, tokenizer, "never run")
    edit_json(folder / "config.json", model_type="gpt2")
    load_teacher(folder, settings(folder), tokenizer.vocab_size, Ranks())
    assert not (folder / "ran").exists()


def test_foreign_models_that_cannot_teach_are_refused(tmp_path, tokenizer, monkeypatch, copied):
    gpt2 = transformers_model("GPT2", tokenizer, tmp_path / "gpt2")
    refused(gpt2, tokenizer, "reads 32 tokens at most; lower MAX_SEQ_LEN=64", max_seq_len=64)
    refused(transformers_model("Bert", tokenizer, tmp_path / "bert"), tokenizer, "not a causal language model")
    with monkeypatch.context() as patched:
        patched.setitem(__import__("sys").modules, "transformers", None)
        refused(gpt2, tokenizer, "pip install .*transformers")
        load_teacher(copied, settings(copied), tokenizer.vocab_size, Ranks())  # a Llama needs no transformers
    tensors = load_file(gpt2 / "model.safetensors")
    some = {name: tensor for name, tensor in tensors.items() if "h.1.mlp" not in name}
    save_file(some, gpt2 / "model.safetensors", {"format": "pt"})
    refused(gpt2, tokenizer, "lacks weights", CheckpointError)
    (gpt2 / "model.safetensors").write_bytes(b"nothing of the kind")
    refused(gpt2, tokenizer, "cannot be loaded", CheckpointError)


KINDS = ("forward_kl", "reverse_kl", "jsd")
VOCAB = 50  # not a multiple of 128, so that the model pads it


def random_logits(rows: int = 6, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def plain_divergence(student: torch.Tensor, teacher: torch.Tensor, kind: str, temperature: float, beta: float) -> torch.Tensor:
    """The definition times temperature squared, with torch's own KL."""
    log_q, log_p = (F.log_softmax(logits / temperature, -1) for logits in (student, teacher))
    log_m = torch.log(beta * log_p.exp() + (1 - beta) * log_q.exp())

    def kl(log_one, log_other):
        return F.kl_div(log_other, log_one, reduction="none", log_target=True).sum(-1)

    value = {"forward_kl": lambda: kl(log_p, log_q), "reverse_kl": lambda: kl(log_q, log_p),
             "jsd": lambda: beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)}[kind]()
    return value * temperature**2


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("kind, trl_beta", [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.3), ("jsd", 0.5)])
def test_divergence_is_trls_times_temperature_squared(kind, trl_beta, temperature):
    pytest.importorskip("trl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.gkd import GKDTrainer
    student, teacher = random_logits(seed=1)[None], random_logits(seed=2)[None]
    labels = torch.tensor([[1, IGNORE_INDEX, 2, 3, IGNORE_INDEX, 4]])
    reference = GKDTrainer.generalized_jsd_loss(student, teacher, labels, beta=trl_beta, temperature=temperature, reduction="sum")
    value, _ = divergence(student[0], teacher[0], kind, temperature, trl_beta)
    actual = value[labels[0] != IGNORE_INDEX].sum()
    torch.testing.assert_close(actual, reference * temperature**2, rtol=1e-5, atol=1e-5)


def test_extreme_logits_stay_finite():
    for kind in KINDS:
        value, gradient = divergence(random_logits(scale=500.0, seed=1), random_logits(scale=500.0, seed=2), kind, 1.0)
        assert value.isfinite().all() and gradient.isfinite().all()


class Teacher:
    """A teacher that computes all logits with our model."""

    def __init__(self, model: Transformer):
        self.model = model.eval().requires_grad_(False)

    def logits(self, batch):
        logits_MV = self.model(batch.tokens_BT, document_ids_BT=batch.document_ids_BT, mode="logits").flatten(0, 1)
        logits_MV = logits_MV if batch.target_index_M is None else logits_MV[batch.target_index_M]
        return lambda part: logits_MV[part]


def loss_settings(**changes) -> Config:
    return Config(**{f"distillation_{name}": value for name, value in changes.items()})


def gradients(model: Transformer, total: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    total.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_positions", [True, False])
@pytest.mark.parametrize("chunk, cache_bytes", [(0, 2**20), (7, 2**20), (0, 4 * VOCAB * 3), (7, 1)])
def test_loss_and_gradients_are_those_of_all_logits(kind, with_positions, chunk, cache_bytes, monkeypatch):
    monkeypatch.setattr(distillation, "CACHE_BYTES", cache_bytes)
    student, teacher, batch = llama(1, VOCAB, head_chunk_tokens=chunk), llama(2, VOCAB), a_batch(VOCAB, with_positions)
    objective = Distillation(loss_settings(loss=kind, weight=0.3, temperature=2.0, jsd_beta=0.3), Teacher(teacher))
    summed = objective.loss_sum(student, batch)
    actual = gradients(student, summed.total)

    logits, teacher_logits = (model(batch.tokens_BT, document_ids_BT=batch.document_ids_BT, mode="logits") for model in (student, teacher))
    counted = batch.targets_BT != IGNORE_INDEX
    part = plain_divergence(logits[counted], teacher_logits[counted], kind, 2.0, 0.3).sum()
    cross_entropy = F.cross_entropy(logits[counted], batch.targets_BT[counted], reduction="sum")
    plain = gradients(student, 0.3 * part + 0.7 * cross_entropy)

    assert objective.count(batch) == counted.sum()
    torch.testing.assert_close(summed.total.detach(), (0.3 * part + 0.7 * cross_entropy).detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(summed.metrics["divergence"], part.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(summed.metrics["cross_entropy"], cross_entropy.detach(), rtol=1e-5, atol=1e-5)
    assert not any(value.requires_grad for value in summed.metrics.values())
    with torch.no_grad():
        assert torch.equal(objective.loss_sum(student, batch).total, summed.total), "validation gives the same"
        by_item = objective.by_item(student, batch, "chats")
    assert by_item.total.shape == (3, 5) and not by_item.total[:, 0].any(), "four documents a row, and none with number 0"
    second, numbers = student(batch.tokens_BT, document_ids_BT=batch.document_ids_BT, mode="logits")[1], batch.document_ids_BT[1]
    here = counted[1] & (numbers == 2)
    expected = F.cross_entropy(second[here], batch.targets_BT[1, here], reduction="sum")
    torch.testing.assert_close(by_item.metrics["cross_entropy"][1, 2], expected.detach(), rtol=1e-5, atol=1e-5, check_dtype=False)
    for ours_B, total in ((by_item.total, summed.total), *((by_item.metrics[name], value) for name, value in summed.metrics.items())):
        torch.testing.assert_close(ours_B.sum(), total.detach(), rtol=1e-5, atol=1e-5, check_dtype=False)
    for name, gradient in plain.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_a_batch_without_any_target_gives_zero_and_gradients():
    student, batch = llama(1, VOCAB), a_batch(VOCAB)
    nothing = batch.ignore_from(0)
    nothing = replace(nothing, target_index_M=torch.zeros(0, dtype=torch.long))
    objective = Distillation(loss_settings(), Teacher(llama(2, VOCAB)))
    with torch.no_grad():
        assert not objective.by_item(student, nothing, "rows").total.any()
    for positions in (torch.zeros(0, dtype=torch.long), None):
        empty = Batch(batch.tokens_BT, torch.full_like(batch.targets_BT, IGNORE_INDEX), batch.document_ids_BT, positions)
        summed = Distillation(loss_settings(), Teacher(llama(2, VOCAB))).loss_sum(student, empty)
        assert summed.total.item() == 0 and all(float(value) == 0 for value in summed.metrics.values())
        assert all(gradient.abs().max() == 0 for gradient in gradients(student, summed.total).values())
