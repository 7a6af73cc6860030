// SPDX-License-Identifier: Apache-2.0
#include "generation_options.hpp"

#include <algorithm>
#include <cstdio>
#include <span>

#include "core/check.hpp"
#include "progress.hpp"
#include "qlorapp/core/log.hpp"

namespace qlorapp::cli {

void GenerationOptions::add_to(CommandLine& line) {
  line.option("max_new_tokens", generate.max_new_tokens,
              "maximum number of new tokens; unset: fewer where the model has no more positions");
  line.option("min_new_tokens", generate.min_new_tokens, "minimum number of new tokens");
  line.option("do_sample", generate.sampling.do_sample,
              "sample tokens by their probability instead of choosing the most probable; "
              "unset: true with temperature, top_k, top_p or min_p");
  line.option("temperature", generate.sampling.temperature, "divides the logits");
  line.option("top_k", generate.sampling.top_k, "sample among this many most probable tokens; 0: all");
  line.option("top_p", generate.sampling.top_p, "sample among the fewest tokens that reach this probability");
  line.option("min_p", generate.sampling.min_p, "sample among tokens with at least this share of the largest probability");
  line.option("repetition_penalty", generate.sampling.repetition_penalty,
              "above 1: tokens that already occur become less probable");
  line.option("seed", seed, "seed of the sampling");
  line.texts("stop_strings", stop_strings, "text that ends an answer, which keeps it; give the option again for another text");
}

void GenerationOptions::group(CommandLine& line) {
  line.group("Sampling", {"do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"});
}

void GenerationOptions::settle(const CommandLine& line) {
  for (const char* name : {"temperature", "top_k", "top_p", "min_p"}) {
    if (!line.given(name)) continue;
    if (!line.given("do_sample")) generate.sampling.do_sample = true;
    if (!generate.sampling.do_sample) log_warning(message("[generate] --{} has no effect with --do_sample false", name));
  }
  generate.fits_positions = !line.given("max_new_tokens");
  QLORAPP_CHECK_VALUE(!line.given("max_new_tokens") || generate.min_new_tokens <= generate.max_new_tokens,
                      "[generate] --min_new_tokens ({}) must be at most --max_new_tokens ({}). Lower the one or raise the other.",
                      generate.min_new_tokens, generate.max_new_tokens);
  QLORAPP_CHECK_VALUE(seed >= 0, "[seed] must be an integer >= 0; got {}.", seed);
  generate.sampling.seed = static_cast<uint64_t>(seed);
  generate.sampling.validate();
  static_cast<void>(StopStrings(stop_strings, {}));
}

StopStrings GenerationOptions::stops(FolderText& tools) const {
  return {stop_strings, [&tools](std::span<const TokenId> ids) { return tools.decode(ids, /*skip_special_tokens=*/false); }};
}

void GenerationOptions::add_ends(const CausalLM& model, FolderText& tools, bool chat) {
  generate.eos_token_ids = model.config().eos_token_ids;
  for (const TokenId id : tools.eos_ids()) generate.eos_token_ids.push_back(id);
  if (const auto end = chat ? tools.end_of_turn() : std::nullopt) {
    if (const auto id = tools.token_to_id(*end)) generate.eos_token_ids.push_back(*id);
  }
}

void GrowingText::add(int64_t token) {
  ids_.push_back(static_cast<TokenId>(token));
  give(false);
}

void GrowingText::finish() {
  if (shown_ < ids_.size()) give(true);
}

/// A token's text depends on those before it (spaces, bytes of one character), so the last that were given out are decoded again with the new.
void GrowingText::give(bool all) {
  constexpr std::string_view kUnfinished = "\xEF\xBF\xBD";  // U+FFFD
  const auto decoded = [&](size_t end) {
    return tools_.decode(std::span(ids_).subspan(window_, end - window_), /*skip_special_tokens=*/true);
  };
  const std::string before = decoded(shown_), now = decoded(ids_.size());
  if (!all && (now.size() <= before.size() || now.ends_with(kUnfinished))) return;
  const std::string piece = now.substr(std::min(before.size(), now.size()));
  window_ = shown_;
  shown_ = ids_.size();
  text_ += piece;
  if (!piece.empty()) out_(piece);
}

void show(std::string_view text, bool is_terminal) {
  if (is_terminal) print_text(stdout, text);
  else std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

bool ended(const GenerateOptions& options, const StopStrings& stops, int64_t row, std::span<const int64_t> tokens) {
  return stops.ended(row) || std::ranges::find(options.eos_token_ids, tokens.back()) != options.eos_token_ids.end();
}

std::string speed_text(int64_t tokens, std::chrono::steady_clock::time_point began) {
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  return message("{} tokens, {:.1f} tokens/s", tokens, static_cast<double>(tokens) / seconds);
}

}  // namespace qlorapp::cli
