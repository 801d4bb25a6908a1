"""``import``: a drafter out of a checkpoint, whoever published it. Nothing in its files is run.

Legend: D draft vocabulary, V target vocabulary.
"""

import dataclasses
import functools
import logging
import re
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from specdec.drafter import (
    MLA,
    Concat,
    Drafter,
    DrafterConfig,
    KVInjection,
    LastLayer,
    Narrow,
    Norms,
    PreNorm,
    Wide,
    save_drafter,
)
from specdec.drafter.io import FLOATS, WHOLE, check_finite, measure
from specdec.drafter.io import FORMAT as DRAFTER
from specdec.drafter.model import skeleton_of
from specdec.export import keys, mtp
from specdec.export import tensors as named
from specdec.export.formats import VOCABULARY, flat
from specdec.export.switches import EMBEDDING, HEAD
from specdec.target import Target, TargetSource
from specdec.utils import hub
from specdec.utils.files import claimed
from specdec.utils.numbers import MOST_LAYERS
from specdec.utils.reading import SUMS, check_sums, read_json, regular, sha256
from specdec.utils.text import how_many, nearest_name, tensor_fault

log = logging.getLogger(__name__)

OURS = "specdec.json"
FORMAT = "specdec-export"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
# of a repository on the Hub
FETCHED = (CONFIG, OURS, "*.safetensors", "*.index.json", "mask_embedding.pt")
LATENT = "layers.0.self_attn.kv_a_proj_with_mqa.weight"  # of multi-head latent attention (MLA)
QUERIES = "layers.0.self_attn.q_proj.weight"
BIAS = "fc.bias"
QUERY_BIAS = "layers.0.self_attn.q_proj.bias"
OUTPUT_BIAS = "layers.0.self_attn.o_proj.bias"
CONTEXT = "hidden_norm.weight"  # of DFlash alone, on what every layer reads
FLAGS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
SPECFORGE = "SpecForge or TorchSpec"
NEVER = 16  # draft tokens of which some two are neighbours in the target's vocabulary
EAGLE1 = Norms(embed=False, hidden=False, output=False)


def import_command(
    *,
    checkpoint: str,
    out: str,
    target: TargetSource = TargetSource(),  # noqa: B008  frozen
    revision: str | None = None,
    aux_layers: list[int] | None = None,
) -> None:
    """A published EAGLE checkpoint, whoever wrote it, or the module of multi-token prediction (MTP) that a target's own
    checkpoint has, as a drafter to evaluate and to train on; prints its directory.

    Example: specdec import --checkpoint AngelSlim/Qwen3-4B_eagle3 --target Qwen/Qwen3-4B --out drafters/angelslim

    Args:
        checkpoint: a directory or a Hub id; the target's own for its module
        out: the drafter's directory, not there yet
        target: the model that it drafts for
        revision: a branch, tag or commit of the checkpoint on the Hub
        aux_layers: boundaries that it was trained with, where its config does not say so rightly

    Raises:
        ValueError: an argument is wrong, or the checkpoint is no drafter of this target.
    """
    with claimed(Path(out)):  # before anything is fetched
        save_drafter(import_drafter(checkpoint, target, revision, aux_layers), out, replace=True)
    log.info(
        "wrote the drafter; measure it with: specdec evaluate --target %s --drafter %s",
        target.source,
        out,
    )
    sys.stdout.write(f"{out}\n")


def import_drafter(
    checkpoint: str | Path,
    target: Target | TargetSource,
    revision: str | None = None,
    aux_layers: Sequence[int] | None = None,
) -> Drafter:
    """A published EAGLE checkpoint as a drafter, in the dtype of its weights; see :func:`import_command`.

    Raises:
        ValueError: there is none, or it is no drafter of this target.
    """
    log.info("reading the checkpoint %s", checkpoint)
    directory = fetch(str(checkpoint), revision)
    if (family := mtp.family_of(directory)) is not None:
        if aux_layers:
            raise ValueError(
                f"{checkpoint}: a target's own module reads the target's last state: leave out --aux_layers"
            )
        return mtp.read_module(
            directory, family, target if isinstance(target, Target) else target.load()
        )
    read = read_checkpoint(directory)
    loaded = target if isinstance(target, Target) else target.load()
    drafter = import_checkpoint(read, loaded, tuple(aux_layers) if aux_layers else None)
    if layout(read) == SPECFORGE and keys.write(drafter.config, "eagle3")["norm_output"]:
        log.warning(
            "SpecForge trained norm_output with the raw state fed back until its pull request 879 (September 2026): a "
            "checkpoint of before drafts otherwise here, and in every engine, than it was trained"
        )
    for line in recognised(read, drafter.config, given=bool(aux_layers)):
        log.info("%s", line)
    for line in misread(read, drafter.config, loaded):
        log.warning("%s", line)
    return drafter


