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
    text += concat(text.empty() ? "" : ", ", to_string(settings.segments[i].keep), " in ", static_cast<int64_t>(count),
                   settings.segments[i].end - settings.segments[i].begin > 1
                       ? concat(" segments of ", settings.segments[i].end - settings.segments[i].begin, " blocks")
                       : std::string(" blocks"));
    count = 0;
  }
  return text;
}

struct Option {
  std::string name;
  PlanSettings settings;
};

/// What can be changed without changing the effective batch, and then what changes the result: in the order in which it hurts.
std::vector<Option> options_for(const PlanSettings& asked) {
  std::vector<Option> options{{"as asked", asked}};
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
  for (int64_t batch = asked.batch / 2; batch >= 1; batch /= 2) {
    if (asked.batch % batch != 0) continue;
    add(concat("batch ", batch, " x ", asked.accumulation * (asked.batch / batch)), [&](PlanSettings& s) {
      s.batch = batch;
      s.accumulation = asked.accumulation * (asked.batch / batch);
    });
  }
  if (asked.batch > 1) {
    add(concat("batch 1 x ", asked.accumulation * asked.batch, ", nothing recomputed"), [&](PlanSettings& s) {
      s.batch = 1;
      s.accumulation = asked.accumulation * asked.batch;
      s.segments.clear();
    });
  }
  if (asked.length >= 4) add(concat("length ", asked.length / 2), [&](PlanSettings& s) { s.length = asked.length / 2; });
  if (asked.lora.r > 1) add(concat("rank ", asked.lora.r / 2), [&](PlanSettings& s) { s.lora.r = asked.lora.r / 2; });
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
    return concat(
        "None of them alone is enough. Batch 1 with inputs and embedding on the host, 512 rows of logits, one workspace at a "
        "time and the MLP in tiles takes ",
        gib(plan.peak_reserved()), " and fits: memory_budget=auto finds the fastest such mixture.\n");
  }
  const MemoryParts& parts = plan.of(plan.fullest_of_training()).parts;
  return concat(
      "None of them is enough, nor are all that change no result together: they take ", gib(plan.peak_reserved()), ", of which ",
      gib(parts_of(parts, {MemoryUse::kCodes, MemoryUse::kScales, MemoryUse::kDense, MemoryUse::kAdapters, MemoryUse::kGradients,
                           MemoryUse::kOptimizer})),
      " are base, adapters and optimizer, in ", gib(room), ". Take a shorter length, a smaller model or a larger card.\n");
}

/// "1.5 GiB + 0.2 GiB = 1.7 GiB".
std::string sum_text(const std::vector<Bytes>& terms) {
  std::string text;
  Bytes total;
  for (const Bytes term : terms) {
    if (term.count == 0) continue;
    text += concat(text.empty() ? "" : " + ", gib(term));
    total += term;
  }
  return concat(text, " = ", gib(total));
}

std::string each(Bytes bytes, int64_t count) {
  const double size = static_cast<double>(bytes.count) / static_cast<double>(std::max<int64_t>(1, count));
  return concat(fixed(size, size < 10 && size != std::floor(size) ? 3 : 0), size == 1 ? " byte" : " bytes");
}

