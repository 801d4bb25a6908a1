"""Acceptance length measured while a drafter is trained; this file is also the program that two processes run."""

import csv
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec.commands.fit import run_fit
from specdec.data import Document, TextData
from specdec.data.packing import pack_stream, pack_whole
from specdec.decoding import SpeculativeDecoder, parse_shape
from specdec.drafter import load_drafter
from specdec.evaluation.callback import (
    SHORTEST,
    AcceptanceLength,
    best_and_last,
    document_prompts,
    logged_figures,
    of_all_processes,
)
from specdec.target import Target
from specdec.training.module import DrafterModule
from tests.evaluation.made import answer
from tests.short_run import short_run
from tests.two_processes import launch

NEW = 12
WHOLE = [
    "--trainer.accumulate_grad_batches=1",
    "--data.batch_size=4",
    "--trainer.check_val_every_n_epoch=null",
]
LONG = [*WHOLE, "--trainer.max_steps=32", "--trainer.val_check_interval=16"]


@pytest.fixture(scope="module")
def easy(target_directory: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that looks at little more than the last token and says the text's tokens alone: soon learnt."""
    path = tmp_path_factory.mktemp("easy") / "target"
    shutil.copytree(target_directory, path)
    model = AutoModelForCausalLM.from_pretrained(path)
    said = set(AutoTokenizer.from_pretrained(path).encode(text_file.read_text()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(0.1)
        model.lm_head.weight[sorted(set(range(model.config.vocab_size)) - said)] = 0
    model.save_pretrained(path)
    return path


@pytest.fixture
def base(easy: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of a run on the CPU, validated twice and in the midst of a gradient's accumulation."""
    monkeypatch.setattr(sys, "argv", ["specdec"])
    return short_run(
        easy, text_file,
        model__optimizer__lr="2e-2",
        trainer__max_steps=6,
        trainer__accumulate_grad_batches=2,
        trainer__val_check_interval=3,
        trainer__limit_val_batches=2,
        trainer__log_every_n_steps=2,
        acceptance__max_new_tokens=NEW,
        acceptance__count=3,
        acceptance__share=1,
    )  # fmt: skip


def column(out: Path, name: str) -> list[float]:
    """What was logged under a name."""
    with (out / "csv" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [float(row[name]) for row in rows if row.get(name)]


def measured(
    out: Path, target: Path, text: Path, shape: str, dtype: str = "float32", folder: str = "drafter"
) -> dict[str, float]:
    """The same figures, of the saved drafter."""
    loaded = Target.load(target, dtype=dtype)
    data = TextData(str(text), str(text), seq_len=32)
    data.prepare(loaded.tokenizer)
    prompts = document_prompts(data.splits.validation, 3, 64, 200)
    assert [len(ids) for ids in prompts] == [16, 16, 16]
    decoder = SpeculativeDecoder(
        loaded, load_drafter(out / folder, getattr(torch, dtype)), parse_shape(shape)
    )
    accepted = [
        n for ids in prompts for n in decoder.generate(ids, NEW, loaded.eos_token_ids).accepted
    ]
    mean = 1 + sum(accepted) / len(accepted)
    return {
        "acceptance_length": mean,
        "accepted_at_2": sum(n >= 2 for n in accepted) / len(accepted),
    }


def test_training_is_left_alone_to_the_last_bit(base: list[str], tmp_path: Path) -> None:
    states, extra = [], ["--trainer.precision", "bf16-mixed"]
    for every in ("1", "0"):
        out = tmp_path / every
        assert (
            run_fit(
                "fit", [*base, *extra, "--acceptance.every_n_validations", every, "--out", str(out)]
            )
            == 0
        )
        state = torch.load(out / "checkpoints" / "last.ckpt", weights_only=True)
        optimizer = state["optimizer_states"][0]["state"]
        states.append(
            [*state["state_dict"].values(), *(x for s in optimizer.values() for x in s.values())]
        )
        assert bool(column(out, "val/acceptance_length")) == (every == "1")
    assert all(torch.equal(one, two) for one, two in zip(*states, strict=True))


def test_what_is_logged_is_what_decoding_gives(
    base: list[str], tmp_path: Path, easy: Path, text_file: Path
) -> None:
    out, dtype = tmp_path / "run", "bfloat16"  # the target's; the drafter trains in float32
    assert run_fit("fit", [*base, *LONG, "--model.target.dtype", dtype, "--out", str(out)]) == 0
    wanted = measured(out, easy, text_file, "chain:depth=5", dtype)
    assert wanted["acceptance_length"] > 1.4
    logged = json.loads((out / "DONE.json").read_text())["metrics"]
    for name, value in wanted.items():
        assert logged[f"val/{name}"] == pytest.approx(value)
    assert (
        logged["val/acceptance_length_low"]
        <= wanted["acceptance_length"]
        <= logged["val/acceptance_length_high"]
    )
    assert 1 + sum(logged[f"val/accepted_at_{k}"] for k in range(1, 6)) == pytest.approx(
        wanted["acceptance_length"]
    )
    assert len(set(column(out, "val/acceptance_length"))) > 1  # the weights of each validation


def chosen_by(out: Path) -> dict[str, Any]:
    """What the kept drafter was chosen by, once it is sure that it decodes so."""
    found: dict[str, Any] = json.loads((out / "drafter_best" / "config.json").read_text())[
        "chosen_by"
    ]
    return found


AVERAGE = ["--trainer.callbacks+=specdec.training.callbacks.EMA", "--trainer.callbacks.decay=0.5"]
WORSE = [*WHOLE, "--trainer.max_steps=30", "--trainer.val_check_interval=5"]
WORSE += [
    "--model.schedule=torch.optim.lr_scheduler.MultiStepLR",
    "--model.schedule.milestones=[20]",
]
WORSE += [
    "--model.schedule.gamma=-3",
    "--checkpoint.every_n_train_steps=5",
    "--checkpoint.save_top_k=-1",
]


@pytest.fixture
def worse(base: list[str]) -> list[str]:
    """A run of 30 steps, decoded every 5, which goes uphill from step 20 on."""
    return [*base, *WORSE]


@pytest.mark.parametrize("average", [[], pytest.param(AVERAGE, marks=pytest.mark.slow)])
def test_the_best_drafter_is_kept_beside_the_last(
    worse: list[str],
    tmp_path: Path,
    easy: Path,
    text_file: Path,
    caplog: pytest.LogCaptureFixture,
    average: list[str],
) -> None:
    """As it was decoded: averaged, where the average is validated."""
    caplog.set_level("INFO", "specdec")
    out = tmp_path / "run"
    assert run_fit("fit", [*worse, *average, f"--out={out}"]) == 0
    lengths = dict(zip(decoded_at(out), column(out, "val/acceptance_length"), strict=True))
    best = max(lengths, key=lambda step: lengths[step])
    found, done = chosen_by(out), json.loads((out / "DONE.json").read_text())
    assert 1 < lengths[30] < lengths[best] - 0.1 or lengths[30] == 1 < lengths[best] - 0.1
    assert found["step"] == best < 30 and found["mean"] == pytest.approx(lengths[best])
    assert found["low"] <= found["mean"] <= found["high"] and done["best"] == found
    for folder, length in (("drafter_best", lengths[best]), ("drafter", lengths[30])):
        assert measured(out, easy, text_file, "chain", folder=folder)[
            "acceptance_length"
        ] == pytest.approx(length)
    (said,) = (line for line in caplog.messages if line.startswith("trained 30 steps"))
    assert f"best drafter   {out}/drafter_best\n" in said
    assert (
        f"best: {lengths[best]:.2f} [{found['low']:.2f}, {found['high']:.2f}] at step {best}; last: "
        in said
    )


@pytest.mark.slow
def test_the_best_drafter_survives_a_kill(worse: list[str], tmp_path: Path) -> None:
    """The folder is the run's, though the checkpoint that goes on is older; only what was decoded alike compares."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert run_fit("fit", [*worse, f"--out={whole}"]) == 0
    assert run_fit("fit", [*worse, f"--out={halves}", "--trainer.max_steps=23"]) == 0
    assert chosen_by(halves) == chosen_by(whole)
    for path in (halves / "checkpoints").glob("*.ckpt"):
        if path.name not in ("step-5.ckpt", "step-10.ckpt"):
            path.unlink()
    assert run_fit("fit", [*worse, f"--out={halves}", "--ckpt_path=auto"]) == 0
    assert (
        json.loads((halves / "DONE.json").read_text())["best"]
        == chosen_by(halves)
        == chosen_by(whole)
    )
    one, two = (load_drafter(out / "drafter_best").state_dict() for out in (whole, halves))
    assert all(torch.equal(one[name], two[name]) for name in one)
    longer = [*worse, "--ckpt_path=auto", "--trainer.max_steps=40", f"--out={halves}"]
    assert run_fit("fit", [*longer, "--acceptance.shape=chain:depth=2"]) == 0
    assert (
        chosen_by(halves)["step"] > 30 and chosen_by(halves)["decoded"]["shape"] == "chain:depth=2"
    )
    weights = halves / "drafter_best" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match=r"drafter_best.*remove .*drafter_best") as error:
        run_fit("fit", [*longer, "--trainer.max_steps=41"])
    assert "\n" not in str(error.value)


def test_no_decoding_no_best_drafter(
    base: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "specdec")
    out = tmp_path / "run"
    assert run_fit("fit", [*base, "--acceptance.every_n_validations=0", f"--out={out}"]) == 0
    assert not (out / "drafter_best").exists() and "best" not in json.loads(
        (out / "DONE.json").read_text()
    )
    assert "best drafter" not in caplog.text and "best:" not in caplog.text


def test_what_is_said_of_best_and_last() -> None:
    def found(step: int, mean: float, low: float | None, high: float | None) -> dict[str, Any]:
        return {"step": step, "mean": mean, "low": low, "high": high}

    best, last, bad = (
        found(400, 2.31, 2.1, 2.5),
        found(600, 2.25, 2.05, 2.45),
        found(600, 1.5, 1.4, 1.6),
    )
    both = (
        "2.31 [2.10, 2.50] at step 400; last: 2.25 [2.05, 2.45] at step 600; the intervals overlap"
    )
    assert best_and_last(best, last).startswith(both) and "within the noise" in best_and_last(
        best, last
    )
    assert best_and_last(best, bad).endswith("; the intervals are apart")
    assert best_and_last(best, best) == "2.31 [2.10, 2.50] at step 400, the last one decoded"
    assert "may be noise" in best_and_last(found(1, 2.0, None, None), last)


def test_every_second_validation(base: list[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    seldom = [*base, "--acceptance.every_n_validations", "2"]
    assert run_fit("fit", [*seldom, "--trainer.max_steps", "3", "--out", str(out)]) == 0
    assert len(column(out, "val/loss")) == 2 and len(column(out, "val/acceptance_length")) == 1


class Clock:
    """Moves by a second for every batch that is trained, and by ``decoding`` when a prompt is decoded."""

    def __init__(self, patch: pytest.MonkeyPatch, decoding: float) -> None:
        self.now, step, answers = 5.0, DrafterModule.training_step, AcceptanceLength._answers

        def training_step(module: DrafterModule, *args: Any) -> torch.Tensor:
            self.now += 1.0
            return step(module, *args)

        def decoded(callback: AcceptanceLength, *args: Any) -> Any:
            self.now += decoding
            return answers(callback, *args)

        patch.setattr(DrafterModule, "training_step", training_step)
        patch.setattr(AcceptanceLength, "_answers", decoded)
        patch.setattr("specdec.evaluation.callback.time.monotonic", lambda: self.now)


@pytest.mark.slow
def test_decoding_keeps_to_its_share_of_the_training_time(
    base: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A validation every six seconds, a decoding of half a second: at 5 %, the first, the third after it, the last."""
    caplog.set_level("INFO", "specdec")
    Clock(monkeypatch, 0.5)
    out = tmp_path / "run"
    args = [
        *base,
        "--acceptance.share=0.05",
        "--trainer.max_steps=21",
        "--trainer.val_check_interval=6",
    ]
    args += [
        "--trainer.check_val_every_n_epoch=null",
        "--checkpoint.every_n_train_steps=3",
        "--checkpoint.save_top_k=-1",
    ]
    args += ["--trainer.log_every_n_steps=1", "--model.ttt_steps=1", "--data.batch_size=1"]
    assert run_fit("fit", [*args, f"--out={out}"]) == 0
    # spent and to be spent: 0.5 + 2 * 0.5 = 1.5 s, affordable from the 30th second on; then 2 s, from the 40th
    steps = decoded_at(out)
    assert steps == [3, 15, 21] and len(column(out, "val/loss")) == 7
    spent = column(out, "val/acceptance_seconds")
    assert spent == [0.5, 1.0, 1.5] and spent[-1] <= 0.05 * 42
    lines = [line for line in caplog.messages if "acceptance length" in line]
    assert lines[0].startswith(
        "no acceptance length at step 6, nor until it is affordable: decoding takes 0.5 s"
    )
    assert "12 % of the 12 s of training, more than acceptance.share (5 %)" in lines[0]
    assert (
        lines[-1]
        == "acceptance lengths at 3 of 7 validations took 1.5 s, 3.6 % of the training time"
    )
    assert len(lines) == 3  # a streak that is passed over is told once

    resumed = tmp_path / "resumed"  # it knows what was spent and trained before
    more = ["--ckpt_path", str(out / "checkpoints" / "step-9.ckpt"), f"--out={resumed}"]
    assert run_fit("fit", [*args, *more]) == 0
    assert decoded_at(resumed) == [15, 21] and column(resumed, "val/acceptance_seconds") == [
        1.0,
        1.5,
    ]


def decoded_at(out: Path) -> list[int]:
    with (out / "csv" / "version_0" / "metrics.csv").open() as file:
        return [
            int(row["step"]) + 1 for row in csv.DictReader(file) if row.get("val/acceptance_length")
        ]


@pytest.mark.slow
def test_nothing_is_decoded_at_the_sanity_check(
    base: list[str], tmp_path: Path, easy: Path, text_file: Path
) -> None:
    out, shape = tmp_path / "run", "tree:depth=3,top_k=2,nodes=6"
    more = ["--trainer.num_sanity_val_steps", "2", "--acceptance.shape", shape, "--out", str(out)]
    assert run_fit("fit", [*base, *more]) == 0
    logged = column(out, "val/acceptance_length")
    assert len(logged) == len(column(out, "val/loss"))
    assert logged[-1] == pytest.approx(measured(out, easy, text_file, shape)["acceptance_length"])


@pytest.mark.slow
def test_averaged_weights_are_measured(
    base: list[str], tmp_path: Path, easy: Path, text_file: Path
) -> None:
    out = tmp_path / "run"
    average = [
        "--trainer.callbacks+=specdec.training.callbacks.EMA",
        "--trainer.callbacks.decay=0.9",
    ]
    assert run_fit("fit", [*base, *LONG, *average, "--out", str(out)]) == 0
    wanted = measured(out, easy, text_file, "chain")["acceptance_length"]
    assert wanted > 1.2
    assert column(out, "val/acceptance_length")[-1] == pytest.approx(wanted)
    checkpoint = torch.load(out / "checkpoints" / "last.ckpt", weights_only=True)
    drafter = load_drafter(out / "drafter")
    assert not torch.equal(
        drafter.lm_head.weight,
        checkpoint["current_model_state"]["train_step.drafter.lm_head.weight"],
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (["--acceptance.shape", "bush"], "shape 'bush'"),
        (["--acceptance.shape", "tree:top_k=201,nodes=12"], "draft vocabulary of 200"),
        (
            ["--acceptance.max_new_tokens", "0"],
            "acceptance.max_new_tokens must be at least 1, not 0",
        ),
        (["--acceptance.prompt_tokens", "4"], "acceptance.prompt_tokens must be at least"),
        (["--acceptance.share", "0"], "acceptance.share must be above 0, not 0"),
        (["--acceptance.max_new_tokens", "250"], "no validation document can be made a prompt"),
    ],
)
def test_wrong_input_is_told_before_training(
    base: list[str], tmp_path: Path, override: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        run_fit("fit", [*base, *override, "--out", str(tmp_path / "run")])
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_nothing_is_asked_of_data_that_is_never_validated(base: list[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    more = ["--acceptance.max_new_tokens", "250", "--trainer.limit_val_batches", "0"]
    assert run_fit("fit", [*base, *more, "--trainer.max_steps", "1", "--out", str(out)]) == 0


def test_logged_figures_of_few_answers(caplog: pytest.LogCaptureFixture) -> None:
    found = logged_figures([answer("0", (0, 2), depth=2)])
    assert found == {"acceptance_length": 2.0, "accepted_at_1": 0.5, "accepted_at_2": 0.5}
    assert logged_figures([answer("0", ()), answer("1", ())]) == {}
    assert "no acceptance length" in caplog.text
    with pytest.raises(ValueError, match="every_n_validations must be at least 0, not -1"):
        AcceptanceLength(every_n_validations=-1)


def text(start: int, length: int) -> Document:
    return Document(torch.arange(start, start + length), torch.ones(length, dtype=torch.bool))


def chat(start: int, length: int, answers: slice) -> Document:
    mask_T = torch.zeros(length, dtype=torch.bool)
    mask_T[answers] = True
    return Document(torch.arange(start, start + length), mask_T)


def test_a_text_is_cut_at_the_length_asked_for_or_at_its_half() -> None:
    rows = pack_stream([text(0, 100), text(200, 30), text(300, 12), text(400, 58)], 200)
    assert document_prompts(rows, 8, 20, 500) == [
        list(range(20)),
        list(range(200, 215)),
        list(range(400, 420)),
    ]
    assert document_prompts(rows, 2, 20, 500) == [list(range(20)), list(range(200, 215))]
    assert document_prompts(rows, 8, 20, 10) == [list(range(n, n + 10)) for n in (0, 200, 400)]


def test_a_conversation_is_cut_where_its_first_answer_begins() -> None:
    documents = [chat(0, 40, slice(5, 9)), chat(100, 40, slice(0, 0)), chat(200, 30, slice(20, 30))]
    rows = pack_whole(documents, 64)
    assert sorted(document_prompts(rows, 8, 20, 500)) == [[0, 1, 2, 3, 4], list(range(200, 220))]
    assert document_prompts(rows, 8, 20, 19) == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    "documents",
    [
        [text(0, 2 * SHORTEST - 1)],
        [chat(0, 64, slice(50, 60))],
        [chat(0, 64, slice(0, 0))],
    ],
)
def test_no_prompt_is_one_clear_line(documents: list[Document]) -> None:
    rows = pack_stream(documents, 64)
    with pytest.raises(
        ValueError, match=r"begins within 49 tokens.*acceptance.max_new_tokens"
    ) as error:
        document_prompts(rows, 8, 20, 49)
    assert "\n" not in str(error.value)


ANSWERS = [
    answer("a", (3, 1, 0)),
    answer("b", (2,)),
    answer("c", (1, 3)),
    answer("d", (0,)),
    answer("e", (2, 0, 1)),
]
# which answers a process has
CASES: dict[str, list[list[int]]] = {
    "in turns": [[0, 2, 4], [1, 3]], "in another order": [[3, 1], [4, 0, 2]],
    "one has none": [[], [0, 1, 2, 3, 4]], "none has any": [[], []],
}  # fmt: skip


def program(out: Path) -> None:
    """Every case, one after another; each process writes what it computes."""
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo")
    mine = {name: [ANSWERS[n] for n in case[rank]] for name, case in CASES.items()}
    found = {name: logged_figures(of_all_processes(answers)) for name, answers in mine.items()}
    (out / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_are_one(tmp_path: Path) -> None:
    """To the last bit, on both."""
    launch("tests.evaluation.test_callback", tmp_path, 2)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for name in CASES:
        wanted = logged_figures([] if name == "none has any" else ANSWERS)
        assert found[0][name] == found[1][name] == wanted, name


if __name__ == "__main__":
    program(Path(sys.argv[1]))
