"""``specdec push``: a drafter or an export, with its card, in a repository of the Hugging Face Hub."""

import hashlib
import logging
import sys
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import ModelInfo, RepoSibling
from huggingface_hub.utils import validate_repo_id

from specdec import __version__
from specdec.drafter import load_drafter
from specdec.export import card, checkpoint
from specdec.export.card_text import hub_id
from specdec.utils.hub import reached
from specdec.utils.reading import DOCUMENTS, SUMS, read_json

log = logging.getLogger(__name__)

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def push(
    *,
    drafter: Path,
    repo: str,
    evaluation: list[Path] = [],  # noqa: B006
    license: str | None = None,
    base_model: str | None = None,
    private: bool = False,
    revision: str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
) -> None:
    """A drafter or an export of one, with a model card, to the Hugging Face Hub; prints the repository's URL.

    Weights, configs, checksums and the card go there in one commit; licences and notices beside them too, and nothing
    else. The token is that of HF_TOKEN or of hf auth login.

    Example: specdec push --drafter runs/a/drafter --repo me/qwen3-4b-eagle3.1 --evaluation runs/a-evaluated

    Args:
        drafter: a drafter's directory, or one that specdec export wrote
        repo: USER/NAME or ORGANISATION/NAME, made if it is not there yet
        evaluation: directories of specdec evaluate that the card quotes; by default those in the run's folder
        license: of the drafter, by the Hub's short name such as apache-2.0
        base_model: the target's name on the Hub, if it was loaded from a directory
        private: make a repository that only its owners see
        revision: a branch, made if it is not there yet; by default main
        overwrite: replace files of these names that are other ones there
        dry_run: say what would be uploaded and print the card; asks the Hub nothing

    Raises:
        ValueError: the directory is no drafter or damaged, there is no token, or the Hub refuses or cannot be reached.
    """
    check_repository(repo, needs_token=not dry_run)
    files, record = _opened(drafter)
    kept = drafter / card.README
    own = kept.read_text(encoding="utf-8") if kept.is_file() else ""
    if own.strip() and card.MARK not in own:
        if evaluation or license or base_model:
            raise ValueError(
                f"{kept} is your own card, which is kept: write that into it, or remove it for a new one"
            )
        text = own
    else:
        record["evaluations"] = (
            card.evaluations(drafter, record, evaluation) or record["evaluations"]
        )
        text = str(card.model_card(record, repo, license, base_model))
        _say_what_is_missing(record, license, base_model)
    operations = [CommitOperationAdd(file.name, file) for file in files]
    operations.append(CommitOperationAdd(card.README, text.encode()))
    sizes = {one.path_in_repo: one.upload_info.size for one in operations}
    listed = ", ".join(f"{name} ({size / 1e6:,.2f} MB)" for name, size in sizes.items())
    log.info("%s to %s: %s", "this would be uploaded" if dry_run else "uploading", repo, listed)
    if dry_run:
        sys.stdout.write(text)
        return
    sys.stdout.write(
        f"{_commit(operations, repo, private, revision, overwrite, record['drafter_sha256'])}\n"
    )


def check_repository(repo: str, needs_token: bool = True) -> None:
    """ValueError if that cannot be a repository's name on the Hub, or there is no token to write to it."""
    validate_repo_id(repo)
    if "/" not in repo:
        raise ValueError(f"{repo}: name the repository with its owner, as USER/{repo}")
    if needs_token and not get_token():
        raise ValueError(
            "there is no token for the Hugging Face Hub: log in with hf auth login, or set HF_TOKEN to one that may "
            "write"
        )


