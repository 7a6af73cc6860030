// SPDX-License-Identifier: Apache-2.0
#include "qlorapp/nn/checkpointed_block.hpp"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/check.hpp"
#include "nn/kept_outputs.hpp"

namespace qlorapp {

void KeptOutputs::store(const std::vector<at::Tensor>& outputs) {
  std::vector<Output>& call = calls_.emplace_back();
  for (const at::Tensor& output : outputs) {
    call.push_back(output.defined() ? Output{output.detach(), output._version()} : Output{});
  }
}

std::vector<at::Tensor> KeptOutputs::take() {
  if (next_ == calls_.size()) return {};
  std::vector<at::Tensor> outputs;
  for (const Output& output : calls_[next_++]) {
    if (output.tensor.defined() && output.tensor._version() != output.version) return {};
    outputs.push_back(output.tensor.defined() ? output.tensor.detach() : at::Tensor());
  }
  return outputs;
}

KeptOutputs*& kept_outputs_here() {
  static thread_local KeptOutputs* kept = nullptr;
  return kept;
}

namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using Run = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// The owner of a node: a std::shared_ptr in torch 2.11, a c10::intrusive_ptr in 2.15.
template <class T, class... Args>
auto make_node(Args&&... args) {
  if constexpr (std::is_same_v<decltype(Edge::function), std::shared_ptr<Node>>) {
    return std::shared_ptr<T>(new T(std::forward<Args>(args)...), [](T* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<T>(std::forward<Args>(args)...);
  }
}

/// @param text  makes the message, which is needed on failure only.
template <class Text>
void require(bool condition, const Text& text) {
  if (!condition) throw Error(text());
}

/// States of the CPU generator and of the generators of the devices that hold an input.
class RandomState {
 public:
  explicit RandomState(const std::vector<at::Tensor>& inputs) {
    remember(at::detail::getDefaultCPUGenerator());
    std::vector<c10::Device> seen;
    for (const at::Tensor& input : inputs) {
      if (!input.defined() || input.device().is_cpu() || input.device().is_meta()) continue;
      if (std::find(seen.begin(), seen.end(), input.device()) != seen.end()) continue;
      seen.push_back(input.device());
      remember(at::globalContext().defaultGenerator(input.device()));
    }
  }
  void restore() const {
    for (const auto& [generator, state] : states_) {
      at::Generator target = generator;
      const std::lock_guard lock(target.mutex());
      target.set_state(state);
    }
  }

 private:
  void remember(at::Generator generator) {
    const std::lock_guard lock(generator.mutex());
    states_.emplace_back(generator, generator.get_state());
  }
  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

/// Autocast of the CPU and of the accelerator, as it stands at construction; set() makes it so again.
class AutocastState {
 public:
  /// The same, but each cast is made anew: a cached cast is a tensor of the graph that made it.
  [[nodiscard]] AutocastState without_cache() const {
    AutocastState state = *this;
    state.cache_ = false;
    return state;
  }
  AutocastState() : cache_(at::autocast::is_autocast_cache_enabled()) {
    for (size_t i = 0; i < kTypes.size(); ++i) {
      enabled_[i] = at::autocast::is_autocast_enabled(kTypes[i]);
      dtype_[i] = at::autocast::get_autocast_dtype(kTypes[i]);
    }
  }
  void set() const {
    for (size_t i = 0; i < kTypes.size(); ++i) {
      at::autocast::set_autocast_enabled(kTypes[i], enabled_[i]);
      at::autocast::set_autocast_dtype(kTypes[i], dtype_[i]);
    }
    at::autocast::set_autocast_cache_enabled(cache_);
  }

 private:
  static constexpr std::array<at::DeviceType, 2> kTypes{at::kCPU, at::kCUDA};
  std::array<bool, 2> enabled_{};
  std::array<at::ScalarType, 2> dtype_{};
  bool cache_;
};

/// Sets a state for a scope and puts the previous one back, also when the scope is left by an exception.
template <class State>
struct Restored {
  explicit Restored(const State& wanted, State now) : before(std::move(now)) {
    if constexpr (requires { wanted.set(); }) {
      wanted.set();
    } else {
      wanted.restore();
    }
  }
  ~Restored() {
    if constexpr (requires { before.set(); }) {
      before.set();
    } else {
      before.restore();
    }
  }
  Restored(const Restored&) = delete;
  Restored& operator=(const Restored&) = delete;
  State before;
};

/// For a scope, outer hooks (save_on_cpu) do not see the tensors that autograd saves: they are dropped with the graph of the first run.
class NoSavedTensorHooks {
 public:
  NoSavedTensorHooks() : before_(at::SavedTensorDefaultHooks::get_tls_state()) {
    at::impl::SavedTensorDefaultHooksTLS none;
    none.disabled_error_message = before_.disabled_error_message;
    none.is_tracing = before_.is_tracing;
    at::SavedTensorDefaultHooks::set_tls_state(none);
  }
  ~NoSavedTensorHooks() { at::SavedTensorDefaultHooks::set_tls_state(before_); }
  NoSavedTensorHooks(const NoSavedTensorHooks&) = delete;
  NoSavedTensorHooks& operator=(const NoSavedTensorHooks&) = delete;

 private:
  at::impl::SavedTensorDefaultHooksTLS before_;
};

/// For a scope, layers on this thread keep their outputs there; null: they keep none, also inside of a block that does.
class KeepsOutputs {
 public:
  explicit KeepsOutputs(KeptOutputs* kept) : before_(std::exchange(kept_outputs_here(), kept)) {}
  ~KeepsOutputs() { kept_outputs_here() = before_; }
  KeepsOutputs(const KeepsOutputs&) = delete;
  KeepsOutputs& operator=(const KeepsOutputs&) = delete;

 private:
  KeptOutputs* before_;
};

/// Tells the nodes that one run of a block makes on this thread from those that it finds.
class NodesMadeHere {
 public:
  [[nodiscard]] bool include(const Node& node) const {
    return node.sequence_nr() >= first_ && node.sequence_nr() != kLeaf && node.thread_id() == thread_;
  }

  /// Calls visit with every edge that leads from these nodes, reached from the outputs, to a node outside.
  template <class Visit>
  void for_each_edge_out(const variable_list& outputs, const Visit& visit) const {
    std::vector<Node*> pending;
    std::unordered_set<Node*> seen;
    const auto reach = [&](Node* node) {
      if (seen.insert(node).second) pending.push_back(node);
    };
    for (const at::Tensor& output : outputs) {
      if (output.defined() && output.requires_grad()) reach(output.grad_fn().get());
    }
    while (!pending.empty()) {
      Node* const node = pending.back();
      pending.pop_back();
      for (Edge& edge : node->next_edges()) {
        if (!edge.is_valid()) continue;
        if (include(*edge.function)) {
          reach(edge.function.get());
        } else {
          visit(edge);
        }
      }
      // A write into a view holds the edges of its function twice (its own first edge is that of the view).
      if (auto* const write = dynamic_cast<torch::autograd::CopySlices*>(node); write != nullptr && write->fn != nullptr) {
        for (size_t i = 1; i < write->num_outputs(); ++i) write->fn->next_edges()[i] = write->next_edge(i);
      }
    }
  }

 private:
  static constexpr uint64_t kLeaf = std::numeric_limits<uint64_t>::max();  ///< The sequence number of a leaf's AccumulateGrad.
  uint64_t first_ = at::sequence_number::peek();
  uint64_t thread_ = at::RecordFunction::currentThreadId();
};

/// Runs the block, grad on. An output that is an input or a captured tensor becomes a view of it, which has a node of its own.
variable_list run_with_graph(const Run& run, const variable_list& inputs, const NodesMadeHere& here) {
  const at::AutoGradMode grad(true);
  variable_list outputs = run(inputs);
  for (at::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad()) continue;
    const auto node = output.grad_fn();
    if (node == nullptr || !here.include(*node)) output = output.view_as(output);
  }
  return outputs;
}

/// Where a recompute's gradient of a tensor outside the block ends, in place of that tensor's own node: whose hooks run once,
/// in the outer graph, on the whole gradient.
struct GradientEnd : Node {
  explicit GradientEnd(const Edge& replaced) : Node(std::numeric_limits<uint64_t>::max()) {
    input_metadata_.emplace_back(replaced.function->input_metadata(replaced.input_nr));
  }
  variable_list apply(variable_list&& /*grads*/) override { return {}; }  // captured before it would run
};

[[nodiscard]] std::string shape_of(const Edge& edge) {
  const auto& metadata = edge.function->input_metadata(edge.input_nr);
  return metadata.was_default_constructed() ? "unknown" : c10::str(metadata.shape_as_dim_vector());
}

constexpr const char* kSameTwice = "A checkpointed block must compute the same thing twice.";

/// The node of a checkpointed block: its edges are those that lead out of the block.
class CheckpointNode : public Node {
 public:
  CheckpointNode(Run run, const variable_list& inputs, const CheckpointOptions& options) : run_(std::move(run)), random_(inputs) {
    if (options.keep_linear_outputs) kept_.emplace();
    for (const at::Tensor& input : inputs) inputs_.emplace_back(input, /*is_output=*/false);
  }

  [[nodiscard]] std::string name() const override { return "CheckpointBackward"; }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    run_ = nullptr;
    inputs_.clear();
    kept_.reset();
  }

  /// The first run; `this` is not in the graph yet.
  variable_list run_first(const variable_list& inputs) {
    const NodesMadeHere here;
    const NoSavedTensorHooks no_hooks;
    const KeepsOutputs keeps(kept());
    const Restored autocast(autocast_.without_cache(), autocast_);
    variable_list outputs = run_with_graph(run_, inputs, here);
    std::unordered_set<Edge> seen;
    here.for_each_edge_out(outputs, [&](const Edge& edge) {
      if (seen.insert(edge).second) leaving_.push_back(edge);
    });
    set_next_edges(edge_list(leaving_));
    return outputs;
  }

  variable_list apply(variable_list&& grads) override {
    require(!at::GradMode::is_enabled(), [] {
      return "[checkpoint] a gradient of a gradient (create_graph=True) cannot pass a checkpointed block. Run the block itself for "
             "that.";
    });
    const std::lock_guard lock(mutex_);
    require(run_ != nullptr, [] { return torch::autograd::ERR_BACKWARD_TWICE; });
    variable_list inputs;
    for (const SavedVariable& input : inputs_) inputs.push_back(input.unpack());

    const NodesMadeHere here;
    const variable_list outputs = [&] {
      const Restored random(random_, RandomState(inputs));
      const Restored autocast(autocast_.without_cache(), AutocastState());
      if (kept_) kept_->rewind();
      const KeepsOutputs keeps(kept());
      return run_with_graph(run_, inputs, here);
    }();
    const std::unordered_map<Edge, Edge> ends = end_gradients(outputs, here);

    edge_list roots, wanted;
    variable_list root_grads;
    require(outputs.size() == grads.size(), [&] {
      return message("[checkpoint] the recompute returned {} tensors, the forward {}. {}", outputs.size(), grads.size(),
                     kSameTwice);
    });
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!grads[i].defined()) continue;
      const at::Tensor& output = outputs[i];
      require(output.defined() && output.requires_grad(), [&] {
        return message("[checkpoint] output {} of the recompute needs no gradient, that of the forward did. {}", i, kSameTwice);
      });
      require(output.sizes() == grads[i].sizes(), [&] {
        return message("[checkpoint] output {} of the recompute has shape {}, of the forward {}. {}", i, joined(output.sizes()),
                       joined(grads[i].sizes()), kSameTwice);
      });
      roots.push_back(torch::autograd::impl::gradient_edge(output));
      root_grads.push_back(grads[i]);
    }
    variable_list result(leaving_.size());
    std::vector<size_t> slots;
    for (size_t i = 0; i < leaving_.size(); ++i) {
      if (!task_should_compute_output(i)) continue;
      wanted.push_back(ends.at(leaving_[i]));
      slots.push_back(i);
    }
    if (roots.empty() || wanted.empty()) return result;
    variable_list found = torch::autograd::Engine::get_default_engine().execute(
        roots, root_grads, /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/false, wanted);
    for (size_t i = 0; i < slots.size(); ++i) result[slots[i]] = std::move(found[i]);
    return result;
  }

