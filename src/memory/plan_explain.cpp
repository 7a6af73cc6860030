// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "qlorapp/memory/plan_report.hpp"
#include "report_text.hpp"

namespace qlorapp {

using namespace report;

namespace {

std::string keep_text(const PlanSettings& settings) {
  if (settings.segments.empty()) return "nothing recomputed (everything is kept)";
  std::string text;
  size_t count = 0;
  for (size_t i = 0; i < settings.segments.size(); ++i) {
    ++count;
    const auto same = [&](const Segment& a, const Segment& b) { return a.keep == b.keep && a.end - a.begin == b.end - b.begin; };
    if (i + 1 < settings.segments.size() && same(settings.segments[i], settings.segments[i + 1])) continue;
    text += message("{}{} in {}{}", text.empty() ? "" : ", ", to_string(settings.segments[i].keep), static_cast<int64_t>(count),
                    settings.segments[i].end - settings.segments[i].begin > 1
                        ? message(" segments of {} blocks", settings.segments[i].end - settings.segments[i].begin)
                        : std::string(" blocks"));
    count = 0;
  }
  return text;
}

struct Option {
  std::string name;
  PlanSettings settings;
};

/// Options that keep the effective batch first, then those that change the result, mildest first.
std::vector<Option> options_for(const PlanSettings& asked) {
  std::vector<Option> options{{"as requested", asked}};
  const int64_t blocks = asked.model.num_hidden_layers;
  const auto add = [&](std::string name, auto change) {
    Option option{std::move(name), asked};
    change(option.settings);
    options.push_back(std::move(option));
  };
  if (asked.segments.empty()) {
    add("keep inputs only (gradient checkpointing)",
        [&](PlanSettings& s) { s.segments = keep_in_each_block(blocks, Keep::kInputOnly); });
  }
  add("inputs on the host", [&](PlanSettings& s) { s.segments = keep_in_each_block(blocks, Keep::kInputOnHost); });
  if (!asked.memory.base_on_host && asked.base_shards == 1)
    add("frozen base on the host (base_on_host)", [](PlanSettings& s) { s.memory.base_on_host = true; });
  for (int64_t batch = asked.batch / 2; batch >= 1; batch /= 2) {
    if (asked.batch % batch != 0) continue;
    add(message("batch {} x {}", batch, asked.accumulation * (asked.batch / batch)), [&](PlanSettings& s) {
      s.batch = batch;
      s.accumulation = asked.accumulation * (asked.batch / batch);
    });
  }
  if (asked.batch > 1) {
    add(message("batch 1 x {}, nothing recomputed", asked.accumulation * asked.batch), [&](PlanSettings& s) {
      s.batch = 1;
      s.accumulation = asked.accumulation * asked.batch;
      s.segments.clear();
    });
  }
  if (asked.length >= 4) add(message("length {}", asked.length / 2), [&](PlanSettings& s) { s.length = asked.length / 2; });
  if (asked.lora.r > 1) add(message("rank {}", asked.lora.r / 2), [&](PlanSettings& s) { s.lora.r = asked.lora.r / 2; });
  return options;
}

/// Where no change alone is enough: what all that changes no result takes together.
std::string all_together(PlanSettings settings, Bytes room) {
  settings.accumulation *= settings.batch;
  settings.batch = 1;
  settings.segments = keep_in_each_block(settings.model.num_hidden_layers, Keep::kInputOnHost);
  settings.memory.loss_chunk_rows = 512;
  settings.memory.weight_workspace = WeightWorkspace::kStack;
  settings.memory.embedding_on_host = !settings.model.tie_word_embeddings;
  settings.memory.mlp_tile_rows = 1024;
  const MemoryPlan plan = plan_memory_in(settings, room);
  if (plan.fits) {
    return message(
        "No single change is enough. Batch 1 with inputs and embedding on the host, 512 rows of logits, one workspace at a time "
        "and the MLP in tiles needs {} and fits. memory_budget=auto finds the fastest such mixture.\n",
        gib(plan.peak_reserved()));
  }
  PlanSettings on_host = settings;
  on_host.memory.base_on_host = settings.base_shards == 1;
  const MemoryPlan least = plan_memory_in(on_host, room);
  if (least.fits) {
    return message(
        "No single change is enough. Batch 1 with inputs, embedding and base on the host, 512 rows of logits, one workspace at a "
        "time "
        "and the MLP in tiles needs {} and fits.\n",
        gib(least.peak_reserved()));
  }
  const MemoryParts& parts = least.of(least.fullest_of_training()).parts;
  return message(
      "No single change is enough. All changes that keep the result need {} together, of which {} are base, adapters and "
      "optimizer; the card has {}. Use a shorter length, a smaller model or a larger card.\n",
      gib(least.peak_reserved()),
      gib(parts_of(parts, {MemoryUse::kCodes, MemoryUse::kScales, MemoryUse::kDense, MemoryUse::kAdapters, MemoryUse::kGradients,
                           MemoryUse::kOptimizer})),
      gib(room));
}

/// "1.5 GiB + 0.2 GiB = 1.7 GiB".
std::string sum_text(const std::vector<Bytes>& terms) {
  std::string text;
  Bytes total;
  for (const Bytes term : terms) {
    if (term.count == 0) continue;
    text += message("{}{}", text.empty() ? "" : " + ", gib(term));
    total += term;
  }
  return message("{} = {}", text, gib(total));
}

std::string each(Bytes bytes, int64_t count) {
  const double size = static_cast<double>(bytes.count) / static_cast<double>(std::max<int64_t>(1, count));
  return message("{}{}", fixed(size, size < 10 && size != std::floor(size) ? 3 : 0), size == 1 ? " byte" : " bytes");
}

/// What is there before the first token: parts with how they come about, and their sum.
std::string resident_text(const MemoryPlan& plan, const PlanSettings& settings) {
  const MemoryParts& parts = plan.of(plan.fullest_of_training()).parts;
  const int64_t elements = 2 * part(parts, MemoryUse::kCodes).count, trained = plan.trainable_parameters;
  const int64_t dense = part(parts, MemoryUse::kDense).count / static_cast<int64_t>(c10::elementSize(settings.compute_dtype));
  const std::vector<std::pair<MemoryUse, std::string>> rows{
      {MemoryUse::kCodes, settings.memory.base_on_host ? std::string("two blocks of the base, which waits in host memory")
                          : settings.base_shards > 1
                              ? message("1/{} of the base with its scales, and two whole blocks", settings.base_shards)
                              : message("{} elements of linear layers x 1/2 byte", elements)},
      {MemoryUse::kScales, message("the same x {}{}", each(part(parts, MemoryUse::kScales), elements),
                                   settings.quantization.double_quant ? ", themselves quantized" : "")},
      {MemoryUse::kDense, message("{} elements x {} bytes", dense, c10::elementSize(settings.compute_dtype))},
      {MemoryUse::kAdapters, message("{} parameters x 4 bytes, float32", trained)},
      {MemoryUse::kGradients, message("{} parameters x 4 bytes, float32", trained)},
      {MemoryUse::kOptimizer, plan.optimizer_on_host
                                  ? std::string("one piece at a time; the moments are in host memory")
                                  : message("{} parameters x {}", trained, each(part(parts, MemoryUse::kOptimizer), trained))},
      {MemoryUse::kLibrary, "cuBLAS allocates it once"}};
  Table table;
  std::vector<Bytes> terms;
  for (const auto& [use, text] : rows) {
    if (part(parts, use).count == 0) continue;
    table.row({std::string(ops::to_string(use)), gib(part(parts, use)), text});
    terms.push_back(part(parts, use));
  }
  return message("{}  {}\n", table.text(), sum_text(terms));
}

/// What a micro-batch adds at its fullest, and the way from there to what the card must have.
std::string micro_batch_text(const MemoryPlan& plan, const PlanSettings& settings) {
  const PhasePlan& fullest = plan.of(plan.fullest_of_training());
  const MemoryParts& parts = fullest.parts;
  const int64_t tokens = settings.batch * settings.length, blocks = settings.model.num_hidden_layers;
  const auto size = [&](MemoryUse use) { return part(parts, use); };
  const std::vector<std::pair<MemoryUse, std::string>> rows{
      {MemoryUse::kBatch, message("tokens, targets and positions of {}{}, rotary tables", settings.accumulation,
                                  settings.accumulation == 1 ? " micro-batch" : " micro-batches")},
      {MemoryUse::kKept, message("{} blocks x {} tokens x {}", blocks, tokens, each(size(MemoryUse::kKept), blocks * tokens))},
      {MemoryUse::kActivation,
       message("{} tokens x {}, in the block being computed", tokens, each(size(MemoryUse::kActivation), tokens))},
      {MemoryUse::kDequantized, "one stack of weights in the compute dtype"},
      {MemoryUse::kAttention, "workspace of the attention kernel"},
      {MemoryUse::kLogits, message("a chunk of rows x {} vocabulary entries", settings.model.vocab_size)},
      {MemoryUse::kLoading, "buffers of the load"}};
  Table table;
  std::vector<Bytes> terms;
  for (const auto& [use, text] : rows) {
    if (size(use).count < 1024) continue;  // a loss that waits is no part
    table.row({std::string(ops::to_string(use)), gib(size(use)), text});
    terms.push_back(size(use));
  }
  Bytes added;
  for (const Bytes term : terms) added += term;
  std::string text = message("{}  {}\n\n", table.text(), sum_text(terms));
  text += message("  Steps 1 and 2: {} in use", sum_text({fullest.tensors - added, added}));
  if (fullest.allocated > fullest.tensors)
    text += message("; with the allocator's rounding of {}, {} are allocated", gib(fullest.allocated - fullest.tensors),
                    gib(fullest.allocated));
  const Bytes cached = plan.peak_reserved() - fullest.allocated;
  if (cached.count > 0) text += message(".\n  Cached and fragmented at most: {} reserved", sum_text({fullest.allocated, cached}));
  return text + ".\n";
}

/// The same run in transformers, peft and bitsandbytes, term by term.
std::string peer_text(const MemoryPlan& plan, const PlanSettings& settings, Bytes room) {
  const PeerMemory peer = hugging_face_memory(plan, settings);
  const int64_t tokens = settings.batch * settings.length;
  const bool wide = settings.compute_dtype == at::kFloat;
  const bool keeps_all = settings.segments.empty();
  Table table;
  table.row({message("base, with unquantized parts in {}", dtype_name(settings.compute_dtype)), gib(peer.base), "as in step 1"});
  if (peer.prepared.count > 0)
    table.row({"embedding, head, norms in float32", gib(peer.prepared), "only if prepare_model_for_kbit_training is called"});
  table.row({"adapters, gradients, moments", gib(peer.adapters), "as in step 1"});
  table.row({"kept for backward", gib(peer.kept),
             keeps_all ? "as in step 2; transformers keeps more of each block"
                       : message("{} blocks x {} tokens x {} x {} bytes: the inputs", settings.model.num_hidden_layers, tokens,
                                 settings.model.hidden_size, c10::elementSize(settings.compute_dtype))});
  table.row({"activations and a dequantized weight", gib(peer.working), "as in step 2"});
  table.row({"logits", gib(peer.logits),
             message("{} x {} x {}", tokens, settings.model.vocab_size,
                     wide ? "(4 bytes + 4 of their gradient)" : "(2 bytes + 4 of a float32 copy + 4 of its gradient)")});
  const auto verdict = [&](Bytes total) { return total > room ? "does not fit" : "fits"; };
  const std::string without = message("{}{}, in {}: {}", sum_text({peer.base, peer.adapters, peer.kept, peer.working, peer.logits}),
                                      keeps_all ? " at least" : "", gib(room), verdict(peer.total() - peer.prepared));
  if (peer.prepared.count == 0) return message("{}  {}.\n", table.text(), without);
  return message("{}  {}.\n  With prepare_model_for_kbit_training, which a script may call or not: {}{}: {}.\n", table.text(),
                 without, sum_text({peer.total() - peer.prepared, peer.prepared}), keeps_all ? " at least" : "",
                 verdict(peer.total()));
}

}  // namespace

PeerMemory hugging_face_memory(const MemoryPlan& plan, const PlanSettings& settings) {
  if (settings.memory.base_on_host || settings.base_shards > 1) {  // of its data parallel run, which has no such option
    PlanSettings resident = settings;
    resident.memory.base_on_host = false;
    resident.base_shards = 1;
    return hugging_face_memory(plan_memory(resident), resident);
  }
  const MemoryParts& parts = plan.of(plan.fullest_of_training()).parts;
  const auto element = static_cast<int64_t>(c10::elementSize(settings.compute_dtype));
  const int64_t tokens = settings.batch * settings.length, trained = plan.trainable_parameters;
  const format::ModelConfig& model = settings.model;
  PeerMemory peer;
  Bytes dense = part(parts, MemoryUse::kDense);
  if (settings.memory.embedding_on_host) dense += Bytes{model.vocab_size * model.hidden_size * element};
  peer.base = parts_of(parts, {MemoryUse::kCodes, MemoryUse::kScales}) + dense;
  peer.prepared = Bytes{dense.count / element * (4 - element)};
  peer.adapters = Bytes{trained * 8 + (settings.optimizer_is_8bit ? trained * 2 + trained / 256 * 8 : trained * 8)};
  peer.kept = settings.segments.empty() ? part(plan.of(MemoryPhase::kLoss).parts, MemoryUse::kKept)
                                        : Bytes{model.num_hidden_layers * tokens * model.hidden_size * element};
  peer.working = parts_of(plan.of(MemoryPhase::kBackward).parts, {MemoryUse::kActivation, MemoryUse::kDequantized});
  peer.logits = Bytes{tokens * model.vocab_size * (element == 4 ? 8 : 10)};
  return peer;
}

std::string explain(const PlanSettings& settings, const Gpu& gpu, const DeviceAllowance& allowance) {
  const Bytes room = room_on(gpu, allowance);
  const MemoryPlan plan = plan_memory_in(settings, room);
  const bool fits = plan.fits;
  const int64_t tokens = settings.batch * settings.length;
  std::string text = message(
      "The configuration: {} G parameters on {} ({}, of which {} are for the CUDA context), {}{}{} tokens, accumulation {}, "
      "{}, rank {}, {}.\n\n",
      fixed(static_cast<double>(plan.base_parameters) * 1e-9, 2), name_of(gpu), gib(gpu.memory), gib(allowance.on(gpu)),
      settings.batch, settings.batch == 1 ? " row of " : " rows of ", settings.length, settings.accumulation,
      dtype_name(settings.compute_dtype), settings.lora.r, keep_text(settings));
  text += message("Step 1. Memory in use before the first token.\n\n{}\n", resident_text(plan, settings));
  text += message("Step 2. Memory that a micro-batch of {} x {} = {} tokens adds at its peak, in {}.\n\n{}\n", settings.batch,
                  settings.length, tokens, ops::to_string(plan.fullest_of_training()), micro_batch_text(plan, settings));
  text += "Step 3. The checklist.\n\n" + checklist(plan, settings) + "\n";
  text += message("Step 4. Does it fit? {} of {}: {}\n\n", gib(plan.peak_reserved()), gib(room),
                  fits ? message("yes, {} are left.", gib(room - plan.peak_reserved()))
                       : message("no, {} are missing.", gib(plan.peak_reserved() - room)));
  text += message(
      "Step 5. Memory of the same run in transformers, peft and bitsandbytes, where the loss holds all logits.\n\n{}  Gradient "
      "accumulation needs no memory: micro-batches run one after another. The adapters need the least.\n\n",
      peer_text(plan, settings, room));
  text += "Step 6. Changes, least costly first. ";
  const bool timed = rates_are_known(settings, gpu);
  const StepTime time = timed ? step_time(settings, gpu, static_cast<double>(settings.length)) : StepTime{};
  text += timed ? message("Times are per optimizer step over the same rows; the estimate is {}.\n\n", evidence_text(time.evidence))
                : std::string(
                      "Times need this card's rates: give --gpu_bandwidth, --gpu_tflops (dense 16-bit), and --bf16 "
                      "or --fp16.\n\n");
  text += bus_text(settings, gpu);
  Table table;
  table.row({"change", "reserved", "fits", "step"});
  std::string first;
  const double base_time = timed ? optimizer_step_seconds(settings, gpu) : 0;
  for (const Option& option : options_for(settings)) {
    const MemoryPlan found = plan_memory_in(option.settings, room);
    std::string step = "-";
    if (base_time > 0) {
      const double seconds = optimizer_step_seconds(option.settings, gpu);
      step = message("{} ({} %)", duration(seconds), fixed(100 * (seconds / base_time - 1), 0));
    }
    if (first.empty() && found.fits) first = option.name;
    table.row({option.name, gib(found.peak_reserved()), found.fits ? "yes" : "no", step});
  }
  text += table.text() + "\n";
  text += fits            ? "No change is needed: the run fits.\n"
          : first.empty() ? all_together(settings, room)
                          : message("Change first: {}.\n", first);
  text +=
      "The usual order is batch, length, rank. Rank belongs last: it saves the least and costs quality. A smaller batch with "
      "proportionally more accumulation computes the same update. A shorter length discards data.\n";
  return text;
}

}  // namespace qlorapp
