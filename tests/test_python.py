"""The Python API under a plain Lightning trainer, its page, its example and its notebook."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import nbformat
import pytest
import torch
from nbclient import NotebookClient
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, LlamaForCausalLM

from specdec import (
    DrafterModule,
    DrafterSpec,
    FromDrafter,
    LastLayer,
    Narrow,
    Norms,
    PreNorm,
    SpeculativeDecoder,
    Target,
    TargetSource,
    TextData,
    WarmupCosine,
    load_drafter,
)
from specdec.training.losses import DistributionLoss, LossRows
from tests.conftest import TEXT
from tests.evaluation.test_conversation import TEMPLATE
from tests.examples import load_example

ROOT = Path(__file__).parents[1]
PAGE, EXAMPLE, NOTEBOOK = (
    ROOT / "docs/python.md",
    ROOT / "examples/own_module.py",
    ROOT / "docs/notebook.ipynb",
)
SMALL = DrafterSpec(draft_vocab_size=200)
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def data(text_file: Path, **more: Any) -> TextData:
    return TextData(str(text_file), str(text_file), **({"seq_len": 32, "batch_size": 2} | more))


def trainer(folder: Path, **more: Any) -> pl.Trainer:
    given = {
        "max_steps": 3,
        "default_root_dir": folder,
        "log_every_n_steps": 1,
        "limit_val_batches": 1,
    }
    return pl.Trainer(**(QUIET | given | more))


@pytest.mark.parametrize("loaded", [False, True])
def test_five_lines_to_a_drafter(
    loaded: bool, target_directory: Path, text_file: Path, tmp_path: Path
) -> None:
    target: Any = Target.load(target_directory) if loaded else str(target_directory)
    module = DrafterModule(target=target, drafter=SMALL, ttt_steps=2)
    plain = trainer(tmp_path, val_check_interval=1)
    plain.fit(module, datamodule=data(text_file))
    assert module.save_drafter(tmp_path / "drafter") == tmp_path / "drafter"
    assert {"train/loss", "val/loss"} <= plain.callback_metrics.keys()
    assert module.target is target or not loaded
    drafter = load_drafter(tmp_path / "drafter")
    assert drafter.config.target["source"] == str(target_directory)
    state = module.drafter.state_dict()  # type: ignore[union-attr]
    assert all(torch.equal(tensor, state[name]) for name, tensor in drafter.state_dict().items())
    texts = [
        SpeculativeDecoder(module.target, one).generate("def", 9).text
        for one in (drafter, module.drafter)
    ]
    assert texts[0] == texts[1]
    with pytest.raises(ValueError, match="drafter"):
        module.save_drafter(tmp_path / "drafter")


def test_lightnings_own_checkpoint_goes_on(
    target_directory: Path, text_file: Path, tmp_path: Path
) -> None:
    drafters = []
    for stops in ([6], [3, 6]):
        path = None
        for stop in stops:
            pl.seed_everything(0, verbose=False)
            module = DrafterModule(
                str(target_directory), SMALL, ttt_steps=2, schedule=WarmupCosine(floor=1)
            )
            last = trainer(
                tmp_path,
                max_steps=stop,
                limit_val_batches=0,
                enable_checkpointing=False,
                logger=False,
            )
            last.fit(module, datamodule=data(text_file), ckpt_path=path)
            last.save_checkpoint(path := tmp_path / f"{stop}.ckpt")
        drafters.append(module.drafter)
    one, two = (drafter.state_dict() for drafter in drafters if drafter is not None)
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    # without a trainer, and without a word on target and design
    loaded = DrafterModule.load_from_checkpoint(path)
    assert loaded.drafter is not None and module.drafter is not None
    assert loaded.drafter.config == module.drafter.config
    assert loaded.target_source.source == str(target_directory)
    three = loaded.drafter.state_dict()
    assert all(torch.equal(tensor, three[name]) for name, tensor in one.items())
    text = SpeculativeDecoder(loaded.target, loaded.drafter).generate("def", 9).text
    assert text == SpeculativeDecoder(module.target, module.drafter).generate("def", 9).text
    # a trainer measures it, as the module that it was saved from
    loaded = DrafterModule.load_from_checkpoint(path, ttt_steps=2)
    measured = [
        trainer(tmp_path, logger=False, enable_checkpointing=False).test(
            tested, datamodule=data(text_file), verbose=False
        )
        for tested in (module, loaded)
    ]
    assert measured[0] == measured[1] and measured[0][0]["test/loss"] > 0
    with pytest.raises(ValueError, match="for use, not for training"):
        trainer(tmp_path, max_steps=1).fit(loaded, datamodule=data(text_file))


def test_a_loaded_module_is_not_measured_with_another_target(
    target_directory: Path, text_file: Path, tmp_path: Path
) -> None:
    module = DrafterModule(str(target_directory), SMALL, ttt_steps=2)
    run = trainer(
        tmp_path, max_steps=1, limit_val_batches=0, enable_checkpointing=False, logger=False
    )
    run.fit(module, datamodule=data(text_file))
    run.save_checkpoint(path := tmp_path / "one.ckpt")
    other = tmp_path / "other"
    model = LlamaForCausalLM.from_pretrained(target_directory)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    model.save_pretrained(other)
    AutoTokenizer.from_pretrained(target_directory).save_pretrained(other)
    loaded = DrafterModule.load_from_checkpoint(path, target=str(other))
    with pytest.raises(ValueError, match="the checkpoint's drafter was trained for"):
        trainer(tmp_path, logger=False).test(loaded, datamodule=data(text_file))


@dataclasses.dataclass(frozen=True)
class Distance(DistributionLoss):
    """By autograd, as one's own loss is."""

    reads: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, rows: LossRows) -> torch.Tensor:
        return (rows.draft_RD.softmax(-1) - rows.p_RD).square().sum(-1)


