"""Which engine was chosen: who the target is there, whose tokenizer counts, and how it is set going."""

import contextlib
import re
import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from jsonargparse import ArgumentParser, Namespace

from specdec.embedded.source import TargetSource
from specdec.export.arguments import found_at
from specdec.regeneration.asking import Asking
from specdec.regeneration.in_process import InProcess
from specdec.regeneration.remote import Remote
from specdec.regeneration.rendering import Rendering
from specdec.regeneration.retrying import Retrying
from specdec.regeneration.run import Engine
from specdec.serving.arguments import add_server, launched_given, running
from specdec.serving.bench.endpoint import KEY, PATIENCE, Endpoint
from specdec.serving.engine import find_vllm
from specdec.serving.launch import Launch
from specdec.target.loading import load_tokenizer

USERS = ("concurrency", "retries", "backoff", "request_timeout")


class Chosen(Protocol):
    """An engine that is not necessarily up yet."""

    @property
    def identity(self) -> dict[str, Any]:
        """Who answers: what must be the same when a run is gone on with."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The target's."""
        ...

    @property
    def how(self) -> dict[str, Any]:
        """What else it was told, which changes no answer."""
        ...

    def up(self) -> contextlib.AbstractContextManager[Engine]:
        """The engine, for as long as it is needed."""
        ...


class Here:
    """The target in this process."""

    def __init__(self, args: Namespace, asking: Asking) -> None:
        self.target = args.target.load(args.device)
        self.tokenizer = self.target.tokenizer
        self.engine = InProcess(self.target, asking, args.batch_size)
        self.how = {"device": args.device, "batch_size": args.batch_size}

    @property
    def identity(self) -> dict[str, Any]:
        """With the fingerprint of its weights."""
        return {"engine": "transformers", **self.target.identity, "dtype": str(self.target.dtype)}

    def up(self) -> contextlib.AbstractContextManager[Engine]:
        return contextlib.nullcontext(self.engine)


class Started:
    """The target in a vLLM that is started for it."""

    def __init__(self, args: Namespace, asking: Asking, extra: list[str]) -> None:
        self.args, self.asking = args, asking
        self.how = {"concurrency": args.concurrency}
        self.retrying = Retrying(args.retries, args.backoff)
        server = (args.host, args.port, args.timeout, args.grace)
        self.launch = Launch(find_vllm(args.vllm), args.target, *server, extra=tuple(extra))

    @property
    def identity(self) -> dict[str, Any]:
        """By its name: its weights are seen by vLLM alone."""
        target = self.args.target
        return {
            "engine": "vllm",
            "source": target.source,
            "revision": target.revision,
            "flags": " ".join(self.launch.extra),
        }

    @cached_property
    def tokenizer(self) -> Any:
        return tokenizer_of(self.args.target)

    @contextlib.contextmanager
    def up(self) -> Iterator[Engine]:
        args = self.args
        with (
            tempfile.TemporaryDirectory(prefix="specdec-regenerate-") as scratch,
            running(self.launch, None, Path(scratch) / "server.log") as server,
        ):
            endpoint = Endpoint(server.url, patience=args.request_timeout)
            model, rendering = endpoint.model(), Rendering(self.tokenizer, self.asking)
            yield Remote(
                endpoint, model, self.asking, True, args.concurrency, self.retrying, rendering, server.check
            )  # fmt: skip


class Served:
    """The target at a URL."""

    def __init__(self, args: Namespace, asking: Asking) -> None:
        self.args = args
        self.how = {"url": args.url, "concurrency": args.concurrency}
        endpoint = Endpoint(args.url, _variable(args.key_variable), args.request_timeout)
        self.model = args.model or endpoint.model()
        retrying = Retrying(args.retries, args.backoff)
        self.engine = Remote(endpoint, self.model, asking, args.engine == "vllm", args.concurrency, retrying)

    @property
    def identity(self) -> dict[str, Any]:
        """By the name under which it is served, wherever that is."""
        return {"engine": self.args.engine, "model": self.model}

    @cached_property
    def tokenizer(self) -> Any:
        return tokenizer_of(self.args.target)

    def up(self) -> contextlib.AbstractContextManager[Engine]:
        return contextlib.nullcontext(self.engine)


def add_engines(parser: ArgumentParser) -> None:
    """Who answers."""
    parser.add_argument("--url", type=str | None, default=None, help="a server that runs already, as http://127.0.0.1:8000; --engine says whether it is vLLM")  # fmt: skip # noqa: E501
    parser.add_argument("--model", type=str | None, default=None, help="its name at --url; by default the first served")
    parser.add_argument("--key_variable", type=str, default=KEY, help="the variable of the environment that holds the key of --url")  # fmt: skip # noqa: E501
    parser.add_argument("--device", type=str, default="cpu", help="of --engine transformers")
    parser.add_argument("--batch_size", type=int, default=32, help="prompts at a time, of --engine transformers")
    parser.add_argument("--concurrency", type=int, default=64, help="questions to a server at a time")
    parser.add_argument("--retries", type=int, default=Retrying.retries, help="tries after the first, where a server is busy or away")  # fmt: skip # noqa: E501
    parser.add_argument("--backoff", type=float, default=Retrying.backoff, help="seconds before the first of them, then doubled")  # fmt: skip # noqa: E501
    parser.add_argument("--request_timeout", type=float, default=PATIENCE, help="seconds that a server may take to answer")  # fmt: skip # noqa: E501
    add_server(parser, port=0)


def choose(parser: ArgumentParser, args: Namespace, asking: Asking, extra: list[str]) -> Chosen:
    """The engine that the arguments name.

    Raises:
        ValueError: an argument means nothing to it, or it is not to be had.
    """
    if args.engine == "openai" and args.url is None:
        raise ValueError("--engine openai asks a server that runs already: give its --url")
    if args.engine == "transformers" and args.url is not None:
        raise ValueError("--url is asked with --engine vllm, or with openai if the server is another")
    heard = {"device", "batch_size"} if args.engine == "transformers" else set(USERS)
    if args.url is not None:
        heard |= {"model", "key_variable"}
    names = {"model", "key_variable", "device", "batch_size", *USERS}
    unheard = [f"--{name}" for name in sorted(names - heard) if args[name] != parser.get_default(name)]
    if args.url is not None or args.engine == "transformers":
        unheard += launched_given(parser, args) + ["flags after --"] * bool(extra)
    if args.url is not None and args.prompt_tokens is None and args.target != TargetSource():
        unheard.append("--target")
    if unheard:
        how = f"--engine {args.engine}{' at a --url' if args.url else ''}"
        raise ValueError(f"{', '.join(unheard)}: {how} has no use for it")
    if args.engine == "transformers":
        return Here(args, asking)
    return Started(args, asking, extra) if args.url is None else Served(args, asking)


def tokenizer_of(target: TargetSource) -> Any:
    """Without its weights."""
    return load_tokenizer(found_at(target), target.revision, target.trust_remote_code)


def _variable(name: str) -> str:
    """A name, and no key that was given in its place; the message must not repeat it."""
    if not re.fullmatch("[A-Z][A-Z0-9_]*", name):
        raise ValueError("key_variable is not the name of a variable, in capitals: the key itself is never an argument")
    return name
