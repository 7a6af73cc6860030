// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/memory/plan_report.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <utility>

#include "qlorapp/core/check.hpp"

namespace qlorapp {
namespace {

using ops::MemoryPhase;
using ops::MemoryUse;

std::string fixed(double value, int digits) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return text.data();
}
/// What is not a tenth of a GiB has a unit that shows it.
std::string gib(Bytes bytes) {
  const double count = static_cast<double>(bytes.count) / (1 << 30);
  return bytes.count != 0 && std::abs(count) < 0.1 ? to_string(bytes) : fixed(count, 2) + " GiB";
}

/// Columns of equal width; the first to the left, the others to the right.
class Table {
 public:
  void row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  [[nodiscard]] std::string text() const {
    std::vector<size_t> widths;
    for (const auto& row : rows_) {
      widths.resize(std::max(widths.size(), row.size()));
      for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
    }
    std::string result;
    for (const auto& row : rows_) {
      std::string line = "  ";
      for (size_t i = 0; i < row.size(); ++i) {
        const std::string space(widths[i] - row[i].size(), ' ');
        line += i == 0 || &row[i] == &row.back() ? row[i] + (i + 1 < row.size() ? space + "  " : "") : space + row[i] + "  ";
      }
      while (!line.empty() && line.back() == ' ') line.pop_back();
      result += line + "\n";
    }
    return result;
  }

 private:
  std::vector<std::vector<std::string>> rows_;
};

Bytes part(const MemoryParts& parts, MemoryUse use) { return parts[static_cast<size_t>(use)]; }
Bytes parts_of(const MemoryParts& parts, std::initializer_list<MemoryUse> uses) {
  Bytes total;
  for (const MemoryUse use : uses) total += part(parts, use);
  return total;
}

std::string name_of(const Gpu& gpu) { return gpu.name.empty() ? "a card of " + gib(gpu.memory) : std::string(gpu.name); }

bool rates_are_known(const PlanSettings& settings, const Gpu& gpu) {
  return gpu.tensor_rate > 0 && gpu.bandwidth > 0 && (settings.compute_dtype != at::kFloat || gpu.float32_rate > 0);
}

/// How certain times of this dtype on this card are.
std::string evidence_text(Evidence evidence) {
  return concat(to_string(evidence), ", +-", fixed(100 * uncertainty(evidence), 0), " %");
}

std::string dtype_name(at::ScalarType dtype) {
  return dtype == at::kHalf ? "float16" : dtype == at::kBFloat16 ? "bfloat16" : "float32";
}

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

std::string memory_lines(const MemoryPlan& plan) {
  const PhasePlan& fullest = plan.of(plan.fullest_of_training());
  Table table;
  for (size_t use = 0; use < ops::kMemoryUseCount; ++use) {
    if (fullest.parts[use].count > 0)
      table.row({std::string(ops::to_string(static_cast<MemoryUse>(use))), gib(fullest.parts[use])});
  }
  if (fullest.allocated > fullest.tensors) table.row({"allocator's rounding", gib(fullest.allocated - fullest.tensors)});
  table.row({concat("allocated, ", ops::to_string(plan.fullest_of_training())), gib(fullest.allocated)});
  if (fullest.reserved > fullest.allocated) table.row({"cached and fragmented at most", gib(fullest.reserved - fullest.allocated)});
  return table.text();
}

/// "1.8 h", "2.3 min", "41.0 s", "0.13 s".
std::string duration(double seconds) {
  return seconds >= 5400  ? fixed(seconds / 3600, 1) + " h"
         : seconds >= 120 ? fixed(seconds / 60, 1) + " min"
                          : fixed(seconds, seconds < 1 ? 2 : 1) + " s";
}

double optimizer_step_seconds(const PlanSettings& settings, const Gpu& gpu) {
  const StepTime time = step_time(settings, gpu, static_cast<double>(settings.length));
  return time.micro_batch() * static_cast<double>(settings.accumulation) + time.optimizer;
}

}  // namespace

Bytes room_on(const Gpu& gpu, const DeviceAllowance& allowance) {
  const Bytes context = allowance.on(gpu);
  QLORAPP_CHECK_VALUE(context < gpu.memory, "[gpu] of its memory, ", to_string(gpu.memory),
                      ", nothing is left beside the CUDA context, ", to_string(context),
                      ". Give a larger --gpu, or what the context really takes as --context.");
  return gpu.memory - context;
}

