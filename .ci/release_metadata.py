"""What a package index shows of a release: the project's addresses, and a README whose links and picture are absolute.

The repository does not know where it is published. Whoever builds a release says so:
``SPECDEC_REPOSITORY=https://github.com/OWNER/specdec python -m build``. Without that variable the README is as it
stands, and no address is named.
"""

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "SPECDEC_REPOSITORY"
# [text](path) and ![text](path), with no scheme and no anchor on the same page
RELATIVE_LINK = re.compile(
    r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?!https?://|#|mailto:)(?P<path>[^)\s]+)\)"
)
# what is still relative then: links with a title, of pictures, by reference, in HTML
LEFT_RELATIVE = re.compile(
    r"\]\((?!https://|#|mailto:)[^)]*\)"
    r"|^\[[^\]]+\]:\s*(?!https://)\S+"
    r"|(?:src|href)=\"(?!https://)[^\"]*",
    re.MULTILINE,
)


class ReleaseMetadata(MetadataHookInterface):
    """Fills in ``readme`` and ``urls``, which pyproject.toml declares as dynamic."""

    def update(self, metadata: dict) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = os.environ.get(VARIABLE, "").rstrip("/")
        urls = {}
        if repository:
            tag = f"v{metadata['version']}"
            text = with_absolute_links(text, repository, tag)
            urls = project_urls(repository, tag)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = urls


def project_urls(repository: str, tag: str) -> dict[str, str]:
    """Return the addresses that an index lists beside a release.

    Raises:
        ValueError: the repository is no https address of an owner's repository, or it holds more than that.
    """
    parts = urlsplit(repository)
    names = parts.path.strip("/").split("/")
    more = parts.query or parts.fragment or "@" in parts.netloc or parts.path.endswith(".git")
    if parts.scheme != "https" or not parts.netloc or len(names) < 2 or more:
        raise ValueError(
            f"{VARIABLE} must be the address of the repository's page, as https://github.com/OWNER/NAME, without user, "
            "query or .git"
        )
    pages = f"{repository}/blob/{tag}"
    return {
        "Repository": repository,
        "Documentation": f"{pages}/docs/index.md",
        "Changelog": f"{pages}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


def with_absolute_links(markdown: str, repository: str, tag: str) -> str:
    """Return a page of the repository's root whose relative links and pictures are those of a tag."""

    def absolute(match: re.Match[str]) -> str:
        view = "raw" if match["picture"] else "blob"
        return f"{match['picture']}[{match['text']}]({repository}/{view}/{tag}/{match['path']})"

    page = RELATIVE_LINK.sub(absolute, markdown)
    if left := LEFT_RELATIVE.search(page):
        raise ValueError(f"README.md: {left[0]} is a link that this hook does not rewrite")
    return page
