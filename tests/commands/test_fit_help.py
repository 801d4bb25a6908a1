"""``specdec fit --help`` is an overview of every option, specdec's before Lightning's."""

import re

import pytest

from specdec.cli import main
from specdec.commands.fit_help import GROUPS, fit_help
from specdec.commands.known import index, known_options


def option_names(text: str) -> list[str]:
    return re.findall(r"(?m)^  --([\w.]+)", text)


def test_the_overview_has_every_option_once_and_is_short() -> None:
    names = option_names(fit_help())
    known = {
        name
        for name, option in known_options(index()["commands"]["fit"]).items()
        if option.type and not name.endswith(".help")
    }
    assert len(names) == len(set(names))
    assert known - set(names) == {"weights_only"}  # of Lightning's, without a use here
    assert len(fit_help().splitlines()) <= 200
    assert max(map(len, fit_help().splitlines())) <= 110


def test_specdecs_options_come_before_lightnings() -> None:
    text = fit_help()
    places = [text.index(f"\n{title}:\n") for title in GROUPS]
    assert places == sorted(places)
    names = option_names(text)
    first_of_lightning = next(
        place for place, name in enumerate(names) if name.startswith("trainer.")
    )
    assert all(name.startswith("trainer.") for name in names[first_of_lightning:])
    assert names.index("model.ttt_steps") < first_of_lightning


def test_the_overview_has_three_examples_and_says_where_the_rest_is() -> None:
    text = fit_help()
    assert text.partition("Examples:\n")[2].partition("\n\n")[0].count("  specdec fit") == 3
    assert "specdec fit --help all prints every option" in text


@pytest.mark.parametrize(("args", "is_whole"), [(["--help"], False), (["--help", "all"], True)])
def test_all_is_printed_when_asked_for(
    args: list[str], is_whole: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *args]) == 0
    text = capsys.readouterr().out
    assert ("known subclasses" in text) is is_whole
    assert (text == index()["commands"]["fit"]) is is_whole


def test_all_of_a_short_help_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--help", "all"]) == 0
    assert capsys.readouterr().out == index()["commands"]["evaluate"]
