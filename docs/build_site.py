"""Build the site into ``build/site``; a warning is an error: ``pip install -e ".[docs]" && python docs/build_site.py``.

Pages keep their places in the repository, so that a link is the same here, in a checkout and on the site. What a page
links to is on the site too: a page, a source file or a config as a page of its own, anything else as it is. The
reference is made here, a page for each package from its docstrings and one of every command's help; notebooks become
pages with their outputs. The navigation and the theme are ``mkdocs.yml``'s.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import griffe
import nbformat
from nbconvert import MarkdownExporter
from nbconvert.filters import ansi2html

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build" / "pages"  # docs_dir of mkdocs.yml
FIRST = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CODE_OF_CONDUCT.md",
    "docs/**/*.md",
    "docs/*.ipynb",
    "docs/site.css",
)
TEXT = {
    ".py": "python",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".toml": "toml",
    ".cff": "yaml",
    ".jsonl": "json",
    "": "text",
}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))")
FENCE = re.compile(r"^(?P<fence>```+|~~~+).*?^(?P=fence)\s*$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):`~?(?P<name>[\w.]+)`")
OPTIONS = "{heading_level: 2, show_root_heading: true, show_root_full_path: true}"


class Roles(griffe.Extension):
    """Turns the roles of docstrings, as in :class:`specdec.drafter.Drafter`, into links, or into code where the
    reference does not have the name."""

    def on_package(
        self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: object
    ) -> None:
        """Once all of a package is loaded."""
        for one in _objects(pkg):
            if one.docstring:
                one.docstring.value = ROLE.sub(
                    lambda match, one=one: _linked(match["name"], one, pkg), one.docstring.value
                )


def _objects(one: griffe.Object) -> Iterator[griffe.Object]:
    yield one
    for member in one.members.values():
        if isinstance(member, griffe.Object):
            yield from _objects(member)


def _linked(name: str, where: griffe.Object, package: griffe.Module) -> str:
    """Markdown for a name that a docstring refers to, as the module around it, or Python itself, knows it."""
    first, _, rest = name.partition(".")
    try:
        start = (
            name if first == package.name else ".".join(filter(None, [where.resolve(first), rest]))
        )
        found = package.modules_collection[start]
        path = (found.final_target if found.is_alias else found).path
    except (griffe.NameResolutionError, griffe.AliasResolutionError, KeyError):
        return f"`{name}`"
    parts = path.split(".")
    shown = found.has_docstrings and parts[0] == package.name and parts[1] in packages()
    return (
        f"[`{name}`][{path}]"
        if shown and not any(part.startswith("_") for part in parts)
        else f"`{name}`"
    )


def copy(source: Path) -> list[Path]:
    """Put one file on the site, or a folder that has no README as a list of what is in it; the files it links to.

    Raises:
        ValueError: a link to a file that is not there, or outside the repository.
    """
    place = PAGES / source.relative_to(ROOT)
    place.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        place.mkdir(exist_ok=True)
        listed = "\n".join(
            f"- [{one.name}]({one.name})"
            for one in sorted(source.iterdir())
            if one.name[0] not in "._"
        )
        return _write(
            place / "README.md", f"# {source.relative_to(ROOT)}\n\n{listed}\n", source / "README.md"
        )
    if source.suffix == ".ipynb":
        return _write(place.with_suffix(".md"), _notebook(source, place.parent), source)
    if source.suffix == ".md":
        return _write(place, source.read_text(encoding="utf-8"), source)
    if (language := TEXT.get(source.suffix)) is not None:
        name, text = source.relative_to(ROOT), source.read_text(encoding="utf-8")
        code = f'````{language} linenums="1"\n{text}\n````\n'
        page = f"---\nsearch: {{exclude: true}}\n---\n# {source.name}\n\n`{name}`\n\n{code}"
        place.with_name(f"{place.name}.md").write_text(page, encoding="utf-8")
    else:
        shutil.copy(source, place)
    return []


def _notebook(source: Path, folder: Path) -> str:
    """A notebook as Markdown, what it printed in colours as HTML; its pictures go into the folder."""
    book = nbformat.read(source, as_version=4)
    for output in (output for cell in book.cells for output in cell.get("outputs", [])):
        if output.output_type == "stream" and "\x1b[" in output.text:
            html = f'<pre class="ansi">{ansi2html(output.text)}</pre>'
            output.update(nbformat.v4.new_output("display_data", {"text/html": html}))
    text, resources = MarkdownExporter().from_notebook_node(book)
    for name, data in resources["outputs"].items():
        folder.joinpath(f"{source.stem}_{name}").write_bytes(data)
        text = text.replace(f"({name})", f"({source.stem}_{name})")
    return text


def _write(place: Path, text: str, source: Path) -> list[Path]:
    """A page whose links to what becomes a page name that; the files behind them."""
    found: list[Path] = []

    def link(match: re.Match[str]) -> str:
        path, anchor = match["path"], match["anchor"] or ""
        if place.parent.joinpath(path).is_file() and not source.parent.joinpath(path).exists():
            return match[0]  # a notebook's picture
        to = (source.parent / path).resolve()
        to = to / "README.md" if (to / "README.md").exists() else to
        if not to.exists() or ROOT not in to.parents:
            raise ValueError(
                f"{source.relative_to(ROOT)}: the link to {path} leads to no file of the repository"
            )
        found.append(to)
        if to.suffix == ".ipynb":
            return path.removesuffix(".ipynb") + ".md" + anchor
        if to.is_dir() or to.name not in path:
            return f"{path.rstrip('/')}/README.md{anchor}"
        return f"{path}{'.md' * (to.suffix in TEXT)}{anchor}"

    parts, end = [], 0
    for code in FENCE.finditer(text):
        parts += [LINK.sub(link, text[end : code.start()]), code[0]]
        end = code.end()
    place.write_text("".join([*parts, LINK.sub(link, text[end:])]), encoding="utf-8")
    return found


def reference() -> None:
    """A page for every package, one for the names that ``import specdec`` gives, and one for the commands."""
    folder = PAGES / "reference"
    folder.mkdir(parents=True)
    specdec = griffe.load("specdec", search_paths=[ROOT])
    names = []
    for one in sorted(specdec.members.values(), key=lambda one: one.name.lower()):
        if one.is_alias and one.target_path.startswith("specdec."):
            home = one.final_target
            says = (home.docstring.value if home.docstring else "").split("\n\n")[0]
            says = ROLE.sub(lambda match: f"`{match['name']}`", says)
            names.append(f"- [`{one.name}`][{home.path}]: {' '.join(says.split())}")
    page = "\n".join([f"# Python names\n\n{specdec.docstring.value}\n", *names, ""])
    folder.joinpath("index.md").write_text(page, encoding="utf-8")
    for package in packages():
        modules = sorted(
            path.relative_to(ROOT) for path in (ROOT / "specdec" / package).glob("*.py")
        )
        dotted = [".".join(path.with_suffix("").parts) for path in modules if path.stem[:1] != "_"]
        parts = [f"# specdec.{package}", f"::: specdec.{package}\n    options: {{members: false}}"]
        parts += [f"::: {name}\n    options: {OPTIONS}" for name in dotted]
        folder.joinpath(f"{package}.md").write_text("\n\n".join(parts) + "\n")
    from command_pages import (
        commands_page,
    )  # next to this file, which the builder loads from elsewhere

    folder.joinpath("command_line.md").write_text(commands_page(), encoding="utf-8")


def packages() -> list[str]:
    """The packages that the reference has a page for."""
    return sorted(path.parent.name for path in (ROOT / "specdec").glob("*/__init__.py"))


def main() -> int:
    """Gather the pages and build; the builder's exit status."""
    shutil.rmtree(PAGES.parent, ignore_errors=True)
    waiting = sorted({path for pattern in FIRST for path in ROOT.glob(pattern)})
    done: set[Path] = set()
    while waiting:
        if (source := waiting.pop()) not in done:
            done.add(source)
            waiting += copy(source)
    reference()
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    built = subprocess.run(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    sys.stdout.write(built.stdout)
    # only logged
    return built.returncode or bool(
        re.search(r"^(griffe|mkdocstrings): ", built.stdout, re.MULTILINE)
    )


if __name__ == "__main__":
    sys.exit(main())
