// SPDX-License-Identifier: Apache-2.0
/// The part of TrainingArguments about places that a run reports to. See training_arguments.hpp.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "qlorapp/core/field_table.hpp"
#include "qlorapp/core/free_form.hpp"

namespace qlorapp {

struct HubArguments {
  std::vector<std::string> report_to = {"none"};
  std::optional<std::string> logging_dir;
  std::optional<std::string> run_name;
  std::string project = "huggingface";
  std::optional<std::string> trackio_space_id;
  std::optional<std::string> trackio_bucket_id;
  FreeForm trackio_static_space_id;
  bool push_to_hub = false;
  std::optional<std::string> hub_token;
  std::optional<bool> hub_private_repo;
  std::optional<std::string> hub_model_id;
  std::string hub_strategy = "every_save";
  bool hub_always_push = false;
  std::optional<std::string> hub_revision;
  std::optional<std::string> push_to_hub_organization;

  static constexpr auto fields() {
    using T = HubArguments;
    constexpr auto kSaid = FieldStatus::kAcceptedAndSaid;
    constexpr auto kNoUpload = "nothing here uploads. Push the adapter folder with hf upload.";
    return FieldTable{
        Field{"report_to", &T::report_to,
              "Python: tensorboard, or a service that transformers reports to and that is installed, such as wandb; all: "
              "each that is installed; none: trainer_state.json alone"},
        Field{"logging_dir", &T::logging_dir,
              "TensorBoard's folder; unset: TENSORBOARD_LOGGING_DIR, else output_dir/runs/<time>_<host>"},
        Field{"run_name", &T::run_name,
              "the run's name at a service; name of TensorBoard's folder in output_dir/runs where logging_dir is unset"},
        Field{"project", &T::project, "trackio's project, with report_to=trackio"},
        Field{"trackio_space_id", &T::trackio_space_id, "the Space that trackio reports to; unset: it stays on this machine"},
        Field{"trackio_bucket_id", &T::trackio_bucket_id, "the bucket that trackio stores the run in"},
        Field{"trackio_static_space_id", &T::trackio_static_space_id, "the static Space that trackio writes at the end of a run"},
        Field{"push_to_hub", &T::push_to_hub, "", kSaid, kNoUpload},
        Field{"hub_token", &T::hub_token, "", kSaid, kNoUpload},
        Field{"hub_private_repo", &T::hub_private_repo, "", kSaid, kNoUpload},
        Field{"hub_model_id", &T::hub_model_id, "", kSaid, kNoUpload},
        Field{"hub_strategy", &T::hub_strategy, "", kSaid, kNoUpload},
        Field{"hub_always_push", &T::hub_always_push, "", kSaid, kNoUpload},
        Field{"hub_revision", &T::hub_revision, "", kSaid, kNoUpload},
        Field{"push_to_hub_organization", &T::push_to_hub_organization, "", kSaid, kNoUpload}};
  }
};

}  // namespace qlorapp
