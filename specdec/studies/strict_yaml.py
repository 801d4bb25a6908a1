"""Reads YAML in which names are text: ``on``, ``off`` and ``1`` are what they look like, and no key may stand twice."""

import re
from pathlib import Path
from typing import Any

import yaml

from specdec.utils.trust import load_yaml, read_yaml_text


class _StrictLoader(yaml.SafeLoader):
    """YAML in which only ``true`` and ``false`` are truth values, as in YAML 1.2, and a key may not stand twice."""

    yaml_implicit_resolvers = {  # noqa: RUF012  as its base has it
        first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:bool"]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:  # type: ignore[override]
        """A mapping whose keys are text, whatever they look like."""
        mapping: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value in mapping:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value!r} stands twice", problem_mark=key.start_mark
                )
            mapping[key.value] = self.construct_object(value, deep=True)
        return mapping


_StrictLoader.add_constructor("tag:yaml.org,2002:map", _StrictLoader.construct_mapping)
_StrictLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("true|false"), list("tf"))


def read_strictly(path: Path | str) -> Any:
    """The contents of a YAML file, by the strict loader; ValueError, with the line, if it cannot be read."""
    return load_yaml(read_yaml_text(path), path, lambda text: yaml.load(text, _StrictLoader))  # noqa: S506
