"""Training from a cache: the numbers of training on the fly, and what is refused."""

import dataclasses
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.export import export_drafter, import_drafter
from specdec.features import Cached, Features, OnTheFly
from specdec.features.runners import TransformersEngine
from specdec.features.store import FeatureIndex, FeatureStore
from specdec.nn.view import View
from specdec.target import Target, TargetSource
from specdec.training.module import DrafterModule
from specdec.training.schedule import WarmupCosine
from tests.features.made import LAYERS, Texts, fill
from tests.tiny import presets
from tests.training.test_module import trainer


class Losses(pl.Callback):
    """Of every step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.found.append(float(outputs["loss"]))


def train(
    target: Path, preset: str, features: Features, steps: int = 24, parts: bool = False, **more: Any
) -> tuple[list[float], Any]:
    pl.seed_everything(0, verbose=False)
    module = DrafterModule(
        target=TargetSource(str(target), parts=parts), drafter=presets()[preset], ttt_steps=2,
        schedule=WarmupCosine(0.0), features=features,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    )  # fmt: skip
    losses = Losses()
    given: dict[str, Any] = {
        "callbacks": [losses],
        "precision": "32-true",
        "max_epochs": -1,
        "max_steps": steps,
    }
    trainer(**given).fit(module, datamodule=Texts(**more))
    return losses.found, module


@pytest.mark.parametrize("preset", ["eagle1", "eagle3_1"])
def test_losses_are_those_of_the_fly_to_the_last_bit(
    preset: str, whole: Path, target_directory: Path
) -> None:
    """Shuffled rows of several documents, three in a batch, fewer in an epoch's last; several epochs."""
    fly, one = train(target_directory, preset, OnTheFly(rows=1))
    cached, other = train(target_directory, preset, Cached(str(whole)))
    assert len(fly) == 24 and fly[0] != fly[-1]
    assert cached == fly
    for a, b in zip(one.drafter.parameters(), other.drafter.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("preset", ["eagle1", "eagle3_1"])
def test_parts_of_a_target_whose_layers_are_gone(
    preset: str, whole: Path, target_directory: Path, tmp_path: Path
) -> None:
    """The same losses to the last bit, the same drafter of the same target, and the same export."""
    want, one = train(target_directory, preset, Cached(str(whole)))
    parts = Path(shutil.copytree(target_directory, tmp_path / "parts"))
    tensors = load_file(file := parts / "model.safetensors")
    save_file(
        {name: x for name, x in tensors.items() if "layers." not in name},
        file,
        metadata={"format": "pt"},
    )
    found, other = train(parts, preset, Cached(str(whole)), parts=True)
    assert found == want and found[0] != found[-1]
    assert all(
        torch.equal(a, b)
        for a, b in zip(one.drafter.parameters(), other.drafter.parameters(), strict=True)
    )
    assert other.drafter.config == dataclasses.replace(
        one.drafter.config, target=dict(one.drafter.config.target) | {"source": str(parts)}
    )
    written = [
        export_drafter(
            module.drafter, module.target, tmp_path / name, served=TargetSource("org/target")
        ).directory
        for name, module in (("whole", one), ("of_parts", other))
    ]
    assert (written[0] / "model.safetensors").read_bytes() == (
        written[1] / "model.safetensors"
    ).read_bytes()
    assert (written[0] / "config.json").read_bytes() == (written[1] / "config.json").read_bytes()
    records = [
        json.loads((one / "specdec.json").read_text())["target"]["fingerprint"] for one in written
    ]
    assert records[0] == records[1] == one.target.identity["fingerprint"]
    again = import_drafter(written[1], Target.load(parts, parts=True))
    assert all(
        torch.equal(a, b) for a, b in zip(again.parameters(), one.drafter.parameters(), strict=True)
    )
    with pytest.raises(
        ValueError, match=r"model\.target\.parts: features OnTheFly run the target's layers"
    ):
        train(parts, preset, OnTheFly(), parts=True)


def test_no_thread_is_left_of_a_run(whole: Path, target_directory: Path) -> None:
    before = {thread for thread in threading.enumerate() if thread.name.startswith("features")}
    _, module = train(target_directory, "eagle3", Cached(str(whole)), steps=2)
    assert (
        not {thread for thread in threading.enumerate() if thread.name.startswith("features")}
        - before
    )
    data = Texts()
    data.prepare(None)
    batch = data.splits.validation
    module.source.prefetch(batch)
    layers = module.source.layers
    assert module.source(module.target, batch, layers, False).aux_BTNH.shape[2] == len(layers)
    module.source.close()


class Uncut(Texts):
    def pack(self, documents: Any) -> Any:
        from specdec.data.packing import pack_whole

        return pack_whole(documents, self.seq_len)


@pytest.mark.parametrize("rows", [1, 2, 8, "batch"])
def test_features_on_the_fly_are_the_targets(rows: Any, target: Target) -> None:
    data = Texts()
    data.prepare(None)
    batch = data.splits.train
    plain = target.forward(batch.ids_BT, View.packed(batch.documents_BT), [2, 7], True)
    found = OnTheFly(rows)(target, batch, [2, 7], True)
    real = batch.documents_BT >= 0
    assert torch.allclose(found.aux_BTNH[real], plain.aux_BTNH[real], atol=1e-5)
    assert torch.allclose(found.final_BTH[real], plain.final_BTH[real], atol=1e-5)
    assert not real.all()


def test_what_is_prefetched_is_read_once(
    whole: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Texts()
    data.prepare(None)
    source = Cached(str(whole)).open(target, data, LAYERS, False)
    data.reader = source
    read: list[int] = []
    inner = source._read  # type: ignore[attr-defined]
    monkeypatch.setattr(
        source, "_read", lambda batch: read.append(len(batch.ids_BT)) or inner(batch)
    )
    for batch in data.train_dataloader():
        source(target, batch, LAYERS, False)
    assert len(read) > 2 and sum(read) == len(data.splits.train.ids_BT)


def changed(cache: Path, **more: Any) -> None:
    """The index, as if another run had written it."""
    path = cache / "index.json"
    index = FeatureIndex.read(path)
    FeatureIndex(dataclasses.replace(index.contract, **more), index.shards).write(path)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"target": {"source": "other/model", "fingerprint": "a" * 64}},
            "made with another target, other/model",
        ),
        (
            {"target_dtype": "bfloat16"},
            "made with the target in bfloat16, which runs in float32 here: set model.targ",
        ),
        (
            {"layers": [1, 3, 4]},
            r"boundaries \[2\] are not stored, only \[1, 3, 4\]: run .* --layers 1 2 3 4 into",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    more: dict[str, Any], message: str, copied: Callable[[], Path], target: Target
) -> None:
    cache, data = copied(), Texts()
    data.prepare(None)
    changed(cache, **more)
    with pytest.raises(ValueError, match=message) as caught:
        Cached(str(cache)).open(target, data, LAYERS, False)
    assert "\n" not in str(caught.value) and str(cache) in str(caught.value)


