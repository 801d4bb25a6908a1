"""``specdec push``: a drafter or an export, with its card, in a repository of the Hugging Face Hub."""

import logging
import sys
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import ModelInfo, RepoSibling
from huggingface_hub.utils import validate_repo_id
from huggingface_hub.utils.sha import git_hash

from specdec import __version__
from specdec.drafter import load_drafter
from specdec.drafter.io import located
from specdec.export import card, checkpoint, gguf
from specdec.export.card import hub_id
from specdec.export.tensors import Raw
from specdec.target.identity import IDENTIFYING
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

    Weights, configs, checksums and the card go there in one commit; licenses and notices too, and nothing else. The
    token is that of HF_TOKEN or of hf auth login.

    Example: specdec push --drafter runs/a/drafter --repo me/qwen3-4b-eagle3.1 --evaluation runs/a-evaluated

    Args:
        drafter: a training run, a drafter, or a directory that specdec export wrote
        repo: USER/NAME or ORGANIZATION/NAME, made if it is not there yet
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
    if not drafter.is_dir():
        raise ValueError(f"{drafter}: no such directory")
    drafter = located(drafter)
    files, record = _files_and_record(drafter)
    text = _own_card(drafter)
    if text is None:
        evaluations = card.evaluations(drafter, record, evaluation)
        record["evaluations"] = evaluations or record["evaluations"]
        text = str(card.model_card(record, repo, license, base_model))
        _say_what_is_missing(record, license, base_model)
    elif evaluation or license or base_model:
        raise ValueError(
            f"{drafter / card.README} is your own card, which is kept: write that into it, or remove it for a new one"
        )
    additions = [CommitOperationAdd(file.name, file) for file in files]
    additions.append(CommitOperationAdd(card.README, text.encode()))
    sizes = [f"{add.path_in_repo} ({add.upload_info.size / 1e6:,.2f} MB)" for add in additions]
    log.info(
        "%s to %s: %s", "this would be uploaded" if dry_run else "uploading", repo, ", ".join(sizes)
    )
    if dry_run:
        sys.stdout.write(text)
        return
    url = _commit(additions, repo, private, revision, overwrite, record["drafter_sha256"])
    sys.stdout.write(f"{url}\n")


def _own_card(directory: Path) -> str | None:
    """Return the text of a card that somebody wrote; None if there is no card, or one that specdec made."""
    file = directory / card.README
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return text if text.strip() and card.MARK not in text else None


def check_repository(repo: str, needs_token: bool = True) -> None:
    """Raise ValueError if this cannot be a repository's name on the Hub, or there is no token to write to it."""
    validate_repo_id(repo)
    if "/" not in repo:
        raise ValueError(f"{repo}: name the repository with its owner, as USER/{repo}")
    if needs_token and not get_token():
        raise ValueError(
            "there is no token for the Hugging Face Hub: log in with hf auth login, or set HF_TOKEN to one that may "
            "write"
        )


def _files_and_record(directory: Path) -> tuple[list[Path], Raw]:
    """Return the files to upload and the card's record; ValueError if a file is damaged."""
    names = [checkpoint.CONFIG, checkpoint.WEIGHTS, gguf.FILE, checkpoint.OURS, SUMS]
    if (directory / checkpoint.OURS).is_file():
        if (directory / gguf.FILE).is_file():
            checkpoint.check_unchanged(directory)
            record = read_json(directory / checkpoint.OURS)
        else:
            record = checkpoint.read_checkpoint(directory).ours or {}
        if record.get("format") != checkpoint.FORMAT or "evaluations" not in record:
            raise ValueError(
                f"{directory / checkpoint.OURS}: not the record of an export of this version: export it again"
            )
    else:
        config = load_drafter(directory, dtype=None).config
        about = {name: config.target.get(name) for name in ("source", "revision", *IDENTIFYING)}
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


def _say_what_is_missing(record: Raw, license: str | None, base_model: str | None) -> None:
    """Warn of what the card leaves out, and say how to give it."""
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
    """Upload in one commit, never visible in part, onto the state that was looked at; return the URL."""
    api = HfApi(library_name="specdec", library_version=__version__)
    with reached(repo):
        info = _repository_info(api, repo, private, revision)
        if private and info.private is False:
            raise ValueError(
                f"{repo} is there already and public: make it private on the Hub, or leave out --private"
            )
        old_files = {file.rfilename: file for file in info.siblings or ()}
        differing = []
        for new in additions:
            old = old_files.pop(new.path_in_repo, None)
            if old is not None and not _same_bytes(new, old):
                differing.append(new.path_in_repo)
        differing += [
            name for name in old_files if name.endswith(WEIGHTS) or name == checkpoint.OURS
        ]
        if differing and not overwrite:
            raise ValueError(
                f"{repo} holds other files than these, {', '.join(sorted(differing))}: nothing was uploaded; choose "
                "another repository, or replace them with --overwrite true (the old ones stay in its history)"
            )
        # The record of an earlier export would contradict a drafter.
        deletions = [CommitOperationDelete(checkpoint.OURS)] if checkpoint.OURS in old_files else []
        api.create_commit(
            repo, [*additions, *deletions], commit_message=f"specdec push: drafter {sha[:12]}",
            parent_commit=info.sha, revision=revision,
        )  # fmt: skip
    return f"{api.endpoint}/{repo}" + ("" if revision is None else f"/tree/{revision}")


def _repository_info(api: HfApi, repo: str, private: bool, revision: str | None) -> ModelInfo:
    """Return what the repository holds; it and its branch are created if they are not there."""
    try:
        return api.model_info(repo, revision=revision, files_metadata=True)
    except RevisionNotFoundError:
        pass
    except RepositoryNotFoundError:
        # The Hub says the same of a token that it does not know, which then may not create one.
        api.create_repo(repo, private=private or None, exist_ok=True)
    if revision is not None:
        api.create_branch(repo, branch=revision, exist_ok=True)
    return api.model_info(repo, revision=revision, files_metadata=True)


def _same_bytes(new: CommitOperationAdd, old: RepoSibling) -> bool:
    """Return whether a file in the repository has the same bytes, by the hash that git or git-lfs knows it by."""
    if old.lfs is not None:
        return old.lfs.sha256 == new.upload_info.sha256.hex()
    with new.as_file() as file:
        return old.blob_id == git_hash(file.read())
