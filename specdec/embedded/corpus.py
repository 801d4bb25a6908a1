"""The embedded target's text, the Python standard library's own sources: tokenizer, documents, held-out prompts.

A document is a function or a method. Each starts with ``<s>``, which encoding adds, so position 0 is always the same
token and a natural attention sink; ``</s>`` ends it, so that a model of them ends its answers too.
"""

import ast
import hashlib
import os
import random
import string
import sysconfig
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from specdec.data import Batch, Document, TokenData
from specdec.data.packing import pack_whole
from specdec.data.rows import read_rows
from specdec.utils.numbers import RowTokens, Seed, Side

SEED = 0  # of the embedded target, and so of which files are held out
BOS = "<s>"
EOS = "</s>"
ANSWERS = Path(__file__).with_name("target") / "answers.jsonl"
HELD_OUT_PERCENT = 5
LEAST_CHARACTERS = 500
MOST_CHARACTERS = 500_000
LEAST_TOKENS = 16  # of a document, or of a piece of one
LEAST_PROSE = 0.7  # share of letters and white space: tables of numbers and of escapes lie below

_SKIPPED_FOLDERS = frozenset(
    {
        "dist-packages",
        "encodings",
        "idle_test",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
    }
)
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")  # written by the build of this interpreter
# Deletes most of a text's prose at the speed of str.translate.
_WITHOUT_ASCII_PROSE = str.maketrans("", "", string.ascii_letters + string.whitespace)


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
    sources = sorted(source for path in _python_files(root) if (source := _read(root, path)))
    train = [source for source in sources if not _held_out(seed, source.path)]
    held_out = [source for source in sources if _held_out(seed, source.path)]
    if not train or not held_out:
        raise ValueError(
            f"{root}: found {len(sources)} usable *.py files of the standard library, too few for a corpus; "
            "this Python keeps it zipped or stripped: use one installed with its sources"
        )
    return Corpus(train, held_out)


def _python_files(root: Path) -> Iterator[Path]:
    """Yield the files that end in ``.py``, in no order; no folder that is left out is entered."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not _is_skipped(name)]
        for name in names:
            if name.endswith(".py") and not _is_skipped(name):
                yield Path(folder, name)


def _is_skipped(name: str) -> bool:
    return name in _SKIPPED_FOLDERS or name.startswith(_SKIPPED_PREFIXES)


def _read(root: Path, path: Path) -> CorpusFile | None:
    """Return the file, or None if it is in another encoding, a dangling link, tiny, vast or a table."""
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return None
    if not LEAST_CHARACTERS <= len(text) <= MOST_CHARACTERS:
        return None
    rest = text.translate(_WITHOUT_ASCII_PROSE)
    others = sum(not (character.isalpha() or character.isspace()) for character in rest)
    if len(text) - others < LEAST_PROSE * len(text):
        return None
    return CorpusFile(path.relative_to(root).as_posix(), text)


def _held_out(seed: int, name: str) -> bool:
    """Return whether a file by its path, or an answer by its text, is held out."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
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


