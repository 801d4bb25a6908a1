"""The strategies that a run is known to train, save and go on under."""

from typing import Any

_OPTIONS = ("", "_find_unused_parameters_false", "_find_unused_parameters_true")
KINDS = {f"{name}{option}": "ddp" for name in ("ddp", "ddp_fork") for option in _OPTIONS}
KINDS |= {"auto": "ddp", "fsdp2": "fsdp2"}
CLASSES = {
    "lightning.pytorch.strategies.DDPStrategy": "ddp",
    "lightning.pytorch.strategies.ddp.DDPStrategy": "ddp",
    "specdec.training.fsdp2.FSDP2": "fsdp2",
}


def kind_of(given: Any) -> str:
    """``ddp`` or ``fsdp2``, from ``trainer.strategy`` as a config has it; ``auto`` on several devices is ``ddp``.

    Raises:
        ValueError: it is another: its processes do not find the run again, or its checkpoints are pickles.
    """
    name = given if isinstance(given, str) else given.class_path
    kind = KINDS.get(name) if isinstance(given, str) else CLASSES.get(name)
    start = None if isinstance(given, str) else (given.get("init_args") or {}).get("start_method")
    if kind is None or start not in (None, "popen", "fork"):
        name = name if kind is None else f"{name} of start_method {start}"
        raise ValueError(f"trainer.strategy={name}: specdec does not train under it: set auto, ddp, ddp_fork or fsdp2")
    return kind
