"""What is built from a checkout holds all that the package needs, and works where there is no checkout."""

import email
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://forge.example/somebody/specdec"
pytestmark = pytest.mark.slow


def output(*command: str | Path, cwd: Path, **environment: str) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=os.environ | environment, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    return output("git", "ls-files", cwd=ROOT).splitlines()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The checkout's source distribution, and the wheel that is built from it, as for a release."""
    folder = tmp_path_factory.mktemp("dist")
    build = (sys.executable, "-m", "build", "--outdir", folder, ROOT)
    output(*build, cwd=folder, SPECDEC_REPOSITORY=REPOSITORY)
    (source,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    for made in (source, wheel):
        sys.stdout.write(f"{made.name}: {made.stat().st_size / 2**20:.1f} MiB\n")
        assert made.stat().st_size < 32 * 2**20
    return source, wheel


def test_every_file_of_the_package_is_in_the_wheel(
    built: tuple[Path, Path], tracked: list[str]
) -> None:
    with zipfile.ZipFile(built[1]) as opened:
        names = {name for name in opened.namelist() if ".dist-info/" not in name}
        data = {name: opened.read(name) for name in names if not name.endswith(".py")}
    wanted = {name: name for name in tracked if name.startswith("specdec/")}
    wanted |= {f"specdec/{name}": name for name in tracked if name.startswith("conf/")}
    assert names == set(wanted)
    assert {
        "specdec/help.json",
        "specdec/conf/quickstart.yaml",
        "specdec/conf/study/drift.yaml",
    } <= data.keys()
    for name, content in data.items():
        assert content == (ROOT / wanted[name]).read_bytes(), name


def test_an_index_shows_the_addresses_and_a_readme_whose_links_work(
    built: tuple[Path, Path], tracked: list[str]
) -> None:
    with zipfile.ZipFile(built[1]) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(opened.read(name))
    addresses = dict(line.split(", ") for line in metadata.get_all("Project-URL"))
    assert addresses["Repository"] == REPOSITORY
    assert addresses["Issues"] == f"{REPOSITORY}/issues"
    readme = metadata.get_payload()
    links = re.findall(r"\]\(([^)]*)\)", readme)
    assert len(links) > 30
    assert [link for link in links if not link.startswith("https://")] == []
    pages = [link for link in links if link.startswith(REPOSITORY)]
    paths = {re.sub(r".*/(?:blob|raw)/v[\d.]+/|#.*", "", page) for page in pages}
    assert paths <= set(tracked)
    assert "![A completion; tokens proposed" in readme
    assert f"{REPOSITORY}/raw/v" in readme


@pytest.mark.parametrize(
    "address",
    [
        "http://forge.example/a/b",
        "https://forge.example/a",
        "https://forge.example/a/b.git",
        "https://user:token@forge.example/a/b",
        "https://forge.example/a/b?x=1",
    ],
)
def test_an_address_that_is_no_repository_s_page_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="SPECDEC_REPOSITORY must be") as error:
        release_hook().project_urls(address, "v1")
    assert "token" not in str(error.value)


def test_a_link_that_stays_relative_ends_the_build() -> None:
    hook = release_hook()
    page = "[a](docs/a.md) ![b](b.svg) [c](https://x.example) [d](#d)"
    assert hook.with_absolute_links(page, "https://f.example/o/n", "v1") == (
        "[a](https://f.example/o/n/blob/v1/docs/a.md) ![b](https://f.example/o/n/raw/v1/b.svg) "
        "[c](https://x.example) [d](#d)"
    )
    for left in ('[a](b.md "title")', '<img src="a.png">', "[a]: b.md"):
        with pytest.raises(ValueError, match="does not rewrite"):
            hook.with_absolute_links(left, "https://f.example/o/n", "v1")


def release_hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci/release_metadata.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_works_in_an_empty_folder(built: tuple[Path, Path], tmp_path: Path) -> None:
    installed, empty = tmp_path / "installed", tmp_path / "empty"
    empty.mkdir()
    output(
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        installed,
        built[1],
        cwd=empty,
    )

    def python(*words: str) -> str:
        return output(sys.executable, *words, cwd=empty, PYTHONPATH=str(installed))

    assert python("-c", "import specdec; print(specdec.__file__)").startswith(str(installed))
    assert "specdec COMMAND --help" in python("-m", "specdec", "--help")
    quick, first = ("--config", "conf/quickstart.yaml"), ("--config", "conf/train/eagle1.yaml")
    printed = python("-m", "specdec", "fit", *quick, *first, "--print_config")
    assert "LastLayer" in printed and "SmoothL1" in printed
    assert "conf/study/drift.yaml" in python(
        "-m", "specdec", "sweep", "conf/study/drift.yaml", "--print_config"
    )
    assert not list(empty.iterdir())


def test_the_source_distribution_holds_the_sources_and_no_runs(
    built: tuple[Path, Path], tracked: list[str]
) -> None:
    with tarfile.open(built[0]) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert names - {"PKG-INFO"} <= set(tracked)
    assert {name for name in tracked if name.startswith(("specdec/", "conf/", "tests/"))} <= names
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names
