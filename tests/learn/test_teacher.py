"""Teachers compared with documents run separately, with transformers, and with their stored outputs."""

import json
import os
import shutil
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from factories import flip_bit, new_model, run_ranks
from safetensors.torch import load_file, save_file

from checkpoint import huggingface, store
from common.errors import CheckpointError, DataError, SettingsError
from common.files import FileLock
from config import Config
from data_pipeline.shards import HEADER_BYTES, Cache, Shard, TokenSet, header_bytes
from dataloaders import Batch, TokenRows
from fused.head import IGNORE_INDEX
from learn import stored as stored_outputs
from learn.objectives import Distillation
from learn.stored import OutputStore, TeacherRows, top_k_logprobs, with_teacher
from learn.teacher import HFTeacher, LlamaTeacher, find_teacher, load_teacher, teacher_provenance
from model import Transformer
from parallel.ranks import Interrupted, Ranks, RunContext, start_ranks, stop_ranks
from tokenizer import load_tokenizer, train_bpe, write_tiktoken

CPU = torch.device("cpu")
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


def test_a_llama_of_ours_says_of_packed_rows_what_it_says_of_each_document_alone(llama_folder, tokenizer):
    teacher = load_teacher(llama_folder, settings(llama_folder), tokenizer.vocab_size, Ranks())
    assert isinstance(teacher, LlamaTeacher) and teacher.model.config.attention_backend == "auto"
    held_against_documents_alone(teacher, lambda tokens: teacher.model.logits(tokens), tokenizer.vocab_size)


def test_a_foreign_model_says_of_packed_rows_what_it_says_of_each_document_alone(tmp_path, tokenizer):
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
        said = torch.cat([logits_of(slice(0, 5)), logits_of(slice(5, len(places)))])
        assert said.shape == (len(places), vocab_size) and said.dtype == torch.float32 and not said.requires_grad
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
                        torch.testing.assert_close(said[places.index(place)], logits, rtol=1e-4, atol=1e-4)
                        checked += 1
        assert checked > 20


@pytest.mark.parametrize("with_documents", [True, False])
def test_a_llama_is_the_same_through_transformers_and_through_our_model(llama_folder, tokenizer, with_documents):
    transformers = pytest.importorskip("transformers")
    ours = load_teacher(llama_folder, settings(llama_folder, attention_backend="math"), tokenizer.vocab_size, Ranks())
    assert ours.model.config.attention_backend == "math"
    theirs = HFTeacher(transformers.AutoModelForCausalLM.from_pretrained(llama_folder), tokenizer.vocab_size)
    batch = a_batch(tokenizer.vocab_size)
    if not with_documents:
        batch = Batch(batch.tokens_BT, batch.targets_BT, None, batch.target_index_M)
    torch.testing.assert_close(ours.logits(batch)(slice(None)), theirs.logits(batch)(slice(None)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stored, asked, expected", [
    (torch.bfloat16, "auto", torch.bfloat16), (torch.bfloat16, "fp32", torch.float32), (torch.float32, "auto", torch.float32),
    (torch.float32, "bf16", torch.bfloat16), (torch.float16, "auto", torch.float32)])  # a CPU has no kernels for float16
def test_teacher_precision_is_the_files_own_or_the_one_asked_for(copied, tokenizer, stored, asked, expected):
    tensors = {name: tensor.to(stored) for name, tensor in load_file(copied / "model.safetensors").items()}
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    teacher = load_teacher(copied, settings(copied, teacher_precision=asked), tokenizer.vocab_size, Ranks())
    assert teacher.model.compute_dtype == expected and {parameter.dtype for parameter in teacher.model.parameters()} == {expected}
    assert not teacher.model.training and not any(parameter.requires_grad for parameter in teacher.model.parameters())
    assert teacher.logits(a_batch(tokenizer.vocab_size))(slice(None)).dtype == torch.float32


def test_adapters_alone_are_no_teacher(copied, tokenizer):
    (copied / "config.json").rename(copied / "adapter_config.json")
    with pytest.raises(CheckpointError, match="merge them"):
        find_teacher(settings(copied), tokenizer)


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


