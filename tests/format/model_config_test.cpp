// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/format/model_layout.hpp"

#include <string>
#include <vector>

#include "catch.hpp"
#include "core/check.hpp"
#include "format/expect_error.hpp"
#include "qlorapp/core/log.hpp"

using namespace qlorapp;
using namespace qlorapp::format;

namespace {

/// A whole config with `more` behind it; an entry of `more` replaces the one of the same key.
std::string config(const std::string& more = "", const std::string& without = "") {
  const std::pair<std::string, std::string> entries[] = {{"architectures", R"(["LlamaForCausalLM"])"},
                                                         {"model_type", R"("llama")"},
                                                         {"hidden_size", "64"},
                                                         {"intermediate_size", "176"},
                                                         {"num_hidden_layers", "2"},
                                                         {"num_attention_heads", "4"},
                                                         {"vocab_size", "96"}};
  std::string text;
  for (const auto& [key, value] : entries) {
    if (key != without && !has(more, "\"" + key + "\"")) text += (text.empty() ? "" : ",") + ("\"" + key + "\":" + value);
  }
  return "{" + text + (more.empty() || text.empty() ? "" : ",") + more + "}";
}

ModelConfig parse(const std::string& text) { return parse_model_config(text, "config.json"); }

std::string refusal(const std::string& text) {
  return thrown<FormatError>([&] { (void)parse(text); });
}

struct Warnings {
  Warnings() {
    set_log_sink([this](LogLevel, std::string_view line) { lines.emplace_back(line); });
  }
  ~Warnings() { set_log_sink({}); }
  Warnings(const Warnings&) = delete;
  Warnings& operator=(const Warnings&) = delete;
  std::vector<std::string> lines;
};

}  // namespace

TEST_CASE("what a Llama's config leaves out has the defaults of its family", "[format][cpu]") {
  const ModelConfig model = parse(config());
  REQUIRE(model.num_key_value_heads == 4);
  REQUIRE(model.head_dim == 16);
  REQUIRE(model.rms_norm_eps == 1e-6);
  REQUIRE(model.max_position_embeddings == 2048);
  REQUIRE_FALSE(model.tie_word_embeddings);
  REQUIRE(model.ropes.front().type == RopeSettings::Type::kDefault);
  REQUIRE(model.ropes.front().theta == 10000.0);
  REQUIRE_FALSE(model.dtype.has_value());
  REQUIRE_FALSE(model.quantization.has_value());
  REQUIRE(model.eos_token_ids.empty());
  REQUIRE(parse(config("", "architectures")).family->architecture == "LlamaForCausalLM");
  REQUIRE(parse(config("", "model_type")).family->model_type == "llama");
}

TEST_CASE("the rope settings of transformers 4 and 5 mean the same", "[format][cpu]") {
  const std::string inner = R"("factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":8192)";
  for (const std::string& more : {R"("rope_theta":500000.0,"rope_scaling":{"rope_type":"llama3",)" + inner + "}",
                                  R"("rope_theta":500000.0,"rope_scaling":{"type":"llama3",)" + inner + "}",
                                  R"("rope_theta":500000.0,"rope_scaling":{"type":"llama3","rope_type":"llama3",)" + inner + "}",
                                  R"("rope_parameters":{"rope_type":"llama3","rope_theta":500000.0,)" + inner + "}"}) {
    const RopeSettings rope = parse(config(more)).ropes.front();
    REQUIRE(rope.type == RopeSettings::Type::kLlama3);
    REQUIRE(rope.theta == 500000.0);
    REQUIRE(rope.factor == 8.0);
    REQUIRE(rope.low_freq_factor == 1.0);
    REQUIRE(rope.high_freq_factor == 4.0);
    REQUIRE(rope.original_max_position_embeddings == 8192);
  }
  REQUIRE(parse(config(R"("rope_theta":1000000,"rope_scaling":null)")).ropes.front().theta == 1e6);
  REQUIRE(parse(config(R"("rope_parameters":{"rope_theta":5e5,"rope_type":"default"})")).ropes.front().theta == 5e5);
}

