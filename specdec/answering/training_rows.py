"""Conversations that the target answers, as documents to train on: tokens, loss mask, and the states of every token.

The tokens and masks are those that training reads of the file that ``specdec regenerate`` writes: the same code makes
them of the same row. The states are those of the passes that wrote the answers; nothing is run again for them.

Legend: R tokens of a document, N boundaries, H hidden.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from specdec.answering.dialogue import Dialogue
from specdec.answering.in_process import InProcess
from specdec.answering.settings import AnswerSettings
from specdec.data.chat import conversation, encode
from specdec.data.layouts import ChatConversation
from specdec.data.loader import Document
from specdec.data.rows import DataRow
from specdec.data.turns import Turns
from specdec.decoding import Generation, RecordedText, RecordingDecoder, Request
from specdec.target import Target

log = logging.getLogger(__name__)

UNSUPERVISED = "no answer begins within data.seq_len"


class DocumentStates(NamedTuple):
    """The target's states of a document's tokens, on the CPU.

    The last token of an answer was read by no pass; where it is the document's last, its states are zeros. No slot
    that is trained reads them: a slot's token, the next one and the one that is predicted are of one document.
    """

    aux_RNH: Tensor
    final_RH: Tensor


class AnsweredRow(NamedTuple):
    """What became of a conversation: documents, or the reason why there are none."""

    documents: list[Document]
    states: list[DocumentStates]  # of each document
    left_out: str | None = None


class TrainingRows:
    """Answers conversations, and makes documents of them.

    Args:
        batch: prompts at a time.
        layers: boundaries whose states are kept.
        seq_len: tokens of a document at most; longer ones are cut.
        turns: how the turns of a conversation are put into documents, as ``ChatData`` has it.
        broken: whether a row that cannot be trained on is an error ("refuse"), or is left out ("drop").

    Raises:
        ValueError: the target has no chat template, or one without the switch that the settings ask for.
    """

    def __init__(
        self,
        target: Target,
        settings: AnswerSettings,
        batch: int,
        layers: Sequence[int],
        seq_len: int,
        turns: Turns,
        broken: str,
    ) -> None:
        self.answering = RecordingAnswers(target, settings, batch, layers)
        self.settings = settings
        self.tokenizer = target.tokenizer
        self.seq_len = seq_len
        self.turns = turns
        self.broken = broken

    def rows(self, conversations: Sequence[ChatConversation]) -> list[AnsweredRow]:
        """Answer conversations; return what became of each.

        Raises:
            ValueError: a prompt batch does not fit in memory, or a row cannot be trained on and is not to be left out.
        """
        dialogues = list(map(Dialogue.of, conversations))
        self.answering.forget()
        for _ in self.answering.answers(dialogues):
            pass  # each is added to its dialogue
        rows = list(map(self._row, dialogues))
        self.answering.forget()
        return rows

    def _row(self, dialogue: Dialogue) -> AnsweredRow:
        if reason := dialogue.left_out(self.settings.truncated):
            return AnsweredRow([], [], reason)
        try:
            documents = list(self._documents(dialogue))
        except ValueError as error:
            if self.broken == "refuse":
                raise
            return AnsweredRow([], [], str(error))
        texts = self.answering.texts[id(dialogue)]
        states = [states_of(document, texts) for document in documents]
        return AnsweredRow(documents, states, None if documents else UNSUPERVISED)

    def _documents(self, dialogue: Dialogue) -> Iterator[Document]:
        """The documents that training reads of the dialogue's row in a file, those with a supervised token."""
        line = json.dumps(dialogue.fields(), ensure_ascii=False)
        row = conversation(DataRow(dialogue.place, dialogue.id, json.loads(line)))
        for document in encode([row], self.tokenizer, self.seq_len, self.turns):
            if document.loss_mask_T.any():
                yield Document(document.ids_T.long(), document.loss_mask_T)


class RecordingAnswers(InProcess):
    """The target in this process, which keeps the states of what it reads and writes.

    Args:
        layers: boundaries whose states are kept.
    """

    decoder: RecordingDecoder

    def __init__(
        self, target: Target, settings: AnswerSettings, batch: int, layers: Sequence[int]
    ) -> None:
        self.layers = layers
        super().__init__(target, settings, batch)
        # of each row, by its Python id, the texts that no later text of it begins with
        self.texts: dict[int, list[RecordedText]] = {}

    def make_decoder(self) -> RecordingDecoder:
        return RecordingDecoder(self.target, self.settings.sampling(), self.batch, self.layers)

    def forget(self) -> None:
        """Let go of the texts of all rows."""
        self.texts.clear()
        self.decoder.forget()

    def generations(
        self, rows: Sequence[Dialogue], requests: Sequence[Request]
    ) -> Iterator[tuple[int, Generation]]:
        for number, text in self.decoder.record(requests, self.target.eos_token_ids):
            ids = ids_of_text(text)
            texts = self.texts.setdefault(id(rows[number]), [])
            texts[:] = [
                earlier for earlier in texts if not starts_with(ids, ids_of_text(earlier))
            ] + [text]
            yield number, text.generation


def ids_of_text(text: RecordedText) -> list[int]:
    """The tokens of a prompt and its answer."""
    return [*text.generation.prompt, *text.generation.ids]


def starts_with(ids: list[int], first: list[int]) -> bool:
    """Whether token ids begin with these."""
    return ids[: len(first)] == first


def states_of(document: Document, texts: Sequence[RecordedText]) -> DocumentStates:
    """The states of a document, which is the beginning of one of the texts.

    Raises:
        ValueError: it is the beginning of none: no states were computed for these tokens.
    """
    ids = document.ids_T.tolist()
    text = next((text for text in texts if starts_with(ids_of_text(text), ids)), None)
    if text is None:
        raise ValueError(
            f"a document of {len(ids)} tokens holds other tokens than the target read and wrote: report this as a bug"
        )
    # one token less than the document where it ends with the answer's last token
    missing = len(ids) - len(text.final_RH)
    return DocumentStates(
        F.pad(text.aux_RNH[: len(ids)], (0, 0, 0, 0, 0, max(missing, 0))),
        F.pad(text.final_RH[: len(ids)], (0, 0, 0, max(missing, 0))),
    )
