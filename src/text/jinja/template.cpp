// SPDX-License-Identifier: Apache-2.0
#include "template.hpp"

#include <algorithm>
#include <optional>

#include "builtins.hpp"
#include "core/check.hpp"

namespace qlorapp::jinja {
namespace {

constexpr int64_t kMostSteps = 10'000'000;
constexpr int64_t kMostComparisons = 50'000'000;
constexpr int kDeepestCall = 100;
constexpr int kDeepestRun = 3000;  // nodes in each other, at up to a kilobyte of stack

/// Names and their values. A loop's turn, a macro's call, and the body of `with` and `generation` each have one of their own; what is set
/// there is not seen outside. Macros keep the one that they were made in.
struct Scope {
  std::shared_ptr<Scope> parent;
  std::vector<std::pair<std::string_view, Value>> names = {};

  [[nodiscard]] const Value* find(std::string_view name) const {
    for (const Scope* scope = this; scope != nullptr; scope = scope->parent.get()) {
      for (const auto& [key, value] : scope->names) {
        if (key == name) return &value;
      }
    }
    return nullptr;
  }
  void set(std::string_view name, Value value) {
    for (auto& [key, held] : names) {
      if (key == name) {
        held = std::move(value);
        return;
      }
    }
    names.emplace_back(name, std::move(value));
  }
};
using ScopePtr = std::shared_ptr<Scope>;

enum class After { kGoOn, kBreak, kContinue };

class Run {
 public:
  explicit Run(const Dict& variables) : scope_(std::make_shared<Scope>()), variables_(variables) {
    allow_comparisons(kMostComparisons);
  }
  ~Run() {
    // A macro and its scope hold each other, and a namespace may hold itself.
    for (const ScopePtr& scope : with_macros_) scope->names.clear();
    for (const auto& space : spaces_) space->attributes.entries.clear();
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  Template::Rendered render(const Body& body) {
    run(body);
    return std::move(out_);
  }

 private:
  /// Restores what it holds.
  template <class T>
  class Restored {
   public:
    Restored(T& place, T value) : place_(place), before_(std::exchange(place, std::move(value))) {}
    ~Restored() { place_ = std::move(before_); }
    Restored(const Restored&) = delete;
    Restored& operator=(const Restored&) = delete;

   private:
    T& place_;
    T before_;
  };

  struct Nested {
    explicit Nested(Run& run) : depth(run.nested_) {
      if (++depth > kDeepestRun) {
        --depth;
        throw Failure(message("it needs more than {} expressions and calls in each other", kDeepestRun));
      }
    }
    ~Nested() { --depth; }
    Nested(const Nested&) = delete;
    Nested& operator=(const Nested&) = delete;
    int& depth;
  };

  /// What an operation looks at is a quarter of the work of making it.
  void look_at(const Value& value) {
    if (value.text() != nullptr) step(value.text()->size() >> 2);
    if (value.sequence() != nullptr) step(value.sequence()->items.size() << 2);
  }

  /// @param bytes  that the step makes: a long text is as much work as many steps.
  void step(std::size_t bytes = 0) {
    steps_ += 1 + static_cast<int64_t>(bytes >> 6);
    if (steps_ > kMostSteps) throw Failure(message("it takes more than {} steps; is there a loop without an end?", kMostSteps));
  }

  // --- statements

  After run(const Body& body) {
    for (const NodePtr& node : body) {
      const After after = run(*node);
      if (after != After::kGoOn) return after;
    }
    return After::kGoOn;
  }

  After run(const Node& node) {
    step();
    const Nested nested(*this);
    switch (node.kind) {
      case Kind::kText:
        write(std::string_view(node.name));
        return After::kGoOn;
      case Kind::kOutput:
        write(value_of(*node.children[0]));
        return After::kGoOn;
      case Kind::kIf:
        return run(value_of(*node.children[0]).truth() ? node.body : node.other);
      case Kind::kFor:
        return run_loop(node);
      case Kind::kSet:
        assign(*node.children[0], value_of(*node.children[1]));
        return After::kGoOn;
      case Kind::kSetBlock: {
        Value text = captured(node.body, inner());
        if (node.children[1]) text = value_of(*node.children[1], &text);
        assign(*node.children[0], std::move(text));
        return After::kGoOn;
      }
      case Kind::kMacro:
        scope_->set(node.name, macro(node, node.children.data(), node.children.size()));
        return After::kGoOn;
      case Kind::kCallBlock: {
        const Value caller = macro(node, node.children.data() + 1, node.children.size() - 1);
        write(called(*node.children[0], &caller));
        return After::kGoOn;
      }
      case Kind::kFilterBlock: {
        const Value text = captured(node.body, inner());
        write(value_of(*node.children[0], &text));
        return After::kGoOn;
      }
      case Kind::kWith: {
        ScopePtr scope = inner();
        for (std::size_t i = 0; i < node.children.size(); i += 2) {
          Value value = value_of(*node.children[i + 1]);
          const Restored here(scope_, scope);
          assign(*node.children[i], std::move(value));
        }
        const Restored here(scope_, std::move(scope));
        return run(node.body);
      }
      case Kind::kGeneration: {
        const std::size_t begin = out_.text.size();
        const std::string text = captured(node.body, inner());
        out_.generated.emplace_back(begin, begin + text.size());
        write(std::string_view(text));
        return After::kGoOn;
      }
      case Kind::kBreak:
        return After::kBreak;
      case Kind::kContinue:
        return After::kContinue;
      default:
        return After::kGoOn;
    }
  }

  [[nodiscard]] ScopePtr inner() const { return std::make_shared<Scope>(Scope{scope_}); }

  void write(const Value& value) {
    if (value.text() != nullptr) write(std::string_view(*value.text()));
    else write(std::string_view(value.str()));
  }
  void write(std::string_view text) {
    if (target_->size() + text.size() > kLongestText) throw Failure("the text is too long");
    target_->append(text);
  }

  /// What a body writes.
  std::string captured(const Body& body, ScopePtr scope) {
    std::string text;
    const Restored there(target_, &text);
    const Restored here(scope_, std::move(scope));
    run(body);
    step(text.size());
    return text;
  }

  After run_loop(const Node& node) {
    const Value all = value_of(*node.children[1]);
    if (all.text() != nullptr) step(all.text()->size() << 4);
    std::shared_ptr<const Sequence> items = all.iterated();
    const Node* const filter = node.children[2].get();
    const bool lazy = filter != nullptr && node.name == "lazy";  // each item is asked about when its turn comes
    if (filter != nullptr && !lazy) {
      List kept;
      for (const Value& item : items->items) {
        step();
        const Restored here(scope_, inner());
        assign(*node.children[0], item);
        if (value_of(*filter).truth()) kept.push_back(item);
      }
      items = std::make_shared<const Sequence>(Sequence{std::move(kept)});
    }
    if (items->items.empty()) {
      const Restored here(scope_, inner());
      return run(node.other);
    }
    ScopePtr scope;
    bool any = !lazy;
    for (std::size_t i = 0; i < items->items.size(); ++i) {
      step();
      if (lazy) {
        const Restored here(scope_, inner());
        assign(*node.children[0], items->items[i]);
        if (!value_of(*filter).truth()) continue;
        any = true;
      }
      if (scope && scope.use_count() == 1) scope->names.clear();  // no macro keeps it
      else scope = inner();
      ScopePtr own = scope;
      const ScopePtr outer = std::exchange(scope_, std::move(own));
      After after = After::kGoOn;
      try {
        scope->set("loop", Loop{items, i});
        assign(*node.children[0], items->items[i]);
        after = run(node.body);
      } catch (...) {
        scope_ = outer;
        throw;
      }
      scope_ = outer;
      if (after == After::kBreak) break;
    }
    if (any) return After::kGoOn;
    const Restored here(scope_, inner());
    return run(node.other);
  }

  void assign(const Node& target, Value value) {
    if (target.kind == Kind::kName) return scope_->set(target.name, std::move(value));
    if (target.kind == Kind::kAttribute) {
      const Value object = value_of(*target.children[0]);
      if (object.space() == nullptr) throw Failure("cannot assign attribute on non-namespace object");
      // Only one that holds a namespace or a function can hold itself.
      if (value.depth() > 0 && std::find(spaces_.begin(), spaces_.end(), object.shared_space()) == spaces_.end()) {
        step(spaces_.size() << 6);
        spaces_.push_back(object.shared_space());
      }
      return object.space()->set(target.name, std::move(value));
    }
    const std::shared_ptr<const Sequence> items = value.iterated();
    if (items->items.size() != target.children.size())
      throw Failure(message("expected {} values to unpack, got {}", target.children.size(), items->items.size()));
    for (std::size_t i = 0; i < target.children.size(); ++i) assign(*target.children[i], items->items[i]);
  }

  /// @param defaults  of the last parameters.
  Value macro(const Node& node, const NodePtr* defaults, std::size_t default_count) {
    with_macros_.push_back(scope_);
    return Function([this, &node, defaults, default_count, scope = scope_](const Arguments& arguments) -> Value {
      if (depth_ >= kDeepestCall) throw Failure(message("macros call each other more than {} times", kDeepestCall));
      const Restored deeper(depth_, depth_ + 1);
      if (arguments.values.size() > node.names.size())
        throw Failure(message("macro '{}' takes not more than {} argument(s)", node.name, node.names.size()));
      const ScopePtr own = std::make_shared<Scope>(Scope{scope});
      const Restored here(scope_, own);
      for (std::size_t i = 0; i < node.names.size(); ++i) {
        const std::size_t behind = node.names.size() - i;
        if (const Value* const given = arguments.find(i, node.names[i])) own->set(node.names[i], *given);
        else if (behind <= default_count) own->set(node.names[i], value_of(*defaults[default_count - behind]));
        else own->set(node.names[i], Value::undefined(message("parameter '{}' was not provided", node.names[i])));
      }
      for (const auto& [key, value] : arguments.named) {
        if (key == "caller") own->set("caller", value);
        else if (std::find(node.names.begin(), node.names.end(), key) == node.names.end())
          throw Failure(message("macro '{}' takes no keyword argument '{}'", node.name, key));
      }
      return captured(node.body, own);
    });
  }

  // --- expressions

  Arguments arguments_of(const Node& node, std::size_t from) {
    Arguments out;
    out.values.reserve(node.children.size() - from);
    for (std::size_t i = from; i < node.children.size(); ++i) out.values.push_back(value_of(*node.children[i]));
    for (const auto& [key, value] : node.keywords) out.named.emplace_back(key, value_of(*value));
    return out;
  }

  Value weighed(Value value) {
    if (value.text() != nullptr) step(value.text()->size());
    if (value.sequence() != nullptr) step(value.sequence()->items.size() << 4);
    return value;
  }

  Value called(const Node& node, const Value* caller) {
    const Value callee = value_of(*node.children[0]);
    if (callee.function() == nullptr) {
      throw Failure(callee.is_undefined() ? message("{} is undefined: it cannot be called", callee.what())
                                          : message("'{}' object is not callable", callee.type_name()));
    }
    Arguments arguments = arguments_of(node, 1);
    if (caller != nullptr) arguments.named.emplace_back("caller", *caller);
    return weighed((*callee.function())(arguments));
  }

  /// @param filtered  what stands for the value of the innermost filter, in a block.
  Value value_of(const Node& node, const Value* inside = nullptr) {
    step();
    const Nested nested(*this);
    const auto child = [&](std::size_t i) { return value_of(*node.children[i]); };
    switch (node.kind) {
      case Kind::kConstant:
        return node.constant;
      case Kind::kName:
        return variable(node.name);
      case Kind::kList:
      case Kind::kTuple: {
        List items;
        for (const NodePtr& item : node.children) items.push_back(value_of(*item));
        return Value(std::move(items), node.kind == Kind::kTuple);
      }
      case Kind::kDict: {
        Dict dict;
        for (std::size_t i = 0; i < node.children.size(); i += 2) {
          const Value key = child(i);
          Value value = child(i + 1);
          const auto same =
              std::find_if(dict.entries.begin(), dict.entries.end(), [&](const auto& entry) { return entry.first == key; });
          if (same != dict.entries.end()) same->second = std::move(value);
          else dict.entries.emplace_back(key, std::move(value));
        }
        return dict;
      }
      case Kind::kAttribute: {
        const Value object = child(0);
        look_at(object);
        return attribute_of(object, node.name);
      }
      case Kind::kItem: {
        const Value object = child(0);
        look_at(object);
        return item_of(object, child(1));
      }
      case Kind::kSlice: {
        const Value object = child(0);
        look_at(object);
        std::optional<Value> bounds[3];
        for (std::size_t i = 0; i < 3; ++i) {
          if (node.children[i + 1]) bounds[i] = child(i + 1);
        }
        const auto bound = [&](std::size_t i) { return bounds[i] ? &*bounds[i] : nullptr; };
        return slice_of(object, bound(0), bound(1), bound(2));
      }
      case Kind::kCall:
        return called(node, nullptr);
      case Kind::kFilter: {
        const Value value = node.children[0] ? value_of(*node.children[0], inside) : *inside;
        look_at(value);
        return weighed(filtered(node.name, value, arguments_of(node, 1)));
      }
      case Kind::kTest: {
        const Value value = child(0);
        look_at(value);
        return tested(node.name, value, arguments_of(node, 1));
      }
      case Kind::kNot:
        return !child(0).truth();
      case Kind::kNegative: {
        const Value value = child(0);
        return value.real() != nullptr ? Value(-*value.real()) : computed("-", 0, value);
      }
      case Kind::kPositive:
        return computed("+", 0, child(0));
      case Kind::kAnd: {
        Value left = child(0);
        return left.truth() ? child(1) : left;
      }
      case Kind::kOr: {
        Value left = child(0);
        return left.truth() ? left : child(1);
      }
      case Kind::kChoice:
        if (child(0).truth()) return child(1);
        return node.children[2] ? child(2) : Value::undefined("the value of an 'if' without 'else'");
      case Kind::kCompare:
        return compared(node);
      case Kind::kJoin: {
        std::string left = child(0).str();
        left += child(1).str();
        if (left.size() > kLongestText) throw Failure("the text is too long");
        return weighed(std::move(left));
      }
      default: {
        const Value left = child(0);
        return weighed(computed(sign_of(node.kind), left, child(1)));
      }
    }
  }

  static std::string_view sign_of(Kind kind) {
    switch (kind) {
      case Kind::kAdd:
        return "+";
      case Kind::kSubtract:
        return "-";
      case Kind::kMultiply:
        return "*";
      case Kind::kDivide:
        return "/";
      case Kind::kFloorDivide:
        return "//";
      case Kind::kPower:
        return "**";
      default:
        return "%";
    }
  }

  bool compared(const Node& node) {
    Value left = value_of(*node.children[0]);
    for (std::size_t i = 0; i < node.names.size(); ++i) {
      Value right = value_of(*node.children[i + 1]);
      look_at(left);
      look_at(right);
      const std::string& op = node.names[i];
      bool holds = false;
      if (op == "==") holds = left == right;
      else if (op == "!=") holds = !(left == right);
      else if (op == "<") holds = Value::less(left, right);
      else if (op == ">") holds = Value::less(right, left);
      else if (op == "<=") holds = !Value::less(right, left);
      else if (op == ">=") holds = !Value::less(left, right);
      else holds = contains(right, left) == (op == "in");
      if (!holds) return false;
      left = std::move(right);
    }
    return true;
  }

  Value variable(const std::string& name) const {
    if (const Value* const found = scope_->find(name)) return *found;
    if (const Value* const found = variables_.find(name)) return *found;
    if (const Value* const found = global_functions().find(name)) return *found;
    return Value::undefined(message("'{}'", name));
  }

  ScopePtr scope_;
  std::vector<ScopePtr> with_macros_;
  std::vector<std::shared_ptr<Value::Namespace>> spaces_;
  const Dict& variables_;
  Template::Rendered out_;
  std::string* target_ = &out_.text;
  int64_t steps_ = 0;
  int depth_ = 0, nested_ = 0;
};

}  // namespace

Template::Rendered Template::render(const Dict& variables) const { return Run(variables).render(*body_); }

}  // namespace qlorapp::jinja