def test_foreign_models_that_cannot_teach_are_refused(tmp_path, tokenizer, monkeypatch, copied):
    gpt2 = transformers_model("GPT2", tokenizer, tmp_path / "gpt2")
    refused(gpt2, tokenizer, "reads 32 tokens at most; lower MAX_SEQ_LEN=64", max_seq_len=64)
    refused(transformers_model("Bert", tokenizer, tmp_path / "bert"), tokenizer, "not a causal language model")
    with monkeypatch.context() as patched:
        patched.setitem(__import__("sys").modules, "transformers", None)
        refused(gpt2, tokenizer, "pip install transformers")
        load_teacher(copied, settings(copied), tokenizer.vocab_size, Ranks())  # a Llama needs no transformers
    tensors = load_file(gpt2 / "model.safetensors")
    some = {name: tensor for name, tensor in tensors.items() if "h.1.mlp" not in name}
    save_file(some, gpt2 / "model.safetensors", {"format": "pt"})
    refused(gpt2, tokenizer, "lacks weights", CheckpointError)
    (gpt2 / "model.safetensors").write_bytes(b"nothing of the kind")
    refused(gpt2, tokenizer, "cannot be loaded", CheckpointError)
    (gpt2 / "model.safetensors").unlink()
    refused(gpt2, tokenizer, "cannot be loaded", CheckpointError)


def test_code_that_comes_with_a_model_is_never_run(tmp_path, tokenizer):
    folder = transformers_model("GPT2", tokenizer, tmp_path / "gpt2")
    (folder / "evil.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n")
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    edit_json(folder / "config.json", model_type="evil", auto_map=auto_map)
    refused(folder, tokenizer, "never run")
    edit_json(folder / "config.json", model_type="gpt2")
    load_teacher(folder, settings(folder), tokenizer.vocab_size, Ranks())
    assert not (folder / "ran").exists()