/// What is there before the first token: parts with how they come about, and their sum.
std::string resident_text(const MemoryPlan& plan, const PlanSettings& settings) {
  const MemoryParts& parts = plan.of(plan.fullest_of_training()).parts;
  const int64_t elements = 2 * part(parts, MemoryUse::kCodes).count, trained = plan.trainable_parameters;
  const int64_t dense = part(parts, MemoryUse::kDense).count / static_cast<int64_t>(c10::elementSize(settings.compute_dtype));
  const std::vector<std::pair<MemoryUse, std::string>> rows{
      {MemoryUse::kCodes, concat(elements, " elements of linear layers x 1/2 byte")},
      {MemoryUse::kScales, concat("the same x ", each(part(parts, MemoryUse::kScales), elements),
                                  settings.quantization.double_quant ? ", themselves quantized" : "")},
      {MemoryUse::kDense, concat(dense, " elements x ", c10::elementSize(settings.compute_dtype), " bytes")},
      {MemoryUse::kAdapters, concat(trained, " parameters x 4 bytes, float32")},
      {MemoryUse::kGradients, concat(trained, " parameters x 4 bytes, float32")},
      {MemoryUse::kOptimizer, plan.optimizer_on_host
                                  ? std::string("a piece at a time: the moments are in host memory")
                                  : concat(trained, " parameters x ", each(part(parts, MemoryUse::kOptimizer), trained))},
      {MemoryUse::kLibrary, "cuBLAS takes it once"}};
  Table table;
  std::vector<Bytes> terms;
  for (const auto& [use, text] : rows) {
    if (part(parts, use).count == 0) continue;
    table.row({std::string(ops::to_string(use)), gib(part(parts, use)), text});
    terms.push_back(part(parts, use));
  }
  return concat(table.text(), "  ", sum_text(terms), "\n");
}

/// What a micro-batch adds at its fullest, and the way from there to what the card must have.
std::string micro_batch_text(const MemoryPlan& plan, const PlanSettings& settings) {
  const PhasePlan& fullest = plan.of(plan.fullest_of_training());
  const MemoryParts& parts = fullest.parts;
  const int64_t tokens = settings.batch * settings.length, blocks = settings.model.num_hidden_layers;
  const auto size = [&](MemoryUse use) { return part(parts, use); };
  const std::vector<std::pair<MemoryUse, std::string>> rows{
      {MemoryUse::kBatch, concat("tokens, targets and positions of ", settings.accumulation,
                                 settings.accumulation == 1 ? " micro-batch" : " micro-batches", ", rotary tables")},
      {MemoryUse::kKept, concat(blocks, " blocks x ", tokens, " tokens x ", each(size(MemoryUse::kKept), blocks * tokens))},
      {MemoryUse::kActivation,
       concat(tokens, " tokens x ", each(size(MemoryUse::kActivation), tokens), ", of the block that is computed")},
      {MemoryUse::kDequantized, "one stack of weights in the compute dtype"},
      {MemoryUse::kAttention, "what the attention kernel takes beside its results"},
      {MemoryUse::kLogits, concat("a chunk of rows x ", settings.model.vocab_size, " words")},
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
  std::string text = concat(table.text(), "  ", sum_text(terms), "\n\n");
  text += concat("  Steps 1 and 2: ", sum_text({fullest.tensors - added, added}), " in use");
  if (fullest.allocated > fullest.tensors)
    text += concat("; with the allocator's rounding of ", gib(fullest.allocated - fullest.tensors), ", ", gib(fullest.allocated),
                   " are allocated");
  const Bytes cached = plan.peak_reserved() - fullest.allocated;
  if (cached.count > 0) text += concat(".\n  Cached and fragmented at most: ", sum_text({fullest.allocated, cached}), " reserved");
  return text + ".\n";
}

/// The same run in transformers, peft and bitsandbytes, term by term.
std::string peer_text(const MemoryPlan& plan, const PlanSettings& settings, Bytes room) {
  const PeerMemory peer = hugging_face_memory(plan, settings);
  const int64_t tokens = settings.batch * settings.length;
  const bool wide = settings.compute_dtype == at::kFloat;
  const bool keeps_all = settings.segments.empty();
  Table table;
  table.row({concat("base, what is not in four bits in ", dtype_name(settings.compute_dtype)), gib(peer.base), "as in step 1"});
  table.row({"embedding, head, norms in float32", gib(peer.prepared), "what prepare_model_for_kbit_training adds"});
  table.row({"adapters, gradients, moments", gib(peer.adapters), "as in step 1"});
  table.row({"kept for backward", gib(peer.kept),
             keeps_all ? "as here; theirs keep more of each block"
                       : concat(settings.model.num_hidden_layers, " blocks x ", tokens, " tokens x ", settings.model.hidden_size,
                                " x ", c10::elementSize(settings.compute_dtype), " bytes: the inputs")});
  table.row({"activations and a dequantized weight", gib(peer.working), "as in step 2"});
  table.row({"logits", gib(peer.logits),
             concat(tokens, " x ", settings.model.vocab_size, " x ",
                    wide ? "(4 bytes + 4 of their gradient)" : "(2 bytes + 4 of a float32 copy + 4 of its gradient)")});
  return concat(table.text(), "  ", sum_text({peer.base, peer.prepared, peer.adapters, peer.kept, peer.working, peer.logits}),
                keeps_all ? " at least" : "", ", in ", gib(room), ": ", peer.total() > room ? "does not fit" : "fits", ".\n");
}

}  // namespace

