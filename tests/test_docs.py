"""The page that shows parts of one's own: every example is whole, and does what the page says."""

import importlib
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from specdec.cli import main
from specdec.data import Batch
from specdec.decoding import Chain, PlainDecoder, Request, SpeculativeDecoder, parse_shape
from specdec.decoding.accept import Rule
from specdec.drafter import Drafter, DrafterSpec, Norms, load_drafter
from specdec.export import export_drafter
from specdec.features import OnTheFly
from specdec.target import Target
from specdec.training.losses import LossRows
from specdec.utils import imports
from tests.data.families import in_default_run
from tests.parity.unrolled import worst_gap
from tests.perfect import disturb, markov_target, perfect_drafter
from tests.tiny import presets, tiny_drafter, tiny_target

PAGE = Path(__file__).parents[1] / "docs" / "add_a_variant.md"
SECTIONS = dict(
    re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
)
WAY_OF_DRAFTING = "Way of drafting"
PAGES = SECTIONS | {WAY_OF_DRAFTING: PAGE.with_name("add_a_way_of_drafting.md").read_text()}
FIRST = "Fusion"
DRAFTER = ("Fusion", "Norm", "Entry", "Recurrence", WAY_OF_DRAFTING)
Write = Callable[[str], list[list[str]]]


@pytest.fixture
def written(
    tmp_path: Path,
    target_directory: Path,
    text_file: Path,
    drafter_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Write]:
    """Writes a section's module into the working folder; its commands, each with what makes it small."""
    small = {
        "model": {
            "target": {"source": str(target_directory)},
            "drafter": {"draft_vocab_size": 200},
            "ttt_steps": 2,
        },
        "data": {
            "class_path": "TextData",
            "init_args": {
                "train": str(text_file),
                "val": str(text_file),
                "seq_len": 32,
                "batch_size": 2,
            },
        },
        "trainer": {
            "max_steps": 2,
            "log_every_n_steps": 1,
            "accelerator": "cpu",
            "enable_model_summary": False,
            "limit_val_batches": 0,
        },
    }
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(small))
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "def add_3(a, b):"}) + "\n")
    lines = "".join(f"def add_{n}(a, b): return a + b + {n}\n" for n in range(40))
    (tmp_path / "lines.txt").write_text(lines)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "drafter").symlink_to(drafter_directory)
    evaluate = [
        "--target",
        str(target_directory),
        "--max_new_tokens",
        "8",
        "--compile",
        "off",
        "--out",
        "out",
    ]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "path", [path for path in sys.path if not Path(path, "my_parts.py").exists()]
    )
    monkeypatch.setattr(sys, "argv", ["specdec"])
    monkeypatch.delenv(imports.VARIABLE, raising=False)
    sys.modules.pop("my_parts", None)

    def write(section: str) -> list[list[str]]:
        (code,) = re.findall(r"```python\n(.*?)```", PAGES[section], re.DOTALL)
        (shell,) = re.findall(r"```bash\n(.*?)```", PAGES[section], re.DOTALL)
        Path("my_parts.py").write_text(code)
        words = [shlex.split(line) for line in shell.replace("\\\n", "").splitlines()]
        assert all(line[0] == "specdec" for line in words)
        # the page's own options win over small.yaml
        fits = [
            [*line[1:2], "--config", "small.yaml", *line[2:]] for line in words if line[1] == "fit"
        ]
        return [*fits, *([*line[1:], *evaluate] for line in words if line[1] == "evaluate")]

    yield write
    sys.modules.pop("my_parts", None)


