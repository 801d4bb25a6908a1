"""What a config that does not say trains with."""

from typing import Any

MODEL_AND_DATA: dict[str, Any] = {
    "data": {"class_path": "specdec.embedded.datamodule.EmbeddedData"},
    "model.optimizer": {
        "class_path": "specdec.optimizers.AdamW",
        "init_args": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.0},
    },
}