def functions(text: str) -> list[tuple[int, str]]:
    """Line and text, decorators included and dedented, of every function and method of a file, except those within
    another function; none of a file that this Python cannot parse."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that a later Python will refuse
        try:
            module = ast.parse(text)
        except (SyntaxError, ValueError):
            return []
    lines = text.splitlines(keepends=True)
    sources = []
    waiting = list(module.body)
    for node in waiting:  # which grows
        if isinstance(node, ast.ClassDef):
            waiting += node.body
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            source = "".join(lines[first - 1 : node.end_lineno])
            sources.append((first, textwrap.dedent(source)))
    return sorted(sources)


def encode_documents(tokenizer: Any, files: Sequence[CorpusFile], longest: int) -> list[Document]:
    """Every function and method of the files, as tokens, all of them supervised.

    One of more than ``longest`` tokens is cut into pieces; each starts with ``<s>``, the last one alone ends with
    ``</s>``. Pieces of fewer than :data:`LEAST_TOKENS` are left out.

    Raises:
        ValueError: the files have none.
    """
    texts = [(text, True) for file in files for _, text in functions(file.text)]
    if not texts:
        raise ValueError(f"{len(files)} files without a function: nothing to learn from")
    return encode_pieces(tokenizer, texts, longest)


def encode_pieces(
    tokenizer: Any, texts: Sequence[tuple[str, bool]], longest: int
) -> list[Document]:
    """The same of texts, each with whether ``</s>`` ends it."""
    bare = [text for text, _ in texts]
    encoded = tokenizer(bare, add_special_tokens=False, return_attention_mask=False, verbose=False)[
        "input_ids"
    ]
    documents = []
    for ids, (_, ended) in zip(encoded, texts, strict=True):
        whole = [*ids, tokenizer.eos_token_id] if ended else ids
        for start in range(0, len(whole), longest - 1):
            piece = torch.tensor([tokenizer.bos_token_id, *whole[start : start + longest - 1]])
            if len(piece) >= LEAST_TOKENS:
                documents.append(Document(piece, torch.ones_like(piece, dtype=torch.bool)))
    return documents


class EmbeddedData(TokenData):
    """The corpus that the embedded target was trained on: the same split by file, the same documents, each of which
    starts with ``<s>``.

    Args:
        answers: train and validate on what the embedded target writes after the beginnings of the training functions,
            which came with it, in place of functions: a drafter is to know its target's text. Every answer is in one
            of the two, by a hash of its text.
    """

    def __init__(
        self, seq_len: RowTokens = 512, batch_size: Side = 8, seed: Seed = 0, answers: bool = False
    ) -> None:
        super().__init__(seq_len, batch_size, seed)
        self.answers = answers

    def documents(self, tokenizer: Any) -> tuple[list[Document], list[Document]]:
        """Documents of the training and of the held-out files, or answers of both kinds."""
        if tokenizer.bos_token_id is None or tokenizer.eos_token_id is None:
            raise ValueError(
                "EmbeddedData is for targets whose tokenizer begins and ends texts (<s>, </s>), as the embedded one: "
                "choose --data TextData or ChatData"
            )
        if self.answers:
            return self._answers(tokenizer)
        files = corpus(SEED)
        held_out = encode_documents(tokenizer, files.held_out, self.seq_len)
        return encode_documents(tokenizer, files.train, self.seq_len), held_out

    def _answers(self, tokenizer: Any) -> tuple[list[Document], list[Document]]:
        """Return the target's answers to train on, and those that are held out."""
        train: list[tuple[str, bool]] = []
        held_out: list[tuple[str, bool]] = []
        for text, ended in read_rows(
            str(ANSWERS), lambda row: (row.values["text"], row.values["ended"])
        ):
            part = held_out if _held_out(SEED, text) else train
            part.append((text, ended))
        return (
            encode_pieces(tokenizer, train, self.seq_len),
            encode_pieces(tokenizer, held_out, self.seq_len),
        )

    def pack(self, documents: Sequence[Document]) -> Batch:
        """As many whole documents to a row as fit."""
        return pack_whole(documents, self.seq_len)


def held_out_prompts(
    count: int, prompt_tokens: int, seed: int, tokenizer: Any
) -> list[dict[str, Any]]:
    """Cut prompts from the functions and methods of held-out files: how each begins, and no less than as much follows.

    They are spread over the files: a file gives its second prompt after every other gave one.

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
    chosen = [prompt for turn in zip_longest(*files) for prompt in turn if prompt is not None]
    if len(chosen) < count:
        raise ValueError(
            f"count is {count}: the files hold {len(chosen)} prompts of {prompt_tokens} tokens; "
            "ask for fewer or shorter ones"
        )
    return chosen[:count]


def _prompts(source: CorpusFile, length: int, tokenizer: Any) -> list[dict[str, Any]]:
    """Every prompt of a file, in order."""
    prompts: list[dict[str, Any]] = []
    for line, function in functions(source.text):
        ids = tokenizer.encode(function, verbose=False)
        text = tokenizer.decode(ids[:length], skip_special_tokens=True)
        # text cut between two tokens may be tokenized otherwise, and text cut inside a character is spoilt
        if (
            len(ids) >= 2 * length
            and function.startswith(text)
            and len(tokenizer.encode(text)) == length
        ):
            prompts.append(
                {"prompt_id": f"{source.path}:{line}", "prompt": text, "category": source.path}
            )
    return prompts
