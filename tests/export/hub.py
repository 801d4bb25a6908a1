"""A Hugging Face Hub on this machine: the endpoints that a push and a download ask for, and nothing behind them."""

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import huggingface_hub.constants
import pytest

TOKEN = "hf_secret_of_the_tests"


class Hub:
    """Repositories by name, each a list of branches with their files; ``fail`` may answer a request in its place.

    ``fail(method, path)`` gives a status to refuse with, 0 to close the connection without a word, None to go on.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: dict[str, bool | None] = {}
        self.commits: list[dict[str, Any]] = []
        self.large: dict[str, bytes] = {}  # of git-lfs, by SHA-256
        self.asked: list[str] = []
        self.fail: Callable[[str, str], int | None] = lambda method, path: None
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                path = urlsplit(self.path).path
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                hub.asked.append(f"{self.command} {path}")
                status, content, headers = hub.refuse(
                    self.command, path, self.headers.get("Authorization"), body
                )
                if not status:
                    self.close_connection = True
                    return
                self.send_response(status)
                for name, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_HEAD = answer

            def log_message(self, *rest: object) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def refuse(
        self, method: str, path: str, token: str | None, body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        """Status, content and headers: of ``fail``, of a token that is not known, or of what was asked."""
        status = self.fail(method, path)
        if status is not None:
            return status, b'{"error": "refused"}', {}
        if token != f"Bearer {TOKEN}" and not path.startswith("/upload/"):
            return 401, b"{}", {"X-Error-Message": "Invalid credentials in Authorization header"}
        found, headers = self.serve(method, path, body)
        if isinstance(found, int):
            return found, b"{}", headers
        return 200, found if isinstance(found, bytes) else json.dumps(found).encode(), headers

    def serve(self, method: str, path: str, body: bytes) -> tuple[Any, dict[str, str]]:
        """What is asked for, JSON-able or bytes, or a status."""
        given = json.loads(body) if body.startswith(b"{") and b"\n" not in body.strip() else {}
        if path == "/api/repos/create":
            name = f"{given['organization']}/{given['name']}"
            self.repos[name] = {"main": {".gitattributes": b"*.safetensors filter=lfs"}}
            self.private[name] = given.get("visibility") == "private"
            return {"url": f"{self.url}/{name}"}, {}
        if path == "/api/validate-yaml":
            wrong = not given["content"].startswith("---\n")
            return (400, {}) if wrong else ({"errors": [], "warnings": []}, {})
        if path.startswith("/upload/"):
            self.large[hashlib.sha256(body).hexdigest()] = body
            return b"", {}
        if path.endswith("/info/lfs/objects/batch"):
            link = {"upload": {"href": f"{self.url}/upload/x"}}
            return {"objects": [{**one, "actions": link} for one in given["objects"]]}, {}
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            name, revision, file = found.groups()
            content = self.repos[name][revision.replace("0" * 40, "main")].get(file)
            if content is None:
                return 404, {"X-Error-Code": "EntryNotFound"}
            return content, {
                "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
                "X-Repo-Commit": "0" * 40,
            }
        found = re.fullmatch(
            r"/api/models/([^/]+/[^/]+)(?:/(revision|preupload|commit|branch|tree)/([^/]+))?", path
        )
        assert found, path
        name, what, revision = found[1], found[2], (found[3] or "main").replace("0" * 40, "main")
        if name not in self.repos:
            return 404, {"X-Error-Code": "RepoNotFound"}
        branches = self.repos[name]
        if what == "branch":
            branches[revision] = dict(branches["main"])
            return {}, {}
        if revision not in branches:
            return 404, {"X-Error-Code": "RevisionNotFound"}
        files = branches[revision]
        if what == "preupload":
            large = [one["path"].endswith(".safetensors") for one in given["files"]]
            modes = ["lfs" if each else "regular" for each in large]
            return {"files": [{"path": one["path"], "uploadMode": mode, "shouldIgnore": False}
                              for one, mode in zip(given["files"], modes, strict=True)]}, {}  # fmt: skip
        if what == "commit":
            return self.commit(name, revision, [json.loads(line) for line in body.splitlines()]), {}
        if what == "tree":
            return [{"type": "file", "path": path, "size": len(content), "oid": git_hash(content)}
                    for path, content in files.items()], {}  # fmt: skip
        siblings = [self.sibling(path, content) for path, content in files.items()]
        private = self.private[name]
        return {"id": name, "sha": "0" * 40, "private": private, "siblings": siblings}, {}

    def sibling(self, path: str, content: bytes) -> dict[str, Any]:
        """A file as the Hub lists it."""
        large = {
            "lfs": {
                "sha256": hashlib.sha256(content).hexdigest(),
                "size": len(content),
                "pointerSize": 9,
            }
        }
        found = {"rfilename": path, "size": len(content), "blobId": git_hash(content)}
        return found | (large if path.endswith(".safetensors") else {})

    def commit(self, name: str, revision: str, lines: list[dict[str, Any]]) -> dict[str, str]:
        """Apply the operations of a commit."""
        files = self.repos[name][revision]
        self.commits.append(lines[0]["value"])
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.large[value["oid"]]
            else:
                assert line["key"] == "deletedFile"
                del files[value["path"]]
        return {"commitUrl": f"{self.url}/{name}/commit/{'1' * 40}", "commitOid": "1" * 40}


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextlib.contextmanager
def running_hub(patch: pytest.MonkeyPatch, cache: Path) -> Iterator[Hub]:
    """A Hub that huggingface_hub asks, with a user who is logged in and an empty cache."""
    hub = Hub()
    thread = threading.Thread(target=hub.server.serve_forever, args=(0.05,))
    thread.start()
    patch.setenv("HF_TOKEN", TOKEN)
    for name, value in (
        ("ENDPOINT", hub.url),
        ("HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"),
        ("HF_HUB_CACHE", str(cache)),
        ("HF_HUB_OFFLINE", False),
        ("HF_HUB_DISABLE_XET", True),  # whose protocol is a library of its own
    ):
        patch.setattr(huggingface_hub.constants, name, value)
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()
