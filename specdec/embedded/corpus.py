"""The embedded target's text, the Python standard library's own sources: tokenizer, rows, data and held-out prompts.

Every text starts with ``<s>``: encoding adds it, and training rows begin with it, so position 0 is always the same
token and a natural attention sink. ``</s>`` ends a file.

Legend: R rows, T predicted tokens of a row.
"""

import hashlib
import random
import re
import sysconfig
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from specdec.data import Document, TokenData

SEED = 0  # of the embedded target, and so of which files are held out
BOS, EOS = "<s>", "</s>"
HELD_OUT_PERCENT = 5
LEAST_CHARACTERS = 500
MOST_CHARACTERS = 500_000
LEAST_PROSE = 0.7  # share of letters and white space: tables of numbers and of escapes lie below

_SKIPPED_FOLDERS = frozenset(
    {"dist-packages", "encodings", "idle_test", "lib2to3", "pydoc_data", "site-packages", "test", "tests"}
)
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")  # written by the build of this interpreter
_STATEMENT = re.compile(r"^(?:@|async def |def |class )", re.MULTILINE)


class CorpusFile(NamedTuple):
    """One file: its path below the standard library, with forward slashes, and its text."""

    path: str
    text: str


class Corpus(NamedTuple):
    """Files to train on and files never trained on, each sorted by path."""

    train: list[CorpusFile]
    held_out: list[CorpusFile]

    @property
    def sha256(self) -> str:
        """Of every file's path and text."""
        return hashlib.sha256(repr([list(map(tuple, part)) for part in self]).encode()).hexdigest()


