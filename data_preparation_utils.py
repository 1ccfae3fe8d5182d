"""Prepare documents, chats, preference pairs or prompts, from a source to a folder with token shards.

The set's folder is named after a hash of its source, tokenizer and settings, so that a second call finds it.
`prepare_from_flags` of extensions/preparation_flags.py also links it beside it under the source's name; the
scripts load_{pretrain,instruct,dpo,prompts}_dataset.py call it. The implementation is in data_pipeline/:
sources (records), chats, templates (labels), prepare, workers (tokens, journal, manifest), shards (files).
"""

import os
from pathlib import Path

from common.errors import DataError, SettingsError
from common.files import disk_errors
from common.text import show
from data_pipeline import mixture
from data_pipeline.chats import SHORTCUTS as EXAMPLE_SHORTCUTS
from data_pipeline.examples import kind_of_examples
from data_pipeline.prepare import DOCUMENTS, prepare
from data_pipeline.source_files import SHORTCUTS, Source, source_of
from data_pipeline.templates import text_tokenizer
from data_pipeline.workers import PreparationOptions
from tokenizer import load_tokenizer

NAMES = {"documents": SHORTCUTS, **EXAMPLE_SHORTCUTS}


def prepare_set(kind: str, source: str | Source, output_dir: str | Path, options: PreparationOptions) -> Path:
    """Prepare a set of a kind (a key of KINDS) in `output_dir`, unless it exists, and return its folder."""
    source = source_of(source, NAMES[kind]) if isinstance(source, str) else source
    if kind != "documents" and (source.column or source.documents):
        raise SettingsError(f"{source.path or source.name}: remove column and documents, which are for text")
    tokenizer = load_tokenizer(options.tokenizer_path, options.tokenizer_backend)
    if kind == "documents":
        more = text_tokenizer(tokenizer).special_ids.keys() - tokenizer.special_ids.keys()
        data_kind = DOCUMENTS._replace(settings={"chat_tokens": sorted(more)} if more else {})
    else:
        data_kind = kind_of_examples(kind, tokenizer, options.system_prompt)
    return prepare(data_kind, source, tokenizer, Path(output_dir), options)


def prepare_mixture(kind: str, file: str | Path, output_dir: Path, options: PreparationOptions) -> Path:
    """Prepare each source of a `MixFile` as a separate set, unless it exists; return the mixture's folder."""
    sources, mixed = mixture.read_mix(file)
    for index, (source, entry) in enumerate(zip(sources, mixed.sources), 1):
        show(f"Source {index} of {len(sources)}: {entry.label}")
        entry.set = os.path.join("..", prepare_set(kind, source, output_dir, options).name)
    with disk_errors(output_dir, DataError, "choose another --output"):
        return mixture.write_mixture(output_dir, mixed)
