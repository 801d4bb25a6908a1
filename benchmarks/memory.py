"""The memory that ``fit`` estimates before its first step, beside what short trainings in float32 take on a CPU.

Every training is a process of its own: the embedded target, three random ones that are made here, and any directory
that ``--target`` names. Measured is the peak resident set from the load of the target to the last step, less that
before it. Linux alone, by ``/proc``.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness

STEPS, ROWS, LENGTH, UNROLL = 2, 4, 128, 2
DRAFT_TOKENS = 8192
WITHIN = 0.2
MADE = ("gemma3, 131,072 tokens, tied", "qwen3, 49,152 tokens", "llama, 65,536 tokens")


def make(name: str, directory: Path) -> None:
    """Write a random target of one of the families, with the embedded target's tokenizer."""
    import torch
    from transformers import (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    from specdec.target import TargetSource

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 7, "max_position_embeddings": 2048, "intermediate_size": 1024}
    if name == MADE[0]:
        heads = {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "sliding_window": 512,
        }
        model = Gemma3ForCausalLM(
            Gemma3TextConfig(vocab_size=131072, hidden_size=256, **heads, **sizes)
        )
    elif name == MADE[1]:
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
        model = Qwen3ForCausalLM(Qwen3Config(vocab_size=49152, hidden_size=512, **heads, **sizes))
    else:
        heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=65536, hidden_size=384, **heads, **sizes))
    model.save_pretrained(directory)
    TargetSource().load_tokenizer().save_pretrained(directory)


def resident(key: str) -> float:
    """MB, by a line of ``/proc/self/status``: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024 / 1e6


def train(job: dict[str, Any]) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """A short training; estimate and measurement in MB."""
    import lightning.pytorch as pl
    import torch

    from specdec.data import Batch, TokenData
    from specdec.data.token_data import Splits
    from specdec.drafter import DrafterSpec
    from specdec.target import TargetSource
    from specdec.target.loading import skeleton
    from specdec.training.memory import memory_need
    from specdec.training.module import DrafterModule

    torch.set_num_threads(job["threads"])

    class RandomRows(TokenData):
        """Rows of random tokens, all supervised."""

        def __init__(self, vocabulary: int) -> None:
            super().__init__(LENGTH, ROWS)
            ids = torch.randint(
                0, vocabulary, (ROWS * STEPS, LENGTH), generator=torch.Generator().manual_seed(0)
            )
            rows = Batch(ids, torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids))
            self._splits = Splits(rows, rows)

    place = TargetSource(job["target"]).directory()
    # whatever transformers imports for the family stands in memory now
    skeleton(place, None, False)
    before = resident("VmRSS")
    size = job["draft_vocab_size"]
    module = DrafterModule(
        target=job["target"], drafter=DrafterSpec(draft_vocab_size=size), ttt_steps=UNROLL
    )
    target = module.target
    trainer = pl.Trainer(
        max_steps=STEPS, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu", limit_val_batches=0, num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, datamodule=RandomRows(target.vocab_size))
    assert module.drafter is not None
    stored = sum(x.nbytes for x in (*target.model.parameters(), *target.model.buffers()))
    need = memory_need(module.drafter.config, module.objective, ROWS, LENGTH, target_bytes=stored)
    found = {"estimated": sum(need.values()) / 1e6, "measured": resident("VmHWM") - before}
    return found | {
        "parts": {name: value / 1e6 for name, value in need.items()}
    }, lambda question: None


def main(argv: list[str]) -> int:
    """Measure, print, and keep; the exit status is 1 if an estimate is off by more than a fifth."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", nargs="*", default=[], metavar="DIR", help="further targets")
    parser.add_argument("--threads", type=int, default=1, help="of torch (1)")
    parser.add_argument(
        "--out", type=Path, help="a report, .md; raw figures go to the .json beside it"
    )
    parser.add_argument("--force", action="store_true", help="write over one that is there")
    options = parser.parse_args(argv)
    harness.check_out(options.out, options.force)
    about = harness.machine(options.threads)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        targets = {"embedded": "embedded"} | {Path(place).name: place for place in options.target}
        for number, name in enumerate(MADE):
            make(name, Path(folder) / str(number))
            targets[name] = str(Path(folder) / str(number))
        for name, place in targets.items():
            size = 4 * DRAFT_TOKENS if name == MADE[2] else DRAFT_TOKENS
            job = {"target": place, "draft_vocab_size": size, "threads": options.threads}
            with harness.Worker(
                sys.executable, name, Path(__file__), job, Path(folder) / "log"
            ) as worker:
                rows.append({"target": name, "draft_vocab_size": size} | worker.about)
            harness.tell(
                f"{name}: {rows[-1]['estimated']:.0f} MB estimated, {rows[-1]['measured']:.0f} measured"
            )
    lines = [
        "# Memory of short trainings beside the estimate", "",
        f"EAGLE-3.1, {UNROLL} unroll steps, {ROWS} rows of {LENGTH} tokens, {STEPS} steps, float32 on a CPU, frozen "
        "embedding. Estimated is what fit logs before its first step; measured the peak resident set from the load of "
        "the target to the last step, less the resident set before it, once libraries were loaded.", "",
        *harness.conditions(about, about["versions"]), "",
        *harness.table(
            ("target", "draft vocabulary", "estimated, MB", "measured, MB", "estimated / measured"),
            [(row["target"], f"{row['draft_vocab_size']:,}", f"{row['estimated']:,.0f}", f"{row['measured']:,.0f}",
              f"{row['estimated'] / row['measured']:.2f}") for row in rows],
        ),
    ]  # fmt: skip
    harness.keep(options.out, lines, {"rows": rows, "about": about})
    return int(any(abs(row["estimated"] / row["measured"] - 1) > WITHIN for row in rows))


if __name__ == "__main__":
    if "--worker" in sys.argv:
        harness.serve(train)
    else:
        sys.exit(main(sys.argv[1:]))
