"""``specdec probe``: which switches of a saved drafter are alive, by turning each and decoding first turns."""

import json
import sys

from jsonargparse import ArgumentParser
from rich.console import Console
from rich.table import Table

from specdec.arguments import parse, target_shorthand
from specdec.decoding import parse_growth
from specdec.evaluation.arguments import add_decoded
from specdec.evaluation.pair import load_pair
from specdec.evaluation.probe import Probed, probe_switches
from specdec.evaluation.prompts import load_prompts
from specdec.evaluation.skipping import first_turns


def main(argv: list[str]) -> int:
    """Run the command; status 1 if a switch is dead.

    Raises:
        ValueError: an argument, a file or the pair of drafter and target is wrong.
    """
    parser = ArgumentParser(prog="specdec probe", description=__doc__, exit_on_error=False, allow_abbrev=False)
    add_decoded(parser, max_new_tokens=32, limit=4)
    parser.add_argument("--growth", type=str, default="chain", help="as of specdec evaluate, of two levels at least")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parse(parser, target_shorthand(argv))
    growth, prompts = parse_growth(args.growth), load_prompts(args.prompts, args.limit)
    target, drafter, _ = load_pair(args.target, args.drafter, other_target=args.other_target)
    asked, _ = first_turns(target, prompts, args.max_new_tokens)
    console = Console(stderr=True)
    with console.status("probing") as status:
        found = probe_switches(target, drafter, growth, asked, args.max_new_tokens, status.update)
    if args.json:
        sys.stdout.write(json.dumps([one._asdict() for one in found], indent=2) + "\n")
    else:
        Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150).print(_table(found))
    return 1 if any(one.dead for one in found) else 0


def _table(found: list[Probed]) -> Table:
    out = Table("switch", "trained", "turned", "acceptance length", "turned", "proposals changed", "")
    for one in found:
        length = "-" if one.length_flipped is None else f"{one.length_flipped:.3f}"
        changed = "-" if one.changed is None else f"{one.changed:.1%}"
        told = "DEAD" if one.dead else one.reason or ""
        out.add_row(one.switch, one.trained, one.flipped, f"{one.length_trained:.3f}", length, changed, told)
    return out