TEST_CASE("token ids may be one, several or none", "[format][cpu]") {
  const ModelConfig model = parse(config(R"("bos_token_id":1,"eos_token_id":[2,95],"pad_token_id":-1)"));
  REQUIRE(model.bos_token_id == 1);
  REQUIRE(model.eos_token_ids == std::vector<int64_t>{2, 95});
  REQUIRE_FALSE(model.pad_token_id.has_value());
  REQUIRE(parse(config(R"("eos_token_id":2)")).eos_token_ids == std::vector<int64_t>{2});
  REQUIRE(parse(config(R"("torch_dtype":"float16")")).dtype == Dtype::kF16);
  REQUIRE(parse(config(R"("dtype":"bfloat16")")).dtype == Dtype::kBF16);
}

TEST_CASE("what would change the result, or is no size of a model, is refused by name", "[format][cpu]") {
  const struct {
    std::string text, reason;
  } rows[] = {
      {config(R"("architectures":["MambaForCausalLM"],"model_type":"mamba")"),
       "HeliumForCausalLM; got 'MambaForCausalLM' with model_type 'mamba'. Did you mean 'LlamaForCausalLM'? Python's "
       "AutoModelForCausalLM"},
      {config(R"("architectures":["Qwen3MoeForCausalLM"],"model_type":"qwen3_moe")"), "Did you mean 'Qwen3ForCausalLM'?"},
      {config(R"("architectures":["LlamaForSequenceClassification"])"), "got 'LlamaForSequenceClassification' with model_type"},
      {config(R"("architectures":["MistralForCausalLM","X"])"), "got 'MistralForCausalLM', 'X' with model_type"},
      {config(R"("architectures":["LlamaForCausalLM","X"],"model_type":"qwen2")"), "model_type 'qwen2'"},
      {config(R"("architectures":[])", "model_type"), "got 'none'"},
      {config(R"("architectures":"LlamaForCausalLM")"), "architectures must be a list of strings"},
      {config(R"("model_type":"qwen2")"), "model_type 'qwen2'"},
      {"{}", "got 'none'"},
      {config(R"("auto_map":{"AutoModel":"x.Y"})"), "auto_map must be absent"},
      {config(R"("trust_remote_code":true)"), "trust_remote_code must be absent"},
      {config("", "hidden_size"), "hidden_size is required"},
      {config("", "vocab_size"), "vocab_size is required"},
      {config(R"("hidden_size":0)"), "hidden_size must be an integer from 1"},
      {config(R"("hidden_size":-64)"), "hidden_size must be an integer"},
      {config(R"("hidden_size":64.0)"), "hidden_size must be an integer"},
      {config(R"("hidden_size":"64")"), "hidden_size must be an integer"},
      {config(R"("hidden_size":true)"), "hidden_size must be an integer"},
      {config(R"("hidden_size":1000000000000)"), "hidden_size must be an integer"},
      {config(R"("vocab_size":99999999999)"), "vocab_size must be"},
      {config(R"("num_hidden_layers":100000)"), "num_hidden_layers must be"},
      {config(R"("intermediate_size":9223372036854775808)"), "64-bit integer"},
      {config(R"("num_key_value_heads":3)"), "num_key_value_heads must divide num_attention_heads, 4; got 3"},
      {config(R"("num_attention_heads":3)"), "num_attention_heads must divide hidden_size, 64"},
      {config(R"("head_dim":15)"), "head_dim must be even"},
      {config(R"("num_attention_heads":64)"), "head_dim must be even"},
      {config(R"("head_dim":16777216)"), "head_dim times num_attention_heads"},
      {config(R"("rms_norm_eps":0)"), "rms_norm_eps"},
      {config(R"("rms_norm_eps":NaN)"), "invalid JSON"},
      {config(R"("rms_norm_eps":"1e-5")"), "rms_norm_eps must be a finite number"},
      {config(R"("hidden_act":"gelu")"), "hidden_act must be silu"},
      {config(R"("architectures":["Gemma3ForCausalLM"],"model_type":"gemma3_text","hidden_activation":"gelu")"),
       "hidden_activation must be gelu_pytorch_tanh"},
      {config(R"("architectures":["Qwen3ForCausalLM"],"model_type":"qwen3","num_key_value_heads":2,"mlp_bias":true)"),
       "mlp_bias is not supported: biases"},
      {config(R"("attention_dropout":0.1)"), "attention_dropout is not supported"},
      {config(R"("sliding_window":4096)"), "sliding_window is not supported"},
      {config(R"("sliding_window":4096,"use_sliding_window":true)"), "sliding_window is not supported"},
      {config(R"("use_sliding_window":true)"), "use_sliding_window is not supported"},
      {config(R"("layer_types":["sliding_attention"])"), "layer_types must be full_attention"},
      {config(R"("final_logit_softcapping":30.0)"), "final_logit_softcapping is not supported"},
      {config(R"("partial_rotary_factor":0.5)"), "partial_rotary_factor is not supported"},
      {config(R"("num_local_experts":8)"), "num_local_experts is not supported"},
      {config(R"("is_encoder_decoder":true)"), "is_encoder_decoder is not supported"},
      {config(R"("torch_dtype":"float64")"), "torch_dtype must be float32"},
      {config(R"("dtype":"torch.int8")"), "dtype must be float32"},
      {config(R"("dtype":"torch.")"), "dtype must be float32"},
      {config(R"("rms_norm_esp":1e-5)"), "Did you mean 'rms_norm_eps'?"},
      {config(R"("eso_token_id":2)"), "Did you mean 'eos_token_id'?"},
      {config(R"("rope_parammters":{"rope_theta":5e5,"rope_type":"default"})"), "Did you mean 'rope_parameters'?"},
      {config(R"("rope_thets":5e5)"), "Did you mean 'rope_theta'?"},
      {config(R"("num_key_value_head":2)"), "Did you mean 'num_key_value_heads'?"},
      {config(R"("tie_words_embeddings":true)"), "Did you mean 'tie_word_embeddings'?"},
      {config(R"("head-dim":8)"), "Did you mean 'head_dim'?"},
      {config(R"("atention_bias":true)"), "Did you mean 'attention_bias'?"},
      {config(R"("quantisation_config":{"load_in_4bit":true})"), "Did you mean 'quantization_config'?"},
      {config(R"("eos_tokens_id":2)"), "Did you mean 'eos_token_id'?"},
      {config(R"("torch_dtype":"float32","dtype":"float16")"), "must not contradict"},
      {config(R"("bos_token_id":96)"), "bos_token_id must be an integer from -1 to 95"},
      {config(R"("eos_token_id":[2,96])"), "eos_token_id must hold ids from 0 to 95"},
      {config(R"("eos_token_id":"2")"), "eos_token_id must be an integer"},
      {config(R"("rope_theta":0)"), "rope_theta must be above 0"},
      {config(R"("rope_scaling":{"type":"su","factor":2.0})"),
       "rope_type must be default, linear, dynamic, llama3, yarn or longrope in a model of type llama; got \"su\""},
      {config(R"("rope_scaling":{"type":"linear"})"), "factor is required"},
      {config(R"("rope_scaling":{"rope_type":"yarn","factor":0.5})"), "factor must be at least 1"},
      {config(R"("rope_scaling":{"rope_type":"longrope","short_factor":[1,2],"long_factor":[1,2]})"),
       "short_factor must be 8 numbers above 0"},
      {config(R"("rope_scaling":{"rope_type":"longrope","short_factor":[1,1,1,1,1,1,1,0]})"),
       "short_factor must be 8 numbers above 0"},
      {config(R"("rope_scaling":[1])"), "rope_scaling must be a JSON object"},
      {config(R"("rope_scaling":{"rope_type":"default","type":"llama3"})"), "must not contradict"},
      {config(R"("rope_theta":1e4,"rope_parameters":{"rope_theta":5e5,"rope_type":"default"})"), "must not contradict"},
      {config(R"("rope_scaling":{"rope_type":"default"},"rope_parameters":{"rope_type":"default","rope_theta":2})"),
       "must not contradict"},
      {config(R"("rope_parameters":{"rope_type":"default","attention_factor":2})"), "attention_factor must be absent"},
      {config(R"("rope_parameters":{"rope_type":"default","partial_rotary_factor":0.5})"), "partial_rotary_factor must be 1"},
      {config(R"("rope_parameters":{"full_attention":{"rope_type":"default"}})"), "full_attention must be absent"},
      {config(R"("rope_scaling":{"rope_type":"llama3","factor":8.0})"), "low_freq_factor is required"},
      {config(R"("rope_scaling":{"rope_type":"llama3","factor":0.5,"low_freq_factor":1,"high_freq_factor":4})"),
       "factor must be at least 1"},
      {config(R"("rope_scaling":{"rope_type":"llama3","factor":8,"low_freq_factor":4,"high_freq_factor":4})"),
       "high_freq_factor must be above"},
      {config(R"("rope_scaling":{"rope_type":"llama3","factor":8,"low_freq_factor":0,"high_freq_factor":4})"),
       "low_freq_factor must be above 0"},
      {config(R"("quantization_config":{"quant_method":"gptq","bits":4})"), "quant_method must be bitsandbytes; got \"gptq\""},
      {config(R"("quantization_config":{"quant_method":"bitsandbytes","load_in_8bit":true})"),
       "load_in_8bit must be false: eight-bit"},
      {config(R"("quantization_config":{"quant_method":"bitsandbytes"})"), "load_in_4bit must be true"},
      {config(R"("quantization_config":{"load_in_4bit":true,"_load_in_4bit":false})"), "load_in_4bit must be true"},
      {config(R"("quantization_config":{"load_in_4bit":true,"bnb_4bit_quant_type":"int4"})"),
       "bnb_4bit_quant_type must be nf4 or fp4"},
      {config(R"("quantization_config":{"load_in_4bit":true,"bnb_4bit_compute_dtype":"float64"})"),
       "bnb_4bit_compute_dtype must be"},
      {config(R"("quantization_config":{"load_in_4bit":true,"bnb_4bit_quant_storage":"load"})"),
       "bnb_4bit_quant_storage must be one of"},
      {config(R"("quantization_config":{"load_in_4bit":true,"bnb_4bit_quant_typ":"nf4"})"), "Did you mean 'bnb_4bit_quant_type'?"},
      {config(R"("quantization_config":{"load_in_4bit":true,"llm_int8_skip_modules":[1]})"),
       "llm_int8_skip_modules must be a list of strings"},
      {config(R"("quantization_config":4)"), "quantization_config must be a JSON object"},
      {std::string(10'000, '['), "nested at most 16 deep"},
      {"[]", "must be a JSON object"},
  };
  for (const auto& row : rows) {
    INFO(row.text.substr(0, 300) << "\n" << refusal(row.text));
    REQUIRE(has(refusal(row.text), row.reason));
    REQUIRE(has(refusal(row.text), "[config.json]"));
  }
}

TEST_CASE("tokens that other programs name are unknown keys and no slips", "[format][cpu]") {
  const Warnings warnings;
  (void)parse(config(R"("eot_token_id":5,"eod_token_id":6,"eos_token":"</s>","sos_token":"<s>")"));
  REQUIRE(warnings.lines.size() == 1);
  REQUIRE(has(warnings.lines.front(), "unknown keys are ignored: "));
}

TEST_CASE("keys that change nothing pass in silence, unknown ones are said once, private ones are ignored", "[format][cpu]") {
  const Warnings warnings;
  (void)parse(config(
      R"("use_cache":true,"initializer_range":0.02,"pretraining_tp":1,"attention_dropout":0.0,"attention_bias":false,"mlp_bias":false,
    "transformers_version":"5.23.0","hidden_act":"silu","sliding_window":null,"layer_types":["full_attention","full_attention"],"_name_or_path":"x",
    "_attn_implementation_internal":"evil/kernel","tie_word_embeddings":false,"num_local_experts":0,"partial_rotary_factor":1.0)"));
  REQUIRE(warnings.lines.empty());
  (void)parse(config(R"("a_key_of_tomorrow":1,"another":null)"));
  (void)parse(config(R"("a_key_of_tomorrow":2,"another":[])"));
  REQUIRE(warnings.lines == std::vector<std::string>{"[config.json] unknown keys are ignored: 'a_key_of_tomorrow', 'another'."});
  std::string many;
  for (int i = 0; i < 5000; ++i) many += message("{}key_{}\":0", i == 0 ? "\"" : ",\"", i);
  (void)parse(config(many));
  REQUIRE(warnings.lines.size() == 2);
  REQUIRE(has(warnings.lines[1], "'key_9' and 4990 more."));
}

TEST_CASE("what transformers' Llama does not read does not stop a load, and says nothing", "[format][cpu]") {
  const Warnings warnings;
  for (const char* more :
       {R"("pretraining_tp":2)", R"("sliding_window":4096,"use_sliding_window":false,"max_window_layers":1)",
        R"("sliding_window":4096,"layer_types":["full_attention","full_attention"])",
        R"("resid_pdrop":0.1,"embd_pdrop":0.1,"hidden_dropout":0.1)", R"("hidden_act":"swish")",
        R"("original_max_position_embeddings":16)", R"("rope_scaling":{"type":"linear","factor":1.0})", R"("dtype":"auto")",
        R"("architectures":["LlamaModel"])", R"("architectures":["X","LlamaForCausalLM"])", R"("architectures":[])",
        R"("is_decoder":true,"boi_token_id":1,"unk_token_id":0)", R"("rope_parammters":null)"}) {
    INFO(more);
    REQUIRE(computed_fields(parse(config(more))) == computed_fields(parse(config())));
    REQUIRE_FALSE(parse(config(more)).dtype.has_value());
  }
  REQUIRE(warnings.lines == std::vector<std::string>{"[config.json] unknown keys are ignored: 'rope_parammters'."});
  REQUIRE(parse(config(R"("dtype":"torch.bfloat16")")).dtype == Dtype::kBF16);
  REQUIRE(parse(config(R"("torch_dtype":"torch.float16","dtype":"float16")")).dtype == Dtype::kF16);
  REQUIRE(parse(config(R"("torch_dtype":"auto","dtype":"float16")")).dtype == Dtype::kF16);
}

TEST_CASE("each field that enters the computation is one of computed_fields", "[format][cpu]") {
  const std::string llama3 =
      R"("rope_parameters":{"rope_type":"llama3","rope_theta":5e5,"factor":8,"low_freq_factor":1,"high_freq_factor":4,"original_max_position_embeddings":)";
  const std::pair<std::string, std::string> pairs[] = {
      {"", R"("rms_norm_eps":1e-5)"},
      {"", R"("rope_theta":20000)"},
      {"", R"("tie_word_embeddings":true)"},
      {"", R"("num_attention_heads":8)"},
      {"", R"("num_key_value_heads":2)"},
      {"", R"("head_dim":32)"},
      {"", R"("hidden_size":128)"},
      {"", R"("intermediate_size":100)"},
      {"", R"("num_hidden_layers":3)"},
      {"", R"("vocab_size":97)"},
      {llama3 + "8192}", llama3 + "4096}"},
      {llama3 + "8192}", R"("rope_theta":5e5)"},
      {llama3 + "8192}", llama3 + R"(8192},"original_max_position_embeddings":100)"},
  };
  for (const auto& [before, after] : pairs) {
    INFO(after);
    const auto was = computed_fields(parse(config(before))), is = computed_fields(parse(config(after)));
    REQUIRE(was.size() == is.size());
    REQUIRE(was != is);
  }
  REQUIRE(computed_fields(parse(config(R"("rms_norm_eps":1e-6,"bos_token_id":1,"dtype":"float16")"))) ==
          computed_fields(parse(config(R"("eos_token_id":2,"max_position_embeddings":64)"))));
}

TEST_CASE("the text of a checkpoint that reads images is configured by text_config, and by what holds for the whole",
          "[format][cpu]") {
  const ModelConfig gemma = parse(
      R"({"architectures":["Gemma3ForConditionalGeneration"],"model_type":"gemma3","boi_token_index":255999,"eos_token_id":[1,106],
      "image_token_index":262144,"mm_tokens_per_image":256,"torch_dtype":"bfloat16","vision_config":{"hidden_size":1152},
      "text_config":{"hidden_size":2560,"intermediate_size":10240,"model_type":"gemma3_text","num_hidden_layers":34,
      "rope_scaling":{"factor":8.0,"rope_type":"linear"},"sliding_window":1024}})");
  REQUIRE(gemma.family->architecture == "Gemma3ForCausalLM");
  REQUIRE(gemma.tie_word_embeddings);
  REQUIRE(gemma.dtype == Dtype::kBF16);
  REQUIRE(gemma.eos_token_ids == std::vector<int64_t>{1, 106});
  REQUIRE(gemma.vocab_size == 262208);
  REQUIRE(parameters(gemma).front().name() == "model.language_model.embed_tokens.weight");
  REQUIRE(parameters(gemma).back().name() == "model.language_model.norm.weight");

  // Qwen's first files have the keys of the text beside the others.
  const std::string flat = R"({"architectures":["Qwen2_5_VLForConditionalGeneration"],"model_type":"qwen2_5_vl","hidden_size":3584,
      "intermediate_size":18944,"num_hidden_layers":28,"num_attention_heads":28,"num_key_value_heads":4,"vocab_size":152064,
      "rms_norm_eps":1e-6,"sliding_window":32768,"use_sliding_window":false,"max_window_layers":28,"image_token_id":151655,
      "vision_start_token_id":151652,"vision_config":{"depth":32},"rope_scaling":{"type":"mrope","mrope_section":[16,24,24]}})";
  const ModelConfig qwen = parse(flat);
  REQUIRE(qwen.family->architecture == "Qwen2ForCausalLM");
  REQUIRE(qwen.ropes.front().type == RopeSettings::Type::kDefault);
  REQUIRE(qwen.ropes.front().theta == 1e6);
  REQUIRE(!qwen.tie_word_embeddings);
  REQUIRE(qwen.layer(0).window == 0);

  const std::string experts =
      R"({"architectures":["Gemma3ForConditionalGeneration"],"model_type":"gemma3","text_config":{"model_type":"qwen3_moe"}})";
  REQUIRE_THAT(refusal(experts),
               Catch::Matchers::ContainsSubstring("config.json, text_config") && Catch::Matchers::ContainsSubstring("qwen3_moe"));
}

TEST_CASE("the parameters of Llama-3.2-1B are those that PEFT counts", "[format][cpu]") {
  const ModelConfig model =
      parse(R"({"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_size":2048,"intermediate_size":8192,
    "num_hidden_layers":16,"num_attention_heads":32,"num_key_value_heads":8,"head_dim":64,"vocab_size":128256,"tie_word_embeddings":true})");
  REQUIRE(parameter_count(model) == 1'235'814'400);
  const auto layers = parameters(model, Role::kLinear);
  REQUIRE(layers.size() == 16 * 7);
  REQUIRE(layers[8].module == "model.layers.1.self_attn.k_proj");
  REQUIRE(layers[8].shape == std::vector<int64_t>{512, 2048});
  REQUIRE(layers[13].module == "model.layers.1.mlp.down_proj");
  REQUIRE(layers[13].shape == std::vector<int64_t>{2048, 8192});
}

TEST_CASE("a head's rotary frequencies fall from one to nearly 1 / theta; llama3 slows long waves by its factor", "[format][cpu]") {
  const auto plain = rope_inverse_frequencies(parse(config(R"("rope_theta":500000.0,"head_dim":64)")).ropes.front());
  REQUIRE(plain.size() == 32);
  REQUIRE(plain[0] == 1.0F);
  const auto scaled = rope_inverse_frequencies(
      parse(
          config(
              R"("head_dim":64,"rope_theta":500000.0,"rope_scaling":{"rope_type":"llama3","factor":32.0,"low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":8192})"))
          .ropes.front());
  REQUIRE(scaled[0] == plain[0]);
  REQUIRE(scaled[31] == plain[31] / 32.0F);
  for (size_t i = 1; i < scaled.size(); ++i) REQUIRE(scaled[i] < scaled[i - 1]);
}
