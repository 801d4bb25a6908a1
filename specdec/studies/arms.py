"""Makes trainings, measures and prompts of combinations of levels, each parsed as its command would before any begins.

Arms must be comparable: the same tokens, the same data in the same order, and only the changes that the levels name.
"""

import dataclasses
import functools
import hashlib
import importlib
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_origin, get_type_hints

import torch
from transformers import PreTrainedModel

from specdec.commands.fit import Configured, configured, one_parser
from specdec.commands.parser import parse_arguments, parser_of
from specdec.commands.plan import drafter_config
from specdec.data import TokenData
from specdec.decoding import parse_shape
from specdec.diagnostics.conditions import parse_conditions
from specdec.drafter import Drafter, DrafterConfig
from specdec.drafter.dry_run import dry_run
from specdec.embedded.corpus import SEED, held_out_prompts
from specdec.evaluation.benchmark import parse_baseline
from specdec.evaluation.overrides import OVERRIDABLE
from specdec.evaluation.prompts import Prompt, load_prompts, prompts_sha256
from specdec.studies.study import Combination, Study, arm_name, as_list, measure_of
from specdec.target import EMBEDDED, TargetSource
from specdec.target.loading import skeleton
from specdec.training.building import check
from specdec.training.run_directory import RunDirectory
from specdec.utils.config import differences, is_part, normalize_config, to_text
from specdec.utils.progress import progress
from specdec.utils.text import how_many
from specdec.utils.trust import parse_yaml

COMMANDS = {
    "evaluate": "specdec.evaluation.run:evaluate_command",
    "drift": "specdec.diagnostics.drift:drift",
    "robustness": "specdec.diagnostics.robustness:robustness",
}
# acceptance is compared
DEFAULTS: dict[str, dict[str, Any]] = {"evaluate": {"compile": False, "plain": False}}
# of embedded prompts
PROMPTS = 40
PROMPT_TOKENS = 64
# arguments that are the study's, not the command's
OF_PROMPTS = ("prompts", "prompts_count", "prompt_tokens")
# of a fit's config
NOT_KEPT = ("allow_changes", "ckpt_path", "out", "seed_everything", "weights_only")


@dataclass(frozen=True)
class Measure:
    """A measure of an arm, parsed, the same for all of its seeds.

    Args:
        config: of the command, defaults included; without prompts, drafter and ``out``.
    """

    config: Mapping[str, Any]
    target: TargetSource


@dataclass(frozen=True)
class Arm:
    """One combination of levels, parsed.

    Args:
        config: of its fits, defaults included, without the seed.
        data: not read yet.
        drafter: its architecture, with the target's dimensions.
    """

    name: str
    levels: Combination
    config: Mapping[str, Any]
    target: TargetSource
    data: TokenData
    drafter: DrafterConfig
    trained_parameters: int
    measures: Mapping[str, Measure]

    @property
    def tokens(self) -> int | None:
        """Tokens that a fit trains on, padding included; None if its length is in epochs, or not known."""
        trainer = self.config["trainer"]
        devices = str(trainer["devices"])
        plain = trainer["max_steps"] > 0 and trainer["max_epochs"] in (None, -1)
        if (
            not plain
            or not devices.isdecimal()
            or trainer["fast_dev_run"]
            or trainer["overfit_batches"]
        ):
            return None
        if "GradientAccumulationScheduler" in self.callbacks:
            return None
        rows = (
            self.data.batch_size
            * trainer["accumulate_grad_batches"]
            * int(devices)
            * trainer["num_nodes"]
        )
        return trainer["max_steps"] * rows * self.data.seq_len

    def with_data_seed(self, seed: int) -> "Arm":
        """The arm with other rows in another order, where its data have a seed."""
        data = self.config["data"]
        if "seed" not in data["init_args"]:
            return self
        data = {**data, "init_args": {**data["init_args"], "seed": seed}}
        return dataclasses.replace(self, config={**self.config, "data": data})

    @property
    def callbacks(self) -> list[str]:
        """Names of its callbacks' classes."""
        callbacks = as_list(self.config["trainer"]["callbacks"] or [])
        return [
            callback["class_path"].rpartition(".")[2] for callback in callbacks if is_part(callback)
        ]


def read_arms(study: Study) -> list[Arm]:
    """Every arm of a study; ValueError, with the arm's name, if one is illegal or two are the same."""
    arms: list[Arm] = []
    combinations = list(study.combinations)
    with one_parser(), progress("checking", "arm", len(combinations)) as advance:
        for combination in combinations:
            name = arm_name(combination)
            try:
                arms.append(_arm(study, name, combination))
            except ValueError as error:
                raise ValueError(f"arm {name}: {error}") from error
            advance(1)
    for arm, other in itertools.combinations(arms, 2):
        if arm.measures == other.measures and normalize_config(arm.config) == normalize_config(
            other.config
        ):
            raise ValueError(
                f"arms {arm.name} and {other.name} come to the same training and the same measures: "
                "change a level, or leave one of them out (leave_out)"
            )
    return arms