std::string phase_table(const MemoryPlan& plan) {
  Table table;
  table.row({"phase", "tensors", "allocated", "reserved", "fullest part"});
  for (size_t i = 0; i < ops::kMemoryPhaseCount; ++i) {
    const PhasePlan& phase = plan.phases[i];
    if (!phase.planned) continue;
    const auto most = std::max_element(phase.parts.begin(), phase.parts.end());
    table.row({std::string(ops::to_string(static_cast<MemoryPhase>(i))), gib(phase.tensors), gib(phase.allocated),
               gib(phase.reserved),
               concat(ops::to_string(static_cast<MemoryUse>(most - phase.parts.begin())), " ", gib(*most),
                      static_cast<MemoryPhase>(i) == MemoryPhase::kMerge ? "; host memory, after the run" : "")});
  }
  return table.text();
}

std::string checklist(const MemoryPlan& plan, const PlanSettings& settings) {
  const MemoryParts& parts = plan.of(plan.fullest_of_training()).parts;
  const PhasePlan& fullest = plan.of(plan.fullest_of_training());
  const Bytes base = parts_of(parts, {MemoryUse::kCodes, MemoryUse::kScales, MemoryUse::kDense});
  const auto parameters = static_cast<double>(plan.base_parameters), trainable = static_cast<double>(plan.trainable_parameters);
  const auto rule = [&](double bytes) { return gib({static_cast<int64_t>(bytes)}); };
  const double hidden = static_cast<double>(settings.model.hidden_size),
               layers = static_cast<double>(settings.model.num_hidden_layers);
  const double tokens = static_cast<double>(settings.batch) * static_cast<double>(settings.length);
  Table table;
  table.row({"component", "rule of thumb", "planned", "what it is"});
  table.row(
      {"base model (4-bit)", rule(parameters * 0.5), gib(base),
       concat("codes ", gib(part(parts, MemoryUse::kCodes)), ", scales ", gib(part(parts, MemoryUse::kScales)),
              ", embedding, head and norms in ", dtype_name(settings.compute_dtype), " ", gib(part(parts, MemoryUse::kDense)))});
  table.row({"LoRA adapters", rule(static_cast<double>(settings.lora.r) * 7 * hidden * layers * 4),
             gib(part(parts, MemoryUse::kAdapters)), concat(plan.trainable_parameters, " parameters, float32")});
  table.row({"gradients (LoRA only)", rule(trainable * 4), gib(part(parts, MemoryUse::kGradients)), "float32, in one arena"});
  table.row({"optimizer states", rule(trainable * 8), gib(part(parts, MemoryUse::kOptimizer)),
             plan.optimizer_on_host       ? "in host memory"
             : settings.optimizer_is_8bit ? "two moments in eight bits"
                                          : "two moments in float32"});
  table.row(
      {"activations", rule(tokens * hidden * layers * 2), gib(parts_of(parts, {MemoryUse::kKept, MemoryUse::kActivation})),
       concat("kept for backward ", gib(part(parts, MemoryUse::kKept)), ", in use ", gib(part(parts, MemoryUse::kActivation)))});
  table.row({"logits", "-", gib(part(parts, MemoryUse::kLogits)),
             concat("at this moment; ", gib(part(plan.of(MemoryPhase::kLoss).parts, MemoryUse::kLogits)),
                    " in the loss, a chunk of rows; whole they would be ",
                    rule(tokens * static_cast<double>(settings.model.vocab_size) *
                         static_cast<double>(c10::elementSize(settings.compute_dtype))))});
  table.row({"workspaces", "-", gib(parts_of(parts, {MemoryUse::kDequantized, MemoryUse::kAttention, MemoryUse::kLibrary})),
             "a dequantized weight, attention, cuBLAS"});
  table.row({"batch", "-", gib(part(parts, MemoryUse::kBatch)), "tokens, targets, positions, rotary tables"});
  // A GPU's cache only grows, so this is what the allocator holds at the end; on a CPU the fullest moment of training.
  Bytes reserved;
  for (size_t i = 0; i < ops::kMemoryPhaseCount; ++i) {
    const auto phase = static_cast<MemoryPhase>(i);
    if (phase != MemoryPhase::kLoad && phase != MemoryPhase::kMerge) reserved = std::max(reserved, plan.of(phase).reserved);
  }
  if (settings.device.type == at::kCUDA) {
    table.row({"rounding and fragmentation", "-", gib(reserved - fullest.tensors),
               "of torch's caching allocator, reserved and not in use"});
  }
  table.row({"total", "", gib(reserved),
             concat("fullest in: ", ops::to_string(plan.fullest_of_training()),
                    settings.device.type == at::kCUDA ? "; without the CUDA context" : "")});
  if (const Bytes load = plan.of(MemoryPhase::kLoad).reserved; load > reserved) {
    table.row({"load, before training", "-", gib(load), "one weight at a time, with the buffers that it comes through"});
  }
  table.row({"merge, after training", "-", gib(plan.of(MemoryPhase::kMerge).allocated),
             "host memory: qlorapp merge, one weight at a time"});
  return table.text();
}

