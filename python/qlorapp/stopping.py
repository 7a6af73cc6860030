# SPDX-License-Identifier: Apache-2.0
"""When generate() stops beside its token limit: stopping_criteria, stop_strings and max_time, as transformers has them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

#: criterion(input_ids so far, scores): True for all rows, or one truth value a row.
Criterion = Callable[[torch.Tensor, None], Any]


def criteria_of(given: Any, stop_strings: Any, max_time: float | None, tokenizer: Any) -> list[Criterion]:
    """What is asked at each position: what was passed, and transformers' own classes for the two options.

    given: a criterion, or a list of them (StoppingCriteriaList is one).
    @raises TypeError for what cannot be called, ValueError for stop_strings without a tokenizer.
    """
    criteria = [given] if callable(given) and not isinstance(given, list) else list(given if given is not None else ())
    for criterion in criteria:
        if not callable(criterion):
            raise TypeError(
                f"[generate] stopping_criteria must be callables of (input_ids, scores), as transformers.StoppingCriteria is; got "
                f"{type(criterion).__name__}. Pass StoppingCriteriaList([…])."
            )
    if stop_strings:
        if tokenizer is None:
            raise ValueError(f"[generate] stop_strings={stop_strings!r} needs the tokenizer. Pass tokenizer=tokenizer as well.")
        criteria.append(_of_transformers("stop_strings", "StopStringCriteria")(tokenizer, stop_strings))
    if max_time is not None:
        criteria.append(_of_transformers("max_time", "MaxTimeCriteria")(max_time))
    return criteria


def _of_transformers(option: str, name: str) -> Any:
    try:
        from transformers.generation import stopping_criteria
    except ModuleNotFoundError as error:
        raise ImportError(
            f"[generate] {option} uses transformers' {name}, which is not installed: pip install 'qlorapp[hf]'."
        ) from error
    return getattr(stopping_criteria, name)


class StopCheck:
    """Asks the criteria once a position, with the whole batch as transformers would show it.

    The C++ loop asks row by row, and a row must answer before the tokens of the rows after it are known. So the criteria are asked at
    the last row of a position, and a row before it that they stop goes on for one token more, which `trim` takes off again.
    """

    def __init__(self, criteria: Iterable[Criterion], input_ids: torch.Tensor, eos_token_ids: list[int], fill: int) -> None:
        """input_ids: (B, T), the padded prompts as they were given. fill: what ended rows show."""
        self._criteria = list(criteria)
        self._ids = input_ids
        self._eos = set(eos_token_ids)
        self._fill = fill
        self._running = list(range(input_ids.shape[0]))
        self._tokens: dict[int, int] = {}  # of this position
        self._stopped: set[int] = set()  # rows that learn of it with their next token
        self._extra: set[int] = set()  # rows that have such a token

    def __call__(self, row: int, token: int) -> bool:
        """Whether the row goes on. Called for each row that runs, in their order, at each position."""
        if row in self._stopped:
            self._stopped.remove(row)
            self._extra.add(row)
            return False
        self._tokens[row] = token
        if row != self._running[-1]:
            return True
        column = torch.full((self._ids.shape[0], 1), self._fill, dtype=self._ids.dtype, device=self._ids.device)
        for one, chosen in self._tokens.items():
            column[one] = chosen
        self._ids = torch.cat([self._ids, column], dim=1)
        done = self._asked()
        ended = {one for one, chosen in self._tokens.items() if chosen in self._eos}
        self._running = [one for one in self._running if one not in ended and not done[one]]
        self._stopped |= {one for one in self._tokens if one != row and one not in ended and done[one]}
        self._tokens = {}
        return not done[row]

    def _asked(self) -> list[bool]:
        """The answers for each row. Every criterion is asked, whatever those before it said."""
        rows = self._ids.shape[0]
        done = torch.zeros(rows, dtype=torch.bool)
        for criterion in self._criteria:
            answer = torch.as_tensor(criterion(self._ids, None)).bool().cpu()
            if answer.dim() > 1 or answer.numel() not in (1, rows):
                raise ValueError(
                    f"[generate] a criterion must return a bool, or a bool for each of {rows} rows; {type(criterion).__name__} returned shape "
                    f"{tuple(answer.shape)}. Return torch.full((input_ids.shape[0],), …)."
                )
            done |= answer
        return [bool(answer) for answer in done]

    def trim(self, rows: list[list[int]]) -> list[list[int]]:
        """The generated tokens without those that came after a row's end."""
        return [tokens[:-1] if row in self._extra else tokens for row, tokens in enumerate(rows)]
