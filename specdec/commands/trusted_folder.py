"""What the user's own settings allow config files of the working folder: ``~/.config/specdec/trust.yaml``.

The file names folders, and what a command may do there, as ``--allow_imports``, ``--allow_env`` and ``--allow_keys``
would allow it:

    /home/me/project: {keys: [logger], imports: [my_parts]}

A command gets this only in that folder and with no config file from anywhere else. Nothing but that file grants it, so
that a folder from a stranger cannot grant it to itself.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.utils.config import SHIPPED, packaged_path, preset_file
from specdec.utils.trust import Allowed, load_yaml, read_yaml_text

NAME = "trust.yaml"
DATA = re.compile(r"data(\..*)?|prompts|bench|suite")
"""Options whose values are files of rows, unless these end in a config's suffix."""


def settings_file() -> Path:
    """``$XDG_CONFIG_HOME/specdec/trust.yaml``, else ``~/.config/specdec/trust.yaml``."""
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home).expanduser() / "specdec" / NAME


def folder_permissions(args: Sequence[str]) -> Allowed:
    """Return what the user's settings allow a command in the working folder.

    That is nothing if the command names no config file, or one that really lies in another folder, or below this one,
    where downloads often lie. Configs that come with specdec do not count.

    Raises:
        ValueError: the settings are damaged, or say what they cannot.
    """
    settings = settings_file()
    folders = {path.parent for path in _config_files(args) if not path.is_relative_to(SHIPPED)}
    working_folder = Path.cwd().resolve()
    if folders != {working_folder} or not settings.is_file():
        return Allowed()
    entries = load_yaml(read_yaml_text(settings), settings)
    for folder, entry in _checked(entries, settings).items():
        if Path(folder).expanduser().resolve() == working_folder:
            return Allowed(**{name: tuple(values) for name, values in entry.items()})
    return Allowed()


def _config_files(args: Sequence[str]) -> Iterator[Path]:
    """Yield the files, by their real places, that a command line names and that may hold options."""
    option = ""
    for word in args:
        name, equals, value = word.partition("=")
        is_option = word.startswith("-")
        option = name.lstrip("-") if is_option else option
        value = value if is_option and equals else word
        path = Path(packaged_path(str(preset_file(option, value))))
        holds_rows = DATA.fullmatch(option) and path.suffix not in (".yaml", ".yml")
        if path.is_file() and not holds_rows:
            yield path.resolve()


def _checked(entries: Any, settings: Path) -> Mapping[str, Mapping[str, list[str]]]:
    """Return the settings, which map folders to lists of names; raise ValueError if they do not."""
    form = f"{settings}: write FOLDER: {{keys: [logger], imports: [my_parts]}}, with a folder's whole path"
    if entries is None:
        return {}
    if not isinstance(entries, Mapping):
        raise ValueError(form)
    for folder, entry in entries.items():
        if not isinstance(folder, str) or not Path(folder).expanduser().is_absolute():
            raise ValueError(f"{form}, not {folder!r:.60}")
        if not isinstance(entry, Mapping) or not set(entry) <= set(Allowed._fields):
            raise ValueError(f"{form}, not {entry!r:.60}")
        for names in entry.values():
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise ValueError(f"{form}, not {names!r:.60}")
    return entries