def arm_differences(baseline: Arm, arm: Arm) -> list[str]:
    """Return an arm's changes, a line for each setting (``norms.aux: none to each``), ``model.drafter``'s first."""
    changes = [*differences(normalize_config(baseline.config), normalize_config(arm.config))]
    changes.sort(key=lambda change: not change[0].startswith("model.drafter."))
    changes += differences(_measure_configs(baseline), _measure_configs(arm))
    return [
        f"{key.removeprefix('model.drafter.')}: {to_text(a)} to {to_text(b)}"
        for key, a, b in changes
    ]


def _measure_configs(arm: Arm) -> dict[str, Any]:
    """Return the configs of an arm's measures, whose target is the training's."""
    return {name: {**measure.config, "target": {}} for name, measure in arm.measures.items()}


def check_equal(baseline: Arm, arms: Sequence[Arm], allow_unequal: bool = False) -> list[str]:
    """Sentences on the arms whose budget of tokens is not the baseline's.

    Raises:
        ValueError: there are such and ``allow_unequal`` is not given, or an arm may end early.
    """
    unequal = []
    for arm in arms:
        if arm.config["trainer"]["max_time"] is not None or "EarlyStopping" in arm.callbacks:
            raise ValueError(
                f"arm {arm.name}: trainer.max_time or EarlyStopping may end it early: remove it, for all train alike"
            )
        difference = ""
        if arm.tokens is None or baseline.tokens is None:
            groups = [
                [normalize_config(compared.config[group]) for group in ("trainer", "data")]
                for compared in (arm, baseline)
            ]
            if groups[0] != groups[1]:
                difference = (
                    "its length is not in steps, and its trainer or data are not the baseline's"
                )
        elif arm.tokens != baseline.tokens:
            tokens = how_many(arm.tokens, "token")
            difference = (
                f"it trains on {tokens}, the baseline, {baseline.name}, on {baseline.tokens:,}"
            )
        if difference and not allow_unequal:
            raise ValueError(
                f"arm {arm.name}: {difference}: give all arms the same budget by trainer.max_steps, "
                "or say --allow_unequal"
            )
        unequal += [f"arm {arm.name}: {difference}"] if difference else []
    return unequal


def arguments(study: Study, combination: Combination) -> list[str]:
    """The arguments of ``specdec fit`` for an arm: the study's files, the levels', then keys, deeper ones last."""
    levels = [study.axes[axis][level] for axis, level in combination.items()]
    files = [*study.common.files, *(file for level in levels for file in level.files)]
    of_levels = {
        key: value
        for level in levels
        for key, value in level.settings.items()
        if not measure_of(key)
    }
    settings = {
        key: value for key, value in study.common.settings.items() if key not in of_levels
    } | of_levels
    # a part before what is inside it
    inside_last = sorted(settings.items(), key=lambda setting: setting[0].count("."))
    return [
        *(word for file in files for word in ("--config", file)),
        *(argument(*setting) for setting in inside_last),
    ]


def argument(key: str, value: Any) -> str:
    """A setting as on the command line."""
    return f"--{key}={value if isinstance(value, str) else json.dumps(value)}"


def _arm(study: Study, name: str, combination: Combination) -> Arm:
    """Parse an arm, build its drafter without weights, and run a first pass through it."""
    # Lightning warns of a command line beside the given one
    argv = sys.argv
    sys.argv = sys.argv[:1]
    try:
        cli = configured(Configured, "fit", arguments(study, combination), RunDirectory())
    finally:
        sys.argv = argv
    config = {key: value for key, value in cli.full().items() if key not in NOT_KEPT}
    module = cli.model
    data = cli.datamodule
    model = _skeleton(module.target_source)
    design = drafter_config(module, model)
    positions = model.config.get_text_config(decoder=True).max_position_embeddings
    check(
        design,
        data.seq_len,
        positions,
        module.start,
        module.train_embed,
        module.train_head,
        module.objective.steps,
    )
    with torch.device("meta"):
        drafter = Drafter(design, torch.arange(design.draft_vocab_size, device="cpu"))
    dry_run(drafter)
    trained = sum(weight.numel() for weight in drafter.parameters())
    trained -= 0 if module.train_embed else drafter.embed_tokens.weight.numel()
    trained -= 0 if module.train_head else drafter.lm_head.weight.numel()
    source = module.target_source
    measures = {
        kind: _measure(source, kind, json.dumps(arguments))
        for kind, arguments in _measure_arguments(study, combination).items()
    }
    for kind, measure in measures.items():
        try:
            design.with_window(*(measure.config[option] for option in OVERRIDABLE))
        except ValueError as error:
            raise ValueError(f"{kind}: {error}") from error
    return Arm(name, dict(combination), config, source, data, design, trained, measures)


