"""The arguments that commands share which decode prompts with a saved drafter."""

from jsonargparse import ArgumentParser

from specdec.embedded.source import TargetSource


def add_decoded(
    parser: ArgumentParser, max_new_tokens: int = 128, limit: int | None = None, several: bool = False
) -> None:
    """Who decodes, and what; ``several`` drafters, if so."""
    parser.add_argument("--target", type=TargetSource, default=TargetSource())
    if several:
        parser.add_argument("--drafter", type=str, nargs="+", required=True, help="directories of drafters")
    else:
        parser.add_argument("--drafter", type=str, required=True, help="the drafter's directory")
    parser.add_argument("--other_target", type=bool, default=False, help="decode even with a drafter that was trained for another target of the same shape, as after fine-tuning")  # fmt: skip # noqa: E501
    parser.add_argument("--prompts", type=str, nargs="+", required=True, help=".jsonl, .json or .parquet rows of a known layout, text with one prompt a line, or hub:REPOSITORY:CONFIG:SPLIT")  # fmt: skip # noqa: E501
    parser.add_argument("--max_new_tokens", type=int, default=max_new_tokens, help="new tokens per answer")
    parser.add_argument("--limit", type=int | None, default=limit, help="use the first prompts only")


def measuring_parser(name: str, description: str | None, several: bool = False) -> ArgumentParser:
    """Of a command that measures a drafter, or ``several``, on a device and takes a config file."""
    out = ArgumentParser(prog=f"specdec {name}", description=description, exit_on_error=False, allow_abbrev=False)
    out.add_argument("--config", action="config", help="a YAML file with any of the arguments below")
    add_decoded(out, several=several)
    out.add_argument("--layouts", type=str, nargs="+", default=[], help="layouts to prefer, as humaneval_verbatim, humaneval_raw or prompt_turn")  # fmt: skip # noqa: E501
    out.add_argument("--device", type=str, default="cpu")
    return out
