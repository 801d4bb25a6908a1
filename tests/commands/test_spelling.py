"""Misspelt names are refused with the likely one, and nothing that the parser takes is."""

import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.cli import COMMANDS, check_command_line
from specdec.commands.known import KnownPart, index

ROOT = Path(__file__).parents[2]
PARTS = "from specdec.drafter import Fusion\n\n\nclass TokenGate(Fusion):\n    pass\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a user's module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPECDEC_ALLOW_IMPORTS", raising=False)
    (tmp_path / "own_gates.py").write_text(PARTS)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "fit --trainer.max_step 5",
            "unknown option --trainer.max_step; did you mean --trainer.max_steps?",
        ),
        ("fit --max_steps=5", "did you mean --trainer.max_steps?"),
        ("doctor --trainer.max_step 5", "did you mean --trainer.max_steps?"),
        ("evaluate --drafer x", "did you mean --drafter?"),
        (
            "fit --model.drafter.fusion Concatt",
            "model.drafter.fusion: there is no Concatt; did you mean Concat?",
        ),
        ("fit --model.drafter.fusion Blend", "choose from Fusion, LastLayer, Concat"),
        ("fit --model.drafter.norms.aux=concatt", "did you mean concat?"),
        ("fit --data ChatDat", "did you mean ChatData?"),
        ("fit --model.loss SoftCrosEntropy", "did you mean SoftCrossEntropy?"),
        ("fit --trainer.callbacks+=EarlyStoping", "did you mean EarlyStopping?"),
        (
            "fit --model.loss.betta 1",
            "unknown option --model.loss.betta; did you mean --model.loss.beta?",
        ),
        ("fit --data ChatData --data.init_args.trian x", "did you mean --data.train?"),
        ("sweep x --engine Locl", "did you mean Local?"),
        ("fit --config nowhere.yaml", "nowhere.yaml: no such file"),
    ],
)
def test_a_command_line_with_the_likely_name(line: str, said: str) -> None:
    name, *args = line.split()
    with pytest.raises(ValueError, match=re.escape(said)):
        check_command_line(name, args)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            "trainer: {max_step: 5}",
            "unknown key trainer.max_step in c.yaml; did you mean trainer.max_steps?",
        ),
        ("model: {ttt_step: 3}", "did you mean model.ttt_steps?"),
        ("max_steps: 3", "did you mean trainer.max_steps?"),
        (
            "model: {drafter: {fusion: Concatt}}",
            "model.drafter.fusion in c.yaml: there is no Concatt; did you mean",
        ),
        ("model: {drafter: part.yaml}", "unknown key model.drafter.fusio in"),
        (
            "model: {loss: {class_path: JensenShannon, init_args: {betta: 2}}}",
            "model.loss in c.yaml: JensenShannon has no argument betta; did you mean beta?",
        ),
        (
            "trainer: {callbacks: [Timer, {class_path: EarlyStopping, init_args: {monitr: a}}]}",
            "EarlyStopping has no argument monitr; did you mean monitor?",
        ),
    ],
)
def test_a_config_file_with_its_name(config: str, said: str, folder: Path) -> None:
    (folder / "c.yaml").write_text(config)
    (folder / "part.yaml").write_text("fusio: Concat")
    with pytest.raises(ValueError, match=re.escape(said)):
        check_command_line("fit", ["--config", "c.yaml"])


