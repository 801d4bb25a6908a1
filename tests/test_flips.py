"""One flipped bit, anywhere in what commands leave behind: it is named by whoever reads that next.

More of them: ``SPECDEC_FLIPS=300 pytest tests/test_flips.py``, of each kind.
"""

import base64
import os
import random
import shutil
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from specdec.data.rows import read_rows
from specdec.diagnostics.drift_measure import VERSION as OF_DRIFT
from specdec.drafter import DrafterSpec, load_drafter, save_drafter
from specdec.evaluation.compare import read_evaluation
from specdec.evaluation.metrics import write_answers
from specdec.export import export_drafter
from specdec.export.read import read_checkpoint
from specdec.features.store import FeatureIndex, FeatureStore, shard_rows
from specdec.studies.recorded_run import RecordedRun
from specdec.studies.reproduce import VERSION, recorded_run
from specdec.studies.results import read_record
from specdec.studies.worker import Job, JobFolder, write_config
from specdec.target import Target
from specdec.training.callbacks import check_run
from specdec.training.checkpoint import AtomicCheckpointIO
from specdec.training.losses_file import with_checksum
from specdec.training.run_directory import write_run_sums
from specdec.utils.files import staged_directory, write_json, write_sums, write_text
from specdec.utils.journal import Journal, read_journal
from specdec.utils.reading import DOCUMENTS, SUMS, check_sums, read_bytes, sha256
from tests.evaluation.made import answer
from tests.export.made import made_drafter
from tests.features.made import Texts, fill, target_of

FLIPS = int(os.environ.get("SPECDEC_FLIPS", "24"))  # of each kind
UNREAD = (".", *DOCUMENTS)  # files without a say: locks, and documents, which may be edited


class Artefact(NamedTuple):
    """What a command leaves in a folder, and who reads it next."""

    make: Callable[[Path, Path], object]  # of the folder and a target's directory
    read: Callable[[Path], object]


def evaluation(folder: Path, target: Path) -> None:
    with staged_directory(folder / "e") as out:
        write_answers(
            out / "answers.jsonl", ["chain of 3"], [[answer(str(n), (1, 2, 0)) for n in range(8)]]
        )
        write_text(out / "report.md", "# Evaluation\n")
        metrics: dict[str, Any] = {
            "results": [{"shape": "chain of 3"}],
            "target": {"fingerprint": "t"},
        }
        metrics["drafter"] = {"weights_sha256": "d"}
        write_json(out / "metrics.json", metrics | {"settings": {"max_new_tokens": 96}})


def measure(folder: Path, target: Path) -> None:
    with staged_directory(folder / "measures" / "d") as out:
        write_json(out / "drift.json", {"version": OF_DRIFT, "series": {"kl": [0.1, 0.25]}})
        (out / "drift.png").write_bytes(bytes(range(256)))


def run(folder: Path, target: Path) -> None:
    write_text(folder / "config.yaml", "seed_everything: 0\nmodel:\n  ttt_steps: 4\n")
    for name in ("provenance.json", "DONE.json", "validation_prompts.jsonl"):
        write_json(folder / name, {"steps": 40, "prompt": "def"})
    write_run_sums(folder)
    write_text(
        folder / "losses.txt",
        "".join(with_checksum(f"{n // 2} {n % 2} {(8 - n / 10).hex()}") for n in range(12)),
    )


def checkpoint(folder: Path, target: Path) -> None:
    state = {"global_step": 4, "state_dict": {"w": torch.arange(300.0)}, "specdec_config": {"a": 1}}
    AtomicCheckpointIO().save_checkpoint(state, folder / "last.ckpt")


def journal(folder: Path, target: Path) -> None:
    with Journal(folder / "j", "test", {"a": 1}) as begun:
        for n in range(6):
            begun.append({"row": str(n), "text": "é\nJ*"})


def goes_on(folder: Path) -> None:
    read_journal(folder / "j")
    with Journal(folder / "j", "test", {"a": 1}):
        pass


def rows(folder: Path, target: Path) -> None:
    write_text(folder / "own.jsonl", '{"text": "a"}\n{"text": "b"}\n')
    write_text(folder / "own.jsonl.sha256", f"{sha256(folder / 'own.jsonl')}  own.jsonl\n")


def study(folder: Path, target: Path) -> None:
    arm = {
        "name": "a",
        "is_baseline": True,
        "runs": [{"seed": 0, "fit": "f"} | dict.fromkeys(MEASURED)],
    }
    write_json(folder / "plan.json", {"version": 3, "arms": [arm]})
    write_text(folder / "study.yaml", "name: made\n")
    write_sums(folder, "study.yaml", "plan.json")
    write_config(
        folder, Job(key="f", kind="fit", label="", command=(), config={"seed_everything": 0})
    )
    with Journal(folder / "jobs" / "f" / "attempts.jsonl", "specdec.job", {"key": "f"}) as begun:
        begun.append({"begun": "2026-01-01T00:00:00.000+00:00", "host": "h"})