class Checkpoint(NamedTuple):
    """What a directory holds."""

    where: str
    raw: dict[str, Any]  # ``config.json``
    tensors: dict[str, Tensor]  # by name, see :func:`specdec.export.tensors.canonical`
    ours: dict[str, Any] | None  # ``specdec.json``, which only our own exports have
    layer: str = ""  # what its first layer is called in the file


def check_unchanged(directory: Path) -> dict[str, str]:
    """Compare an export's files with their hashes, where it has any, and return these by name; ValueError names the
    file that differs."""
    return check_sums(directory, f"export it again or, if you changed it on purpose, remove {SUMS}")


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read a checkpoint's directory; ValueError if a file is missing or damaged, or two tensors have one name."""
    raw = _mapping(directory / CONFIG)
    # of the first that is there, all
    patterns = WEIGHTS, "*.safetensors", "pytorch_model.bin", "*.bin"
    files = next(filter(None, (sorted(directory.glob(pattern)) for pattern in patterns)), [])
    if not files:
        raise ValueError(f"{directory}: no {WEIGHTS}, nor another file of weights")
    tensors: dict[str, Tensor] = {}
    layer = ""
    for file in files:
        for name, value in _tensors(file).items():
            known = named.canonical(name)
            if known in tensors:
                raise ValueError(f"{file}: {name} is there twice, under another spelling too")
            if known is not None:
                tensors[known] = value
            if known in (QUERIES, LATENT):
                layer = name.removesuffix(known.removeprefix("layers.0."))
    try:
        tensors = named.dequantized(tensors, named.fp8_block(raw))
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from error
    hashes = check_unchanged(directory)
    ours = _mapping(directory / OURS) if (directory / OURS).is_file() else None
    if ours is not None and ours.get("weights_sha256") != (
        hashes.get(files[0].name) or sha256(files[0])
    ):
        raise ValueError(
            f"{files[0]}: its SHA-256 is not that in {OURS}; if you changed the weights on purpose, remove {OURS}"
        )
    return Checkpoint(str(directory), raw, tensors, ours, layer)


def fetch(source: str, revision: str | None) -> Path:
    """A local directory as it is, or one fetched from the Hugging Face Hub, or ValueError.

    Pickled weights are fetched only where there are no others.
    """
    if Path(source).is_dir():
        return Path(source)
    found = hub.fetch(source, revision, FETCHED)
    return (
        found
        if any(found.glob("*.safetensors"))
        else hub.fetch(source, revision, (*FETCHED, "*.bin"))
    )