def corpus(seed: int) -> Corpus:
    """Read the standard library and split it by file.

    A file is held out by a hash of ``seed`` and its path, so the split does not move when other files come or go.
    Tests, generated tables, tiny files and files that are not UTF-8 are left out.

    Raises:
        ValueError: this Python comes without the sources of its standard library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    sources = [source for path in sorted(root.rglob("*.py")) if (source := _read(root, path)) is not None]
    sources.sort()
    train = [source for source in sources if not _held_out(seed, source.path)]
    held_out = [source for source in sources if _held_out(seed, source.path)]
    if not train or not held_out:
        raise ValueError(
            f"{root}: found {len(sources)} usable *.py files of the standard library, too few for a corpus; "
            "this Python keeps it zipped or stripped: use one installed with its sources"
        )
    return Corpus(train, held_out)


def _read(root: Path, path: Path) -> CorpusFile | None:
    relative = path.relative_to(root)
    if any(part in _SKIPPED_FOLDERS or part.startswith(_SKIPPED_PREFIXES) for part in relative.parts):
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):  # a file in another encoding, or a dangling link
        return None
    if not LEAST_CHARACTERS <= len(text) <= MOST_CHARACTERS:
        return None
    prose = sum(character.isalpha() or character.isspace() for character in text)
    return CorpusFile(relative.as_posix(), text) if prose >= LEAST_PROSE * len(text) else None


def _held_out(seed: int, path: str) -> bool:
    digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < HELD_OUT_PERCENT


def train_tokenizer(texts: Iterable[str], vocab_size: int, longest: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of exactly ``vocab_size`` tokens; decoded without special tokens, a text comes back whole.

    Args:
        texts: what to train on.
        vocab_size: at least 258: two special tokens and every byte.
        longest: the model's ``max_position_embeddings``.

    Raises:
        ValueError: the texts are too short for ``vocab_size`` tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"vocab_size={vocab_size}: the corpus yields a vocabulary of {tokenizer.get_vocab_size()} tokens; "
            "choose that or a smaller one"
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=longest,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # "<s>" written in a source is four characters, not the token
        model_input_names=["input_ids", "attention_mask"],
    )


def stream_rows(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], seq_len: int) -> Tensor:
    """Cut the texts, joined with ``</s>`` between them, into rows of ``<s>`` and ``seq_len`` tokens; the rest is lost.

    A row may start anywhere in a file, so the model knows texts that begin in the middle.

    Returns:
        int64 (R, T + 1): the input is ``[:, :-1]``, what it should predict ``[:, 1:]``.

    Raises:
        ValueError: the texts do not fill one row.
    """
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    stream = torch.tensor([id_ for ids in encoded for id_ in (*ids, tokenizer.eos_token_id)])
    count = len(stream) // seq_len
    if count == 0:
        raise ValueError(f"seq_len is {seq_len}: the corpus has only {len(stream)} tokens for a row of this length")
    pieces_RT = stream[: count * seq_len].view(count, seq_len)
    return torch.cat([torch.full((count, 1), tokenizer.bos_token_id), pieces_RT], dim=1)


class EmbeddedData(TokenData):
    """The corpus that the embedded target was trained on: the same split by file and the same kind of rows, each of
    which starts with ``<s>``."""

    def documents(self, tokenizer: Any) -> tuple[list[Document], list[Document]]:
        """Rows of the training and of the held-out files."""
        if tokenizer.bos_token_id is None or tokenizer.eos_token_id is None:
            raise ValueError(
                "EmbeddedData is for targets whose tokenizer begins and ends texts (<s>, </s>), as the embedded one: "
                "choose --data TextData or ChatData"
            )
        files = corpus(SEED)
        return self._rows(files.train, tokenizer), self._rows(files.held_out, tokenizer)

    def _rows(self, files: list[CorpusFile], tokenizer: Any) -> list[Document]:
        rows_RT = stream_rows(tokenizer, [file.text for file in files], self.seq_len - 1)  # and <s>
        return [Document(row_T, torch.ones_like(row_T, dtype=torch.bool)) for row_T in rows_RT]


def held_out_prompts(count: int, prompt_tokens: int, seed: int, tokenizer: Any) -> list[dict[str, Any]]:
    """Cut prompts from held-out files, each from the start of a file or of a top-level function or class.

    They do not overlap and are spread over the files: a file gives its second prompt after every other gave one.

    Args:
        count: how many.
        prompt_tokens: length of each in tokens, the ``<s>`` that encoding adds included.
        seed: of the order and of which files are held out: that of the target's config.
        tokenizer: the target's.

    Returns:
        One ``{"prompt_id": "path:line", "prompt": text, "category": path}`` each.

    Raises:
        ValueError: the files do not hold that many prompts of this length.
    """
    generator = random.Random(seed)
    files = [_prompts(source, prompt_tokens, tokenizer) for source in corpus(seed).held_out]
    for prompts in files:
        generator.shuffle(prompts)
    generator.shuffle(files)
    found = [prompt for turn in zip_longest(*files) for prompt in turn if prompt is not None]
    if len(found) < count:
        raise ValueError(
            f"count is {count}: the files hold {len(found)} prompts of {prompt_tokens} tokens; "
            "ask for fewer or shorter ones"
        )
    return found[:count]


def _prompts(source: CorpusFile, length: int, tokenizer: Any) -> list[dict[str, Any]]:
    """Every prompt of a file, in order, none overlapping the one before."""
    prompts: list[dict[str, Any]] = []
    free = 0
    for start in _starts(source.text):
        if start < free:
            continue
        # More text than `length` tokens take, so that the cut lies inside it.
        ids = tokenizer.encode(source.text[start : start + 16 * length])[:length]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        # Text cut between two tokens may be tokenised otherwise, and text cut inside a character is spoilt.
        if source.text.startswith(text, start) and len(tokenizer.encode(text)) == length:
            line = source.text.count("\n", 0, start) + 1
            prompts.append({"prompt_id": f"{source.path}:{line}", "prompt": text, "category": source.path})
            free = start + len(text)
    return prompts


def _starts(text: str) -> list[int]:
    """Offsets of the file and of its top-level functions and classes, their decorators included."""
    starts = [0]
    for match in _STATEMENT.finditer(text):
        line_before = text[text.rfind("\n", 0, max(0, match.start() - 1)) + 1 : match.start()]
        if match.start() > 0 and not line_before.startswith("@"):
            starts.append(match.start())
    return starts
