"""Opens what is named on the command line."""

from typing import Optional

from checkpoint import peft, store
from checkpoint.huggingface import context_length, read_json
from inference.text import LanguageModel
from model_utils import find_model
from run.adapters import base_of_adapters, load_for_use


def open_model(name: str, base: Optional[str] = None) -> LanguageModel:
    """Return the model of a run, checkpoint, Hugging Face folder or name, with its adapters if it has any."""
    of_shape = folder = find_model(name)
    if (folder / peft.CONFIG_FILE).exists():
        of_shape = base_of_adapters(folder, base)
        base = str(of_shape)
    model, tokenizer = load_for_use(folder, base)
    longest = context_length(read_json(of_shape / "config.json"))
    stage = store.read_state(folder).get("settings", {}).get("TRAINING_STAGE")
    return LanguageModel(name, model, tokenizer, longest, stage == "pretrain")
