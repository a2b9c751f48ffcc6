"""Load tokenizers, and wrap them with what the data pipeline needs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.data.chat import ChatWriter
from penstock.data.errors import TokenizerError
from penstock.model.hub import hub_is_reachable

FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"),
    *("sentencepiece.bpe.model", "tekken.json"),
)
"""Tokenizer files. A directory with a tokenizer contains at least one of them."""


LARGEST_VOCABULARY = 1 << 24
"""Limit of token numbers. The largest published vocabularies have about 300,000 tokens."""


def load_tokenizer(
    model: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> Any:
    """Load the tokenizer of a model: a local directory or a Hugging Face id."""
    from transformers import AutoTokenizer

    path = Path(model)
    if path.is_dir() and not trust_remote_code:
        # Without this check, transformers creates an empty tokenizer for some model types.
        if not any((path / name).is_file() for name in FILES):
            raise TokenizerError(
                f"{model} has no tokenizer (none of {', '.join(FILES[:4])}...); copy the "
                f"tokenizer files of the model it comes from into it"
            )
    elif not path.is_dir() and (path.exists() or str(model).count("/") > 1):
        raise TokenizerError(f"{model} is neither a directory nor a Hugging Face id")
    is_offline = not path.is_dir() and not hub_is_reachable()
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(model),
            revision=revision or "main",
            trust_remote_code=trust_remote_code,
            local_files_only=is_offline,
        )
        _check_numbers(tokenizer)
    except Exception as error:  # the exceptions differ by version and by file
        if is_offline:
            raise TokenizerError(
                f"there is no directory {model} here, and the Hub could not be reached; check the "
                f"path, or pass a directory that contains the tokenizer"
            ) from error
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TokenizerError(f"the tokenizer of {model} cannot be loaded: {reason}") from error
    return tokenizer


def _check_numbers(tokenizer: Any) -> None:
    """Raise ValueError for numbers that would make the tokenizer allocate too much, or fail later.

    A fast tokenizer allocates an entry for every number up to the largest token.
    """
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= LARGEST_VOCABULARY:
        raise ValueError(
            f"the vocabulary has the token number {largest}, but the largest one allowed is "
            f"{LARGEST_VOCABULARY - 1}"
        )
    limit = getattr(tokenizer, "model_max_length", None)
    if limit is not None and (not isinstance(limit, int | float) or limit < 1):
        raise ValueError(f"model_max_length must be a number of at least 1, got {limit!r:.60}")


class Tokens:
    """A tokenizer with the operations that the data pipeline needs."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        path = str(getattr(tokenizer, "name_or_path", "") or "")
        self.name = f"the tokenizer of {path}" if path else "the tokenizer"
        # The numbers of a vocabulary may have gaps, so its length is not enough.
        self.size = max(len(tokenizer), max(tokenizer.get_vocab().values(), default=0) + 1)

    @cached_property
    def chat(self) -> ChatWriter | None:
        """Renders chats; None if the tokenizer has no chat template."""
        return ChatWriter(self._tokenizer) if self._tokenizer.chat_template else None

    @cached_property
    def opening(self) -> list[int]:
        """Tokens that the tokenizer puts before a text, such as a beginning-of-sequence token."""
        bare = self.encode(["x"])[0]
        with_special = list(self._tokenizer("x", verbose=False)["input_ids"])
        for start in range(len(with_special) - len(bare) + 1):
            if with_special[start : start + len(bare)] == bare:
                return with_special[:start]
        return []

    @cached_property
    def end(self) -> int:
        """Token that ends a document."""
        if self._tokenizer.eos_token_id is None:
            raise TokenizerError(
                f"{self.name} has no eos_token, which must end every text; "
                f"set it in tokenizer_config.json"
            )
        return int(self._tokenizer.eos_token_id)

    @property
    def pad(self) -> int:
        """Token that fills a row. It is never trained nor attended to, so any token will do."""
        ids = (self._tokenizer.pad_token_id, self._tokenizer.eos_token_id, 0)
        return int(next(token for token in ids if token is not None))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts without special tokens."""
        if not texts:
            return []
        encoding = self._tokenizer(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [list(ids) for ids in encoding["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode tokens, including special tokens, without cleaning up spaces."""
        return str(
            self._tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def fingerprint(self) -> str:
        """Return a hash that is equal for tokenizers that encode the same data equally."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:
            rules = json.loads(backend.to_str())
            rules.pop("truncation", None)  # depends on the last call
            rules.pop("padding", None)
        else:
            rules = sorted(self._tokenizer.get_vocab().items())
        parts = (
            type(self._tokenizer).__name__,
            rules,
            {name: str(word) for name, word in self._tokenizer.special_tokens_map.items()},
            self._tokenizer.chat_template,
            self.opening,
        )
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
