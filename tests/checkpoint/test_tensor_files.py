"""Tensors that are read by rows and one at a time; the bytes of the files are tested in test_store.py."""

import weakref

import pytest
import torch
from safetensors.torch import save_file

from checkpoint import huggingface, model_json
from checkpoint import tensors as tensor_files
from checkpoint.tensors import LazyTensor, lazy, open_tensors, read_all, write_tensors
from common.errors import CheckpointError
from config import ModelConfig, OptimConfig
from learn.optim import Optimizer
from model import Transformer
from model_utils import load_weights
from run.saving import restore_padding, saved_rows


def test_rows_of_a_file_are_those_of_the_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", 40)
    tensors = {"matrix": torch.randn(7, 5), "vector": torch.randn(9).bfloat16(), "scalar": torch.tensor(2.5),
               "wide": torch.randn(3, 50), "empty": torch.zeros(0, 4), "thin": torch.zeros(4, 0)}
    save_file(tensors, tmp_path / "file")
    opened = open_tensors(tmp_path / "file")
    assert opened.keys() == tensors.keys()
    for name, tensor in tensors.items():
        for each in (opened[name], lazy(tensor)):
            assert (each.shape, each.dtype, each.nbytes) == (tensor.shape, tensor.dtype, tensor.nbytes)
            assert torch.equal(each.full(), tensor)
            spans = [(i, j) for i in range(each.rows + 1) for j in range(i, each.rows + 1)] if each.shape else []
            assert all(torch.equal(each.read(i, j), tensor[i:j]) for i, j in spans)
            pieces = [each.read(*span) for span in each.spans()]
            assert torch.equal(torch.cat([tensor[:0].flatten() if tensor.ndim else tensor[None][:0],
                                          *(piece.flatten() for piece in pieces)]), tensor.flatten())
            assert all(piece.nbytes <= 40 or len(piece) == 1 for piece in pieces)
    assert opened["matrix"].equals(lazy(tensors["matrix"])) and not opened["matrix"].equals(lazy(torch.zeros(7, 5)))


def one_at_a_time(tensors: dict[str, torch.Tensor]) -> dict[str, LazyTensor]:
    read_before: list[weakref.ref] = []

    def guarded(tensor: torch.Tensor) -> LazyTensor:
        def read(start: int, stop: int) -> torch.Tensor:
            assert not any(reference() is not None for reference in read_before), "two are in memory"
            rows = lazy(tensor).read(start, stop).clone()
            read_before.append(weakref.ref(rows.untyped_storage()))
            return rows

        return LazyTensor(tuple(tensor.shape), tensor.dtype, read)

    return {name: guarded(tensor) for name, tensor in tensors.items()}


def test_a_model_and_its_optimizer_are_read_one_tensor_at_a_time(monkeypatch, tmp_path):
    """With the padding of the vocabulary, which no file has."""
    config = ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, multiple_of=16)
    trained, loaded = Transformer(config, 100), Transformer(config, 100)
    trained.init_weights(torch.Generator().manual_seed(0))
    optimizer, fresh = Optimizer(trained, OptimConfig()), Optimizer(loaded, OptimConfig())
    trained(torch.arange(20).view(1, 20), torch.arange(20).view(1, 20)).sum().backward()
    optimizer.step(0.01)
    trained.tok_embeddings.weight.data[100:] = 0
    tensors = read_all(huggingface.to_huggingface(trained.state_dict(), config, 100))
    monkeypatch.setattr(huggingface, "load_model_weights", lambda folder: one_at_a_time(tensors))
    model_json.write_json(tmp_path / "config.json", model_json.huggingface_config(config, 100, 64, None, 0, "float32"))
    load_weights(tmp_path, loaded)
    assert all(torch.equal(actual, reference) for actual, reference in zip(loaded.parameters(), trained.parameters()))
    state = {name: lazy(tensor).first_rows(saved_rows(name, tensor, trained)) if tensor.ndim else lazy(tensor)
             for name, tensor in optimizer.state_tensors().items()}
    assert state["tok_embeddings.weight.exp_avg"].shape == (100, 32)
    fresh.load_state_tensors(restore_padding(one_at_a_time(read_all(state)), loaded))
    actual, reference = fresh.state_tensors(), optimizer.state_tensors()
    assert actual.keys() == reference.keys() and all(torch.equal(actual[name], reference[name]) for name in actual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_rows_are_the_mean_of_the_others_which_do_not_change(dtype, monkeypatch):
    whole = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    monkeypatch.setattr("checkpoint.tensors.BLOCK_BYTES", 7 * 6 * dtype.itemsize)  # read in several blocks
    larger = lazy(whole).resized(43)
    rows = larger.read(0, 43)
    assert larger.shape == (43, 6) and rows.dtype == dtype and torch.equal(rows[:40], whole)
    assert torch.equal(rows[40:], whole.double().mean(dim=0).to(dtype).expand(3, 6))
    for span in ((0, 5), (38, 42), (41, 43), (40, 40)):  # as the ranks of a sharded model read it
        assert torch.equal(larger.read(*span), rows[slice(*span)])
    assert torch.equal(lazy(whole).resized(9).full(), whole[:9]) and torch.equal(lazy(whole).resized(40).full(), whole)
    assert torch.equal(larger.padded(128).full()[:43], rows) and not larger.padded(128).full()[43:].any()


def test_a_file_that_is_replaced_or_deleted_is_not_read_on(tmp_path):
    write_tensors(tmp_path / "file", {"a": torch.ones(3)})
    tensor = open_tensors(tmp_path / "file")["a"]
    write_tensors(tmp_path / "other", {"a": torch.zeros(3)})
    (tmp_path / "other").rename(tmp_path / "file")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="file is gone: "):
            tensor.full()
        (tmp_path / "file").unlink(missing_ok=True)
