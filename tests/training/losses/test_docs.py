from pathlib import Path

import pytest

from specdec.training import losses
from specdec.training.losses import Loss

DOCS = Path(__file__).parents[3] / "docs" / "losses.md"
MEMBERS = {name: getattr(losses, name) for name in losses.__all__ if name not in ("Loss", "LawLoss", "FeatureLoss")}
LOSSES = [name for name, member in MEMBERS.items() if isinstance(member, type) and issubclass(member, Loss)]


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_its_line_in_the_table(name: str) -> None:
    assert any(line.startswith(f"| `{name}") for line in DOCS.read_text().splitlines())