@pytest.fixture
def parts(written: Write, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a section's module."""
    monkeypatch.syspath_prepend(Path.cwd())

    def load(section: str) -> ModuleType:
        written(section)
        importlib.invalidate_caches()
        return importlib.import_module("my_parts")

    return load


def test_every_base_has_an_example() -> None:
    assert list(SECTIONS) == [
        *DRAFTER[:-1],
        "Loss",
        "Noise",
        "Schedule",
        "Features",
        "Data",
        "Draft shape",
    ]
    linked = re.findall(r"\(#([\w-]+)\)", PAGE.read_text())
    assert linked == [section.lower().replace(" ", "-") for section in SECTIONS]


@pytest.mark.parametrize("section", in_default_run(PAGES, FIRST))
def test_what_the_page_says_is_trained_and_decodes(
    section: str, written: Write, target_directory: Path
) -> None:
    ours = []
    for line in written(section):
        assert main(line) == 0
        ours += [word.partition(":")[0] for word in line if word.startswith("my_parts.")]
        if line[0] == "evaluate":
            metrics = json.loads(Path("out/metrics.json").read_text())
            assert (
                metrics["results"][0]["identical_outputs"]
                == metrics["results"][0]["compared_outputs"]
                == 1
            )
            continue
        run = Path(line[line.index("--out") + 1])
        assert ours[-1] in (run / "config.yaml").read_text()
        stored = (run / "drafter" / "config.json").read_text()
        assert (ours[-1] in stored) == (section in DRAFTER)
        with imports.allowing(["my_parts"]):
            drafter = load_drafter(run / "drafter")
        target, prompt = Target.load(target_directory), [5, 6, 7]
        made = SpeculativeDecoder(target, drafter, Chain(3)).generate(prompt, max_new_tokens=8)
        assert made.ids == PlainDecoder(target).generate(prompt, max_new_tokens=8).ids
    assert ours


def test_without_the_flag_nothing_of_it_is_imported(
    written: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = [word for word in written(FIRST)[0] if word not in ("--allow_imports", "my_parts")]
    assert main(bare) == 2
    assert "my_parts.Gated (model.drafter.fusion) was not imported" in capsys.readouterr().err
    assert "my_parts" not in sys.modules


@pytest.mark.parametrize(
    ("section", "spec"),
    [
        ("Fusion", lambda own: DrafterSpec(fusion=own.Gated(), draft_vocab_size=40)),
        (
            "Norm",
            lambda own: DrafterSpec(norms=Norms(own.DynamicTanh(), hidden=own.DynamicTanh(0.8))),
        ),
        (
            "Norm",
            lambda own: DrafterSpec(
                norms=Norms(output=own.DynamicTanh(), query_key=own.DynamicTanh())
            ),
        ),
        ("Entry", lambda own: DrafterSpec(entry=own.Additive(), draft_vocab_size=40)),
        ("Recurrence", lambda own: DrafterSpec(recurrence=own.Mixed(0.3), num_layers=2)),
        (WAY_OF_DRAFTING, lambda own: DrafterSpec(recurrence=own.PairedDrafts(), num_layers=2)),
    ],
    ids=[
        "fusion",
        "norm of the states",
        "norm of heads and output",
        "entry",
        "recurrence",
        "way of drafting",
    ],
)
def test_what_is_trained_is_what_is_decoded(
    section: str, spec: Callable[[Any], DrafterSpec], parts: Callable[[str], ModuleType]
) -> None:
    assert worst_gap(spec(parts(section)), [0, 0, 0, 0, 0, 1, 1, 1]) < 1e-12


def test_a_fault_in_one_half_of_a_way_of_drafting_is_found(
    parts: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding that gives the second draft of a pair the state that the first handed on, as training does not."""
    own = parts(WAY_OF_DRAFTING)
    spec = DrafterSpec(recurrence=own.PairedDrafts(), draft_vocab_size=40)
    monkeypatch.setattr(own.Pairs, "next_feature", lambda self, step, read, handed: handed)
    assert worst_gap(spec, [0, 0, 0, 0, 0, 1, 1, 1]) > 1e-3


def test_a_way_of_drafting_in_one_file_decodes_without_loss(
    parts: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    own = parts(WAY_OF_DRAFTING)
    drafter = tiny_drafter(DrafterSpec(recurrence=own.PairedDrafts(), draft_vocab_size=40))
    target = tiny_target()
    requests = [Request([1, 2, 3, last], 24, 0) for last in range(5)]
    plain = {n: made.ids for n, made in PlainDecoder(target).generate_all(requests, ())}
    decoder = SpeculativeDecoder(target, drafter, Chain(5), batch=2)
    assert {n: made.ids for n, made in decoder.generate_all(requests, ())} == plain
    with pytest.raises(ValueError, match="PairedDrafts drafts a chain: use --shape chain"):
        SpeculativeDecoder(target, drafter, parse_shape("tree")).generate([1, 2, 3], 8)
    with pytest.raises(ValueError, match="custom components: no engine knows them"):
        export_drafter(drafter, target, tmp_path / "served")


def test_the_parts_of_a_drafter_are_used(parts: Callable[[str], ModuleType]) -> None:
    drafter: Drafter = tiny_drafter(
        DrafterSpec(fusion=parts("Fusion").Gated(), draft_vocab_size=40)
    )
    assert isinstance(drafter.fusion.gate, nn.Linear) and drafter.config.fusion.default_layers(
        7
    ) == (2, 3, 4)


def test_a_recurrence_refuses_a_design_without_its_norm(parts: Callable[[str], ModuleType]) -> None:
    with pytest.raises(ValueError, match=r"^recurrence Mixed needs norms\.output=true"):
        DrafterSpec(recurrence=parts("Recurrence").Mixed(), norms=Norms("each", output=False))


def test_the_loss_is_the_cross_entropy_of_what_is_drafted_badly(
    parts: Callable[[str], ModuleType],
) -> None:
    draft_RD = torch.tensor([[9.0, 0, 0], [0, 0, 0]], dtype=torch.float64)
    p_RD = torch.tensor([[1.0, 0, 0], [1, 0, 0]], dtype=torch.float64)
    token_R = torch.tensor([0, 0])
    rows = LossRows(draft_RD.clone(), p_RD, p_RD.log(), torch.zeros(2).double(), token_R)
    focal = parts("Loss").Focal
    easy, hard = focal()(rows).tolist()
    assert easy < 1e-9 and hard == pytest.approx((2 / 3) ** 2 * torch.tensor(3.0).log().item())
    torch.testing.assert_close(focal(0)(rows), -draft_RD.log_softmax(-1)[:, 0])
    focal().loss_and_grad_(rows, torch.ones(2).double())
    assert rows.draft_RD[1, 0] < 0 < rows.draft_RD[1, 1]  # towards the target's token


def test_the_noise_is_a_share_of_each_state(parts: Callable[[str], ModuleType]) -> None:
    aux_BTNH = torch.stack([torch.full((1, 3, 4000), size) for size in (1.0, 100.0)], dim=2)
    documents_BT = torch.zeros(1, 3, dtype=torch.int64)
    noise = parts("Noise").RelativeNoise(0.1)
    made = [
        noise(aux_BTNH, documents_BT, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    ]
    assert made[0].equal(made[1]) and not made[0].equal(made[2])
    spread_BTN = (made[0] - aux_BTNH).std(-1)
    torch.testing.assert_close(
        spread_BTN, torch.tensor([0.1, 10.0]).expand(1, 3, 2), rtol=0.05, atol=0
    )


def test_the_schedule_is_a_trapezium(parts: Callable[[str], ModuleType]) -> None:
    schedule = parts("Schedule").WarmupStableDecay(warmup=0.1, decay=0.5)
    factors = [schedule.factor(step, 100) for step in range(100)]
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert factors[10:50] == [1] * 40 and factors[50:] == pytest.approx(
        [(100 - step) / 50 for step in range(50, 100)]
    )
    assert parts("Schedule").WarmupStableDecay(0, 0).factor(0, 3) == 1


def test_the_features_are_rounded_to_eight_bits(parts: Callable[[str], ModuleType]) -> None:
    target, ids_BT = tiny_target(), torch.arange(8)[None]
    batch = Batch(ids_BT, torch.ones(1, 8, dtype=torch.bool), torch.zeros_like(ids_BT))
    exact, rounded = (
        source(target, batch, [2, 4], False) for source in (OnTheFly(), parts("Features").Float8())
    )
    off = (rounded.aux_BTNH - exact.aux_BTNH).abs() / exact.aux_BTNH.abs().amax(-1, keepdim=True)
    assert 0 < off.max() < 2**-4 and rounded.final_BTH.equal(exact.final_BTH)


def test_the_runners_up_are_accepted(parts: Callable[[str], ModuleType]) -> None:
    parts("Draft shape")
    with imports.allowing(["my_parts"]):
        shape = parse_shape("my_parts.RunnersUp:depth=4,spare=3")
    assert (shape.nodes_drafted, shape.name) == (7, "chain of 4 and 3 runners-up")
    target, prompt = markov_target("llama", 0.45), [3, 4, 5]
    drafter = disturb(perfect_drafter(target, presets()["eagle3_1"], sharpness=1.0), 0.4)
    made = [
        SpeculativeDecoder(target, drafter, one).generate(prompt, 40) for one in (Chain(4), shape)
    ]
    assert made[0].ids == made[1].ids == PlainDecoder(target).generate(prompt, 40).ids
    assert len(made[1].accepted) < len(made[0].accepted)
    with pytest.raises(ValueError, match="keeps the drafts it likes best"):
        shape.check_rule(type("Drawn", (Rule,), {"sampled": True})())
    with pytest.raises(ValueError, match="spare must be 1 to the depth 4, not 5"):
        parse_shape("my_parts.RunnersUp:depth=4,spare=5")


@pytest.mark.parametrize(
    "text", ["my_parts.RunnersUp", "os.path", "specdec.decoding.DraftTree", "my_parts.torch"]
)
def test_no_shape_of_a_module_that_nobody_vouched_for(text: str, written: Write) -> None:
    written("Draft shape")
    with pytest.raises(
        ValueError, match=r"your own DraftShape, as my_parts\.Mine:depth=3, with --allow_imports"
    ):
        parse_shape(text)
    assert "my_parts" not in sys.modules


def test_the_table_of_planted_faults_is_that_of_its_results() -> None:
    results = (
        (Path(__file__).parents[1] / "benchmarks/results/planted_xeon-2core_202611.md")
        .read_text()
        .splitlines()
    )
    table = "\n".join(line for line in results if line.startswith("|"))
    assert (
        table.count("\n") > 20
        and table in (Path(__file__).parents[1] / "docs/diagnose.md").read_text()
    )