@dataclasses.dataclass(frozen=True)
class Misspelled(Distance):
    reads: ClassVar[frozenset[str]] = frozenset({"tokens_R"})


def test_a_loss_by_autograd_is_validated_outside_of_fit_too_and_a_checkpoint_warns_of_it(
    target_directory: Path, text_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = DrafterModule(str(target_directory), SMALL, loss=Distance(), ttt_steps=2)
    run = trainer(tmp_path, max_steps=1, enable_checkpointing=False, logger=False)
    run.fit(module, datamodule=data(text_file))
    inside = {name: float(value) for name, value in run.callback_metrics.items() if "val/" in name}
    (outside,) = trainer(tmp_path, logger=False).validate(
        module, datamodule=data(text_file), verbose=False
    )
    with_gradients = trainer(tmp_path, logger=False, inference_mode=False)
    (again,) = with_gradients.validate(module, datamodule=data(text_file), verbose=False)
    assert outside == again and outside["val/loss"] > 0
    assert inside == {} or inside["val/loss"] == outside["val/loss"]
    run.save_checkpoint(path := tmp_path / "one.ckpt")
    DrafterModule.load_from_checkpoint(path, loss=Distance(), ttt_steps=2)
    assert "the checkpoint was trained with" not in caplog.text
    DrafterModule.load_from_checkpoint(path, loss=Distance())
    assert (
        "the checkpoint was trained with ttt_steps=2: give load_from_checkpoint the same"
        in caplog.text
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"loss": "ForwardKL"},
            r"model.loss must be an object, such as SoftCrossEntropy\(\), not 'ForwardKL'",
        ),
        (
            {"loss": Misspelled()},
            "loss Misspelled reads tokens_R: choose from log_mass_R, log_p_RD, token_R",
        ),
        ({"target": "no/such/directory"}, "no/such/directory: no such directory"),
        (
            {"drafter": "eagle4"},
            r"no preset 'eagle4' of a drafter: choose from .*eagle1, .*weighted_sum",
        ),
        (
            {"drafter": DrafterSpec(aux_layers=[1, 2, 9])},
            r"aux_layers \[1, 2, 9\]: the target has boundaries 0 to 7",
        ),
        ({"drafter": DrafterSpec(hidden_size=16)}, "hidden_size 16 is not the target's 32"),
        (
            {"drafter": DrafterSpec(attention_window=16), "ttt_steps": 17},
            "attention_window 16 is less than ttt_steps",
        ),
        ({"start": FromDrafter("nowhere")}, "nowhere: no such drafter directory"),
    ],
)
def test_what_cannot_be_is_refused_at_once(
    target_directory: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DrafterModule(**({"target": str(target_directory)} | given))


@pytest.mark.parametrize(
    ("run", "rows", "message"),
    [
        (
            {},
            None,
            r"needs one of specdec's data modules.*trainer\.fit\(module, datamodule=ChatData\(train=FILE\)\)",
        ),
        ({}, DataLoader([0]), r"datamodule=TokenizedData\(YOURS\)"),  # type: ignore[arg-type]
        (
            {"max_steps": -1, "max_epochs": -1},
            {},
            "needs the run's length: set trainer.max_steps or",
        ),
        ({"max_steps": -1, "max_time": "00:00:01:00"}, {}, "needs the run's length"),
        ({}, {"seq_len": 512}, "data.seq_len 512 exceeds the target's 256 positions"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_anything_is_loaded(
    run: dict[str, Any], rows: Any, message: str, target_directory: Path, text_file: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    module = DrafterModule(TargetSource(str(target_directory)), SMALL)
    monkeypatch.setattr(TargetSource, "load", lambda *args: pytest.fail("it was loaded"))
    given = (
        {"datamodule": data(text_file, **rows)}
        if isinstance(rows, dict)
        else {"train_dataloaders": rows}
    )
    with pytest.raises(ValueError, match=message) as error:
        trainer(tmp_path, logger=False, **run).fit(module, **({} if rows is None else given))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="there is no drafter yet"):
        module.save_drafter(tmp_path / "drafter")


def test_presets_by_name() -> None:
    eagle1 = DrafterSpec(
        LastLayer(),
        Narrow(bias=False),
        Norms(embed=False, hidden=False, output=False),
        PreNorm(),
        "target",
        "all",
    )
    assert (
        DrafterSpec.preset("eagle1") == eagle1 and DrafterSpec.preset("eagle3_1") == DrafterSpec()
    )
    names = [path.stem for path in (ROOT / "conf/drafter").glob("*.yaml")]
    assert len(names) > 10 and all(
        isinstance(DrafterSpec.preset(name), DrafterSpec) for name in names
    )


@pytest.fixture
def folder(target_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a chat target, chats and questions."""
    tokenizer = AutoTokenizer.from_pretrained(target_directory)
    tokenizer.chat_template = TEMPLATE
    target = tmp_path / "target"
    target.mkdir()
    for file in target_directory.iterdir():
        (target / file.name).symlink_to(file)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (target / file).unlink()
    tokenizer.save_pretrained(target)
    functions = TEXT.split("\n\n\n")[:40]
    chats = [
        [{"role": "user", "content": "def"}, {"role": "assistant", "content": one}]
        for one in functions
    ]
    (tmp_path / "answers.jsonl").write_text(
        "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
    )
    (tmp_path / "questions.jsonl").write_text(json.dumps({"prompt": "def add_3"}) + "\n")
    (tmp_path / "texts").mkdir()
    for number, one in enumerate(functions):
        (tmp_path / "texts" / f"{number}.txt").write_text(one)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers that draw nothing, stay on the CPU and log their few steps."""
    original = pl.Trainer.__init__
    monkeypatch.setattr(
        pl.Trainer,
        "__init__",
        lambda self, **given: original(self, **(QUIET | {"log_every_n_steps": 1} | given)),
    )


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.usefixtures("calm")
# fewer than are logged, in small
@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_the_page_does_what_it_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {
        "Qwen/Qwen3-0.6B": str(folder / "target"),
        "max_steps=2000": "max_steps=2",
        "max_new_tokens=64": "max_new_tokens=8",
        "max_new_tokens=256": "max_new_tokens=8",
        "runs/mine/drafter": "drafters/mine",
        '.jsonl")': '.jsonl", seq_len=128)',
        "seq_len=2048": "seq_len=128",
    }
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    names: dict[str, Any] = {  # what the page says is loaded already
        "model": LlamaForCausalLM.from_pretrained(folder / "target"),
        "tokenizer": tokenizer,
        "inputs": tokenizer("def add", return_tensors="pt"),
    }
    *code, own = blocks()
    for block in code:
        for shown, used in small.items():
            block = block.replace(shown, used)
        exec(compile(block, str(PAGE), "exec"), names)
    out = capsys.readouterr().out
    assert (
        "Generation(8 tokens in " in out
        and len(re.findall(r"acceptance length \d\.\d\d\n", out)) == 3
    )
    assert (folder / "drafters/mine/config.json").exists() and (
        folder / "measured/metrics.json"
    ).exists()
    assert (
        own in EXAMPLE.read_text().replace("\n# the guide ends", "")
        and 30 < len(own.splitlines()) < 65
    )


@pytest.mark.usefixtures("calm")
def test_a_module_of_ones_own_learns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--target",
        str(folder / "target"),
        "--train",
        "texts/*.txt",
        "--seq_len",
        "64",
        "--tokens",
        "8",
    ]
    losses = []
    for steps in (1, 25):
        module = load_example(EXAMPLE).main(
            [*arguments, "--out", f"own{steps}", "--max_steps", str(steps)]
        )
        losses.append(float(module.trainer.callback_metrics["train/loss"]))
    assert losses[1] < 0.7 * losses[0]
    assert load_drafter("own25").config.target["source"] == str(folder / "target")
    assert "Generation(8 tokens in " in capsys.readouterr().out


@pytest.mark.usefixtures("calm")
def test_a_module_of_ones_own_without_a_tokenizer(text_file: Path, tmp_path: Path) -> None:
    class Bare(pl.LightningModule):
        def training_step(self, batch: Any, batch_idx: int) -> None: ...

        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

        def configure_optimizers(self) -> None: ...

    with pytest.raises(
        ValueError,
        match="Bare has no tokenizer to read the data with: give it a `tokenizer`, or call",
    ):
        trainer(tmp_path, logger=False, limit_val_batches=0).fit(Bare(), datamodule=data(text_file))


def test_the_notebook_comes_with_what_it_showed() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert [cell.execution_count for cell in code(notebook)] == list(
        range(1, len(code(notebook)) + 1)
    )
    assert_shown(notebook)
    assert NOTEBOOK.stat().st_size < 200_000
    text = NOTEBOOK.read_text()
    assert "/work/" not in text and "/root/" not in text and "/home/" not in text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_runs_in_a_fresh_kernel(tmp_path: Path) -> None:
    """To execute it in place, outputs and plots: jupyter execute --inplace docs/notebook.ipynb"""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    small = {
        "max_steps=150": "max_steps=60",
        "seq_len=256": "seq_len=64",
        "max_new_tokens=96": "max_new_tokens=32",
    }
    assert all(shown in "".join(cell.source for cell in code(notebook)) for shown in small)
    for cell in code(notebook):
        for shown, used in small.items():
            cell.source = cell.source.replace(shown, used)
        cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook,
        timeout=800,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()  # raises CellExecutionError where a cell fails
    assert_shown(notebook)


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def assert_shown(notebook: Any) -> None:
    """Numbers, two plots, a text with accepted tokens coloured, and neither a warning nor an error."""
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {
        "stream",
        "display_data",
        "execute_result",
    }
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert all(output.name == "stdout" for output in outputs if output.output_type == "stream"), (
        printed
    )
    assert "8 of 8 texts are the target's own" in printed
    shown = [output.data for output in outputs if output.output_type != "stream"]
    assert sum("image/png" in data for data in shown) == 2
    assert any("background: #bfe8c5" in data.get("text/html", "") for data in shown)
    first, last = (
        float(one) for one in re.findall(r"loss (\S+) at first, (\S+) after", printed)[0]
    )
    assert last < 0.7 * first