def read_study(folder: Path) -> None:
    (found,) = read_record(folder).arms["a"]
    assert found.states["fit"]
    read_bytes(folder / "study.yaml")
    check_sums(folder / "jobs" / "f", partial=True)


def card(folder: Path, target: Path) -> None:
    with staged_directory(folder / "card", replace=True) as out:
        losses = base64.b64encode(zlib.compress(b"0 0 0x1p+0\n")).decode()
        fit = {"config": {}, "provenance": {}, "losses": losses, "weights_sha256": "0"}
        runs = {"a": {"0": {"fit": fit, "evaluate": None}}}
        write_json(out / "card.json", {"version": VERSION, "manifest": {"runs": runs}})
        write_text(out / "card.md", "# Study\n")


def features(folder: Path, target: Path) -> None:
    fill(folder / "c", target_of(target), Texts(texts=6))
    for shard in (folder / "c").glob("shard-*"):
        assert shard_rows(shard, FeatureIndex.of(folder / "c").contract.columns())


def model(folder: Path, target: Path) -> None:
    with staged_directory(folder / "t") as out:
        shutil.copytree(target, out, dirs_exist_ok=True)


MEASURED = ("evaluate", "drift", "robustness")
ARTEFACTS: dict[str, Artefact] = {
    "evaluation": Artefact(evaluation, lambda folder: read_evaluation(folder / "e")),
    "measure": Artefact(
        measure,
        lambda folder: RecordedRun(0, {"drift": JobFolder(folder, "drift", "d")}).measured("drift"),
    ),
    "run": Artefact(run, check_run),
    "checkpoint": Artefact(
        checkpoint, lambda folder: AtomicCheckpointIO().load_checkpoint(folder / "last.ckpt")
    ),
    "journal": Artefact(journal, goes_on),
    "regenerated rows": Artefact(rows, lambda folder: list(read_rows(str(folder / "own.jsonl")))),
    "study": Artefact(study, read_study),
    "card": Artefact(card, lambda folder: recorded_run(folder / "card", "a", 0)),
    "features": Artefact(features, lambda folder: FeatureStore(folder / "c", {}).verify()),
    "drafter": Artefact(
        lambda folder, target: save_drafter(
            made_drafter(DrafterSpec(), target_of(target)), folder / "d"
        ),
        lambda folder: load_drafter(folder / "d"),
    ),
    "export": Artefact(
        lambda folder, target: export_drafter(
            made_drafter(DrafterSpec(), target_of(target)), target_of(target), folder / "d"
        ),
        lambda folder: read_checkpoint(folder / "d"),
    ),
    "target": Artefact(model, lambda folder: Target.load(folder / "t")),
}


def flips(
    artefact: Artefact, folder: Path, target: Path, count: int, spared: tuple[str, ...] = UNREAD
) -> list[str]:
    """Make it once, flip bits of its files in turn, one at a time; what came of each, as ``silent: FILE, byte 7``."""
    folder.mkdir()
    artefact.make(folder, target)
    artefact.read(folder)
    files = [
        file
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not file.name.startswith(spared)
    ]
    draw, found = random.Random(0), []
    for number in range(count):
        file = files[number % len(files)]
        whole = file.read_bytes()
        at = draw.randrange(len(whole))
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :])
        changed = file.read_bytes()
        try:
            artefact.read(folder)
            found.append(f"silent: {file.name}, byte {at}")
        except ValueError as error:
            told = str(folder) in str(error) and "\n" not in str(error)
            found.append("named" if told else f"nameless: {file.name}, byte {at}: {error}")
        except Exception as error:  # noqa: BLE001  what a user would see as a traceback
            found.append(f"{type(error).__name__}: {file.name}, byte {at}: {error}")
        assert file.read_bytes() == changed, "nothing is mended in silence"
        file.write_bytes(whole)
    artefact.read(folder)
    return found


@pytest.mark.parametrize("name", ARTEFACTS)
def test_every_flipped_bit_is_named(name: str, target_directory: Path, tmp_path: Path) -> None:
    # a stranger's list may be of files that are not here
    spared = (*UNREAD, SUMS) if name == "target" else UNREAD
    assert Counter(flips(ARTEFACTS[name], tmp_path / "x", target_directory, FLIPS, spared)) == {
        "named": FLIPS
    }
