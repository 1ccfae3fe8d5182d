"""Prepare text for pretraining: read it from files or the hub, tokenise it, and write token shards."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from data_preparation_utils import describe_prepared, prepare_pretrain
from errors import SettingsError, run_script
from records import SHORTCUTS, read_mix, source_of
from settings import export_secrets, load_config

USAGE = f"""usage: python scripts/load_pretrain_dataset.py [--source SOURCE | --mix FILE] [--any-setting VALUE]

  --source SOURCE         {', '.join(SHORTCUTS)}, the name of a dataset on the hub, or a file, folder or glob of
                          .jsonl .parquet .txt (also compressed), local or on any fsspec URL     [fineweb-edu]
  --mix FILE              several sources by weight, as JSON: {{"sources": [{{"path" or "name": ..., "weight": 0.7,
                          and any of config split revision files column documents}}, ...], "seed": 0,
                          "stop": "first_exhausted" | "all_exhausted"}}; weights are shares of documents
  --config-name NAME      the hub dataset's config
  --split NAME            the hub dataset's split                                                [train]
  --revision REV          the hub dataset's branch, tag or commit                                [newest]
  --files PATTERN         only these files of the hub dataset, such as 'en/c4-train.0000?-of-01024.json.gz'
  --column NAME           where the text stands                                                  [text]
  --documents HOW         how plain text becomes documents: whole (a file is one), line, blank (blank lines lie
                          between), wikitext (each begins at a line like ' = Title = '), or a line of your own
                          that lies between, such as '<|endoftext|>'                             [whole]
  --max-documents N       only the first N documents; 0 = all                                    [0]
  --on-bad-record HOW     fail, or skip to count and list records that cannot be used            [fail]
  --output FOLDER         where prepared sets lie, each in a folder named by what it is made of  [data/pretrain]

Settings that count here, from .env, the environment or as flags: TOKENIZER_PATH TOKENIZER_BACKEND SHARD_TOKENS
VALIDATION_FRACTION PREPARATION_WORKERS HF_TOKEN. A preparation that was stopped goes on where it was."""

SOURCE_FLAGS = {"config-name": "config", "split": "split", "revision": "revision", "files": "files", "column": "column",
                "documents": "documents"}
OWN_FLAGS = ("source", "mix", "max-documents", "on-bad-record", "output", *SOURCE_FLAGS)


def main(argv: list[str]) -> None:
    loaded = load_config(argv, extra_flags=OWN_FLAGS, complete=False)
    config, flags = loaded.config, loaded.rest
    export_secrets(config)
    if config.tokenizer_path is None:
        raise SettingsError("TOKENIZER_PATH is not set; point it at Llama 3's tokenizer.model, a tokenizer.json or a hub name")
    fields = {field: flags[flag.replace("-", "_")] for flag, field in SOURCE_FLAGS.items() if flag.replace("-", "_") in flags}
    if "mix" in flags and (fields or "source" in flags):
        raise SettingsError("--mix describes its sources itself; give no --source or flags of a source beside it")
    limit = flags.get("max_documents", "0")
    if not limit.isdecimal():
        raise SettingsError(f"--max-documents {limit}: must be a whole number, 0 or more")
    folder = prepare_pretrain(
        read_mix(flags["mix"]) if "mix" in flags else source_of(flags.get("source", "fineweb-edu"), **fields),
        config.tokenizer_path, config.tokenizer_backend, flags.get("output", "data/pretrain"),
        shard_tokens=config.shard_tokens, validation_fraction=config.validation_fraction, workers=config.preparation_workers,
        max_documents=int(limit), on_bad_record=flags.get("on_bad_record", "fail"))
    print(describe_prepared(folder))
    print("Ready. The line for .env:")
    print(f"PRETRAIN_DATA_PATH={folder}")


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(USAGE)
    else:
        run_script(lambda: main(sys.argv[1:]), "Stopped. The same command goes on where it was.")
