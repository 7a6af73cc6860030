# SPDX-License-Identifier: Apache-2.0
"""Mistakes of the loss scale, of accumulation, clipping, optimizer, schedule and losses."""

from mutant import cpp, py, within

OVERFLOW = cpp("train", "GradScaler halves on overflow")
SKIPS = cpp("train", "too many skips in a row")
RAGGED = cpp("train", "k micro-batches of ragged rows")
NO_TARGET = cpp("train", "a window without targets")
COUNTED_ONCE = cpp("train", "each micro-batch's loss is counted once")
LOSSES = cpp("train", "a loss is read once")

MUTANTS = [
    *within(
        "scaler",
        "src/train/grad_scaler.cpp",
        (
            "floor_removed",
            "  if (options_.min_scale > 0) scale_.clamp_min_(options_.min_scale);\n",
            "",
            cpp("train", "the floor stops backing off"),
        ),
        (
            "factors_swapped",
            "combined, options_.growth_factor, options_.backoff_factor,",
            "combined, options_.backoff_factor, options_.growth_factor,",
            OVERFLOW,
        ),
        (
            "one_skip_more",
            "consecutive_skips_ >= options_.max_consecutive_skips",
            "consecutive_skips_ > options_.max_consecutive_skips",
            SKIPS,
        ),
        ("count_not_ended_by_a_step", "    consecutive_skips_ = 0;\n", "", SKIPS),
        ("skips_not_counted", "    ++consecutive_skips_;\n", "", SKIPS),
        ("steps_on_infinity", "return found == 0;", "return true;", OVERFLOW),
        (
            "first_optimizer_decides",
            "combined.defined() ? combined + here : here",
            "combined.defined() ? combined : here",
            cpp("train", "two outputs are scaled alike"),
        ),
        (
            "copy_shares_scale",
            "scale_ = other.scale_.clone();",
            "scale_ = other.scale_;",
            cpp("train", "a copy of a GradScaler"),
        ),
        (
            "streak_of_the_beginning",
            "growth_tracker_.defined() ? growth_tracker_.item<int>() : init_growth_tracker_",
            "init_growth_tracker_",
            cpp("train", "a copy of a GradScaler"),
        ),
        (
            "streak_not_restored",
            "    growth_tracker_.fill_(state->growth_tracker);\n",
            "",
            py("test_grad_scaler.py", "continues_in_torch_and_back"),
        ),
        (
            "unscaled_twice",
            "found_inf));\n  }\n  state.stage = Stage::kUnscaled;",
            "found_inf));\n  }",
            cpp("train", "a copy made within a step"),
        ),
        (
            "checks_of_a_step_kept",
            "|= state.stage == Stage::kStepped;\n  optimizers_.clear();",
            "|= state.stage == Stage::kStepped;",
            SKIPS,
        ),
        ("fp16_accepted", "allow_fp16 || grad.scalar_type() != at::kHalf", "true", cpp("train", "fp16 gradients are refused")),
    ),
    *within(
        "accumulator",
        "src/train/accumulator.cpp",
        (
            "divides_by_micro_batches",
            "loss_sum * 0.0 : loss_sum / static_cast<double>(tokens_)",
            "loss_sum * 0.0 : loss_sum / static_cast<double>(size_)",
            RAGGED,
        ),
        ("shares_0_over_0", "tokens_ == 0 ? loss_sum * 0.0 : ", "", NO_TARGET),
        ("mean_of_0_over_0", "tokens_ == 0 ? at::zeros_like(loss_sum_) : ", "", NO_TARGET),
        ("counts_a_loss_twice", "loss_sum_ + sum : sum;", "loss_sum_ + sum : sum + sum;", RAGGED),
        ("calls_not_counted", "  ++added_;\n", "", COUNTED_ONCE),
        ("one_loss_too_many", "QLORAPP_CHECK_VALUE(added_ < size_,", "QLORAPP_CHECK_VALUE(added_ <= size_,", COUNTED_ONCE),
        ("mean_of_a_part", "added_ == size_,", "added_ <= size_,", COUNTED_ONCE),
        (
            "sums_in_fp32",
            ".detach().to(at::kDouble).reshape",
            ".detach().reshape",
            cpp("train", "a window's loss is summed in double"),
        ),
        (
            "first_labels_not_counted",
            "options.count_position_zero ? batch.first_label_count : 0",
            "options.count_position_zero ? 0 : 0",
            cpp("train", "the older count adds one"),
        ),
        (
            "own_rank_only",
            "options.sum_over_ranks ? options.sum_over_ranks(count) : count",
            "count",
            cpp("train", "the denominator is the count over all ranks"),
        ),
    ),
    *within(
        "ranks",
        "src/train/trainer_run.cpp",
        (
            "flags_of_all",
            "int64_t{is_first() && control_.*flag}",
            "int64_t{control_.*flag}",
            cpp("train", "the flags of the first rank's callbacks"),
        ),
        (
            "flags_of_one",
            "control_.*kFlags[i] = values[i + 1] > 0;",
            "if (is_first()) control_.*kFlags[i] = values[i + 1] > 0;",
            cpp("train", "the flags of the first rank's callbacks"),
        ),
        (
            "own_stop",
            "if (is_training_ && values[0] > 0) throw StopNow{};",
            "if (is_training_ && callbacks_.stop_now && callbacks_.stop_now()) throw StopNow{};",
            cpp("train", "a rank that is asked to stop"),
        ),
    ),
    *within(
        "clip",
        "src/train/clip.cpp",
        (
            "without_epsilon",
            "const at::Tensor coefficient = at::clamp_max(max_norm / (norm + 1e-6), 1.0)",
            "const at::Tensor coefficient = at::clamp_max(max_norm / norm, 1.0)",
            cpp("train", "the coefficient has torch's 1e-6"),
        ),
        (
            "stretches_small_ones",
            "const at::Tensor coefficient = at::clamp_max(max_norm / (norm + 1e-6), 1.0)",
            "const at::Tensor coefficient = max_norm / (norm + 1e-6)",
            cpp("train", "gradients within max_norm keep every bit"),
        ),
        (
            "ends_may_fall",
            "begin <= end && end <= flat.numel()",
            "end <= flat.numel()",
            cpp("train", "a negative max_norm and ends that fall"),
        ),
        (
            "scale_left_in",
            "  if (inverse) multiplier = multiplier * *inverse;\n",
            "",
            cpp("train", "an AdapterArena is clipped whole"),
        ),
        (
            "norm_0_clips_to_0",
            "max_norm > 0 ? at::clamp_max",
            "max_norm >= 0 ? at::clamp_max",
            cpp("train", "an AdapterArena is clipped whole"),
        ),
    ),
    *within(
        "optimizer",
        "src/train/optimizer.cpp",
        ("steps_not_counted", "  ++steps_;\n", "", cpp("train", "a scaled loss gives the step of the plain one")),
        (
            "moments_swapped",
            "moments[0], moments[1], steps_ + 1",
            "moments[1], moments[0], steps_ + 1",
            cpp("train", "a step is taken on clipped gradients"),
        ),
    ),
    *within(
        "adamw",
        "src/ops/cpu/adamw.cpp",
        (
            "steps_on_infinity",
            "n == 0 || detail::number_or(skip, 0.0F) != 0.0F",
            "n == 0",
            cpp("train", "a step on gradients that are not finite"),
        ),
        (
            "one_beta_for_both",
            "std::sqrt(1 - std::pow(beta2, t))",
            "std::sqrt(1 - std::pow(beta1, t))",
            py("test_adamw.py", "at_every_step_number"),
        ),
    ),
    *within(
        "schedule",
        "src/train/schedule.cpp",
        (
            "last_window_not_a_step",
            "(micro_batches % accumulation > 0 ? 1 : 0)",
            "0",
            py("test_schedule.py", "training_steps_follow_the_trainer"),
        ),
        (
            "warm_up_of_one_step_is_a_share",
            "if (warmup_steps >= 1)",
            "if (warmup_steps > 1)",
            py("test_schedule.py", "warm_up_steps_follow"),
        ),
        (
            "decays_over_the_warm_up",
            "std::max<int64_t>(1, training_steps - warmup_steps)",
            "std::max<int64_t>(1, training_steps)",
            py("test_schedule.py", "first_step_has_rate_0"),
        ),
    ),
    *within(
        "losses",
        "src/train/unread_losses.cpp",
        ("read_twice", "std::exchange(steps_, {})", "steps_", LOSSES),
        ("one_bad_step_more", "++state.skips_in_a_row >= kMostInARow", "++state.skips_in_a_row > kMostInARow", LOSSES),
        ("a_good_step_does_not_count", "    state.skips_in_a_row = 0;\n", "", LOSSES),
        ("raise_ignored", "!skips || ++state", "++state", LOSSES),
    ),
]
