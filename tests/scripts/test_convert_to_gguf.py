"""convert_to_gguf.py runs llama.cpp's converter, and tells it of what kind our tokenizers are."""

import json
import os
import runpy
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from commands import ROOT
from factories import UNMEASURED, TinyRun, prepare

SCRIPT = str(ROOT / "scripts" / "convert_to_gguf.py")
# As the real one is built: the class is found in the package, and the script writes what it says.
FAKE = {"conversion/__init__.py": "",
        "conversion/base.py": "class TextModel:\n    def get_vocab_base_pre(self, tokenizer):\n        return 'unknown'\n",
        "convert_hf_to_gguf.py": "import pathlib, sys\nfrom conversion.base import TextModel\n"
                                 "pathlib.Path(sys.argv[3]).write_text(' '.join([TextModel().get_vocab_base_pre(None), *sys.argv]))\n"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """The checkpoint of a run whose tokenizer has merges."""
    folder = tmp_path_factory.mktemp("gguf")
    run = TinyRun(prepare(folder / "data", vocab_size=280), folder / "runs", MAX_STEPS=1, **UNMEASURED)
    assert run.train() == 0
    return run.checkpoint(1)


@pytest.fixture
def convert(tmp_path, monkeypatch, capsys):
    """A function that runs the script with a stand-in of llama.cpp; returns its exit code and what it printed."""
    for name, content in FAKE.items():
        file = tmp_path / "llama.cpp" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)

    def run(model, *flags, llama_cpp=tmp_path / "llama.cpp") -> tuple[int, str]:
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)
        monkeypatch.setattr(sys, "argv", [SCRIPT, str(model), "--llama-cpp", str(llama_cpp), "--output", str(tmp_path / "out.gguf"), *flags])
        for name in ("sentencepiece", "transformers"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        try:
            runpy.run_path(SCRIPT, run_name="__main__")
        except SystemExit as ended:
            return ended.code, "".join(capsys.readouterr())
        finally:
            for name in ("conversion", "conversion.base"):
                sys.modules.pop(name, None)
        return 0, "".join(capsys.readouterr())

    return run


def test_our_tokenizers_are_of_llama_3s_kind(convert, checkpoint, tmp_path):
    code, text = convert(checkpoint.parents[1], "--dtype", "q8_0")
    assert code == 0 and "out.gguf is ready" in text
    converter, output = tmp_path / "llama.cpp" / "convert_hf_to_gguf.py", tmp_path / "out.gguf"
    assert output.read_text() == f"llama-bpe {converter} {checkpoint} --outfile {output} --outtype q8_0"
    assert convert(checkpoint) == (5, f"error: {tmp_path / 'out.gguf'} already exists; choose a new file\n")


def test_other_tokenizers_are_left_to_llama_cpp(convert, checkpoint, tmp_path):
    copy = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    (copy / "MANIFEST.json").unlink()
    content = json.loads((copy / "tokenizer.json").read_text())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\w+"
    (copy / "tokenizer.json").write_text(json.dumps(content))
    (copy / "trainer_state.json").unlink()
    assert convert(copy)[0] == 0 and (tmp_path / "out.gguf").read_text().startswith("unknown ")
    (copy / "tokenizer.json").write_text(json.dumps({**content, "model": {**content["model"], "merges": []}}))
    (tmp_path / "out.gguf").unlink()
    assert "has no merges" in convert(copy)[1]


def test_what_cannot_be_converted_is_refused(convert, checkpoint, tmp_path):
    code, text = convert(checkpoint, llama_cpp=tmp_path)
    assert code == 5 and "convert_hf_to_gguf.py; clone" in text
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text("{}")
    assert "merge them first" in convert(adapters)[1]


@pytest.mark.skipif(not ("LLAMA_CPP" in os.environ and find_spec("sentencepiece") and find_spec("llama_cpp")),
                    reason="LLAMA_CPP names no clone of llama.cpp, or sentencepiece and llama_cpp are not installed")
def test_llama_cpp_writes_the_same_text(checkpoint, tmp_path, monkeypatch):
    import llama_cpp
    import transformers

    output = tmp_path / "model.gguf"
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [SCRIPT, str(checkpoint), "--llama-cpp", os.environ["LLAMA_CPP"], "--output", str(output), "--dtype", "f32"])
    runpy.run_path(SCRIPT, run_name="__main__")
    theirs = llama_cpp.Llama(str(output), n_ctx=32, verbose=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    for text in ("The cat's 12345 dogs \n\n  jump", "Straße 你好 🚀 x\t\ty", "I'LL We've", "<|eot_id|>"):
        ids = tokenizer(text)["input_ids"]
        assert theirs.tokenize(text.encode(), special=True) == ids
        expected = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids):].tolist()
        theirs.reset()
        assert [token for token, _ in zip(theirs.generate(ids, top_k=1, temp=0.0, repeat_penalty=1.0), expected)] == expected
