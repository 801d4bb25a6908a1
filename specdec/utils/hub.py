"""The Hugging Face Hub: what is fetched from it, and its errors in one line each."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

log = logging.getLogger(__name__)

STATUS = {
    401: "the Hub does not accept this token, or needs one: log in again with hf auth login, or set HF_TOKEN",
    403: "this token may not do that: take one with the right to write there",
    404: "there is no such repository or revision, or this token may not see it",
    409: "it is being changed by somebody else: try again",
    412: "it was changed meanwhile: try again",
}


@contextlib.contextmanager
def reached(what: str) -> Iterator[None]:
    """Turn whatever goes wrong between here and the Hub into a ValueError that begins with ``what`` was wanted."""
    # a second, seldom wanted
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError

    try:
        yield
    except (HTTPError, OSError, RuntimeError) as error:
        # uploads run in threads, whose errors come wrapped; a download's tell why the Hub could not be asked
        cause = (
            error.__cause__ if isinstance(error, RuntimeError | LocalEntryNotFoundError) else None
        )
        failure = cause or error
        reason = " ".join(str(failure).split())[:200] or type(failure).__name__
        if isinstance(failure, HfHubHTTPError):
            status = failure.response.status_code
            if status in STATUS:
                reason = f"{STATUS[status]} (status {status})"
        elif isinstance(failure, HTTPError):
            reason = f"the Hugging Face Hub cannot be reached, or broke off ({reason}): try again"
        raise ValueError(f"{what}: {reason}") from error


def fetch(repo: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """The folder in the Hub's cache with those files of a model repository; only what is not there is downloaded.

    Raises:
        ValueError: there is no such repository or revision, nor a directory of that name, or it cannot be fetched.
    """
    from huggingface_hub import snapshot_download

    log.info("%s: asking the Hugging Face Hub, and fetching what is not here yet", repo)
    with reached(f"{repo}: no such directory, nor to be had from the Hugging Face Hub"):
        return Path(snapshot_download(repo, revision=revision, allow_patterns=[*patterns]))
