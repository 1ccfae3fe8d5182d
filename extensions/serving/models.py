"""Opens the models named on the command line."""

import re
from pathlib import Path
from typing import Optional

from checkpoint import peft, store
from checkpoint.huggingface import context_length, read_model_json
from common.errors import PaddockError
from data_pipeline.shards import prepared_folder
from extensions.inference.text import LanguageModel
from extensions.inference.weights import load_to_generate
from model_utils import find_model
from run.adapters import base_of_adapters


def open_model(name: str, base: Optional[str] = None, weights: Optional[str] = None) -> LanguageModel:
    """Return a model, given a run, checkpoint, Hugging Face folder or name, with any adapters applied."""
    shape_folder = folder = find_model(name)
    if (folder / peft.CONFIG_FILE).exists():
        shape_folder = base_of_adapters(folder, base)
        base = str(shape_folder)
    model, tokenizer = load_to_generate(folder, base, weights)
    longest = context_length(read_model_json(shape_folder / "config.json"))
    settings = store.read_state(folder).get("settings", {})
    stage = settings.get("TRAINING_STAGE")
    opened = LanguageModel(name, model, tokenizer, longest, stage == "pretrain")
    opened.prompts = prompts_to_try(opened, settings.get(f"{stage}_DATA_PATH".upper()))
    return opened


def prompts_to_try(model: LanguageModel, data_path: Optional[str]) -> list[str]:
    """Return the beginnings of examples from a run's training data, if it still exists."""
    try:
        examples = read_model_json(prepared_folder(Path(data_path)) / "manifest.json")["examples"]
        prompt = model.chat_format and model.chat_prompt([{"role": "user", "content": "?"}])
    except (TypeError, OSError, ValueError, KeyError, PaddockError):
        return []
    decode = model.tokenizer.decode
    if prompt is None:
        start = decode([model.tokenizer.document_start_id])
        return [" ".join(text.removeprefix(start).split()[:8]) for text in examples]
    # User messages of single-turn examples that the manifest does not shorten
    before, after = decode(prompt.ids).split("?", 1)
    message = rf"{re.escape(before)}([^\u27e6]*?){re.escape(after.strip())}\s*(\u27e6|\nchosen: |$)"
    found = dict.fromkeys(match[1] for text in examples if (match := re.match(message, text.strip())))
    return [text for text in found if " tokens ...] " not in text]
