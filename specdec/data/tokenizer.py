"""Which tokenizer it is: a hash of all that makes tokens of texts and conversations."""

import hashlib
import json
from typing import Any

FIRST_OF_CONTENT = '"added_tokens":'  # behind truncation and padding, which the last call has set


def tokenizer_digest(tokenizer: Any) -> str:
    """Return the hexadecimal SHA-256 of a tokenizer of transformers: its content, special tokens and chat template.

    Where its files lie does not count, nor does the truncation or padding of its last call.
    """
    if tokenizer.is_fast:
        text = tokenizer.backend_tokenizer.to_str()
        content = text[max(text.find(FIRST_OF_CONTENT), 0) :]
    else:
        content = json.dumps([type(tokenizer).__name__, tokenizer.get_vocab()], sort_keys=True)
    asked = [tokenizer.special_tokens_map, tokenizer.chat_template]
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode())
    digest.update(content.encode())
    return digest.hexdigest()
