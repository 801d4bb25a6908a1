"""``specdec plan``: memory and steps of ``specdec fit`` on many devices, from configs alone."""

import json
import math
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from specdec.drafter import DrafterConfig
from specdec.drafter.model import skeleton_of
from specdec.fit import Configured, configured
from specdec.target.loading import DTYPES, named_parts, skeleton
from specdec.training.distributed import strategy_kind
from specdec.training.memory import MB, PRECISIONS, memory_need, precision
from specdec.training.module import DrafterModule
from specdec.training.run_directory import RunDirectory
from specdec.utils.command import OwnOptions


def drafter_config(module: DrafterModule, model: Any) -> DrafterConfig:
    """The design with a target's dimensions, from a model without weights; ValueError if they do not go together."""
    text, V = model.config.get_text_config(decoder=True), model.get_output_embeddings().weight.shape[0]
    sizes, identity = {"vocab_size": V, "num_target_layers": text.num_hidden_layers}, module.target_source.source
    return DrafterConfig.for_target(module.spec, text, **sizes, identity={"source": identity})


def main(argv: list[str]) -> int:
    """Run the command; ValueError if an argument is wrong, or target and design do not go together."""
    example = "Example: specdec plan --world 8 --config conf/quickstart.yaml"
    parser = OwnOptions("plan", __doc__, f"All other flags are specdec fit's. {example}")
    parser.add_argument("--world", type=int, required=True, metavar="N", help="processes, one on each device")
    parser.add_argument("--json", action="store_true", help="print JSON, memory in bytes")
    options, args = parser.parse_known_args(argv)
    if options.world < 1:
        raise ValueError(f"plan: --world must be at least 1, not {options.world}")
    found = plan(configured(Configured, "fit", args, RunDirectory()), options.world)
    if options.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return 0
    table = Table("", "", box=None, show_header=False)
    memory = found.pop("memory_bytes_per_process")
    for name, value in found.items():
        table.add_row(name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value))
    for part, size in memory.items():
        table.add_row(f"memory of a process, MB: {part.replace('_', ' ')}", f"{size / MB:,.0f}")
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 150).print(table)
    return 0


def plan(cli: Configured, world: int) -> dict[str, Any]:
    """What a run's parts need on ``world`` processes; JSON-ready.

    ``train_rows`` are the packed rows of the training data, or why they are not known; memory is in bytes.
    """
    given, data, module = cli.config.fit.trainer, cli.datamodule, cli.model
    trained_in, strategy = precision(given.precision), strategy_kind(given.strategy)
    if trained_in is None:
        raise ValueError(f"trainer.precision={given.precision}: plan knows {', '.join(PRECISIONS)}")
    source = module.target_source
    model = skeleton(source.directory(), source.revision, source.trust_remote_code)
    config = drafter_config(module, model)
    drafter = skeleton_of(config)
    frozen = 0 if module.train_embed else drafter.embed_tokens.weight.numel()
    frozen += 0 if module.train_head else drafter.lm_head.weight.numel()
    target = sum(p.numel() for p in model.parameters())
    held = sum(p.numel() for _, p in named_parts(model).values()) if source.parts else target
    target_bytes = held * DTYPES[source.dtype].itemsize
    memory = memory_need(
        config, module.objective, data.batch_size, data.seq_len, trained_in=trained_in, train_embed=module.train_embed,
        train_head=module.train_head, target_bytes=target_bytes, target_dtype=DTYPES[source.dtype], world=world,
        sharded=strategy == "fsdp2",
    )  # fmt: skip
    rows_per_step = data.batch_size * given.accumulate_grad_batches * world
    rows: int | str
    steps: int | None = None
    try:
        data.prepare(source.load_tokenizer())
        rows = len(data.splits.train.ids_BT)
        steps = math.ceil(math.ceil(rows / world) * world / rows_per_step)
    except ValueError as error:
        rows = str(error)
    return {
        "processes": world,
        "strategy": "one" if world == 1 and strategy == "ddp" else strategy,
        "drafter_trainable_parameters": sum(p.numel() for p in drafter.parameters()) - frozen,
        "drafter_frozen_parameters": frozen,
        "target_parameters": target,
        "rows_per_step": rows_per_step,
        "tokens_per_step": rows_per_step * data.seq_len,
        "train_rows": rows,
        "steps_per_epoch": steps,
        "memory_bytes_per_process": memory | {"total": sum(memory.values())},
    }
