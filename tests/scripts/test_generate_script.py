import json
import sys
from pathlib import Path

import pytest
from commands import python
from factories import tiny_model_folder

from extensions.inference import weights
from extensions.inference.engine import Sampling
from extensions.inference.text import TextGenerator, text_prompt
from extensions.inference.weights import find_model
from scripts import generate as script

SCRIPT = script.__file__
PROMPTS = ["The cat", "A longer beginning: the dog found", ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("folder"), tokenizer)


def texts_of(parts) -> list[str]:
    texts: dict[int, str] = {}
    for part in parts:
        texts[part.index] = texts.get(part.index, "") + part.text
    return [texts[index] for index in sorted(texts)]


def load(folder: Path):
    return weights.load_to_generate(find_model(str(folder)))


def test_the_command_prints_prompt_and_continuation(folder):
    generator = TextGenerator(*load(folder), 8, Sampling(temperature=0.7, top_p=0.9, seed=3))
    texts = texts_of(generator.stream([text_prompt(generator.tokenizer, text) for text in PROMPTS[:2]]))
    done = python(SCRIPT, folder, "--prompt", *PROMPTS[:2], "--max-new-tokens", "8", "--temperature", "0.7", "--top-p", "0.9", "--seed", "3")
    whole = "\n\n".join(prompt + text for prompt, text in zip(PROMPTS, texts))
    assert done.returncode == 0 and done.stdout == whole + "\n", done.stderr


def called(monkeypatch, capsys, *arguments) -> str:
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, arguments)])
    script.main()
    return capsys.readouterr().out


def test_prompts_of_a_file_are_answered_in_order(folder, tmp_path, monkeypatch, capsys):
    """In batches, printed or written as JSON, with the random numbers that they have on the command line."""
    lines = [{"prompt": PROMPTS[1]}, {"messages": [{"role": "user", "content": "The cat"}]}, {"prompt": PROMPTS[0]}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ways = ["--max-new-tokens", 9, "--seed", 4, "--top-k", 40, "--min-p", 0.01, "--repetition-penalty", 1.1]
    printed = called(monkeypatch, capsys, folder, "--prompts", tmp_path / "p.jsonl", "--batch-size", 2, *ways)
    output = tmp_path / "o.jsonl"
    assert called(monkeypatch, capsys, folder, "--prompts", tmp_path / "p.jsonl", "--output", output, *ways) == ""
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert [{name: record[name] for name in line} for line, record in zip(lines, found)] == lines
    assert [record["line"] for record in found] == [1, 2, 3]
    assert all(record["tokens"] == 9 and record["finish_reason"] == "length" for record in found)
    texts = [PROMPTS[1] + found[0]["text"], "> The cat\n\n" + found[1]["text"], PROMPTS[0] + found[2]["text"]]
    assert printed == "\n\n".join(texts) + "\n"
    alone = called(monkeypatch, capsys, folder, "--prompt", PROMPTS[1], *ways)
    assert printed.startswith(alone.rstrip("\n"))


@pytest.mark.parametrize(("flags", "advice"), [([], "; a chat model is asked with --chat"), (["--chat"], "")])
def test_a_text_that_ends_at_once_is_noted(flags, advice, folder, monkeypatch, capsys):
    load_whole = script.load_to_generate

    def ends_at_once(*arguments):
        model, tokenizer = load_whole(*arguments)
        tokenizer.generation = {**tokenizer.generation, "eos_token_id": [*range(tokenizer.vocab_size)]}
        return model, tokenizer

    monkeypatch.setattr(script, "load_to_generate", ends_at_once)
    monkeypatch.setattr(sys, "argv", ["generate.py", str(folder), "--prompt", "The cat", "A dog", *flags])
    script.main()
    assert capsys.readouterr().err == f"note: the model ended 2 texts at once{advice}\n"