std::string summary_line(const MemoryPlan& plan, const PlanSettings& settings) {
  const MemoryPhase phase = plan.fullest_of_training();
  const PhasePlan& fullest = plan.of(phase);
  const MemoryParts& parts = fullest.parts;
  return concat("plan: ", to_string(fullest.allocated), " at most, in ", ops::to_string(phase), " (base ",
                to_string(parts_of(parts, {MemoryUse::kCodes, MemoryUse::kScales, MemoryUse::kDense})),
                ", adapters with gradients and optimizer ",
                to_string(parts_of(parts, {MemoryUse::kAdapters, MemoryUse::kGradients, MemoryUse::kOptimizer})),
                ", kept for backward ", to_string(part(parts, MemoryUse::kKept)), ", logits ",
                to_string(part(parts, MemoryUse::kLogits)), ", other ",
                to_string(fullest.allocated - sum(parts) +
                          parts_of(parts, {MemoryUse::kLibrary, MemoryUse::kBatch, MemoryUse::kActivation, MemoryUse::kDequantized,
                                           MemoryUse::kAttention})),
                ") for ", settings.batch, " x ", settings.length, " tokens");
}

std::string verdict(const MemoryPlan& plan, Bytes room) {
  return concat(to_string(plan.peak_reserved()), " of ", to_string(room), plan.fits ? ": fits" : ": does not fit");
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
  text +=
      "Step 1. What is there before the first token: the base, adapters, gradients, moments.\nStep 2. What a micro-batch adds "
      "at its fullest.\n\n";
  text += memory_lines(plan) + "\n";
  text += "Step 3. The checklist.\n\n" + checklist(plan, settings) + "\n";
  text += concat("Step 4. Does it fit? ", gib(plan.peak_reserved()), " of ", gib(room), ": ",
                 fits ? concat("yes, ", gib(room - plan.peak_reserved()), " are left.")
                      : concat("no, ", gib(plan.peak_reserved() - room), " are missing."),
                 "\n\n");
  const double logits = static_cast<double>(tokens) * static_cast<double>(settings.model.vocab_size);
  const bool wide = settings.compute_dtype == at::kFloat;
  text += concat(
      "Step 5. Why the same setting runs out elsewhere. A loss over whole logits holds ", tokens, " x ", settings.model.vocab_size,
      " of them: ",
      wide ? concat(gib({static_cast<int64_t>(logits * 4)}), " in float32 and as much again for their gradient, ",
                    gib({static_cast<int64_t>(logits * 8)}), " together. ")
           : concat(gib({static_cast<int64_t>(logits * 2)}), " in 16 bits, ", gib({static_cast<int64_t>(logits * 4)}),
                    " more for a float32 copy and as much again for its gradient, ", gib({static_cast<int64_t>(logits * 10)}),
                    " together. prepare_model_for_kbit_training turns embedding and head into float32, ",
                    gib(part(plan.of(plan.fullest_of_training()).parts, MemoryUse::kDense)), " more. "),
      "Gradient accumulation costs nothing: micro-batches follow each other. None of it is the adapters.\n\n");
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

namespace {

/// One of the ways that are compared, worked out.
struct Compared {
  Contender contender;
  PlanSettings settings;
  MemoryPlan plan;
  StepTime time;
  Bytes room;

  [[nodiscard]] int64_t rows() const { return settings.batch * settings.accumulation; }
  [[nodiscard]] double step() const { return time.micro_batch() * static_cast<double>(settings.accumulation) + time.optimizer; }
  [[nodiscard]] double seconds_a_row() const { return step() / static_cast<double>(rows()); }
  [[nodiscard]] std::string name() const {
    return concat(name_of(contender.gpu), ", ", contender.batch, " x ", contender.accumulation);
  }
};

Compared compared(const PlanSettings& settings, const Contender& contender, const DeviceAllowance& allowance) {
  Compared result{contender, settings, {}, {}, room_on(contender.gpu, allowance)};
  result.settings.batch = contender.batch;
  result.settings.accumulation = contender.accumulation;
  result.settings.device = contender.gpu.device();
  if (settings.compute_dtype == at::kBFloat16 && !contender.gpu.has_bf16()) result.settings.compute_dtype = at::kHalf;
  result.plan = plan_memory_in(result.settings, result.room);
  result.time = step_time(result.settings, contender.gpu, static_cast<double>(settings.length));
  return result;
}

std::string speed_text(const Compared& fast, const Compared& slow) {
  const Gpu &a = fast.contender.gpu, &b = slow.contender.gpu;
  const double factor = slow.seconds_a_row() / fast.seconds_a_row();
  if (a.name == b.name && a.tensor_rate == b.tensor_rate && a.bandwidth == b.bandwidth) {
    return concat(
        "Which is faster: ", fast.name(), ", by ", fixed(100 * (factor - 1), 1),
        " %, by estimate. It is one card, so both do the same products over the same tokens; a larger batch dequantizes the "
        "weights less often.\n");
  }
  return concat(
      "Which is faster: ", fast.name(), ", by a factor of about ", fixed(factor, 1),
      ". The cards decide that, not the batch: both do the same products over the same tokens, and a step is bound by the "
      "tensor rate (",
      fixed(a.tensor_rate * a.sustained * 1e-12, 0), " against ", fixed(b.tensor_rate * b.sustained * 1e-12, 0),
      " TFLOP/s sustained, of ", fixed(a.tensor_rate * 1e-12, 0), " and ", fixed(b.tensor_rate * 1e-12, 0), " published).",
      fast.contender.batch != slow.contender.batch ? " The larger batch only dequantizes the weights less often.\n" : "\n");
}

std::string memory_text(const Compared& most, const Compared& least) {
  const Bytes base = parts_of(least.plan.of(least.plan.fullest_of_training()).parts,
                              {MemoryUse::kCodes, MemoryUse::kScales, MemoryUse::kDense, MemoryUse::kAdapters,
                               MemoryUse::kGradients, MemoryUse::kOptimizer});
  const Bytes more = most.plan.peak_reserved() - least.plan.peak_reserved();
  std::string text = concat("Memory: ", most.name(), " takes ", gib(most.plan.peak_reserved()), ", ", least.name(), " takes ",
                            gib(least.plan.peak_reserved()), ". ");
  text += more.count == 0 ? std::string("There is no difference: ")
          : most.contender.batch == least.contender.batch
              ? concat("The difference, ", gib(more), ", is of the cards' kernels: ")
              : concat("The difference, ", gib(more), ", is activations and logits of more rows at a time: ");
  return text + concat("base, adapters and optimizer are ", gib(base), " in both. Accumulation itself takes no memory.\n");
}

}  // namespace

std::string compare(const PlanSettings& settings, const std::vector<Contender>& contenders, const DeviceAllowance& allowance) {
  QLORAPP_CHECK_VALUE(contenders.size() >= 2, "[compare] needs at least two of GPU:BATCHxACCUMULATION; got ", contenders.size(),
                      ".");
  Table table;
  table.row({"card", "effective batch", "reserved", "of", "fits", "micro-batch", "optimizer step", "tokens/s", "time is"});
  std::vector<Compared> all;
  for (const Contender& contender : contenders) {
    const Compared& one = all.emplace_back(compared(settings, contender, allowance));
    table.row({one.name(), concat(one.rows()), gib(one.plan.peak_reserved()), gib(one.room), one.plan.fits ? "yes" : "no",
               duration(one.time.micro_batch()), duration(one.step()),
               fixed(static_cast<double>(one.rows() * settings.length) / one.step(), 0), evidence_text(one.time.evidence)});
  }
  const auto [fast, slow] = std::minmax_element(
      all.begin(), all.end(), [](const Compared& a, const Compared& b) { return a.seconds_a_row() < b.seconds_a_row(); });
  const auto [least, most] = std::minmax_element(
      all.begin(), all.end(), [](const Compared& a, const Compared& b) { return a.plan.peak_reserved() < b.plan.peak_reserved(); });
  std::string text = table.text() + "\n" + speed_text(*fast, *slow) + memory_text(*most, *least);
  for (const Compared& one : all) {
    if (!one.plan.fits)
      text += concat("Does not fit: ", one.name(), ", by ", gib(one.plan.peak_reserved() - one.room),
                     ". A smaller batch with as much more accumulation is the same update.\n");
  }
  const bool same = std::all_of(all.begin(), all.end(), [&](const Compared& one) { return one.rows() == all.front().rows(); });
  text +=
      same ? concat("Quality: the same. Gradients of ", all.front().rows(),
                    " rows are added up before each update either way, weighted by their target tokens, so the order of the "
                    "sums is all that differs. (Averages of micro-batch means, as older trainers form them, do differ on rows of "
                    "unequal length.)")
           : "Quality: the effective batches differ, so the runs are not the same; scale the learning rate or make them equal.";
  if (fast->settings.compute_dtype != slow->settings.compute_dtype) {
    const Gpu& old = fast->contender.gpu.has_bf16() ? slow->contender.gpu : fast->contender.gpu;
    text += concat(" One difference is left: ", name_of(old),
                   " has no bfloat16 and computes in float16 with loss scaling, which now and then skips a step.");
  }
  return text + "\n";
}

}  // namespace qlorapp