@pytest.mark.parametrize(
    "line",
    [
        "--model.loss JensenShannon --model.loss.beta 0.3",
        "--model.loss specdec.training.divergences.JensenShannon --model.loss.init_args.beta 0.3",
        "--model.loss specdec.training.step.SoftCrossEntropy",  # imported there
        "--model.optimizer torch.optim.adamw.AdamW --model.optimizer.lr 1",
        "--trainer.strategy some_strategy --trainer.accelerator cpu --trainer.profiler simple",
        "--trainer.logger false --trainer.logger+=CSVLogger --trainer.logger.save_dir x",
        "--trainer.callbacks=null --model.drafter.norms.embed true --model.drafter.norms.aux each",
        "--allow_imports own_gates --model.drafter.fusion own_gates.TokenGate --model.drafter.fusion.width 3",
        "--allow_imports own_gates --model.drafter.fusion TokenGate",
        "--allow_imports own_gates --model.drafter.fusion own_gates.TokenGat",
        "--allow_imports gates_made --model.drafter.fusion gates_made.TokenGate",
        "--allow_imports gates_of --model.drafter.fusion gates_of.TokenGate",
        "--config sound.yaml --data.help ChatData",
        "--config broken.yaml",  # which the parser explains
    ],
)
def test_what_the_parser_judges_is_left_to_it(line: str, folder: Path) -> None:
    (folder / "gates_made.py").write_text("globals()['TokenGate'] = type('TokenGate', (), {})\n")
    (folder / "gates_of.py").write_text("from own_gates import *\n")
    (folder / "sound.yaml").write_text(
        "seed_everything: 1\ntrainer.max_steps: 5\nmodel: {loss: {class_path: SoftCrossEntropy, dict_kwargs: {x: 1}}, "
        "ttt_steps: ${trainer.max_steps}, drafter: {fusion: null}}\ntrainer: {callbacks+: {class_path: Timer}}\n"
    )
    (folder / "broken.yaml").write_text("trainer: {max_steps: [}")
    check_command_line("fit", line.split())


def test_no_config_or_command_of_the_documents_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for file in sorted((ROOT / "conf").glob("quickstart.yaml")) + sorted(
        (ROOT / "conf/train").glob("*.yaml")
    ):
        check_command_line("fit", ["--config", str(file.relative_to(ROOT))])
    for preset in sorted((ROOT / "conf/drafter").glob("*.yaml")):
        check_command_line("fit", ["--model.drafter", str(preset.relative_to(ROOT))])
    checked, refused = 0, list[str]()
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        text = "".join(blocks).replace("\\\n", " ")
        for line in re.findall(r"^specdec ([a-z]+ .*?)(?: #.*)?$", text, re.MULTILINE):
            name, *args = shlex.split(line)
            if name in COMMANDS and "..." not in args:
                try:
                    check_command_line(name, args)
                except ValueError as error:
                    refused.append(f"{page.name}: {line}: {error}")
                checked += 1
    # a reader's own files and modules are not here
    assert checked > 30 and not [
        one
        for one in refused
        if not re.search("no such (file|directory|drafter)|was not imported", one)
    ]


def test_another_version_of_a_library_has_its_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(index()["versions"], "lightning", "1.0")
    check_command_line("fit", ["--trainer.max_step", "5", "--trainer.callbacks", "EarlyStoping"])
    with pytest.raises(ValueError, match="Concatt"):
        check_command_line("fit", ["--model.drafter.fusion", "Concatt"])


def test_what_is_known_of_classes() -> None:
    """Of every class that an option of a command names."""
    parts = {name: KnownPart(**about) for name, about in index()["parts"]["fit"].items()}
    assert "Concat" in {path.rpartition(".")[2] for path in parts["model.drafter.fusion"].classes}
    assert (
        parts["model.drafter.norms.aux"].words == ["none", "each", "concat"]
        and parts["trainer.strategy"].free
    )
    assert index()["classes"]["specdec.JensenShannon"] == {"beta": "float"}
    for part in parts.values():
        assert set(part.classes) <= set(index()["classes"])


def test_it_takes_no_heavy_import(folder: Path) -> None:
    """The whole command, of which the checks are some tenths of a second of CPU time."""
    (folder / "c.yaml").write_text("trainer: {max_step: 5}")
    code = (
        "import sys, specdec.cli as cli\nstatus = cli.main(sys.argv[1:])\n"
        "print(status, {'torch', 'lightning', 'transformers'} & set(sys.modules))"
    )
    for args in (
        ["--config", "c.yaml"],
        ["--model.loss", "SoftCrosEntropy"],
    ):
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        done = subprocess.run(
            [sys.executable, "-c", code, "fit", *args],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stdout == "2 set()\n" and "did you mean" in done.stderr, done.stderr
        assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 2
