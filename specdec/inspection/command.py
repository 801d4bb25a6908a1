"""``specdec data inspect``: what a run would train on: samples with the supervised tokens marked, lengths, losses.

The arguments are those of specdec fit for the target and the data: specdec data inspect --config RUN.yaml, or
specdec data inspect --target TARGET --data ChatData --data.train CHATS. Only the target's tokenizer is loaded.
"""

import re
import sys
import tempfile
from typing import Any

import yaml
from lightning.pytorch.cli import LightningArgumentParser
from rich.console import Console

from specdec.arguments import parse, short, target_shorthand
from specdec.compose import compose
from specdec.data import TokenData
from specdec.data.encoded import MaskError
from specdec.embedded.source import TargetSource
from specdec.files import write_json
from specdec.inspection.figures import documents_of, inspected
from specdec.inspection.show import BRACKETS, sample, tables

REFUSED = 1


def main(argv: list[str]) -> int:
    """Run the command; status 1 if there is nothing to learn from, or nothing but.

    Raises:
        ValueError: an argument, the data or the tokenizer is wrong.
    """
    if argv[:1] not in (["inspect"], ["--help"], ["-h"]):
        raise ValueError("write specdec data inspect, with the target and the data of specdec fit")
    args = _read(argv[argv[0] == "inspect" :])
    data, tokenizer = args.data, args.model.target.load_tokenizer()
    try:
        documents = documents_of(data, tokenizer)
    except MaskError as error:
        sys.stderr.write(f"specdec data inspect: refused: {error}\n")
        return REFUSED
    record = inspected(data, documents, tokenizer)
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150, highlight=False)
    marks = ("", "") if console.is_terminal and console.color_system else BRACKETS
    for number, document in enumerate(documents["train"][: args.samples], start=1):
        console.print(sample(document, tokenizer, f"training document {number}", args.sample_tokens, marks))
    console.print(tables(record))
    if args.json:
        write_json(args.json, record)
    return 0


def _read(argv: list[str]) -> Any:
    """The arguments; of config files, which are merged as ``specdec fit`` merges them, data and target alone."""
    argv = [re.sub(r"^--target\.", "--model.target.", arg) for arg in target_shorthand(argv)]
    config, rest = compose(argv)
    target = config.get("model", {}).get("target")
    kept = {"model": None if target is None else {"target": target}, "data": config.get("data")}
    parser = LightningArgumentParser(
        prog="specdec data inspect", description=__doc__, exit_on_error=False, allow_abbrev=False
    )
    parser.add_argument("--config", action="config", help="a training run's config")
    parser.add_argument("--model.target", type=TargetSource, default=TargetSource())
    parser.add_lightning_class_args(TokenData, "data", subclass_mode=True)
    parser.add_argument("--samples", type=int, default=3, help="documents to show")
    parser.add_argument("--sample_tokens", type=int, default=600, help="tokens of each to show")
    parser.add_argument("--json", type=str | None, default=None, help="a file for all figures")
    parser.set_defaults({"data": {"class_path": "specdec.embedded.datamodule.EmbeddedData"}})
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump({key: value for key, value in kept.items() if value is not None}, file, sort_keys=False)
        file.flush()
        try:
            return parse(parser, ["--config", file.name, *rest])
        except ValueError as error:
            raise ValueError(short(str(error).replace(file.name, "the config"))) from error
