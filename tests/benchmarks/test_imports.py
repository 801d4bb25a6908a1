"""Published layouts are read as what they mean, and the comparison sees what is planted in them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.imports import __main__ as imports
from benchmarks.imports.__main__ import FAULTS, Files, compare
from benchmarks.imports.collection import Layout, layouts

LAYOUTS = {layout.name: layout for layout in layouts()}
SOME = (
    "yuhuili/EAGLE-Vicuna-7B-v1.3", "yuhuili/EAGLE-Qwen2-7B-Instruct", "yuhuili/EAGLE3-Vicuna1.3-13B",
    "SpecForge qwen2-5-vl-7b-eagle3", "SpecForge qwen2.5-0.5b-dflash", "RedHatAI/gpt-oss-20b-speculator.eagle3",
    "nvidia/gpt-oss-120b-Eagle3-throughput", "a tied embedding over the whole vocabulary, without a head",
)  # fmt: skip


def shallow(layout: Layout) -> Layout:
    """Of a target of as few layers as its boundaries allow, which is quicker to make."""
    return layout if layout.config.get("dflash_config") else layout._replace(target_layers=12)


@pytest.mark.parametrize("name", SOME)
def test_a_layout_is_read_as_what_it_means(name: str) -> None:
    result = compare(shallow(LAYOUTS[name]))
    assert result is not None and result.verdict == "equal", result


@pytest.mark.parametrize(("fault", "plant"), FAULTS.items(), ids=list(FAULTS))
def test_a_planted_fault_is_found(
    fault: str, plant: Callable[[Layout, Files], Files | None]
) -> None:
    layout = LAYOUTS["SpecForge gpt-oss-20B-eagle3"]
    result = compare(layout, plant)
    assert result is not None and result.verdict in ("DIFFERS", "REFUSED"), fault


def test_what_it_is_to_find_is_not_found_where_nothing_is_planted() -> None:
    result = compare(LAYOUTS["SpecForge gpt-oss-20B-eagle3"], lambda layout, files: files)
    assert result is not None and result.verdict == "equal" and result.apart < 1e-6


def test_the_collection_is_told_honestly() -> None:
    """Every layout says where its keys come from, and no name stands twice."""
    assert len(LAYOUTS) == len(layouts()) > 40
    assert all(layout.source and layout.public == (not _made_up(layout)) for layout in layouts())


def _made_up(layout: Layout) -> bool:
    return layout.source.startswith(("reconstructed", "made up"))


@pytest.mark.slow
def test_the_whole_table(tmp_path: Path) -> None:
    out = tmp_path / "imports.md"
    assert imports.main(["--out", str(out)]) == 0
    raw = json.loads(out.with_suffix(".json").read_text())
    verdicts = [row["verdict"] for row in raw["layouts"]]
    assert (
        len(verdicts) > 90
        and set(verdicts) == {"equal", "refused"}
        and verdicts.count("equal") > 80
    )
