"""The tokenizer of the embedded target: byte-level BPE trained on the corpus.

Every text starts with ``<s>``: encoding adds it, and training rows begin with it, so position 0 is always the same
token and a natural attention sink. ``</s>`` ends a file. Decoding with ``skip_special_tokens=True`` gives back the
text byte for byte.
"""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS = "<s>", "</s>"


def train_tokenizer(texts: Iterable[str], vocab_size: int, longest: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer of exactly ``vocab_size`` tokens.

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
