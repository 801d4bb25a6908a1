"""The drafter's directory: everything comes back, and damage is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import specdec.drafter.io as io
from specdec.drafter import Drafter, DrafterSpec, load_drafter, save_drafter
from specdec.drafter.io import located
from specdec.nn.view import View
from specdec.utils import reading
from specdec.utils.files import write_sums
from specdec.utils.reading import sha256
from tests.tiny import HIDDEN, presets, tiny_drafter


@pytest.fixture
def made(tmp_path: Path) -> tuple[Drafter, Path]:
    drafter = tiny_drafter(presets()["eagle3_1"], dtype=torch.float32)
    return drafter, save_drafter(drafter, tmp_path / "drafter")


def run(drafter: Drafter) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    aux = torch.randn(1, 4, len(drafter.config.aux_layers), HIDDEN, generator=generator)
    ids, view = torch.tensor([[3, 1, 4, 1]]), View.packed(torch.zeros(1, 4, dtype=torch.int64))
    return drafter.logits(drafter.step(ids, drafter.fuse(aux), view).normed_BTH)


SPECS = {**presets(), "two layers": DrafterSpec(draft_vocab_size=40, num_layers=2, hidden_size=20)}


@pytest.mark.parametrize("name", SPECS)
def test_all_of_it_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    drafter = tiny_drafter(SPECS[name], dtype=torch.float32)
    assert save_drafter(drafter, tmp_path / "drafter") == tmp_path / "drafter"
    back = load_drafter(tmp_path / "drafter")
    assert back.config == drafter.config
    assert list(back.state_dict()) == list(drafter.state_dict())
    for key, tensor in drafter.state_dict().items():
        assert (
            torch.equal(back.state_dict()[key], tensor)
            and back.state_dict()[key].dtype == tensor.dtype
        )
    assert torch.equal(back.vocab.draft_ids_V, drafter.vocab.draft_ids_V)
    assert torch.equal(run(back), run(drafter))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float32,
        torch.float64,
    ],
)
def test_weights_come_back_in_the_dtype_they_were_stored_in(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    drafter = tiny_drafter(presets()["eagle3"], dtype=dtype)
    back = load_drafter(save_drafter(drafter, tmp_path / "drafter"), dtype=dtype)
    for key, tensor in drafter.state_dict().items():
        assert torch.equal(back.state_dict()[key], tensor), key


def test_an_older_drafter_is_not_overwritten_silently(made: tuple[Drafter, Path]) -> None:
    _, directory = made
    other = tiny_drafter(presets()["eagle1"], seed=1, dtype=torch.float32)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(ValueError, match=r"drafter exists already: choose another place"):
        save_drafter(other, directory)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    save_drafter(other, directory, replace=True)
    assert load_drafter(directory).config == other.config
    assert [path.name for path in directory.parent.iterdir()] == ["drafter"]


def full(*args: Any, **kwargs: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("step", ["save_file", "write_json", "sha256"])
@pytest.mark.parametrize("replace", [False, True])
def test_a_failed_write_leaves_what_was_there(
    step: str, replace: bool, made: tuple[Drafter, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, directory = made
    if not replace:
        directory = directory.parent / "new"
    monkeypatch.setattr(io, step, full)
    with pytest.raises(ValueError, match="no space left on device"):
        save_drafter(tiny_drafter(presets()["eagle1"], dtype=torch.float32), directory, replace)
    monkeypatch.undo()
    assert [path.name for path in directory.parent.iterdir()] == ["drafter"]
    assert torch.equal(run(load_drafter(made[1])), run(drafter))


def test_weights_are_hashed_once(
    made: tuple[Drafter, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []

    def counted(path: Path) -> str:
        hashed.append(path.name)
        return sha256(path)

    monkeypatch.setattr(reading, "sha256", counted)
    monkeypatch.setattr(io, "sha256", counted)
    load_drafter(made[1])
    (made[1] / reading.SUMS).unlink()
    load_drafter(made[1])
    assert hashed.count("model.safetensors") == 2


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def edit(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    where = directory / "config.json"
    stored = json.loads(where.read_text())
    change(stored)
    where.write_text(json.dumps(stored))
    (directory / "SHA256SUMS").unlink(missing_ok=True)  # on purpose


def swap(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Other tensors under a matching hash: what a broken converter would leave."""
    weights = directory / "model.safetensors"
    tensors = load_file(weights)
    change(tensors)
    save_file(tensors, weights)
    edit(directory, lambda stored: stored.update(weights_sha256=sha256(weights)))


