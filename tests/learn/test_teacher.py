"""Teachers compared with documents run separately, and with transformers."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from factories import new_model
from safetensors.torch import load_file, save_file

from checkpoint import huggingface, store
from common.errors import CheckpointError, SettingsError
from config import Config
from data_pipeline.vocabulary import train_bpe, write_tiktoken
from dataloaders import Batch
from extensions.hf_teacher import HFTeacher
from learn.teacher import LlamaTeacher, find_teacher, load_teacher
from model import Transformer
from model_kernels.head import IGNORE_INDEX
from parallel.ranks import Ranks
from tokenizer import load_tokenizer

TEXTS = ["The cat saw the dog. The hen lost the fox. A bird fed the cow and the cat met the hen by the barn."] * 3
SHAPE = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 16, "init_std": 0.2}
ROW_TOKENS = 12


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    write_tiktoken(train_bpe(TEXTS, 270), path)
    return load_tokenizer(str(path))


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory, tokenizer) -> Path:
    """A checkpoint of ours, with its manifest."""
    folder = tmp_path_factory.mktemp("runs") / "parent" / "checkpoints" / "step-00000010"

    def write(into: Path) -> None:
        huggingface.save_model_folder(into, llama(tokenizer).state_dict(), Config(**SHAPE), tokenizer, ROW_TOKENS)

    store.publish(folder, write, {"step": 10, "world_size": 1, "val_loss": None})
    return folder


@pytest.fixture
def copied(llama_folder, tmp_path) -> Path:
    """The same as a plain model folder, which a test may damage."""
    shutil.copytree(llama_folder, tmp_path / "copied")
    (tmp_path / "copied" / store.MANIFEST).unlink()
    return tmp_path / "copied"


def llama(tokenizer, seed: int = 0) -> Transformer:
    return new_model(Config(**SHAPE), tokenizer.vocab_size, seed)


def settings(teacher_model="teacher", **changes) -> Config:
    return Config(**{"teacher_model": str(teacher_model), "max_seq_len": ROW_TOKENS, "micro_batch_size": 2, "compile": False,
                     "distillation_enabled": True} | changes)


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def a_batch(vocab_size: int, with_positions: bool = True, rows: int = 3, tokens: int = 16) -> Batch:
    """Rows of documents of unequal length, the last of each row padding without a target."""
    generator = torch.Generator().manual_seed(0)
    tokens_BT, targets_BT = torch.randint(0, vocab_size, (2, rows, tokens), generator=generator)
    targets_BT[torch.rand(rows, tokens, generator=generator) < 0.3] = IGNORE_INDEX
    document_ids_BT = torch.ones(rows, tokens, dtype=torch.int32)
    for row in range(rows):
        document_ids_BT[row, 3 + row:] = 2
        document_ids_BT[row, 8 + 2 * row:] = 3
        document_ids_BT[row, 13 + row:] = 4
        targets_BT[row, 13 + row:] = IGNORE_INDEX
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


@pytest.mark.parametrize("with_documents", [True, False])
def test_a_llama_is_the_same_through_transformers_and_through_our_model(llama_folder, tokenizer, with_documents):
    transformers = pytest.importorskip("transformers")
    actual = load_teacher(llama_folder, settings(llama_folder, attention_backend="math"), tokenizer.vocab_size, Ranks())
    assert actual.model.config.attention_backend == "math"
    reference = HFTeacher(transformers.AutoModelForCausalLM.from_pretrained(llama_folder), tokenizer.vocab_size)
    batch = a_batch(tokenizer.vocab_size)
    if not with_documents:
        batch = Batch(batch.tokens_BT, batch.targets_BT, None, batch.target_index_M)
    torch.testing.assert_close(actual.logits(batch)(slice(None)), reference.logits(batch)(slice(None)), rtol=1e-4, atol=1e-4)


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


@pytest.fixture
def other_tokenizer(tmp_path):
    """A function that trains a tokenizer on texts."""
    def train(texts: list[str], size: int):
        write_tiktoken(train_bpe(texts, size), tmp_path / "other.model")
        return load_tokenizer(str(tmp_path / "other.model"))

    return train


def test_another_vocabulary_is_refused_and_the_same_one_accepted_through_either_backend(copied, tokenizer, other_tokenizer):
    assert find_teacher(settings(copied), tokenizer) == copied
    assert find_teacher(settings(copied), load_tokenizer(str(copied), "huggingface")) == copied
    same_size = other_tokenizer(["Quite other words are found here, over and over: otters, rivers, mills."] * 3, 270)
    assert same_size.vocab_size == tokenizer.vocab_size
    with pytest.raises(SettingsError, match="the id 2[56][0-9] is '.*' to it, '.*' to the student"):
        find_teacher(settings(copied), same_size)
    larger = other_tokenizer(TEXTS, 280)
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
    (gpt2 / "model.safetensors").unlink()
    refused(gpt2, tokenizer, "cannot be loaded", CheckpointError)
