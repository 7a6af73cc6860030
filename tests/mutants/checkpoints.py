# SPDX-License-Identifier: Apache-2.0
"""Mistakes of checkpoints: their files, their order on the disk, and what a resumed run gets back."""

from mutant import cpp, py, within

SAVE_FAILS = cpp("files", "when any call of a save fails")
MANIFEST = cpp("files", "a manifest finds each flipped bit")
OUTSIDE = cpp("files", "a manifest that names files outside")
ONE_WRITER = cpp("files", "a folder has one writer")
TOGETHER = cpp("files", "files are replaced together")
STRANGER = cpp("files", "an unfinished save of a stranger")
LATER = cpp("files", "an interrupted save gives way")
RESTORED = cpp("train", "a state comes back from a checkpoint")
REFUSED = cpp("train", "a run state of another version")
INPUTS = cpp("train", "another base")
FINGERPRINT = cpp("train", "each token")
ANSWERED = cpp("train", "the file of answers has each evaluation once")
ASKED = cpp("train", "questions are evenly spaced rows")
UP_TO_THE_END = cpp("train", "a question is the tokens before the first answer")
COMPARED = cpp("train", "base and adapter are compared on the same rows")

MUTANTS = [
    *within(
        "atomic_file",
        "src/files/atomic_file.cpp",
        (
            "not_flushed",
            "} else if (retrying([&] { return ::fsync(descriptor_); }) != 0) {",
            "} else if (false) {",
            SAVE_FAILS,
        ),
        (
            "renamed_before_the_flush",
            """  const bool is_flushed_later = is_staging(folder_);
  if (is_flushed_later) {
    (void)::sync_file_range(descriptor_, 0, 0, SYNC_FILE_RANGE_WRITE);  // the disk may begin
  } else if (retrying([&] { return ::fsync(descriptor_); }) != 0) {
    fail("flushing to the disk failed", errno);
  }
  // Some network file systems report a failed write only here. After EINTR the descriptor is closed all the same.
  if (::close(std::exchange(descriptor_, -1)) != 0 && errno != EINTR) fail("closing failed", errno);
  if (retrying([&] { return ::rename(temporary_.c_str(), path_.c_str()); }) != 0) fail("replacing the file failed", errno);
""",
            """  if (retrying([&] { return ::rename(temporary_.c_str(), path_.c_str()); }) != 0) fail("replacing the file failed", errno);
  const bool is_flushed_later = is_staging(folder_);
  if (is_flushed_later) {
    (void)::sync_file_range(descriptor_, 0, 0, SYNC_FILE_RANGE_WRITE);  // the disk may begin
  } else if (retrying([&] { return ::fsync(descriptor_); }) != 0) {
    fail("flushing to the disk failed", errno);
  }
  // Some network file systems report a failed write only here. After EINTR the descriptor is closed all the same.
  if (::close(std::exchange(descriptor_, -1)) != 0 && errno != EINTR) fail("closing failed", errno);
""",
            SAVE_FAILS,
        ),
        (
            "folder_not_flushed",
            "  if (!is_flushed_later) flush(folder_);\n",
            "",
            cpp("io", "a run's file is on the disk"),
        ),
        (
            "interrupted_write_fails",
            "    if (written < 0 && errno == EINTR) continue;\n",
            "",
            cpp("files", "interrupted and one-byte writes"),
        ),
        (
            "short_write_is_whole",
            "bytes.subspan(static_cast<size_t>(written))",
            "bytes.subspan(bytes.size())",
            cpp("files", "interrupted and one-byte writes"),
        ),
        ("temporary_left", "  if (!temporary_.empty()) ::unlink(temporary_.c_str());\n", "", SAVE_FAILS),
        (
            "mode_lost",
            "    (void)::fchmod(descriptor_, target.st_mode & 0777);",
            "    ",
            cpp("files", "a written file has the umask's mode"),
        ),
    ),
    *within(
        "manifest",
        "src/files/manifest.cpp",
        ("checksum_not_compared", "} else if (found.sha256 != wanted.sha256) {", "} else if (found.size < 0) {", MANIFEST),
        ("size_not_compared", "if (found.size != wanted.size) {", "if (found.size < wanted.size) {", MANIFEST),
        ("seal_not_compared", "manifest_text(manifest) == text,", "true,", MANIFEST),
        ("chunks_rounded_down", "(file.size + kManifestChunk - 1) / kManifestChunk", "file.size / kManifestChunk", MANIFEST),
        (
            "newer_schema_accepted",
            "QLORAPP_CHECK_FORMAT(schema == kSchema,",
            "QLORAPP_CHECK_FORMAT(schema >= kSchema,",
            OUTSIDE,
        ),
        (
            "run_id_not_checked",
            "is_hexadecimal(manifest.run_id, 32) && manifest.step >= 0",
            "manifest.step >= 0",
            py("test_hostile_files.py", "checkpoint", "tests/fuzz/judge"),
        ),
        (
            "files_not_flushed",
            "  flush_tree(folder);\n  return files;",
            "  return files;",
            cpp("io", "a checkpoint gets its name after"),
        ),
    ),
    *within(
        "lock",
        "src/files/folder_lock.cpp",
        ("shared", "::flock(descriptor_, LOCK_EX | LOCK_NB)", "::flock(descriptor_, LOCK_SH | LOCK_NB)", ONE_WRITER),
        ("not_taken", "if (failed == EWOULDBLOCK) {", "if (failed == EACCES) {", ONE_WRITER),
        ("dead_run_not_noticed", "  left_ = content(descriptor_);\n", "", ONE_WRITER),
    ),
    *within(
        "folder_update",
        "src/files/folder_update.cpp",
        (
            "guard_not_hidden",
            "if (file_name(name) != guard || !exists(to(name))",
            "if (!guard.empty() || !exists(to(name))",
            TOGETHER,
        ),
        ("guard_renamed_first", "return file_name(name) != guard; });", "return file_name(name) == guard; });", TOGETHER),
        ("litter_left", "    flush_all(folders);\n    remove_folder(path_);\n", "    flush_all(folders);\n", TOGETHER),
        ("interrupted_one_forgotten", "  pending.apply(guard);\n", "", TOGETHER),
        ("link_followed", "!status || S_ISDIR(status->st_mode)", "!status || !path_.empty()", STRANGER),
        ("strangers_update_done", "is_plain_file(path_, std::string(kFiles))", "exists(path_)", STRANGER),
        ("later_save_overwritten", "if (there && is_later(there->st_mtim, committed_)) return name;", "(void)there;", LATER),
        ("time_of_the_list_kept", "  make_latest(list, staging_, written);\n", "", cpp("files", "a clock that is set back")),
    ),
    *within(
        "folder",
        "src/files/folder.cpp",
        ("parent_folder_accepted", 'part == "." || part == ".." ||', 'part == "." ||', STRANGER),
        (
            "unread_is_empty",
            "  if (!stream) fail(errno);\n",
            "  if (!stream) return names;\n",
            cpp("files", "a folder that cannot be read"),
        ),
        ("left_files_stay", "  remove_left();\n", "", cpp("files", "what a killed program left in a fresh folder")),
    ),
    *within(
        "checkpoint",
        "src/io/checkpoint_folder.cpp",
        (
            "run_id_ignored",
            "!run_id.empty() && manifest.run_id != run_id",
            "!run_id.empty() && manifest.step < 0",
            cpp("io", "a new run in an old folder"),
        ),
        (
            "run_not_written",
            '  write_run_file("", "");\n}\n\nvoid RunFolder::go_on_from',
            "}\n\nvoid RunFolder::go_on_from",
            cpp("io", "a new run in an old folder"),
        ),
        ("prunes_other_runs", "if (run == run_id_) own", "if (run || !run) own", cpp("io", "a new run in an old folder")),
        ("keeps_one_more", "std::ssize(own) - limit;", "std::ssize(own) - limit - 1;", cpp("io", "a new run in an old folder")),
        (
            "damage_ignored",
            'return lines.empty() ? "" : lines.front();',
            'return "";',
            cpp("io", "resuming takes the newest checkpoint"),
        ),
        (
            "put_back_forgotten",
            '      if (!files::exists(place)) rename(left, place, "put back", place);\n',
            "",
            cpp("io", "the next run puts back"),
        ),
        (
            "fallback_loses_the_old_one",
            '      rename(final_, replaced, "replace", final_);\n',
            "      remove_folder(final_);\n",
            cpp("io", "where folders cannot be exchanged"),
        ),
        (
            "renamed_before_the_manifest",
            """  const std::string manifest_file = path_in(temporary_, files::kManifestName);
  files::write_file_atomically(manifest_file, files::manifest_text(manifest));
  files::flush(manifest_file);
  files::flush(temporary_);
  std::string replaced;
  if (files::exists(final_)) {
    replaced = temporary_;
    if (!swap_folders(temporary_, final_)) {
      replaced = path_in(run_->path(), message("{}{}", kReplacedPrefix, step_));
      rename(final_, replaced, "replace", final_);
      rename(temporary_, final_, "rename to", final_);
    }
  } else {
    rename(temporary_, final_, "rename to", final_);
  }
""",
            """  std::string replaced;
  if (files::exists(final_)) {
    replaced = temporary_;
    if (!swap_folders(temporary_, final_)) {
      replaced = path_in(run_->path(), message("{}{}", kReplacedPrefix, step_));
      rename(final_, replaced, "replace", final_);
      rename(temporary_, final_, "rename to", final_);
    }
  } else {
    rename(temporary_, final_, "rename to", final_);
  }
  files::write_file_atomically(path_in(final_, files::kManifestName), files::manifest_text(manifest));
""",
            cpp("io", "a checkpoint gets its name after"),
        ),
        ("manifest_not_flushed", "  files::flush(manifest_file);\n", "", cpp("io", "a checkpoint gets its name after")),
        ("manifest_entry_not_flushed", "  files::flush(temporary_);\n", "", cpp("io", "a checkpoint gets its name after")),
        ("name_not_flushed", "  files::flush(run_->path());\n", "", cpp("io", "a checkpoint gets its name after")),
        (
            "pruned_in_place",
            "    if (files::retrying([&] { return std::rename(path.c_str(), pruned.c_str()); }) != 0) {",
            "    if (remove_folder(path); files::retrying([&] { return std::rename(path.c_str(), pruned.c_str()); }) != 0) {",
            cpp("io", "a checkpoint that is pruned"),
        ),
        (
            "best_one_pruned",
            "    if (std::any_of(keep.begin(), keep.end(), is_it)) continue;\n",
            "",
            cpp("io", "a checkpoint that is pruned"),
        ),
        (
            "other_step_accepted",
            "step && !is_output && *step != manifest.step)",
            "step && !is_output && *step < 0)",
            cpp("io", "a checkpoint that holds only the model"),
        ),
        (
            "model_alone_accepted",
            "if (to_resume && !is_output && !has(",
            "if (!to_resume && !is_output && !has(",
            cpp("io", "a checkpoint that holds only the model"),
        ),
        ("changes_ignored", "if (changed || std::any_of", "if (std::any_of", cpp("io", "a run that goes on with changes")),
    ),
    *within(
        "train_state",
        "src/train/train_state.cpp",
        ("seed_not_restored", '  reader.bits("seed", seed);\n', "", RESTORED),
        ("micro_step_not_restored", '  reader.integer("micro_step", micro_step);\n', "", RESTORED),
        ("skips_in_a_row_not_restored", '  reader.integer("skips_in_a_row", skips_in_a_row);\n', "", RESTORED),
        ("cursor_not_restored", '  reader.integer("batch", cursor.batch);\n', "", RESTORED),
        ("moments_not_restored", "    tensor.copy_(stored);\n", "", RESTORED),
        ("step_count_not_restored", "  optimizer.set_step_count(optimizer_step);\n", "", RESTORED),
        ("loss_scale_not_restored", "    scaler.load_state_dict(state);\n", "", RESTORED),
        ("what_is_owed_is_lost", '  json["owes_save"] = int{owes_save};\n', '  json["owes_save"] = 0;\n', RESTORED),
        ("shape_not_compared", "stored.sizes() == tensor.sizes() && stored", "stored", REFUSED),
    ),
    *within(
        "run_state_reader",
        "src/train/run_state_reader.hpp",
        (
            "older_schema_accepted",
            "QLORAPP_CHECK_FORMAT(schema == kRunStateSchema,",
            "QLORAPP_CHECK_FORMAT(schema <= kRunStateSchema,",
            REFUSED,
        ),
        (
            "negative_number_accepted",
            "value.get<int64_t>() >= 0 && value.get",
            "value.get",
            REFUSED,
        ),
        ("too_large_for_its_field", " && value.get<int64_t>() <= kMost,", ",", REFUSED),
        (
            "rest_of_digits_ignored",
            "error == std::errc{} && stop == digits.data() + digits.size(),",
            "error == std::errc{},",
            REFUSED,
        ),
        units=("src/train/train_state.cpp",),
    ),
    *within(
        "run_inputs",
        "src/train/run_inputs.cpp",
        ("positions_ignored", "mixed(word ^ (i * kMixPosition))", "mixed(word)", FINGERPRINT),
        (
            "order_of_rows_ignored",
            "value = mixed(value + kMixPosition) ^ mixed(row_sum(row))",
            "value ^= mixed(row_sum(row))",
            FINGERPRINT,
        ),
        (
            "lengths_in_packs_ignored",
            "for (const int64_t length : row.row_lengths) sum = mixed(sum) + static_cast<uint64_t>(length);",
            "",
            FINGERPRINT,
        ),
        (
            "scales_of_the_base_ignored",
            "(inputs.device != saved.device && inputs.base_without_scales == saved.base_without_scales)",
            "inputs.base_without_scales == saved.base_without_scales",
            INPUTS,
        ),
        (
            "config_of_the_base_ignored",
            "  check_base_config(folder, saved, inputs);\n",
            "",
            py("test_stranger_checkpoints.py", "config_computes_something_else"),
        ),
        ("data_ignored", "if (saved.train_data != inputs.train_data) append", "if (saved.train_data == 0) append", INPUTS),
        (
            "split_counts_not_with_dropout",
            "append(equal && same_masks ? others : decisive,",
            "append(equal ? others : decisive,",
            INPUTS,
        ),
    ),
    *within(
        "base_fingerprint",
        "src/nn/base_fingerprint.cpp",
        (
            "scales_left_out",
            "        fold(result.whole, *scales);\n",
            "        static_cast<void>(scales);\n",
            py("test_nothing_lost.py", "the_scales_of_the_base_count"),
        ),
    ),
    *within(
        "answer_file",
        "src/train/answer_file.cpp",
        ("later_steps_stay", "place->step > last ||", "place->step < 0 ||", ANSWERED),
        ("step_twice", "if (step <= newest_) keep", "if (step < newest_) keep", ANSWERED),
        ("other_data_goes", " && place->data == data", "", ANSWERED),
        (
            "torn_line_stays",
            "    if (end == std::string::npos) break;\n",
            "    if (end == std::string::npos) return;\n",
            ANSWERED,
        ),
    ),
    *within(
        "answer_rows",
        "src/train/answer_rows.cpp",
        ("whole_rows_asked", "if (prompt == 0 || prompt >= positions)", "if (prompt >= positions)", ASKED),
        ("end_expected", " || ends_answer(label, ends);", ";", UP_TO_THE_END),
        ("second_answer_expected", "return !is_trained(label) || ", "return ", UP_TO_THE_END),
        (
            "white_space_counts",
            "unicode::strip(row.answer) ==",
            "row.answer ==",
            cpp("train", "an answer matches without its end"),
        ),
    ),
    *within(
        "comparison",
        "src/train/comparison.cpp",
        ("base_left_on", "~AdaptersOff() { model_.adapters().enable(true); }", "~AdaptersOff() = default;", COMPARED),
        ("adapter_twice", "{ model_.adapters().enable(false); }", "{}", COMPARED),
    ),
]