def _mapping(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: not a JSON object")
    return value


def _tensors(file: Path) -> dict[str, Tensor]:
    """A file's tensors, which take no more memory than it has bytes; ValueError if it is damaged or holds more."""
    if file.suffix == ".safetensors":
        if odd := {each.dtype for each in measure(file).values()} - {
            *FLOATS,
            *WHOLE.values(),
            *named.FP8.values(),
        }:
            raise ValueError(f"{file}: weights of {odd.pop()}: only unquantised ones can be read")
        return load_file(file)
    size = regular(file)
    try:
        # what torch.save has written since 1.6, never compressed
        with zipfile.ZipFile(file) as archive:
            if sum(member.file_size for member in archive.infolist()) > size:
                raise ValueError("it would unpack to more than it is")
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        # a stranger's pickle may be anything, and so may what its reader stumbles over
        reason = (" ".join(str(error).split()) or type(error).__name__)[:120].replace("\x1b[1m", "")
        raise ValueError(
            f"{file}: no file of plain weights, which is all that is read ({reason})"
        ) from error
    if not isinstance(loaded, dict) or not all(map(_is_plain, loaded, loaded.values())):
        raise ValueError(f"{file}: not a table of tensors")
    # two, if head and embedding are one
    if (asked := sum(value.nbytes for value in loaded.values())) > 2 * size:
        raise ValueError(f"{file}: its {size:,} bytes are repeated into tensors of {asked:,}")
    return dict(loaded)


def _is_plain(name: Any, value: Any) -> bool:
    """Whether it is a named tensor whose numbers lie in the file."""
    return (
        isinstance(name, str)
        and name.isprintable()
        and len(name) <= 500
        and type(value) in (Tensor, torch.nn.Parameter)
        and value.layout == torch.strided
        and value.device.type == "cpu"
    )


def import_checkpoint(
    checkpoint: Checkpoint, target: Target, aux_layers: tuple[int, ...] | None = None
) -> Drafter:
    """The drafter that a checkpoint describes, in the dtype of its weights.

    What a checkpoint leaves to the target, embedding or head, is taken from it.

    Args:
        aux_layers: boundaries that the checkpoint was trained with, where its config does not say so rightly.

    Raises:
        ValueError: the checkpoint is not a drafter of this target, or has parts that drafters here have not.
    """
    try:
        config = described(checkpoint, target, aux_layers)
        if checkpoint.ours is not None:
            stored = DrafterConfig.from_json(checkpoint.ours.get("drafter"), OURS)
            if differing := contradictions(stored, config):
                raise ValueError(
                    f"{OURS} and config.json differ in {', '.join(differing)}: undo the change, or remove {OURS} to go "
                    "by config.json alone"
                )
            same = target.is_of(stored.target)  # wherever it lies now
            config = stored if same else dataclasses.replace(stored, target=dict(target.identity))
        tensors = checkpoint.tensors
        if (
            isinstance(config.entry, Wide)
            and (embedding := _tied_head(checkpoint, target)) is not None
        ):
            tensors = {**tensors, HEAD: embedding}
        ids_D, order_D = _vocabulary(tensors, config)
        return _filled(config, ids_D, tensors, order_D, target)
    except ValueError as error:
        raise ValueError(f"{checkpoint.where}: {error}") from error


def layout(checkpoint: Checkpoint) -> str:
    """Whose layout a checkpoint has, by what tells it from others'."""
    raw = checkpoint.raw
    ours = checkpoint.ours
    inner = raw.get("eagle_config") or {}
    if ours is not None:
        return f"an export of specdec's, format {ours.get('exported_as')}"
    if "speculators_model_type" in raw:
        return "speculators"
    if "dflash_config" in raw:
        return "z-lab"
    if (
        "norm_before_fc" in inner
        or "use_last_layernorm" in inner
        or inner.get("use_aux_hidden_state") is False
    ):
        return "NVIDIA"
    if checkpoint.layer.startswith("model."):
        return "Automodel"
    if keys.IDS in inner:
        return SPECFORGE
    return "SafeAILab" if checkpoint.layer == "midlayer." or BIAS in checkpoint.tensors else "vLLM"


def recognised(checkpoint: Checkpoint, config: DrafterConfig, given: bool = False) -> list[str]:
    """What was made of a checkpoint, in sentences; ``given``: the boundaries were not to be looked for in it."""
    raw = flat(checkpoint.raw)
    tensors = checkpoint.tensors
    wide = isinstance(config.entry, Wide)
    block = isinstance(config.entry, KVInjection)
    family = "DFlash" if block else "EAGLE-3" if wide else "EAGLE-1"
    last = "the last state, which " + ("a drafter without fc reads" if wide else "EAGLE-1 reads")
    inner = raw.get("dflash_config" if block else "eagle_config") or {}
    places = (
        [(raw, keys.AUX), (inner, "target_layer_ids")]
        if block
        else [(raw, keys.IDS), (inner, keys.IDS)]
    )
    named_there = any(holder.get(key) for holder, key in [*places, (inner, "layer_ids")])
    why = (
        "as given"
        if given
        else "of its config"
        if named_there
        else "its config names none: EAGLE-3's own"
    )
    switches = (
        {key: keys.write(config, "eagle3")[key] for key in FLAGS} if wide and not block else {}
    )
    on, off = (
        [key for key, value in switches.items() if value is state] for state in (True, False)
    )
    size = config.draft_vocab_size
    whole = config.vocab_size
    maps = " and ".join(name for name in named.MAPS if name in tensors) or "no d2t"
    theirs = [
        what for what, name in (("embedding", EMBEDDING), ("head", HEAD)) if name not in tensors
    ]
    kinds = sorted(
        {
            str(value.dtype).removeprefix("torch.")
            for name, value in tensors.items()
            if name not in named.MAPS
        }
    )
    parts = []
    if (stated := raw.get("num_hidden_layers")) is not None and stated != config.num_layers:
        parts.append(
            f"layers: {config.num_layers}, as the file has; its config says {stated}, which engines go by"
        )
    if (
        stated := raw.get("max_position_embeddings")
    ) is not None and stated < config.max_position_embeddings:
        parts.append(
            f"positions: {stated:,} in its config, raised to the target's {config.max_position_embeddings:,}"
        )
    if config.attention_bias:
        where = "queries, keys and values" + (
            " and the output" if config.attention_bias is True else ""
        )
        parts.append(f"biases: on {where}")
    if config.drafting.summary:
        parts.append(config.drafting.summary)
    if isinstance(config.attention, MLA):
        parts.append(
            f"attention: MLA, keys and values from a latent of {config.attention.kv_lora_rank}"
        )
    return [
        f"layout: {family}, {layout(checkpoint)}; its layer is called {checkpoint.layer}*, "
        f"{how_many(len(tensors), 'tensor')} in {' and '.join(kinds)}",
        f"boundaries: {', '.join(map(str, config.aux_layers))} of {config.num_target_layers}"
        + (f" ({why})" if config.fusion.mixes else f" ({last})"),
        *(
            [f"switches: {', '.join(on) or 'none'} on; {', '.join(off) or 'none'} off"]
            if switches
            else []
        ),
        *parts,
        f"draft vocabulary: {size:,} of {how_many(whole, 'token')} ({100 * size / whole:.1f} %), {maps}"
        + (f"; the target's {' and '.join(theirs)}" if theirs else "; its own embedding and head"),
    ]


def misread(checkpoint: Checkpoint, config: DrafterConfig, target: Target) -> list[str]:
    """What engines make otherwise of a checkpoint than was read, in sentences that say the way out."""
    raw = flat(checkpoint.raw)
    lines = []
    longest = target.config.max_position_embeddings
    if config.max_position_embeddings < longest:
        lines.append(
            f"its rope {config.rope['rope_type']} depends on max_position_embeddings, which is "
            f"{config.max_position_embeddings:,} here and {longest:,} in the target: engines raise it to the server's "
            "length and then rotate otherwise"
        )
    if isinstance(config.entry, Wide) and _tied_head(checkpoint, target) is not None:
        lines.append(
            "tie_word_embeddings is true and the file has no lm_head: its embedding is read as its head, as SGLang "
            "does; vLLM ignores the key and takes the target's head: serve an export of this drafter in its place"
        )
    ids = raw.get(keys.IDS)
    if (
        "speculators_model_type" in checkpoint.raw
        and checkpoint.ours is None
        and ids
        and target.num_layers > 6
    ):
        usual = list(Concat().default_layers(target.num_layers))
        if [i + 1 for i in sorted(ids)] == usual and list(config.aux_layers) == sorted(ids):
            lines.append(
                f"{keys.IDS} {ids} are read as boundaries, as speculators' layout numbers them; they are EAGLE-3's "
                f"{usual} less one: if the file was converted from a layout that numbers outputs of layers, give "
                f"--aux_layers {usual}"
            )
    return lines


def contradictions(stored: DrafterConfig, read: DrafterConfig) -> list[str]:
    """Fields in which our own config differs from what the checkpoint's says.

    No checkpoint tells whose head it was trained with, nor a zero bias from none; the target is whichever is given.
    """
    one = stored.to_json()
    two = read.to_json()
    both_narrow = isinstance(stored.entry, Narrow) and isinstance(read.entry, Narrow)
    silent = {"head", "target"} | ({"entry"} if both_narrow else set())
    silent |= (
        {"attention_bias"}
        if stored.attention_bias == "qkv" and read.attention_bias is True
        else set()
    )
    return [name for name in one if name not in silent and one[name] != two[name]]


def described(
    checkpoint: Checkpoint, target: Target, aux_layers: tuple[int, ...] | None = None
) -> DrafterConfig:
    """The drafter's config of config.json, the tensors' names and the target; ValueError if there is none."""
    tensors = checkpoint.tensors
    raw = checkpoint.raw
    if raw.get("format") == DRAFTER:
        raise ValueError(
            "no drafter as others publish them, but specdec's own, which needs no import"
        )
    config = {**flat(raw)}
    if (LATENT in tensors) != (config.get("kv_lora_rank") is not None):
        lacks = "kv_lora_rank in config.json" if LATENT in tensors else LATENT
        raise ValueError(f"of a drafter with multi-head latent attention (MLA) it lacks {lacks}")
    reads = LATENT if LATENT in tensors else QUERIES  # what reads the first layer's input
    last_state = keys.reads_last_state(config) and "fc.weight" not in tensors
    _check_matrices(tensors, (reads,) if last_state else (reads, "fc.weight"))
    hidden = tensors[reads].shape[1] // 2 if last_state else len(tensors["fc.weight"])
    block = CONTEXT in tensors
    if block:
        _check_block(checkpoint, config, target)
    # EAGLE-3's layer reads embedding and feature
    wide = last_state or tensors[reads].shape[1] == 2 * hidden
    if wide and not last_state and keys.reads_last_state(config):
        raise ValueError(
            "use_aux_hidden_state is false and the file has fc.weight, which engines drop: remove one"
        )
    method = "dflash" if block else "eagle3" if wide else "eagle"
    config["num_hidden_layers"] = _layers(tensors, config.get("num_hidden_layers"))
    found = {"recurrence": PreNorm()} | keys.read(config, method)
    if not block and (named.MASK in tensors) != found["recurrence"].drafting().one_call:
        lacks = (
            "mask_token_id in config.json" if named.MASK in tensors else "the tensor mask_hidden"
        )
        raise ValueError(
            f"a parallel drafter (P-EAGLE) has a mask token and a learned state: it lacks {lacks}"
        )
    found["attention_bias"] = _biases(tensors, found["attention_bias"])
    norms = found.pop("norms") | {"query_key": "layers.0.self_attn.q_norm.weight" in tensors}
    if wide or block:
        shared = HEAD not in tensors and found["draft_vocab_size"] == found["vocab_size"]
        shared = shared and (block or _tied_head(checkpoint, target) is None)
        found |= {
            "entry": KVInjection() if block else Wide(),
            "head": "target" if shared else "own",
        }
    else:
        found |= {
            "entry": Narrow(bias=BIAS in tensors),
            "head": "target",
            "target_hidden_size": hidden,
        }
        found["draft_vocab_size"] = found["vocab_size"]
    if (wide or block) and not last_state:
        numbered = checkpoint.ours is not None or "speculators_model_type" in raw
        if aux_layers is None:  # else what the config names is not asked: it may be what is wrong
            aux_layers = (
                keys.block_boundaries(config)
                if block
                else keys.boundaries(config, target.num_layers, numbered)
            )
        found |= {"fusion": Concat(), "aux_layers": aux_layers}
    else:
        if aux_layers:
            raise ValueError(
                "a drafter without fused states reads the target's last state: leave out --aux_layers"
            )
        found |= {"fusion": LastLayer(), "aux_layers": (target.num_layers,)}
    found["norms"] = dataclasses.replace(
        Norms(embed=not block) if wide or block else EAGLE1, **norms
    )
    for field, theirs in (
        ("vocab_size", target.vocab_size),
        ("target_hidden_size", target.hidden_size),
    ):
        if found[field] != theirs:
            raise ValueError(
                f"it is for a target of {field} {found[field]}, {target.source} has {theirs}"
            )
    described_config = DrafterConfig(
        **found, num_target_layers=target.num_layers, target=dict(target.identity)
    )
    return keys.reaching(described_config, target.config.max_position_embeddings)


def _check_matrices(tensors: Mapping[str, Tensor], wanted: Sequence[str]) -> None:
    """Raise ValueError unless these are matrices of the file, with what stands there under a name like it."""
    lacking = [name for name in wanted if name not in tensors or tensors[name].ndim != 2]
    if lacking:
        also = " (or midlayer.*)" if lacking[0] == QUERIES else ""
        near = nearest_name(lacking[0], tensors)
        raise ValueError(
            f"no drafter: it lacks a matrix {lacking[0]}{also}; {near}".removesuffix("; ")
        )


def _check_block(checkpoint: Checkpoint, config: Mapping[str, Any], target: Target) -> None:
    """Raise ValueError for a block drafter of another target, or with a mask that has an embedding of its own."""
    if (Path(checkpoint.where) / "mask_embedding.pt").exists():
        raise ValueError(
            "it has a mask_embedding.pt, a mask with an embedding of its own, which drafters here have not"
        )
    layers = config.get("num_target_layers", target.num_layers)
    if layers != target.num_layers:
        raise ValueError(
            f"it is for a target of {layers!r:.60} layers, {target.source} has {target.num_layers}"
        )


def _layers(tensors: Mapping[str, Tensor], stated: Any) -> Any:
    """How many layers a checkpoint has: what its config says, or fewer where the file's are numbered 0..n-1 (EAGLE's
    authors kept the target's 40 in the config of a drafter of one layer)."""
    numbers = {int(match[1]) for name in tensors if (match := re.match(r"layers\.(\d+)\.", name))}
    whole = numbers == set(range(len(numbers)))
    more = stated is None or (type(stated) is int and len(numbers) < stated <= MOST_LAYERS)
    return len(numbers) if numbers and whole and more else stated


def _biases(tensors: Mapping[str, Tensor], stated: Any) -> Any:
    """``attention_bias`` of a drafter whose config says ``stated``, which names no bias on the output; ValueError for
    biases that it does not switch on."""
    if stated is False and QUERY_BIAS in tensors:
        raise ValueError(
            f"the file has {QUERY_BIAS}, and neither attention_bias nor qkv_bias is true in config.json: engines would "
            "drop it without a word; write qkv_bias: true there if the drafter was trained with it"
        )
    return (
        "qkv" if stated is True and QUERY_BIAS in tensors and OUTPUT_BIAS not in tensors else stated
    )


def _tied_head(checkpoint: Checkpoint, target: Target) -> Tensor | None:
    """The embedding of an EAGLE-3 checkpoint that has no head and says that the two are tied, where that is another
    head than the target's; ValueError if its draft vocabulary is smaller than the embedding."""
    config = flat(checkpoint.raw)
    if config.get("tie_word_embeddings") is not True or HEAD in checkpoint.tensors:
        return None
    size = config.get("draft_vocab_size")
    if size not in (None, config.get("vocab_size")):
        raise ValueError(
            f"tie_word_embeddings is true and there is no {HEAD}: an embedding of {config.get('vocab_size')} tokens is "
            f"no head over {size}, and engines would draft from one that nobody trained"
        )
    embedding = checkpoint.tensors.get(EMBEDDING, target.embedding_weight().detach().cpu())
    return None if same_numbers(embedding, target.head_weight()) else embedding


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal number by number, whatever their dtypes and devices."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.shape == b.shape and torch.equal(a.to("cpu", dtype), b.to("cpu", dtype))


def _vocabulary(tensors: Mapping[str, Tensor], config: DrafterConfig) -> tuple[Tensor, Tensor]:
    """The draft vocabulary ascending, and where its tokens stand in the checkpoint: some order them by frequency."""
    D = config.draft_vocab_size
    V = config.vocab_size
    if named.DRAFT_TO_TARGET not in tensors and D < V:
        raise ValueError(
            f"it lacks d2t, which says what its {how_many(D, 'draft token')} are of {V:,}"
        )
    offsets_D = tensors.get(named.DRAFT_TO_TARGET, torch.zeros(D, dtype=torch.int64))
    if offsets_D.shape != (D,):
        raise ValueError(
            f"d2t has shape {list(offsets_D.shape)}, the config says {how_many(D, 'draft token')}"
        )
    if offsets_D.dtype not in WHOLE or offsets_D.dtype == torch.bool:
        raise ValueError(f"d2t is {offsets_D.dtype}, wanted integers")
    offsets_D = offsets_D.to(torch.int64)
    # offsets stand still wherever two tokens of the target follow each other, which some always do; ids never do
    if NEVER <= D < V and bool((offsets_D.diff() > 0).all()):
        raise ValueError(
            "d2t rises with every token, as target ids do: it must hold offsets, target id less draft id"
        )
    ids_D, order_D = (torch.arange(D) + offsets_D).sort()
    if bool((ids_D.diff() <= 0).any()) or int(ids_D[0]) < 0 or int(ids_D[-1]) >= V:
        raise ValueError(
            f"d2t must hold offsets to tokens of their own in 0..{V - 1}, target id less draft id"
        )
    members_V = tensors.get(named.TARGET_TO_DRAFT)
    if members_V is not None and (members_V.shape != (V,) or members_V.dtype not in WHOLE):
        raise ValueError(
            f"t2d is {members_V.dtype} of shape {list(members_V.shape)}, wanted bool of [{V}]"
        )
    if members_V is not None and not torch.equal(members_V.bool().nonzero()[:, 0], ids_D):
        raise ValueError("t2d and d2t name different tokens")
    return ids_D, order_D


def _filled(
    config: DrafterConfig,
    ids_D: Tensor,
    tensors: Mapping[str, Tensor],
    order_D: Tensor,
    target: Target,
) -> Drafter:
    """A drafter with the checkpoint's weights, in a dtype that holds all of them; it is built once their shapes fit."""
    weights = {name: value for name, value in tensors.items() if name not in named.MAPS}
    dtypes = {value.dtype for value in weights.values()}
    if odd := dtypes - {torch.float16, torch.bfloat16, torch.float32, torch.float64}:
        raise ValueError(f"weights of {odd.pop()}: only unquantised ones can be read")
    own_head = HEAD in weights
    if config.hidden_size == target.hidden_size:
        theirs = {EMBEDDING: target.embedding_weight()}
        theirs |= (
            {HEAD: target.head_weight()} if config.draft_vocab_size == config.vocab_size else {}
        )
        weights = theirs | weights
    _drop_doubles(weights, config)
    if named.MASK in weights:  # published flat
        if weights[named.MASK].numel() % target.hidden_size:
            raise ValueError(
                f"mask_hidden has {weights[named.MASK].numel()} numbers, no multiple of {target.hidden_size}"
            )
        weights[named.MASK] = weights[named.MASK].reshape(-1, target.hidden_size)
    rows = named.table(config)
    state = {
        name: value
        for name, value in skeleton_of(config).state_dict().items()
        if name != VOCABULARY
    }
    shapes = named.published(state, config)
    wanted = {str(named.translate(name, rows)): list(value.shape) for name, value in shapes.items()}
    if fault := tensor_fault({name: value.shape for name, value in weights.items()}, wanted):
        raise ValueError(fault)
    check_finite(weights)
    if own_head:
        weights[HEAD] = weights[HEAD][order_D]
    back = {theirs: ours for ours, theirs in rows.items()}
    dtype = functools.reduce(torch.promote_types, dtypes)
    published = {
        str(named.translate(name, back)): value.to("cpu", dtype) for name, value in weights.items()
    }
    made = named.merged(state, published, config)
    drafter = Drafter(config, ids_D).to(dtype)
    drafter.load_state_dict(made | {VOCABULARY: drafter.vocab.target_ids_D})
    return drafter.eval().requires_grad_(False)


def _drop_doubles(weights: dict[str, Tensor], config: DrafterConfig) -> None:
    """What engines need and says nothing: a zero bias, a further layer's input norm under its second name."""
    for i in range(1, config.num_layers):
        first = f"layers.{i}.input_layernorm.weight"
        second = f"layers.{i}.hidden_norm.weight"
        if second in weights:
            double = weights.pop(second)
            if not torch.equal(weights.setdefault(first, double).double(), double.double()):
                raise ValueError(f"{second} and {first} differ: engines take one or the other")
    zeros = [BIAS] if config.entry == Narrow(bias=False) else []
    if config.attention_bias == "qkv":
        zeros += [f"layers.{i}.self_attn.o_proj.bias" for i in range(config.num_layers)]
    for name in zeros:
        if name in weights and not weights[name].any():
            del weights[name]
