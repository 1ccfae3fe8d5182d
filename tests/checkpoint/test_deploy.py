"""The folder is what docs/serving.md says that vLLM, llama.cpp and Ollama expect."""

import hashlib
import re

import pytest

from scripts.convert_to_gguf import OLLAMA
from tokenizer import PATTERN


def test_ollama_knows_how_our_tokenizers_split_text():
    # Source: parseTokenizer in convert/tokenizer.go of github.com/ollama/ollama, for llama-bpe.
    assert hashlib.sha256(PATTERN.encode()).hexdigest() == "d98f9631be1e9607a9848c26c1f9eac1aa9fc21ac6ba82a2fc0741af9780a48f"


def test_the_template_for_ollama_renders_chats_as_the_chat_template_does(whole):
    jinja2 = pytest.importorskip("jinja2")
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."},
                {"role": "user", "content": "Why?"}]
    template = OLLAMA["<|start_header_id|>"]
    before, turn, after = re.fullmatch(r"(.*)\{\{ range \.Messages \}\}(.*)\{\{ end \}\}(.*)", template, re.DOTALL).groups()
    turns = [turn.replace("{{ .Role }}", message["role"]).replace("{{ .Content }}", message["content"]) for message in messages]
    actual = jinja2.Template((whole.checkpoint(6) / "chat_template.jinja").read_text()).render(
        messages=messages, bos_token="", add_generation_prompt=True)
    assert before + "".join(turns) + after == actual and "{{" not in actual