def test_a_teachers_facts_follow_its_weights_and_its_configuration(copied):
    facts = teacher_provenance(copied, settings())
    assert facts == teacher_provenance(copied, settings()) != teacher_provenance(copied, settings(teacher_precision="bf16"))
    edit_json(copied / "config.json", rope_theta=1234.0)
    assert teacher_provenance(copied, settings())["config_sha256"] != facts["config_sha256"]
    tensors = load_file(copied / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    assert teacher_provenance(copied, settings())["weights_sha256"] != facts["weights_sha256"]


FACTS = {"weights_sha256": "w", "data": "d"}
NOBODY_STOPS = SimpleNamespace(received=None)


def token_rows(folder: Path, tokenizer, rows: int = 9, seed: int = 0) -> TokenRows:
    """Rows of random tokens, several documents in each."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = np.random.default_rng(seed).integers(0, 270, rows * ROW_TOKENS + 1).astype("<u2")
    ids[::5] = tokenizer.document_start_id
    (folder / "train-00000.bin").write_bytes(header_bytes(len(ids), "uint16") + ids.tobytes())
    shard = Shard(folder / "train-00000.bin", "uint16", HEADER_BYTES, len(ids))
    return TokenRows(TokenSet((shard,), "d"), ROW_TOKENS, tokenizer.document_start_id)


class CountingTeacher(LlamaTeacher):
    """A teacher that counts its rows, and may signal the run to stop."""

    def __init__(self, tokenizer, stop_after: int = 10**9, signals=None):
        super().__init__(llama(tokenizer, 2), tokenizer.vocab_size)
        self.asked, self.stop_after, self.signals = 0, stop_after, signals

    def logits(self, batch: Batch):
        self.asked += len(batch.tokens_BT)
        if self.asked >= self.stop_after:
            self.signals.received = 15
        return super().logits(batch)


def stored(rows, folder: Path, tokenizer, teacher, signals=NOBODY_STOPS, indices=None, said=None, ranks=Ranks(), facts=FACTS,
           **changes) -> TeacherRows:
    config = settings(**({"distillation_top_k": 8} | changes))
    log = SimpleNamespace(info=[].append if said is None else said.append)
    outputs = OutputStore(Cache(folder), RunContext(ranks, signals, log))
    return with_teacher(outputs, rows, facts | {"vocab_size": tokenizer.vocab_size}, lambda: teacher, config, indices)


def empty_store(rows, folder: Path) -> TeacherRows:
    return TeacherRows(rows, folder / "store", {"top_k": 8, "vocab_size": 270})


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (the_store(folder) / name).read_bytes() for name in ("facts.json", "rows.bin", "checksums.bin")}


def the_store(folder: Path) -> Path:
    [store] = folder.rglob("teacher-*")
    return store


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_what_is_stored_are_the_likeliest_and_the_sum_of_the_others(tokenizer, temperature):
    teacher, batch, vocab_size = CountingTeacher(tokenizer), a_batch(tokenizer.vocab_size), tokenizer.vocab_size
    ids, logprobs = (torch.from_numpy(array) for array in top_k_logprobs(teacher, batch, 6, temperature, vocab_size))
    counted = batch.targets_BT != IGNORE_INDEX
    expected = torch.log_softmax(teacher.logits(batch)(slice(None)) / temperature, -1)
    kept = expected.gather(1, ids[counted])
    torch.testing.assert_close(logprobs[counted][:, :-1], kept)
    torch.testing.assert_close(kept.sort(descending=True).values, expected.topk(6).values)
    torch.testing.assert_close(logprobs[counted].exp().sum(-1), torch.ones(int(counted.sum())))
    assert logprobs[~counted].abs().max() == 0


def test_stored_with_every_token_kept_is_the_live_teacher(tmp_path, tokenizer):
    rows, student, teacher = token_rows(tmp_path, tokenizer), llama(tokenizer, 1), CountingTeacher(tokenizer)
    k = tokenizer.vocab_size
    batch = stored(rows, tmp_path, tokenizer, teacher, distillation_top_k=k)(np.arange(4))
    losses, gradients = [], []
    for objective in (Distillation(settings(), teacher), Distillation(settings())):
        student.zero_grad()
        total = objective.loss_sum(student, batch).total
        total.backward()
        losses.append(total.item())
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in student.parameters()]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert (gradients[1] - gradients[0]).norm() < 1e-3 * gradients[0].norm()  # what float16 rounds off


def test_a_teacher_is_asked_once(tmp_path, tokenizer):
    rows, teacher, said = token_rows(tmp_path, tokenizer), CountingTeacher(tokenizer), []
    first = stored(rows, tmp_path, tokenizer, teacher, said=said)
    again = stored(rows, tmp_path, tokenizer, None)
    assert teacher.asked == len(rows) == len(again) and "8 most likely tokens of 9 rows" in said[0]
    for name in ("teacher_ids", "teacher_logprobs"):
        torch.testing.assert_close(first(np.array([3, 8])).stored[name], again(np.array([3, 8])).stored[name])
    assert again(np.array([3])).to(CPU).stored["teacher_ids"].shape == (1, ROW_TOKENS, 8)


def test_only_the_rows_that_will_be_read_are_asked_for(tmp_path, tokenizer):
    rows, teacher = token_rows(tmp_path, tokenizer), CountingTeacher(tokenizer)
    partly = stored(rows, tmp_path, tokenizer, teacher, indices=np.array([5, 1, 5]))
    assert teacher.asked == 2 and partly(np.array([1, 5])).stored
    assert len(stored(rows, tmp_path / "none", tokenizer, None, indices=np.arange(0))) == 9  # a run without steps
    with pytest.raises(DataError, match="row 2 is missing"):
        partly(np.array([2]))
    stored(rows, tmp_path, tokenizer, teacher)
    assert teacher.asked == len(rows)


def test_a_stopped_pass_goes_on_and_gives_the_same_store(tmp_path, tokenizer):
    rows, whole, signals = token_rows(tmp_path / "data", tokenizer), CountingTeacher(tokenizer), SimpleNamespace(received=None)
    stored(rows, tmp_path / "whole", tokenizer, whole)
    first = CountingTeacher(tokenizer, 4, signals)
    with pytest.raises(Interrupted):
        stored(rows, tmp_path / "stopped", tokenizer, first, signals)
    second = CountingTeacher(tokenizer)
    stored(rows, tmp_path / "stopped", tokenizer, second)
    assert (first.asked, second.asked) == (4, 5)
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


def test_a_row_is_marked_as_stored_when_its_record_is_on_the_disk(tmp_path, tokenizer, monkeypatch):
    """The order of the calls shows what a power cut would leave; before the commit, a kill leaves nothing stored."""
    rows, calls, fsync, pwrite = token_rows(tmp_path / "data", tokenizer), [], os.fsync, os.pwrite

    def noted(name, call):
        def noting(descriptor, *arguments):
            calls.append((name, Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
            return call(descriptor, *arguments)
        return noting

    store = empty_store(rows, tmp_path)
    with store.writing():
        monkeypatch.setattr(os, "fsync", noted("sync", fsync))
        monkeypatch.setattr(os, "pwrite", noted("write", pwrite))
        store.write(rows(np.arange(2)), np.arange(2), np.zeros(2, store.record))
        assert len(store.missing(np.arange(9))) == 9
    assert store.missing(np.arange(9)).tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert calls == [("write", "rows.bin")] * 2 + [("sync", "rows.bin")] + [("write", "checksums.bin")] * 2 + [("sync", "checksums.bin")]


@pytest.mark.parametrize("part", ["tokens_BT", "targets_BT", "document_ids_BT"])
def test_a_record_of_a_row_with_other_tokens_targets_or_documents_is_damaged(part, tmp_path, tokenizer):
    rows = token_rows(tmp_path / "data", tokenizer)
    store = empty_store(rows, tmp_path)
    with store.writing():
        store.write(rows(np.arange(3)), np.arange(3), np.zeros(3, store.record))

    def changed(indices: np.ndarray) -> Batch:
        batch = rows(indices)
        getattr(batch, part)[1, 5] += 1
        return batch

    assert store.damaged(np.arange(3)).tolist() == []
    store.rows = changed
    assert store.damaged(np.arange(3)).tolist() == [1]


def store_as_a_rank(folder: str, tokenizer_path: str) -> int:
    """Store outputs as one of several ranks."""
    tokenizer = load_tokenizer(tokenizer_path)
    ranks = start_ranks("cpu", 60)
    rows = token_rows(Path(folder) / f"data-{ranks.rank}", tokenizer)
    stored(rows, Path(folder) / "two", tokenizer, CountingTeacher(tokenizer), ranks=ranks)
    stop_ranks()
    return 0


def test_two_ranks_make_the_store_of_one(tmp_path, tokenizer):
    write_tiktoken(tokenizer.ranks, tmp_path / "tokenizer.model")
    run_ranks(store_as_a_rank, str(tmp_path), str(tmp_path / "tokenizer.model"), world_size=2, folder=tmp_path / "outputs")
    stored(token_rows(tmp_path / "data", tokenizer), tmp_path / "one", tokenizer, CountingTeacher(tokenizer))
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_other_facts_are_another_store(tmp_path, tokenizer):
    rows, teacher = token_rows(tmp_path, tokenizer), CountingTeacher(tokenizer)
    for number, changes in enumerate(({}, {"distillation_temperature": 1.0}, {"distillation_top_k": 4}, {"document_mask": False},
                                      {"facts": {"weights_sha256": "w", "data": "other"}},
                                      {"facts": {"weights_sha256": "other", "data": "d"}}), start=1):
        stored(rows, tmp_path, tokenizer, teacher, **changes)
        assert teacher.asked == number * len(rows) and len(list(tmp_path.rglob("teacher-*"))) == number


@pytest.mark.parametrize("spoil, damaged, again", [
    (lambda store: os.truncate(store / "rows.bin", 100), 9, 9),
    (lambda store: os.truncate(store / "checksums.bin", 8), 0, 7),
    (lambda store: (store / "checksums.bin").unlink(), 0, 9),
    (lambda store: flip_bit(store / "rows.bin", 700), 1, 1),
    (lambda store: flip_bit(store / "checksums.bin", 0), 1, 1)])
def test_what_is_damaged_in_a_store_is_computed_again_and_only_that(tmp_path, tokenizer, spoil, damaged, again):
    rows, teacher, said = token_rows(tmp_path, tokenizer), CountingTeacher(tokenizer), []
    stored(rows, tmp_path, tokenizer, CountingTeacher(tokenizer))
    whole = contents(tmp_path)
    (the_store(tmp_path) / ".verified.json").unlink()  # as an older version leaves it
    stored(rows, tmp_path, tokenizer, None)
    spoil(the_store(tmp_path))
    stored(rows, tmp_path, tokenizer, teacher, said=said)
    assert teacher.asked == again and contents(tmp_path) == whole
    assert any(f" {damaged} rows in {the_store(tmp_path)} are damaged" in line for line in said) == bool(damaged), said
    assert stored(rows, tmp_path, tokenizer, None)(np.arange(9)).stored


def test_of_two_jobs_one_fills_the_store_and_the_other_waits(tmp_path, tokenizer, monkeypatch):
    """The jobs may run on different machines, whose outputs differ in their last bits."""
    monkeypatch.setattr(stored_outputs, "WAIT_SECONDS", 0.01)
    rows, waits, said = token_rows(tmp_path, tokenizer), threading.Event(), []

    class WaitedFor(CountingTeacher):
        def logits(self, batch: Batch):
            assert waits.wait(30)
            return super().logits(batch)

    def info(text: str) -> None:
        said.append(text)
        if "waiting for" in text:
            waits.set()

    with ThreadPoolExecutor() as pool:
        first = pool.submit(stored, rows, tmp_path, tokenizer, WaitedFor(tokenizer))
        while not list(tmp_path.rglob("checksums.bin")):
            time.sleep(0.01)
        second = stored(rows, tmp_path, tokenizer, None, said=SimpleNamespace(append=info))
        assert second(np.arange(9)).stored and first.result()(np.arange(9)).stored
    assert any(f"process {os.getpid()} on" in line for line in said)


def test_a_job_that_waits_leaves_at_a_signal_and_one_that_died_holds_nothing(tmp_path, tokenizer):
    rows, signals = token_rows(tmp_path, tokenizer), SimpleNamespace(received=None)
    stored(rows, tmp_path, tokenizer, CountingTeacher(tokenizer))
    [lock] = tmp_path.rglob(".teacher-*.lock")
    shutil.rmtree(the_store(tmp_path))
    ready, tell = os.pipe()
    if not (child := os.fork()):
        held = FileLock(lock)
        os.write(tell, held.take().encode() or b"taken")
        time.sleep(60)
        os._exit(0)
    assert os.read(ready, 99) == b"taken"
    signals.received = 15
    with pytest.raises(Interrupted):
        stored(rows, tmp_path, tokenizer, None, signals)
    assert not list(tmp_path.rglob("teacher-*"))
    os.kill(child, 9)
    os.waitpid(child, 0)
    assert stored(rows, tmp_path, tokenizer, CountingTeacher(tokenizer))


def test_a_full_disk_is_told_and_what_was_stored_is_kept(tmp_path, tokenizer, monkeypatch):
    rows, teacher, original, calls = token_rows(tmp_path, tokenizer), CountingTeacher(tokenizer), os.pwrite, []

    def full_after_five_rows(descriptor: int, content: bytes, offset: int) -> int:
        calls.append(len(content))
        if len(content) > 4 and len(calls) > 5:
            raise OSError(28, "No space left on device")
        return original(descriptor, content, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full_after_five_rows)
        with pytest.raises(DataError, match="No space left on device; [0-9,]+ bytes are free; free some space"):
            stored(rows, tmp_path, tokenizer, teacher)
    again = CountingTeacher(tokenizer)
    stored(rows, tmp_path, tokenizer, again)
    assert again.asked == len(rows) - 5


def test_too_small_a_disk_is_told_before_the_teacher_is_loaded(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=100))
    with pytest.raises(DataError, match="more bytes, but 100 are free; set CACHE_DIR"):
        stored(token_rows(tmp_path, tokenizer), tmp_path, tokenizer, None)


def test_a_complete_store_needs_no_right_to_write(tmp_path, tokenizer, monkeypatch):
    rows = token_rows(tmp_path, tokenizer)
    stored(rows, tmp_path, tokenizer, CountingTeacher(tokenizer))
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, *mode: pytest.fail("for writing")
                        if flags & (os.O_WRONLY | os.O_RDWR) else real(path, flags, *mode))
    assert isinstance(stored(rows, tmp_path, tokenizer, None), TeacherRows)
