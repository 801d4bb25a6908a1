"""Only strategies whose checkpoints are known to be whole and plain."""

from typing import Any

import pytest

from specdec.training.strategies import kind_of

DDP = "lightning.pytorch.strategies.DDPStrategy"


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ("auto", "ddp"),
        ("ddp_fork", "ddp"),
        ("ddp_find_unused_parameters_false", "ddp"),
        ("fsdp2", "fsdp2"),
        ({"class_path": DDP, "init_args": {"start_method": None}}, "ddp"),
        ({"class_path": "specdec.training.fsdp2.FSDP2"}, "fsdp2"),
    ],
)
def test_known_ones(given: Any, kind: str) -> None:
    assert kind_of(Given(given) if isinstance(given, dict) else given) == kind


@pytest.mark.parametrize(
    "given",
    ["ddp_spawn", "ddp_notebook", "fsdp", "deepspeed_stage_2", "single_xla", {"class_path": "my.DDPStrategy"},
     {"class_path": DDP, "init_args": {"start_method": "spawn"}}],
)  # fmt: skip
def test_any_other_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"^trainer\.strategy=[^\n]*set auto, ddp, ddp_fork or fsdp2$"):
        kind_of(Given(given) if isinstance(given, dict) else given)


class Given(dict[str, Any]):
    """As jsonargparse has it."""

    def __getattr__(self, name: str) -> Any:
        return self[name]
