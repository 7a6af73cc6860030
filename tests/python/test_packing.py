# SPDX-License-Identifier: Apache-2.0
"""Packs of rows: what every strategy must hold, whatever the rows."""

import functools
import math

import datasets
import pytest
import qlorapp
from hypothesis import given, settings
from hypothesis import strategies as st
from qlorapp import _C
from tiny_llama import folder  # noqa: F401  (a fixture)
from tiny_trainer import adapted, base_model, in_cpp, rows, tokenizer

STRATEGIES = ["bfd", "bfd_split", "wrapped"]
lengths_of_rows = st.lists(st.integers(2, 40), min_size=1, max_size=60)


def rows_of(lengths):
    """Every token of every row is another number, so that each can be found again."""
    first = 0
    made = []
    for length in lengths:
        ids = list(range(first, first + length))
        made.append((ids, ids))
        first += length
    return made


def pieces_of(packs):
    pieces = []
    for ids, labels, row_lengths in packs:
        assert ids == labels and sum(row_lengths) == len(ids) and min(row_lengths) >= 1
        begin = 0
        for length in row_lengths:
            pieces.append(ids[begin : begin + length])
            begin += length
    return pieces


@settings(deadline=None, max_examples=200)
@given(lengths=lengths_of_rows, capacity=st.integers(2, 48), strategy=st.sampled_from(STRATEGIES))
def test_no_pack_is_too_long_and_only_the_strategy_s_tokens_are_lost(lengths, capacity, strategy):
    rows = rows_of(lengths)
    packs = _C.pack(rows, capacity, strategy)
    assert max(len(ids) for ids, _, _ in packs) <= capacity
    pieces = pieces_of(packs)
    for piece in pieces:  # of one row each, in its order
        assert piece == list(range(piece[0], piece[-1] + 1))
        assert sum(piece[0] in ids and piece[-1] in ids for ids, _ in rows) == 1
    kept = sorted(token for piece in pieces for token in piece)
    assert len(kept) == len(set(kept))
    if strategy == "bfd":
        expected = [token for ids, _ in rows for token in ids[:capacity]]
    else:  # a piece of one token has no target: nothing predicts it, and it predicts nothing
        expected = [token for ids, _ in rows for token in ids]
        alone = set(expected) - set(kept)
        assert len(alone) <= (len(rows) if strategy == "bfd_split" else 2 * (sum(lengths) // capacity + 1))
        expected = [token for token in expected if token not in alone]
    assert kept == sorted(expected)


@settings(deadline=None, max_examples=200)
@given(lengths=lengths_of_rows, capacity=st.integers(40, 90))
def test_packs_are_those_of_best_fit_decreasing(lengths, capacity):
    """Against the rule as written down, by looking at every pack for every row."""
    packs: list[list[int]] = []
    room: list[int] = []
    reached: list[int] = []  # when a pack got the room that it has: of equals the first is taken
    for turn, i in enumerate(sorted(range(len(lengths)), key=lambda i: -lengths[i])):
        fitting = [p for p in range(len(packs)) if room[p] >= lengths[i]]
        if fitting:
            best = min(fitting, key=lambda p: (room[p], reached[p]))
        else:
            packs.append([])
            room.append(capacity)
            reached.append(0)
            best = len(packs) - 1
        packs[best].append(i)
        room[best] -= lengths[i]
        reached[best] = turn
    assert _C.best_fit_decreasing(lengths, capacity) == packs


def optimum(lengths, capacity):
    """The fewest packs, by trying all."""

    @functools.cache
    def search(rest, rooms):
        if not rest:
            return 0
        first, *others = rest
        best = 1 + search(tuple(others), tuple(sorted((*rooms, capacity - first))))
        for i, room in enumerate(rooms):
            if room >= first:
                left = tuple(sorted((*rooms[:i], room - first, *rooms[i + 1 :])))
                best = min(best, search(tuple(others), left))
        return best

    return search(tuple(sorted(lengths, reverse=True)), ())


@settings(deadline=None, max_examples=60)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8), capacity=st.integers(12, 20))
def test_packs_are_within_eleven_ninths_of_the_fewest_possible(lengths, capacity):
    """The proven bound of best- and first-fit decreasing: 11/9 of the optimum and 6/9."""
    assert len(_C.best_fit_decreasing(lengths, capacity)) <= math.floor(11 / 9 * optimum(lengths, capacity) + 6 / 9)


def test_wrapped_fills_every_pack_but_the_last():
    packs = _C.pack(rows_of([7, 5, 9, 30, 4, 6]), 10, "wrapped")
    # Pieces of one token, at 20, 50 and 60, have no target and are left out.
    assert [len(ids) for ids, _, _ in packs] == [10, 10, 9, 10, 10, 9]


def test_rows_without_a_target_are_left_out():
    rows = [([1, 2, 3], [-100, -100, -100]), ([4, 5, 6, 7], [-100, -100, -100, 7]), ([8, 9], [8, 9])]
    assert pieces_of([(ids, ids, lengths) for ids, _, lengths in _C.pack(rows, 8)]) == [[4, 5, 6, 7], [8, 9]]
    assert pieces_of([(ids, ids, lengths) for ids, _, lengths in _C.pack(rows, 3)]) == [[8, 9]]  # what 7 stood for was cut off


# --- in training


def test_a_step_over_packs_is_the_step_over_their_rows(folder, tmp_path):
    """One step over all rows: the same mean over the same targets, and the same update after it."""
    data = datasets.Dataset.from_list([{"input_ids": row["input_ids"]} for row in rows(48)])

    def run(packing):
        config = qlorapp.SFTConfig(
            output_dir=str(tmp_path), packing=packing, max_length=64, per_device_train_batch_size=48, max_steps=2, logging_steps=1,
            lr_scheduler_type="constant", save_strategy="no", report_to="none", use_cpu=True, bf16=False, disable_tqdm=True,
        )  # fmt: skip
        trainer = qlorapp.SFTTrainer(adapted(base_model(folder)), config, train_dataset=data, processing_class=tokenizer())
        trainer.train()
        assert in_cpp(trainer)
        return len(trainer.train_dataset), trainer.state.log_history

    (count, packed), (_, alone) = run(True), run(False)
    assert count < 12
    assert packed[0]["loss"] == pytest.approx(alone[0]["loss"], rel=1e-6)
    assert packed[0]["grad_norm"] == pytest.approx(alone[0]["grad_norm"], rel=1e-5)
    assert packed[1]["loss"] == pytest.approx(alone[1]["loss"], rel=1e-4)  # AdamW's first step turns rounding into signs
