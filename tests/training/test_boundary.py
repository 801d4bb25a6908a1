"""A run stands between two steps until the next batch is drawn."""

from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl

from specdec.training.boundary import Boundary


def test_a_step_is_whole_until_a_batch_is_drawn() -> None:
    places: list[Any] = [{"batches": 0}]
    total = SimpleNamespace(ready=0)
    loop = SimpleNamespace(
        epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(total=total)),
        _combined_loader=SimpleNamespace(_state_dicts=lambda: [dict(place) for place in places]),
    )
    trainer = SimpleNamespace(global_step=4, fit_loop=loop)
    boundary = Boundary(cast(pl.Trainer, trainer))
    assert boundary.holds()
    places[0]["batches"] = 1  # drawn, and on its way to the device
    assert not boundary.holds()
    total.ready = 1
    boundary.reach()  # accumulated, no more
    assert not boundary.holds()
    places[0]["batches"] = total.ready = 2
    trainer.global_step = 5  # stepped, and something after it fails
    assert not boundary.holds()
    boundary.reach()
    assert boundary.holds()
    places.clear()  # loaders that know no place
    trainer.global_step = 6
    boundary.reach()
    total.ready = 3
    assert not boundary.holds()