def test_taps_that_are_off_by_one_are_caught_before_the_first_step(
    target_directory: Path, target: Target, tmp_path: Path
) -> None:
    """The layers are stored right, and the index says of them that they are their neighbours."""
    cache = fill(tmp_path / "cache", target, Texts(), layers=[1, 2, 3])
    changed(cache, layers=LAYERS)
    with pytest.raises(
        ValueError, match=r"boundary 2 is not the target's .* nearest other is boundary 1"
    ):
        train(target_directory, "eagle3", Cached(str(cache)), steps=1)


def test_a_final_state_before_the_norm_is_caught(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = TransformersEngine.states

    def wrong(self: Any, rows: Any) -> Any:
        for row, aux_RNH, final_RH in right(self, rows):
            yield row, aux_RNH, final_RH * 1.5

    monkeypatch.setattr(TransformersEngine, "states", wrong)
    data = Texts()
    cache = fill(tmp_path / "cache", target, data)
    with pytest.raises(ValueError, match="the final state is not the target's"):
        Cached(str(cache)).open(target, data, LAYERS, False)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (Texts(seq_len=24), "seq_len was 32, is 24"),
        (Texts(seed=1), "seed was 0, is 1"),
        (Uncut(), "class was tests.features.made.Texts, is tests.features.test_source.Uncut"),
    ],
)
def test_other_data_is_told_by_what_differs(
    other: Texts, reason: str, whole: Path, target: Target
) -> None:
    other.prepare(None)
    with pytest.raises(ValueError, match=reason) as caught:
        Cached(str(whole)).open(target, other, LAYERS, False)
    assert "\n" not in str(caught.value) and "run specdec cache" in str(caught.value)


def test_narrower_states_are_said_to_be_rounded(
    target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = Texts()
    cache = fill(tmp_path / "cache", target, data, dtype="bfloat16")
    source = Cached(str(cache)).open(target, data, LAYERS, False)
    assert "rounded to bfloat16" in caplog.text
    found, true = (
        one(target, data.splits.train, LAYERS, False) for one in (source, OnTheFly(rows=1))
    )
    assert found.aux_BTNH.dtype == torch.float32
    assert torch.equal(found.aux_BTNH, true.aux_BTNH.bfloat16().float())


def test_eight_bits_have_a_scale_for_every_state(
    target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is off by a sixteenth of its own size at most, or by 1/2**10 of 448ths of its state's largest number."""
    data = Texts()
    cache = fill(tmp_path / "cache", target, data, dtype="float8_e4m3fn")
    source = Cached(str(cache)).open(target, data, LAYERS, False)
    assert "rounded to float8_e4m3fn" in caplog.text
    found, true = (
        one(target, data.splits.train.int64(), LAYERS, False) for one in (source, OnTheFly(rows=1))
    )
    for ours, own in zip(found, true, strict=True):
        assert ours.dtype == torch.float32 and not torch.equal(ours, own)
        largest = own.abs().amax(-1, keepdim=True)
        assert bool(((ours - own).abs() <= 1.001 * own.abs() / 16 + largest / 448 / 2**10).all())
        torch.testing.assert_close(ours.abs().amax(-1, keepdim=True), largest, rtol=1e-6, atol=0)
    index = FeatureStore(cache, {}).contract
    assert index.token_bytes == (len(LAYERS) + 1) * (target.hidden_size + 4)