PeerMemory hugging_face_memory(const MemoryPlan& plan, const PlanSettings& settings) {
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
  std::string text =
      concat("The configuration: ", fixed(static_cast<double>(plan.base_parameters) * 1e-9, 2), " G parameters on ", name_of(gpu),
             " (", gib(gpu.memory), ", of which ", gib(allowance.on(gpu)), " allowed for the CUDA context), ", settings.batch,
             settings.batch == 1 ? " row of " : " rows of ", settings.length, " tokens, accumulation ", settings.accumulation, ", ",
             dtype_name(settings.compute_dtype), ", rank ", settings.lora.r, ", ", keep_text(settings), ".\n\n");
  text += concat("Step 1. What is there before the first token.\n\n", resident_text(plan, settings), "\n");
  text += concat("Step 2. What a micro-batch of ", settings.batch, " x ", settings.length, " = ", tokens,
                 " tokens adds at its fullest moment, which is in ", ops::to_string(plan.fullest_of_training()), ".\n\n",
                 micro_batch_text(plan, settings), "\n");
  text += "Step 3. The checklist.\n\n" + checklist(plan, settings) + "\n";
  text += concat("Step 4. Does it fit? ", gib(plan.peak_reserved()), " of ", gib(room), ": ",
                 fits ? concat("yes, ", gib(room - plan.peak_reserved()), " are left.")
                      : concat("no, ", gib(plan.peak_reserved() - room), " are missing."),
                 "\n\n");
  text += concat("Step 5. What the same run takes in transformers, peft and bitsandbytes, where the loss holds all logits.\n\n",
                 peer_text(plan, settings, room),
                 "  Gradient accumulation costs nothing: micro-batches follow each other. The adapters cost least.\n\n");
  text += "Step 6. What to change, what hurts least first. ";
  const bool timed = rates_are_known(settings, gpu);
  const StepTime time = timed ? step_time(settings, gpu, static_cast<double>(settings.length)) : StepTime{};
  text += timed
              ? concat("Time is of one optimizer step over the same rows; the estimate is ", evidence_text(time.evidence), ".\n\n")
              : std::string(
                    "Times are not known without this card's rates: --gpu_bandwidth, --gpu_tflops (dense 16-bit), and --bf16 "
                    "or --fp16.\n\n");
  Table table;
  table.row({"change", "reserved", "fits", "step"});
  std::string first;
  const double base_time = timed ? optimizer_step_seconds(settings, gpu) : 0;
  for (const Option& option : options_for(settings)) {
    const MemoryPlan found = plan_memory_in(option.settings, room);
    std::string step = "-";
    if (base_time > 0) {
      const double seconds = optimizer_step_seconds(option.settings, gpu);
      step = concat(duration(seconds), " (", fixed(100 * (seconds / base_time - 1), 0), " %)");
    }
    if (first.empty() && found.fits) first = option.name;
    table.row({option.name, gib(found.peak_reserved()), found.fits ? "yes" : "no", step});
  }
  text += table.text() + "\n";
  text += fits            ? "So nothing has to change here: what ran out of memory elsewhere fits.\n"
          : first.empty() ? all_together(settings, room)
                          : concat("So first: ", first, ".\n");
  text +=
      "The customary order, batch, then length, then rank, is right about the last: rank buys least and costs quality. A "
      "smaller batch with as "
      "much more accumulation is the same computation; a shorter length throws data away.\n";
  return text;
}

}  // namespace qlorapp