def _measure_arguments(study: Study, combination: Combination) -> dict[str, dict[str, Any]]:
    """Return the arguments of every measure: the study's, over which the levels' win."""
    arguments = {kind: dict(of_study) for kind, of_study in study.measures.items()}
    for axis, level in combination.items():
        for key, value in study.axes[axis][level].settings.items():
            kind = measure_of(key)
            if kind is None:
                continue
            if kind not in arguments:
                raise ValueError(
                    f"level {level} of axis {axis} gives {key}, but the study has no {kind}: add it, or remove the key"
                )
            arguments[kind][key.partition(".")[2]] = value
    return arguments


@functools.lru_cache(maxsize=8)
def _skeleton(source: TargetSource) -> PreTrainedModel:
    return skeleton(source.directory(), source.revision, source.trust_remote_code)


@functools.lru_cache(maxsize=64)  # most arms have the same
def _measure(target: TargetSource, kind: str, given_json: str) -> Measure:
    """The arguments of a measure, given as JSON, checked by its command's own parser."""
    module, _, name = COMMANDS[kind].partition(":")
    command = getattr(importlib.import_module(module), name)
    parser = parser_of(command, kind)
    options: dict[str, Any] = {"target.source": target.source, "target.revision": target.revision}
    options |= {"target.trust_remote_code": True} if target.trust_remote_code else {}
    options |= {"target.adapter": target.adapter} if target.adapter is not None else {}
    arguments = {
        key: value for key, value in json.loads(given_json).items() if key not in OF_PROMPTS
    }
    options |= DEFAULTS.get(kind, {}) | arguments
    options |= {"prompts": ["of the study"], "drafter": "of a fit that is yet to be run"}
    several = {
        action.dest
        for action in parser._actions
        if get_origin(getattr(action, "_typehint", None)) is list
    }
    argv = [
        argument(key, as_list(value) if key in several else value) for key, value in options.items()
    ]
    try:
        built = parse_arguments(parser, argv)
        # the commands themselves check these when they begin
        for text in as_list(getattr(built, "shape", [])):
            parse_shape(text)
        if several_of := next(
            (name for name in ("suite", "temperatures") if getattr(built, name, [])), None
        ):
            raise ValueError(f"{several_of}: a study has one set of prompts at one temperature: give prompts, and "
                             "sampling.temperature, also as an axis")  # fmt: skip
        get_type_hints(command)["config"](
            **{key: value for key, value in vars(built).items() if key != "config"}
        )
        for text in getattr(built, "baselines", []):
            parse_baseline(text)
        if kind == "robustness":
            parse_conditions(built.conditions)
    except ValueError as error:
        raise ValueError(f"{kind}: {error}") from error
    full = parse_yaml(parser.dump(parser.parse_args(argv), skip_none=False))
    config = {
        name: value
        for name, value in full.items()
        if name not in ("config", "prompts", "drafter", "out")
    }
    return Measure(config, built.target)


class StudyPrompts(NamedTuple):
    """The files that a measure reads, the hash of its prompts, and the text of the one file if it is to be written."""

    files: tuple[str, ...]
    sha256: str
    text: str | None = None


def read_prompts(study: Study, source: TargetSource, directory: Path) -> dict[str, StudyPrompts]:
    """The prompts of every measure; one that does not name any has those of ``evaluate``.

    Args:
        source: whose tokenizer cuts embedded prompts to ``prompt_tokens``.
        directory: the study's, in which embedded prompts get a file named by its hash: a sweep of a changed study does
            not overwrite the prompts of another that runs.

    Raises:
        ValueError: files that cannot be read, or numbers that are out of range.
    """
    evaluate = study.measures.get("evaluate", {})
    common = {key: value for key, value in evaluate.items() if key in (*OF_PROMPTS, "layouts")}
    by_measure = {}
    for measure, arguments in study.measures.items():
        own_arguments = arguments if set(OF_PROMPTS) & set(arguments) else {**common, **arguments}
        files = own_arguments.get("prompts", EMBEDDED)
        limit = own_arguments.get("limit")
        if files != EMBEDDED:
            if misplaced := [name for name in OF_PROMPTS[1:] if name in own_arguments]:
                raise ValueError(
                    f"{measure}: {misplaced[0]} is of embedded prompts: leave it out, or say prompts: embedded"
                )
            paths = tuple(str(file) for file in as_list(files))
            prompts = load_prompts(paths, limit, as_list(own_arguments.get("layouts") or []))
            by_measure[measure] = StudyPrompts(paths, prompts_sha256(prompts))
            continue
        count = own_arguments.get("prompts_count", PROMPTS)
        tokens = own_arguments.get("prompt_tokens", PROMPT_TOKENS)
        if type(count) is not int or type(tokens) is not int or min(count, tokens) < 2:
            raise ValueError(
                f"{measure}: prompts_count is {count}, prompt_tokens {tokens}: both must be 2 at least"
            )
        rows = held_out_prompts(count, tokens, SEED, source.load_tokenizer())
        text = "".join(json.dumps({**row, "category": None}) + "\n" for row in rows)
        prompts = [Prompt(row["prompt_id"], None, None, None, row["prompt"]) for row in rows][
            :limit
        ]
        name = f"prompts-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
        by_measure[measure] = StudyPrompts((str(directory / name),), prompts_sha256(prompts), text)
    return by_measure
