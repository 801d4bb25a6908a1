"""A served model's greedy answers, pass by pass."""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jsonargparse import ArgumentParser, Namespace

from specdec.evaluation.bars import bars
from specdec.serving.arguments import launch_of, launched_given, log_told, running
from specdec.serving.bench.asking import Asking
from specdec.serving.bench.counters import read, settled
from specdec.serving.bench.endpoint import Endpoint
from specdec.serving.drafted import Drafted
from specdec.serving.launch import Launch, flag_of
from specdec.signals import asked_to_end

TRIES = 5
PATH = "/v1/completions"


def engine_asked(
    arguments: ArgumentParser, args: Namespace, extra: list[str], draft_tokens: int | None = None
) -> Launch | str | None:
    """What is started, or the URL of what runs, or None where no engine is asked.

    Args:
        args: with ``engine``, ``url`` and what :func:`specdec.serving.arguments.add_launched` adds.
        extra: flags for vLLM.
        draft_tokens: drafts a pass, where that is no argument of its own.

    Raises:
        ValueError: arguments that do not go together, or there is no vLLM.
    """
    given = [*launched_given(arguments, args), *(["flags after --"] if extra else [])]
    if args.engine is None and (args.url is not None or given):
        given = ["--url"] * (args.url is not None) + given
        raise ValueError(f"{', '.join(given)} would go to vLLM, which is not asked without --engine vllm")
    if args.url is not None and given:
        raise ValueError(f"{', '.join(given)} would start vLLM, which is not started with --url")
    if "--dtype" in map(flag_of, extra):
        raise ValueError("--dtype after -- is not passed on: vLLM runs in the target's, give --target.dtype")
    if args.url is not None:
        Endpoint(args.url)
        return str(args.url)
    if args.engine is None:
        return None
    if draft_tokens is not None:
        args = args.clone()
        args.draft_tokens = draft_tokens
    return launch_of(args, extra)


class Answer(NamedTuple):
    """What a server did with one prompt, end tokens ignored."""

    prompt: list[int]
    ids: list[int]
    known: list[int]
    """Tokens of the answer that were known when each pass began; the first is 1, the prompt's own."""
    accepted: list[int]
    """Drafts that each pass accepted, in the last one those behind the answer's end, too."""
    accepted_at: tuple[int, ...]
    """The server's own counters: passes that accepted at least one draft, at least two, and so on."""


def ask_all(
    where: Launch | str, drafter: Drafted, dtype: str, prompts: Sequence[list[int]], tokens: int, said: Path
) -> list[Answer]:
    """Put every prompt to the vLLM at a URL, or to one that is started for it and ended.

    Args:
        dtype: of what is started.
        said: a new file for what that says.

    Raises:
        Asked: somebody asked this process to end.
        ValueError: as :func:`ask`; or vLLM does not come up.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(where, Launch):
            stack.enter_context(asked_to_end())
            stack.enter_context(log_told())
            launch = dataclasses.replace(where, extra=("--dtype", dtype, *where.extra))
            where = stack.enter_context(running(launch, drafter, said)).url
        endpoint = Endpoint(where)
        model = endpoint.model()
        done = stack.enter_context(bars())("prompts that vLLM answers", len(prompts))
        answers = []
        for prompt in prompts:
            answers.append(ask(endpoint, model, prompt, tokens))
            done(1)
    return answers


def ask(endpoint: Endpoint, model: str, prompt: list[int], tokens: int) -> Answer:
    """Put a prompt to a server that nobody else uses.

    Raises:
        ValueError: it does not answer, drafts nothing, serves somebody else, or does not send every pass by itself.
    """
    for _ in range(TRIES):
        before = read(endpoint)
        pieces = _pieces(endpoint, model, prompt, tokens)
        ids = [token for piece in pieces for token in piece]
        counted = settled(endpoint, before, len(ids)).since(before)
        if counted.generated != len(ids):
            raise ValueError(f"{endpoint.url} counted {counted.generated} tokens of {len(ids)}: somebody else uses it")
        if not counted.passes:
            raise ValueError(f"{endpoint.url} drafts nothing: is it served with the drafter?")
        if counted.passes < len(pieces) - 1:
            raise ValueError(
                f"{endpoint.url} drafts in {counted.passes} of {len(pieces) - 1} passes: give it a --max-model-len of "
                f"{len(prompt) + tokens + len(counted.per_position) + 1} or more"
            )
        if counted.passes == len(pieces) - 1:
            break
    else:
        raise ValueError(
            f"{endpoint.url} sent {counted.passes} passes in {len(pieces) - 1} pieces, and again {TRIES} times: "
            "is it busy, or has it another --stream-interval than 1?"
        )
    *whole, _ = accepted = [len(piece) - 1 for piece in pieces[1:]]
    accepted[-1] = counted.accepted - sum(whole)  # the piece itself is cut at the end of the answer
    if counted.per_position != tuple(sum(a > k for a in accepted) for k in range(len(counted.per_position))):
        raise ValueError(f"{endpoint.url} counts {counted.per_position} accepted drafts, its answer holds {accepted}")
    known = [sum(map(len, pieces[:number])) for number in range(1, len(pieces))]
    return Answer(prompt, ids, known, accepted, counted.per_position)


def _pieces(endpoint: Endpoint, model: str, prompt: list[int], tokens: int) -> list[list[int]]:
    body = {
        **Asking(model, tokens, ignore_eos=True).settings(),
        "prompt": prompt,
        "repetition_penalty": 1.0,  # else the target's generation_config.json has a say
        "return_token_ids": True,
    }
    choices = [event["choices"][0] for event in endpoint.events(PATH, body) if event.get("choices")]
    try:
        return [list(choice["token_ids"]) for choice in choices if choice["token_ids"]]
    except KeyError as error:
        raise ValueError(f"{endpoint.url}{PATH} sends no token_ids, which vLLM does from 0.10.2 on") from error