def _opened(directory: Path) -> tuple[list[Path], dict[str, Any]]:
    """The files that go, and the card's record, of a directory whose files are whole."""
    if not directory.is_dir():
        raise ValueError(f"{directory}: no such directory")
    if not (directory / checkpoint.CONFIG).exists() and (directory / "drafter").is_dir():
        raise ValueError(f"{directory} is a run: push its drafter, {directory / 'drafter'}")
    names = [checkpoint.CONFIG, checkpoint.WEIGHTS, checkpoint.OURS, SUMS]
    if (directory / checkpoint.OURS).is_file():
        record = checkpoint.read_checkpoint(directory).ours or {}
        if record.get("format") != checkpoint.FORMAT or "evaluations" not in record:
            raise ValueError(
                f"{directory / checkpoint.OURS}: not the record of an export of this version: export it again"
            )
    else:
        config = load_drafter(directory, dtype=None).config
        about = {name: config.target.get(name) for name in ("source", "revision", "fingerprint")}
        record = {
            "drafter": config.to_json(), "drafter_sha256": read_json(directory / checkpoint.CONFIG)["weights_sha256"],
            "target": {**about, "trust_remote_code": False}, "training": card.trained(directory), "evaluations": [],
        }  # fmt: skip
    documents = (
        file.name
        for file in directory.iterdir()
        if file.is_file() and file.name.startswith(DOCUMENTS)
    )
    names += sorted(name for name in documents if name != card.README)
    return [directory / name for name in names if (directory / name).is_file()], record


def _say_what_is_missing(
    record: dict[str, Any], license: str | None, base_model: str | None
) -> None:
    """Tell what the card leaves out, and how to give it."""
    if license is None:
        log.warning("the card names no license: --license NAME, as apache-2.0")
    if base_model is None and hub_id(record["target"]["source"]) is None:
        log.warning(
            "the card names no base_model, the target being no model on the Hub: --base_model USER/NAME"
        )
    if not record["evaluations"]:
        log.warning("the card has no figures: --evaluation DIR, of specdec evaluate")


def _commit(
    additions: list[CommitOperationAdd],
    repo: str,
    private: bool,
    revision: str | None,
    overwrite: bool,
    sha: str,
) -> str:
    """Upload in one commit, of which nobody sees a part, onto the state that was looked at; the URL."""
    api = HfApi(library_name="specdec", library_version=__version__)
    with reached(repo):
        there = _there(api, repo, private, revision)
        if private and there.private is False:
            raise ValueError(
                f"{repo} is there already and public: make it private on the Hub, or leave out --private"
            )
        old = {one.rfilename: one for one in there.siblings or ()}
        names = {one.path_in_repo for one in additions}
        differing = [
            one.path_in_repo for one in additions if not _same(one, old.get(one.path_in_repo))
        ]
        differing = [name for name in differing if name in old]
        differing += [
            name for name in old.keys() - names if name.endswith(WEIGHTS) or name == checkpoint.OURS
        ]
        if differing and not overwrite:
            raise ValueError(
                f"{repo} holds other files than these, {', '.join(sorted(differing))}: nothing was uploaded; choose "
                "another repository, or replace them with --overwrite true (the old ones stay in its history)"
            )
        # of an export before
        stale = (
            [CommitOperationDelete(checkpoint.OURS)]
            if checkpoint.OURS in old.keys() - names
            else []
        )
        api.create_commit(
            repo, [*additions, *stale], commit_message=f"specdec push: drafter {sha[:12]}", parent_commit=there.sha,
            revision=revision,
        )  # fmt: skip
    return f"{api.endpoint}/{repo}" + ("" if revision is None else f"/tree/{revision}")


def _there(api: HfApi, repo: str, private: bool, revision: str | None) -> ModelInfo:
    """What the repository holds; it and its branch are made if they are not there."""
    try:
        return api.model_info(repo, revision=revision, files_metadata=True)
    except RevisionNotFoundError:
        pass
    except RepositoryNotFoundError:
        # also of a token that the Hub does not know, which then may not make one
        api.create_repo(repo, private=private or None, exist_ok=True)
    if revision is not None:
        api.create_branch(repo, branch=revision, exist_ok=True)
    return api.model_info(repo, revision=revision, files_metadata=True)


def _same(new: CommitOperationAdd, old: RepoSibling | None) -> bool:
    """Whether a file in the repository has the same bytes, by the hash that git or git-lfs knows it by."""
    if old is None:
        return False
    if old.lfs is not None:
        return old.lfs.sha256 == new.upload_info.sha256.hex()
    with new.as_file() as file:
        content = file.read()
    return (
        old.blob_id
        == hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    )