C, W = "config.json", "model.safetensors"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda d: (d / C).unlink(), rf"{C}: its SHA-256 is not that in SHA256SUMS"),
    "no weights": (lambda d: (d / W).unlink(), rf"{W}: its SHA-256"),
    "empty config": (lambda d: (cut(d / C, 0), (d / "SHA256SUMS").unlink()), rf"{C}, line 1: not valid JSON"),
    "cut config": (lambda d: (cut(d / C, 300), (d / "SHA256SUMS").unlink()), rf"{C}, line \d+: not valid JSON"),
    "empty weights": (lambda d: cut(d / W, 0), rf"{W}: its SHA-256"),
    "cut header": (lambda d: cut(d / W, 100), rf"{W}: its SHA-256"),
    "cut weights": (lambda d: cut(d / W, 20_000), rf"{W}: its SHA-256"),
    "last byte gone": (lambda d: cut(d / W, (d / W).stat().st_size - 1), rf"{W}: its SHA-256"),
    "one bit of the last weight": (lambda d: flip(d / W, -1), rf"{W}: its SHA-256"),
    "one bit inside": (lambda d: flip(d / W, 20_000), rf"{W}: its SHA-256"),
    "one digit of the config": (
        lambda d: (d / C).write_text((d / C).read_text().replace('"hidden_size": 32', '"hidden_size": 33', 1)), C
    ),
    "one letter of the target": (
        lambda d: (d / C).write_text((d / C).read_text().replace('"tiny"', '"tinz"')), rf"{C}: its SHA-256 .* SHA256SUM"
    ),
    "one letter of the hashes": (
        lambda d: (d / "SHA256SUMS").write_text((d / "SHA256SUMS").read_text().upper()), "SHA256SUMS: .*damaged"
    ),
    "no hash": (lambda d: edit(d, lambda s: s.pop("weights_sha256")), rf"{W}: its SHA-256"),
    "weights a directory": (lambda d: ((d / W).unlink(), (d / W).mkdir()), W),
    "another format": (lambda d: edit(d, lambda s: s.update(format="eagle")), rf"{C}: not a specdec drafter"),
    "a Hugging Face config": (
        lambda d: ((d / C).write_text('{"model_type": "llama"}'), write_sums(d)), rf"{C}: not a specdec drafter"
    ),
    "a list": (lambda d: ((d / C).write_text("[]"), write_sums(d)), rf"{C}: not a specdec drafter"),
    "key gone": (lambda d: edit(d, lambda s: s["drafter"].pop("rope")), rf"{C}: the drafter's config lacks rope"),
    "key too many": (lambda d: edit(d, lambda s: s["drafter"].update(fc_norm=1)), rf"{C}: .*unknown keys: fc_norm"),
    "illegal axes": (
        lambda d: edit(d, lambda s: s["drafter"]["norms"].update(output=False)),
        "PostNorm needs norms.output=true",
    ),
    "unknown part": (
        lambda d: edit(d, lambda s: s["drafter"].update(fusion="os.system")),
        rf"{C}: fusion: 'os.system' is no Fusion",
    ),
    "tensor missing": (
        lambda d: swap(d, lambda t: t.pop("fusion.fc.weight")),
        rf"{W}: not as config.json says: it lacks fusion.fc.weight .32, 96.$",
    ),
    "tensor unexpected": (
        lambda d: swap(d, lambda t: t.update({"norms.input.weight": torch.ones(3)})),
        rf"{W}: .*weights without a place: norms.input.weight",
    ),
    "tensor transposed": (
        lambda d: swap(d, lambda t: t.update({"fusion.fc.weight": t["fusion.fc.weight"].T.contiguous()})),
        rf"{W}: .*: fusion.fc.weight is .*, the config says",
    ),
    "tensor that would broadcast": (
        lambda d: swap(d, lambda t: t.update({"norms.output.weight": torch.ones(1)})),
        rf"{W}: .*: norms.output.weight is .1., the config says",
    ),
    "draft ids out of order": (
        lambda d: swap(d, lambda t: t.update({"vocab.target_ids_D": t["vocab.target_ids_D"].flip(0)})),
        "draft vocabulary: the target ids must increase strictly",
    ),
    "draft ids out of range": (
        lambda d: swap(d, lambda t: t["vocab.target_ids_D"].add_(30)),
        "draft vocabulary: the target ids must increase strictly",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_and_the_file_named(name: str, made: tuple[Drafter, Path]) -> None:
    _, directory = made
    load_drafter(directory)
    damage, message = DAMAGE[name]
    damage(directory)
    with pytest.raises(ValueError, match=message) as caught:
        load_drafter(directory)
    assert "\n" not in str(caught.value)


def test_the_weights_of_another_drafter_are_refused(
    made: tuple[Drafter, Path], tmp_path: Path
) -> None:
    """Same shapes, other training run."""
    other = save_drafter(
        tiny_drafter(presets()["eagle3_1"], seed=1, dtype=torch.float32), tmp_path / "other"
    )
    (made[1] / W).write_bytes((other / W).read_bytes())
    with pytest.raises(ValueError, match=rf"{W}: its SHA-256"):
        load_drafter(made[1])


def test_every_byte_of_the_header_is_guarded(made: tuple[Drafter, Path]) -> None:
    weights = made[1] / W
    whole = weights.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    for at in range(0, end, 29):
        weights.write_bytes(whole)
        flip(weights, at)
        with pytest.raises(ValueError, match=W):
            load_drafter(made[1])


def test_no_directory_and_a_file_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("nowhere", "file"):
        with pytest.raises(ValueError, match=f"{name}: no such drafter directory"):
            load_drafter(tmp_path / name)
    with pytest.raises(ValueError, match="a part of the path is a file"):
        save_drafter(tiny_drafter(presets()["eagle1"]), tmp_path / "file" / "drafter")


def test_a_run_stands_for_its_drafter(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saved = save_drafter(tiny_drafter(presets()["eagle1"]), run / "drafter")
    (run / "SHA256SUMS").write_text("0" * 64 + "  losses.txt\n")
    assert located(run) == saved == located(saved)
    same = zip(load_drafter(run).parameters(), load_drafter(saved).parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in same)
