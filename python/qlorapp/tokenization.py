# SPDX-License-Identifier: Apache-2.0
"""AutoTokenizer: transformers' own tokenizers, with a pad token in any case."""

import logging
import os
import re
from typing import Any

from .hub import folder_of

_log = logging.getLogger("qlorapp")

#: Tokens that checkpoints without a pad token have for the purpose, by the names that they are trained under.
_FOR_PADDING = (
    "<|finetune_right_pad_id|>",
    "<|finetune_right_pad|>",
    "<pad>",
    "[PAD]",
    "<|pad|>",
    "<|padding|>",
    "<|endoftext|>",
)
#: Tokens that checkpoints keep free for such purposes.
_RESERVED = re.compile(r"<\|reserved_special_token_\d+\|>|<reserved_?\d+>|<unused_?\d+>|\[unused_?\d+\]|\[control_\d+\]")


def _theirs() -> Any:
    try:
        from transformers import AutoTokenizer as theirs
    except ModuleNotFoundError as error:
        raise ImportError("[AutoTokenizer] is transformers' own: pip install 'qlorapp[hf]'.") from error
    return theirs


def give_pad_token(tokenizer: Any) -> Any:
    """Sets the pad token where there is none, and says so. It is EOS only where the checkpoint has no token to spare.

    Labels are padded by length here, so an EOS that pads is still learnt; transformers' collators go by the token.
    """
    if tokenizer.pad_token is not None:
        return tokenizer
    known, eos = tokenizer.get_vocab(), tokenizer.eos_token
    reserved = sorted(filter(_RESERVED.fullmatch, known), key=known.__getitem__)
    free = (token for token in (*_FOR_PADDING, *reserved, "<unk>", tokenizer.unk_token) if token in known and token != eos)
    token = next(free, eos)
    if token is None:
        raise ValueError("[AutoTokenizer] the checkpoint has neither a pad token nor an EOS. Set tokenizer.pad_token by hand.")
    tokenizer.pad_token = token
    as_eos = ", which is EOS: transformers' DataCollatorForLanguageModeling leaves it out of the loss" if token == eos else ""
    _log.warning(
        "[AutoTokenizer] the checkpoint has no pad token; %s pads%s. Set tokenizer.pad_token for another.", token, as_eos
    )
    return tokenizer


class _Delegating(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_theirs(), name)


class AutoTokenizer(metaclass=_Delegating):
    """transformers.AutoTokenizer, which is imported when it is first used."""

    def __init__(self) -> None:
        raise OSError("[AutoTokenizer] is made by AutoTokenizer.from_pretrained(name or folder).")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """A tokenizer by its folder, or by its name from the local Hugging Face cache or the hub. It has a pad token."""
        name = os.fspath(pretrained_model_name_or_path)
        wanted = {key: kwargs.pop(key, None) for key in ("revision", "token", "cache_dir")}
        folder = folder_of(name, wanted="tokenizer", local_files_only=kwargs.pop("local_files_only", False), **wanted)
        if kwargs.pop("trust_remote_code", False):
            _log.warning("[AutoTokenizer] trust_remote_code has no effect: code of a checkpoint is never run.")
        try:
            tokenizer = _theirs().from_pretrained(
                str(folder), *args, trust_remote_code=False, **kwargs
            )  # or it would ask on stdin
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            raise ValueError(
                f"[AutoTokenizer] the tokenizer of {name} is code of the checkpoint, and code of a checkpoint is never run. Use a checkpoint "
                "with a tokenizer.json that needs none, or load it by transformers, which runs the code."
            ) from error
        tokenizer.name_or_path = name
        return give_pad_token(tokenizer)
