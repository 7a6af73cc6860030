// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/memory/plan_report.hpp"

#include <cmath>
#include <string>

#include "catch.hpp"
#include "core/check.hpp"
#include "memory/plan_settings.hpp"

using namespace qlorapp;
using namespace qlorapp::literals;
using Catch::Matchers::ContainsSubstring;

TEST_CASE("what the Hugging Face stack takes is the sum of its terms, as measured") {
  // docs/performance.md: 8B, "HF stack", checkpointing, batch 1 and 2 of 2,048 tokens, without prepare_model_for_kbit_training.
  for (const auto& [batch, measured] : {std::pair{1, 9.08}, {2, 12.54}}) {
    PlanSettings settings = settings_for("llama-3.1-8b", Keep::kInputOnly);
    settings.batch = batch;
    const PeerMemory peer = hugging_face_memory(plan_memory(settings), settings);
    const double told = static_cast<double>((peer.total() - peer.prepared).count) / 0x1p30;
    INFO(batch << " rows: " << told << " GiB");
    CHECK(std::abs(told / measured - 1) < 0.03);
    CHECK(peer.prepared.count == int64_t{2} * (2 * 128256 * 4096 + 65 * 4096));  // embedding, head and norms, two bytes more each
  }
}

TEST_CASE("an explanation judges the Hugging Face stack with and without its preparation") {
  PlanSettings settings = settings_for("llama-3-8b", "T4");
  settings.segments = keep_in_each_block(settings.model.num_hidden_layers, Keep::kInputOnly);
  settings.compute_dtype = at::kHalf;
  settings.batch = 2;  // docs/performance.md measured 12.54 GiB without
  const PeerMemory peer = hugging_face_memory(plan_memory_in(settings, room_on(find_gpu("T4"), {})), settings);
  const auto gib = [](Bytes bytes) { return message("{:.2f} GiB", static_cast<double>(bytes.count) / 0x1p30); };
  const std::string text = explain(settings, find_gpu("T4"), {});
  CHECK_THAT(text, ContainsSubstring("= " + gib(peer.total() - peer.prepared) + ", in 14.06 GiB: fits.\n"));
  CHECK_THAT(text, ContainsSubstring("= " + gib(peer.total()) + ": does not fit.\n"));
  settings.compute_dtype = at::kFloat;  // nothing is converted
  CHECK(explain(settings, find_gpu("T4"), {}).find("prepare_model_for_kbit_training") == std::string::npos);
}

TEST_CASE("what a peer would take does not depend on what is kept on the host here") {
  PlanSettings settings = settings_for("llama-3.1-8b", Keep::kInputOnly);
  const Bytes plain = hugging_face_memory(plan_memory(settings), settings).base;
  settings.memory.embedding_on_host = true;
  CHECK(hugging_face_memory(plan_memory(settings), settings).base == plain);
}

TEST_CASE("an explanation shows each total as a sum of its terms") {
  PlanSettings settings = settings_for("llama-3-8b", "T4");
  settings.segments = keep_in_each_block(settings.model.num_hidden_layers, Keep::kInputOnly);
  settings.compute_dtype = at::kHalf;
  settings.batch = 4;
  const std::string text = explain(settings, find_gpu("T4"), {});
  CHECK_THAT(text, ContainsSubstring("6979321856 elements of linear layers x 1/2 byte"));
  CHECK_THAT(text, ContainsSubstring("41943040 parameters x 4 bytes, float32"));
  CHECK_THAT(text, ContainsSubstring("32 blocks x 8192 tokens x 4096 x 2 bytes: the inputs"));
  CHECK_THAT(text, ContainsSubstring("8192 x 128256 x (2 bytes + 4 of a float32 copy + 4 of its gradient)"));
  CHECK_THAT(text, ContainsSubstring("does not fit"));  // there; here it does
  CHECK_THAT(text, ContainsSubstring("No change is needed"));
  size_t sums = 0;
  for (size_t at = text.find(" + "); at != std::string::npos; at = text.find(" + ", at + 1)) ++sums;
  CHECK(sums > 15);
}

TEST_CASE("a comparison also shows the fastest way to the same update on each card") {
  PlanSettings settings = settings_for("llama-3.2-1b");
  settings.segments = keep_in_each_block(settings.model.num_hidden_layers, Keep::kInputOnly);
  const std::vector<Contender> cards{{find_gpu("T4"), 2, 4}, {find_gpu("A10"), 8, 1}};
  const std::string text = compare(settings, cards, {});
  CHECK_THAT(text, ContainsSubstring("with the settings that memory_budget chooses:"));
  CHECK_THAT(text, ContainsSubstring("everything"));
  CHECK_THAT(text, ContainsSubstring("float16") && ContainsSubstring("bfloat16"));
  const std::string bounded = compare(settings, cards, {}, 3_GiB);
  CHECK_THAT(bounded, ContainsSubstring("with the settings that memory_budget chooses in 3.00 GiB:"));
  CHECK_THAT(compare(settings, cards, {}, 64_MiB), ContainsSubstring("nothing fits 64.0 MiB"));
}
