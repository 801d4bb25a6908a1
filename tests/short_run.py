"""Arguments of ``specdec fit`` for a run of seconds."""

from pathlib import Path


def short_run(target: Path, text: Path, **changes: object) -> list[str]:
    """Of a run on the CPU; dots of ``changes`` are double underscores."""
    given: dict[str, object] = {
        "model.target.source": target,
        "model.drafter.draft_vocab_size": 200,
        "model.ttt_steps": 2,
        "data": "TextData",
        "data.train": text,
        "data.val": text,
        "data.seq_len": 32,
        "data.batch_size": 2,
        "trainer.accelerator": "cpu",
        "trainer.enable_model_summary": "false",
    }
    given |= {name.replace("__", "."): value for name, value in changes.items()}
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]
