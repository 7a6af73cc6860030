# SPDX-License-Identifier: Apache-2.0
"""What callbacks have in their state() goes into checkpoints, and comes back with restore_callback_states_from_checkpoint."""

import pytest
import qlorapp
import transformers
from tiny_llama import folder  # noqa: F401  (a fixture)
from tiny_trainer import rows, trained


def test_state_and_callback_states_travel_with_a_checkpoint(folder, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "metric_for_best_model": "runtime",
               "greater_is_better": True, "restore_callback_states_from_checkpoint": True}  # fmt: skip
    patience = qlorapp.EarlyStoppingCallback(100, 1e9)
    trained(folder, tmp_path, more={"callbacks": [patience], "eval_dataset": rows(4)}, **options)
    state = qlorapp.TrainerState.load_from_json(tmp_path / "checkpoint-3" / "trainer_state.json")
    assert state.global_step == 3 and state.total_flos > 0
    counter = state.stateful_callbacks["EarlyStoppingCallback"]["attributes"]["early_stopping_patience_counter"]
    again = trained(
        folder, tmp_path, more={"callbacks": [qlorapp.EarlyStoppingCallback()], "eval_dataset": rows(4)},
        resume=tmp_path / "checkpoint-3", **options,
    )  # fmt: skip
    (restored,) = [c for c in again.callback_handler.callbacks if isinstance(c, qlorapp.EarlyStoppingCallback)]
    assert restored.early_stopping_patience == 100 and restored.early_stopping_patience_counter == counter + 3


@pytest.mark.parametrize("state", [{}, {"args": {"patience": 3}}, {"attributes": {"seen": 5}}])
@pytest.mark.parametrize("base", [qlorapp.ExportableState, transformers.trainer_callback.ExportableState])
def test_a_callbacks_state_may_lack_a_part(folder, tmp_path, state, base):
    """As in transformers, whose own ExportableState counts, too."""

    class Counts(qlorapp.TrainerCallback, base):
        def __init__(self, patience=1):
            self.patience, self.seen = patience, 0

        def state(self):
            return state

    options = {"save_strategy": "steps", "save_steps": 3, "restore_callback_states_from_checkpoint": True}
    trained(folder, tmp_path, more={"callbacks": [Counts(7)]}, **options)
    again = trained(folder, tmp_path, more={"callbacks": [Counts(7)]}, resume=tmp_path / "checkpoint-3", **options)
    (restored,) = [c for c in again.callback_handler.callbacks if isinstance(c, Counts)]
    assert restored.patience == state.get("args", {}).get("patience", 1)
    assert restored.seen == state.get("attributes", {}).get("seen", 0)
