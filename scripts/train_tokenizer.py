"""Make a tokenizer of your own text, for TOKENIZER_PATH.

    ./paddock prepare tokenizer books/ "news/*.jsonl" --vocab-size 32000 \\
        --output data/tokenizer.model
    ./paddock prepare tokenizer book.txt --characters --output book.json

--vocab-size trains a byte-level BPE, and writes it in tiktoken's format. With --characters, every character
of the text is a token, and other characters are an error.
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.command_line import CommandParser
from common.errors import local_path, run_script
from common.text import command, counted, print_safely, show
from data_pipeline.source_files import READABLE, list_files, source_of
from data_pipeline.sources import Reading, read_texts
from data_pipeline.vocabulary import train_bpe, write_characters, write_tiktoken
from tokenizer import SPECIALS


def parse_args() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    parser.add_argument("sources", nargs="+", metavar="SOURCE",
                        help=f"files ({READABLE}), folders, globs, URLs, or the name of a dataset on the hub")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--vocab-size", type=int, metavar="N",
                      help=f"vocabulary size, including 256 bytes but not {len(SPECIALS)} special tokens")
    kind.add_argument("--characters", action="store_true", help="one token for each character of the text")
    parser.add_argument("--output", required=True, type=local_path, metavar="FILE", help="file to write")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    parser.add_argument("--column", metavar="NAME", help="column that contains the text (default: text)")
    parser.add_argument("--on-bad-record", choices=("fail", "skip"), default="fail",
                        help="stop at unusable records, or skip and list them (default: fail)")
    args = parser.parse_args()
    if args.output == Path():
        parser.error("--output must be a file")
    if args.characters and args.output.suffix != ".json":
        parser.error(f"--characters writes a tokenizer.json, so --output {args.output} must end in .json")
    if args.output.is_file() and not args.overwrite:
        parser.error(f"{args.output} already exists; choose another file, or add --overwrite")
    return args


def main() -> None:
    args = parse_args()
    reading = Reading(skip_bad=args.on_bad_record == "skip")
    sources = [*map(source_of, args.sources)]
    if args.column is not None:  # if none of the sources has columns, the first one is an error
        tables = [source for source in sources if source.name
                  or any(file.format != "text" for file in list_files(source))] or sources[:1]
        sources = [replace(source, column=args.column) if source in tables else source for source in sources]
    texts = (document.text for source in sources for document in read_texts(source, reading))
    if args.characters:
        size, special = write_characters(texts, args.output), 1
    else:
        ranks = train_bpe(texts, args.vocab_size)
        write_tiktoken(ranks, args.output)
        size, special = len(ranks), len(SPECIALS)
    for record in reading.listing():
        print_safely(f"skipped {record}", sys.stderr)
    lines = []  # that prepare the sources
    for name, source in zip(args.sources, sources):
        flags = ["--column", args.column] if args.column and source.column == args.column else []
        flags += ["--on-bad-record", "skip"] if args.on_bad_record == "skip" else []
        path = Path(name) if os.path.lexists(name) else name
        lines.append(command("scripts/load_pretrain_dataset.py", "--source", path,
                             "--tokenizer-path", args.output, *flags))
    show(f"Wrote {args.output}: {size:,} tokens and {counted(special, 'special token')}, "
         f"{size + special:,} ids; {counted(reading.bad, 'record')} skipped",
         f"Add to .env: TOKENIZER_PATH={args.output}",
         *(f"Prepare text with it: {line}" for line in lines))


if __name__ == "__main__":
    run_script(main)
