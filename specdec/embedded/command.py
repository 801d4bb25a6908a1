"""``specdec pretrain``: build the embedded target, or a small chat target from conversations."""

from dataclasses import fields
from pathlib import Path
from typing import Literal

from jsonargparse import ArgumentParser
from rich.console import Console

from specdec.arguments import parse
from specdec.embedded.build import copy_target, embedded_target, read_record
from specdec.embedded.config import EmbeddedConfig
from specdec.files import staged_directory


def main(argv: list[str]) -> int:
    """Build or find the embedded target and say in one line where it is and how good.

    Args:
        argv: the command line after ``pretrain``.

    Raises:
        ValueError: a number is out of range, ``--out`` exists or may not be written, there is no corpus, or
            an argument is unknown.
        SystemExit: help was asked for (code 0).
    """
    parser = ArgumentParser(
        prog="specdec pretrain",
        description="Train a small Llama on the Python standard library's sources, or on chats, with no download.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="YAML file with any of the arguments below")
    parser.add_argument("--chats", type=str, nargs="+", default=[], help="files of conversations: train a chat target on these instead, into --out")  # fmt: skip # noqa: E501
    parser.add_argument("--broken", type=Literal["refuse", "drop"], default="refuse", help="whether a malformed conversation ends the command or is left out")  # fmt: skip # noqa: E501
    parser.add_argument("--out", type=Path | None, default=None, help="copy the model here (default: the cache)")
    parser.add_class_arguments(EmbeddedConfig)
    arguments = parse(parser, argv)
    config = EmbeddedConfig(**{field.name: arguments[field.name] for field in fields(EmbeddedConfig)})
    if arguments.chats:
        if arguments.out is None:
            raise ValueError("a chat target is not cached: say with --out where it shall be")
        from specdec.embedded.chats import build_chat_target

        path = arguments.out
        with staged_directory(path) as staging:
            build_chat_target(arguments.chats, config, staging, [] if arguments.broken == "drop" else None)
    elif arguments.out is None:
        path = embedded_target(config)
    else:
        path = arguments.out
        with staged_directory(path) as staging:  # before the training: it refuses a place that will not do
            copy_target(embedded_target(config), staging)
    record = read_record(path)
    Console().print(
        f"{path}: held-out loss {record['held_out_loss']:.3f}, {record['tokens_per_second']:,.0f} tokens/s",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )
    return 0