 private:
  /// Cuts the recompute's graph off from what is outside. @returns the end that now stands for each edge out.
  [[nodiscard]] std::unordered_map<Edge, Edge> end_gradients(const variable_list& outputs, const NodesMadeHere& here) const {
    std::unordered_map<Edge, Edge> ends;
    for (const Edge& edge : leaving_) ends.emplace(edge, Edge());
    here.for_each_edge_out(outputs, [&](Edge& edge) {
      const auto known = ends.find(edge);
      require(known != ends.end(), [&] {
        return message(
            "[checkpoint] the recompute uses a tensor of shape {} that requires a gradient and that the forward did not use. {}",
            shape_of(edge), kSameTwice);
      });
      if (!known->second.is_valid()) known->second = Edge(make_node<GradientEnd>(edge), 0);
      edge = known->second;
    });
    for (const auto& [edge, end] : ends) {
      require(end.is_valid(), [&edge = edge] {
        return message(
            "[checkpoint] the recompute does not use a tensor of shape {} that requires a gradient and that the forward used. {}",
            shape_of(edge), kSameTwice);
      });
    }
    return ends;
  }

  [[nodiscard]] KeptOutputs* kept() { return kept_ ? &*kept_ : nullptr; }

  Run run_;
  std::vector<SavedVariable> inputs_;
  std::optional<KeptOutputs> kept_;
  RandomState random_;
  AutocastState autocast_;
  edge_list leaving_;  ///< As next_edges(), which a checkpoint around this one ends elsewhere in its recompute.
};

}  // namespace

std::vector<at::Tensor> checkpoint_tensors(Run run, const std::vector<at::Tensor>& inputs, const CheckpointOptions& options) {
  if (!at::GradMode::is_enabled()) return run(inputs);
  const auto node = make_node<CheckpointNode>(std::move(run), inputs, options);
  const auto version = [](const at::Tensor& tensor) { return tensor.defined() && !tensor.is_inference() ? tensor._version() : 0; };
  std::vector<int64_t> versions;
  for (const at::Tensor& input : inputs) versions.push_back(version(input));
  variable_list outputs = node->run_first(inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    QLORAPP_CHECK_VALUE(version(inputs[i]) == versions[i],
                        "[checkpoint] a block must leave its inputs as they are; it changed input {} in place, and the recompute "
                        "would begin with what it wrote. Write into a copy.",
                        i);
  }
  for (at::Tensor& output : outputs) {
    if (output.defined() && output.requires_grad()) {
      output = output.detach();
      torch::autograd::set_history(output, node);
    } else {
      node->add_input_metadata(Node::undefined_input());
    }
  }
  return outputs;
}

}  // namespace qlorapp
