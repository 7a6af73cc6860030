# SPDX-License-Identifier: Apache-2.0
"""Packs of rows: what every strategy must hold, whatever the rows."""

import functools
import math

import pytest
import qlorapp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qlorapp import _C
from qlorapp.batches import PadRight
from tiny_llama import folder, load  # noqa: F401  (a fixture)
from tiny_trainer import losses, rows, trained

STRATEGIES = ["bfd", "bfd_split", "wrapped"]
lengths_of_rows = st.lists(st.integers(2, 40), min_size=1, max_size=60)


def rows_of(lengths):
    """Every token of every row is another number, so that each can be found again."""
    first = 0
    rows = []
    for length in lengths:
        ids = list(range(first, first + length))
        rows.append((ids, ids))
        first += length
    return rows


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


def short_rows(count=48):
    generator = torch.Generator().manual_seed(3)
    rows = []
    for _ in range(count):
        length = int(torch.randint(3, 12, (1,), generator=generator))
        rows.append({"input_ids": torch.randint(3, 90, (length,), generator=generator).tolist()})
    return rows


def trainer_of(folder, out, rows, **options):
    settings = {
        "save_strategy": "no",
        "logging_steps": 1,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
    }
    arguments = qlorapp.TrainingArguments(output_dir=str(out), **{**settings, **options})
    return qlorapp.Trainer(load(folder), arguments, train_dataset=rows, eval_dataset=rows)


def test_the_first_loss_of_packed_training_is_that_of_the_rows_one_by_one(folder, tmp_path):
    """One step over all rows: the same mean over the same targets, and the same step of the optimizer after it."""
    rows = short_rows()
    packed = trainer_of(folder, tmp_path / "a", rows, packing=True, max_length=64, per_device_train_batch_size=1,
                        gradient_accumulation_steps=100, max_steps=2)  # fmt: skip
    alone = trainer_of(
        folder, tmp_path / "b", rows, per_device_train_batch_size=1, gradient_accumulation_steps=100, max_steps=2
    )
    packed.train()
    alone.train()
    ours, expected = packed.state.log_history, alone.state.log_history
    assert ours[0]["loss"] == pytest.approx(expected[0]["loss"], rel=1e-6)
    assert ours[0]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=1e-5)
    assert ours[1]["loss"] == pytest.approx(expected[1]["loss"], rel=1e-4)  # AdamW's first step turns rounding into signs
    weighted = "eval_loss_token_weighted"
    assert packed.evaluate()[weighted] == pytest.approx(alone.evaluate()[weighted], rel=1e-4)


def test_packing_needs_fewer_steps_and_is_deterministic(folder, tmp_path):
    rows = short_rows()
    plain = trainer_of(folder, tmp_path / "a", rows, num_train_epochs=1)
    assert plain.state.max_steps == 6
    runs = [trainer_of(folder, tmp_path / name, rows, num_train_epochs=2, packing=True, max_length=64, seed=5) for name in "bc"]
    for run in runs:
        assert run.state.max_steps == 2  # 7 packs or fewer in batches of 8
        run.train()
    first, second = (run.state.log_history[:2] for run in runs)
    assert [entry["loss"] for entry in first] == [entry["loss"] for entry in second]


def test_eval_packing_decides_for_the_evaluation_alone(folder, tmp_path):
    """eval_loss is the mean of the batches' means, so packs give another one than rows do."""
    rows, one = short_rows(), {"per_device_eval_batch_size": 1, "max_length": 64}
    alone = trainer_of(folder, tmp_path / "a", rows, **one).evaluate()["eval_loss"]
    apart = trainer_of(folder, tmp_path / "b", rows, packing=True, eval_packing=False, **one).evaluate()["eval_loss"]
    packed = trainer_of(folder, tmp_path / "c", rows, eval_packing=True, **one).evaluate()["eval_loss"]
    assert apart == alone and packed != pytest.approx(alone, rel=1e-5)


def test_a_wrong_strategy_names_the_right_one(tmp_path):
    with pytest.raises(ValueError, match=r"packing_strategy must be one of \[bfd, bfd_split, wrapped\]; got 'bfd_splt'"):
        qlorapp.TrainingArguments(output_dir=str(tmp_path), packing_strategy="bfd_splt")


class OwnLoss(qlorapp.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


@pytest.mark.parametrize("sampling", ["random", "group_by_length"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_packs_of_steps_in_python_are_those_of_the_c_loop(folder, tmp_path, strategy, sampling):
    options = {"packing": True, "packing_strategy": strategy, "max_length": 32, "train_sampling_strategy": sampling}
    native = trained(folder, tmp_path / "native", **options)
    own = trained(folder, tmp_path / "own", OwnLoss, **options)
    assert own._autograd_reasons == ["compute_loss"] and not native._autograd_reasons
    assert losses(own) == pytest.approx(losses(native), rel=1e-5)
    assert len(losses(own)) < len(losses(trained(folder, tmp_path / "plain")))


def test_a_collator_of_one_s_own_gets_the_rows_of_packs(folder, tmp_path):
    seen = []

    def collate(rows):
        seen.append([row["input_ids"] for row in rows])
        return PadRight(0)(rows)

    trained(folder, tmp_path, packing=True, max_length=32, num_train_epochs=1, more={"data_collator": collate})
    assert sorted(ids for batch in seen for ids in batch) == sorted(row["input_ids"] for row in rows(26))
    assert max(sum(map(len, batch)) for batch in seen) > 4 * 13  # a batch of four packs holds more than four rows


def test_packing_beside_a_loader_of_one_s_own_is_refused(folder, tmp_path):
    class OwnLoader(qlorapp.Trainer):
        def get_train_dataloader(self):
            return super().get_train_dataloader()

    with pytest.raises(
        ValueError, match="packing=True packs the rows that get_train_dataloader gives out, which is overridden"
    ):
        trained(folder, tmp_path, OwnLoader, packing=True)
