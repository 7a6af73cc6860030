// SPDX-License-Identifier: Apache-2.0
// Folders of runs, their checkpoints, and files that are replaced together.
#include <nlohmann/json.hpp>

#include "bind.hpp"
#include "files/folder.hpp"
#include "files/folder_update.hpp"
#include "io/background_commit.hpp"
#include "io/checkpoint_folder.hpp"
#include "train/loss_svg.hpp"

namespace qlorapp::python {

void bind_checkpoints(py::module_& m) {
  py::class_<RunFolder, std::shared_ptr<RunFolder>>(m, "RunFolder", "src/io/checkpoint_folder.hpp. Locked until close().")
      .def(py::init<std::string>(), py::arg("path"), NoGil())
      .def_property_readonly("path", &RunFolder::path)
      .def_property_readonly("run_id", &RunFolder::run_id)
      .def_property_readonly("is_new", &RunFolder::is_new)
      .def("owns", &RunFolder::owns, py::arg("checkpoint"), "Whether a checkpoint is there and of this run.")
      .def("begin", &RunFolder::begin)
      .def("go_on_from", &RunFolder::go_on_from, py::arg("checkpoint"), py::arg("changed") = false)
      .def("prune", &RunFolder::prune, py::arg("limit"), py::arg("keep"), NoGil())
      .def("close", &RunFolder::close, "Releases the lock. The folder cannot be used afterwards.");

  py::class_<CheckpointWriter, std::shared_ptr<CheckpointWriter>>(
      m, "CheckpointWriter", "A checkpoint under construction; it vanishes unless commit() is called.")
      .def(py::init<RunFolder&, int64_t>(), py::arg("run"), py::arg("step"), py::keep_alive<1, 2>())
      .def_property_readonly("folder", &CheckpointWriter::folder)
      .def("commit", &CheckpointWriter::commit, NoGil(), "Its path.")
      .def("discard", &CheckpointWriter::discard);

  py::class_<BackgroundCommit>(m, "BackgroundCommit", "src/io/background_commit.hpp: one checkpoint at a time, on a thread.")
      .def(py::init<>())
      .def("start", &BackgroundCommit::start, py::arg("run"), py::arg("checkpoint"), py::arg("limit") = py::none(),
           py::arg("keep") = std::vector<std::string>(), NoGil(), "Waits for the one before, whose error it raises.")
      .def("poll", &BackgroundCommit::poll, "Its path, if it has become whole since the last call.")
      .def("wait", &BackgroundCommit::wait, NoGil(), "Its path, or None if there is none since the last call.")
      .def("settle", &BackgroundCommit::settle, NoGil(), "Waits; an error is logged.");

  m.def(
      "newest_checkpoint",
      [](const std::string& output_dir) {
        NewestCheckpoint found = newest_checkpoint(output_dir);
        return std::pair(std::move(found.path), std::move(found.skipped));
      },
      py::arg("output_dir"), NoGil(), "(path or None, newer ones that were skipped, each with the reason)");
  m.def("check_checkpoint", &check_checkpoint, py::arg("checkpoint"), NoGil(),
        "Raises FormatError if a file is missing or was changed.");

  m.def(
      "write_loss_svg",
      [](const std::string& folder, const std::string& log_history) {
        write_loss_svg(folder, format::parse_json(log_history, "log_history", {.allow_nonfinite = true}));
      },
      py::arg("folder"), py::arg("log_history"), NoGil(), "loss.svg of transformers' log_history, as JSON.");

  py::class_<files::FolderUpdate>(m, "FolderUpdate", "src/files/folder_update.hpp: files that are replaced together.")
      .def(py::init<std::string, std::string>(), py::arg("folder"), py::arg("guard"))
      .def_property_readonly("staging", &files::FolderUpdate::staging)
      .def("retire", &files::FolderUpdate::retire, py::arg("name"))
      .def("commit", &files::FolderUpdate::commit, NoGil())
      .def("discard", &files::FolderUpdate::discard);
  m.def("is_staging", &files::is_staging, py::arg("folder"),
        "Whether a FolderUpdate or CheckpointWriter fills this folder and commits it as a whole.");
}

}  // namespace qlorapp::python
