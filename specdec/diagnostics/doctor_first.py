"""The check that comes before the target is loaded: what its config, its tokenizer and the design tell in seconds."""

from collections.abc import Callable, Iterator
from typing import Any

from specdec.data import ChatData, TextData, TokenData
from specdec.data.template import template_of
from specdec.diagnostics.doctor_setup import CheckResult, Finding, unchecked
from specdec.drafter import DrafterConfig, load_drafter
from specdec.export.ahead import missing_kernels, planned_subject, served, unserved
from specdec.target import NotServable
from specdec.target.loading import load_config
from specdec.training.building import check_shapes, early_config
from specdec.training.module import DrafterModule


def first_findings(module: DrafterModule, data: TokenData, saved: str | None) -> Iterator[Finding]:
    """The drafter's shapes, the engines that will serve it, the tokenizer's template and its first token.

    Args:
        saved: the directory of a saved drafter that stands in place of a new one.

    Raises:
        ValueError: config or tokenizer cannot be read.
    """
    source = module.target_source
    hf_config = load_config(source.directory(), source.revision, source.trust_remote_code)
    configs: list[DrafterConfig] = []

    def shapes() -> str:
        """Keeps the drafter's config where design and target have one."""
        config = load_drafter(saved).config if saved else early_config(module.spec, hf_config)
        if config is None:
            raise ValueError(
                f"{source.source}: its config names no attention heads: it is of no family for a target"
            )
        configs.append(config)
        check_shapes(config)
        heads = f"{config.num_attention_heads} heads of {config.head_dim}, {config.num_key_value_heads} for keys"
        return f"{heads}, boundaries {list(config.aux_layers)}"

    yield _attempted("the drafter has a shape that engines load", shapes)
    if configs:
        yield _served(module, configs[0], hf_config)
    yield from _tokenizer(source.load_tokenizer(), data)


def _attempted(what: str, attempt: Callable[[], str]) -> Finding:
    """Sound, with what the attempt returns as its remark; faulty if it raises ValueError."""
    try:
        remark = attempt()
    except ValueError as error:
        return Finding(what, CheckResult.FAULTY, note=str(error))
    return Finding(what, CheckResult.SOUND, note=remark)


def _served(module: DrafterModule, config: DrafterConfig, hf_config: Any) -> Finding:
    """Whether an engine will serve the drafter, and what the others lack."""
    what = "an engine will serve the drafter"
    try:
        module.target_source.servable()
    except NotServable as error:
        return unchecked(what, str(error))
    subject = planned_subject(config, hf_config, module.train_embed, module.train_head)
    reasons = unserved(subject)
    remarks = [f"{engine} will not: {text}" for engine, text in reasons.items()]
    if kernels := missing_kernels(config):
        remarks.append(kernels)
    if served(reasons):
        return Finding(what, CheckResult.SOUND, note="; ".join(remarks))
    remarks.append("it can be trained and evaluated here alone")
    return Finding(what, CheckResult.FAULTY, note="; ".join(remarks))


def _tokenizer(tokenizer: Any, data: TokenData) -> Iterator[Finding]:
    """A template for conversations, and a first token that is added."""
    if isinstance(data, ChatData):

        def template() -> str:
            template_of(tokenizer)
            return ""

        yield _attempted("the tokenizer has a chat template that writes conversations", template)
    bos = tokenizer.bos_token
    if bos is None or not isinstance(data, ChatData | TextData):
        return
    what = f"texts begin with the BOS token {bos}, which the tokenizer names"
    if isinstance(data, ChatData):
        source = str(tokenizer.chat_template)
        added = "bos_token" in source or bos in source
        where = "chat template writes"
    else:
        added = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
        where = "post-processor adds"
    if added:
        yield Finding(what, CheckResult.SOUND)
        return
    yield unchecked(
        what,
        f"no {where} it: if the model was trained with it, mend the tokenizer (add_bos_token, or its template), since "
        "engines begin texts as this tokenizer does",
    )
