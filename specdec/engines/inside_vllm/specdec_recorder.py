"""Runs in vLLM's environment: an extension of vLLM's worker that records what the drafter proposes in every pass."""

from typing import Any


class ProposalRecorder:
    """Methods that vLLM adds to its worker (``--worker-extension-cls``) and its engine calls by name."""

    def start_recording(self) -> str | None:
        """Record from now on; the reason if this worker has no drafter that can be recorded, else None.

        The observer replaces ``propose`` on this worker's own drafter, and nothing of vLLM's classes.
        """
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        drafter = getattr(runner, "drafter", None)
        if drafter is None or not hasattr(drafter, "propose"):
            return f"the model runner {type(runner).__module__} has no drafter whose proposals can be recorded"
        propose = drafter.propose
        records: list[dict[str, Any]] = []
        self.proposal_records = records

        def recorded(*args: Any, **kwargs: Any) -> Any:
            places = last_places(kwargs)
            last_tokens = kwargs["next_token_ids"].tolist()
            requests = list(runner.input_batch.req_ids)
            drafts = propose(*args, **kwargs)
            rows = zip(requests, places, last_tokens, drafts.tolist(), strict=True)
            for request, place, token, tokens in rows:
                records.append(
                    {"request": request, "place": place + 1, "last": token, "drafts": tokens}
                )
            return drafts

        drafter.propose = recorded
        return None

    def take_proposals(self) -> list[dict[str, Any]]:
        """What was recorded since the last call: request, place of the last known token in its text, that token, and
        the drafts behind it."""
        records = list(self.proposal_records)
        self.proposal_records.clear()
        return records


def last_places(arguments: dict[str, Any]) -> list[int]:
    """The place in its text of each request's last feature, by the arguments of ``propose``."""
    positions = arguments["target_positions"]
    # M-RoPE has a row for each of time, height and width; of a text they are equal
    if positions.ndim == 2:
        positions = positions[0]
    index = arguments["token_indices_to_sample"]
    if index is None:  # no drafts were verified in this pass: the last token of each request
        index = arguments["common_attn_metadata"].query_start_loc[1:] - 1
    return [int(place) for place in positions[index].tolist()]
