"""STUDY.yaml as text has it: ``on``, ``off`` and ``1`` are names where names are meant, and no key stands twice."""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from specdec.files import explain

TRUTH = "tag:yaml.org,2002:bool"


class _Loader(yaml.SafeLoader):
    """Keys are text, and only ``true`` and ``false`` are truth values, as in YAML 1.2."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:  # type: ignore[override]
        """Refuses a key that stands twice, of which YAML would silently keep the last."""
        found: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a word", problem_mark=key.start_mark)
            if key.value in found:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} stands twice", problem_mark=key.start_mark)
            found[key.value] = self.construct_object(value, deep=True)
        return found


_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.construct_mapping)
_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] not in (TRUTH, "tag:yaml.org,2002:timestamp")]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(TRUTH, re.compile("true|false"), list("tf"))


def read(path: Path | str) -> Any:
    """What a YAML file holds.

    Raises:
        ValueError: it cannot be read, or is not YAML; the message names the line.
    """
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)  # noqa: S506  it is a SafeLoader
    except OSError as error:
        raise explain(error, path) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text") from error
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{path}{line}: not a study: {error.problem}") from error
    except yaml.YAMLError as error:  # a character that YAML does not have
        raise ValueError(f"{path}: not a study: {str(error).splitlines()[0]}") from error


def nearest(word: str, known: Iterable[str]) -> str:
    """``; did you mean ...?``, or which there are."""
    known = list(known)
    by_lower = {name.lower(): name for name in known}
    if close := difflib.get_close_matches(word.lower(), by_lower, 1):
        return f"; did you mean {by_lower[close[0]]}?"
    return f"; there are: {', '.join(known)}" if len(known) <= 12 else ""


def check_keys(given: Any, known: Iterable[str], where: str) -> dict[str, Any]:
    """A mapping with no other keys.

    Raises:
        ValueError: it is none, or has one.
    """
    known = list(known)
    if not isinstance(given, dict):
        raise ValueError(f"{where}: must be a mapping of keys, not {given!r}")
    for key in given:
        if key not in known:
            raise ValueError(f"{where}: no such key: {key}{nearest(key, known)}")
    return given
