// SPDX-License-Identifier: Apache-2.0
/// The part of TrainingArguments about machines: data loader, devices, compilers, many processes. See training_arguments.hpp.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "qlorapp/core/field_table.hpp"
#include "qlorapp/core/free_form.hpp"

namespace qlorapp {

struct DistributedArguments {
  int64_t dataloader_num_workers = 0;
  bool dataloader_pin_memory = true;
  bool dataloader_persistent_workers = false;
  std::optional<int64_t> dataloader_prefetch_factor;
  std::optional<std::string> dataloader_multiprocessing_context;
  bool dataloader_in_order = true;
  bool use_cpu = false;
  bool use_mps_device = false;
  bool use_ipex = false;
  std::optional<int64_t> tpu_num_cores;
  bool tpu_metrics_debug = false;
  bool torch_compile = false;
  std::optional<std::string> torch_compile_backend;
  std::optional<std::string> torch_compile_mode;
  std::optional<std::string> torchdynamo;
  FreeForm debug{"\"\""};
  int64_t local_rank = -1;
  std::optional<std::string> ddp_backend;
  std::optional<bool> ddp_find_unused_parameters;
  std::optional<int64_t> ddp_bucket_cap_mb;
  std::optional<bool> ddp_broadcast_buffers;
  std::optional<bool> ddp_static_graph;
  int64_t ddp_timeout = 1800;
  FreeForm fsdp;
  FreeForm fsdp_config;
  int64_t fsdp_min_num_params = 0;
  std::optional<std::string> fsdp_transformer_layer_cls_to_wrap;
  FreeForm deepspeed;
  FreeForm parallelism_config;
  FreeForm accelerator_config;
  std::optional<bool> dispatch_batches;
  std::optional<bool> split_batches;
  std::string mp_parameters;
  std::optional<std::string> ray_scope = "last";

  static constexpr auto fields() {
    using T = DistributedArguments;
    constexpr auto kSaid = FieldStatus::kAcceptedAndSaid;
    constexpr auto kRefused = FieldStatus::kRefused;
    constexpr auto kInMemory = "rows are tokenized once and stay in memory.";
    constexpr auto kNoGraph = "blocks are hand-written C++, there is no graph to compile. Leave it out.";
    constexpr auto kNothingToShard = "a four-bit base and its adapters fit one GPU, nothing is sharded. Leave it out.";
    constexpr auto kNoWrapper = "no DistributedDataParallel is put around the model.";
    constexpr auto kNoAccelerate = "the loop does not use accelerate; batches are never split or dispatched.";
    return FieldTable{
        Field{"dataloader_num_workers", &T::dataloader_num_workers, "", kSaid, kInMemory},
        Field{"dataloader_pin_memory", &T::dataloader_pin_memory, "", kSaid, kInMemory},
        Field{"dataloader_persistent_workers", &T::dataloader_persistent_workers, "", kSaid, kInMemory},
        Field{"dataloader_prefetch_factor", &T::dataloader_prefetch_factor, "", kSaid, kInMemory},
        Field{"dataloader_multiprocessing_context", &T::dataloader_multiprocessing_context, "", kSaid, kInMemory},
        Field{"dataloader_in_order", &T::dataloader_in_order, "", kSaid, kInMemory},
        Field{"use_cpu", &T::use_cpu,
              "the command trains on the CPU even where there is a GPU; in Python device_map decides, and a model elsewhere is "
              "an error"},
        Field{"use_mps_device", &T::use_mps_device, "", kRefused, "there are kernels for CPUs and NVIDIA GPUs. Leave it out."},
        Field{"use_ipex", &T::use_ipex, "", kSaid, "the CPU kernels are the library's own."},
        Field{"tpu_num_cores", &T::tpu_num_cores, "", kRefused, "there are kernels for CPUs and NVIDIA GPUs. Leave it out."},
        Field{"tpu_metrics_debug", &T::tpu_metrics_debug, "", kRefused,
              "there are kernels for CPUs and NVIDIA GPUs. Leave it out."},
        Field{"torch_compile", &T::torch_compile, "", kRefused, kNoGraph},
        Field{"torch_compile_backend", &T::torch_compile_backend, "", kRefused, kNoGraph},
        Field{"torch_compile_mode", &T::torch_compile_mode, "", kRefused, kNoGraph},
        Field{"torchdynamo", &T::torchdynamo, "", kRefused, kNoGraph},
        Field{"debug", &T::debug, "", kRefused, "there is no such instrument. A loss that is not finite is reported by itself."},
        Field{"local_rank", &T::local_rank, "", kSaid,
              "training runs in one process; where WORLD_SIZE says that there are more, it is refused."},
        Field{"ddp_backend", &T::ddp_backend, "", kSaid, kNoWrapper},
        Field{"ddp_find_unused_parameters", &T::ddp_find_unused_parameters, "", kSaid, kNoWrapper},
        Field{"ddp_bucket_cap_mb", &T::ddp_bucket_cap_mb, "", kSaid, kNoWrapper},
        Field{"ddp_broadcast_buffers", &T::ddp_broadcast_buffers, "", kSaid, kNoWrapper},
        Field{"ddp_static_graph", &T::ddp_static_graph, "", kSaid, kNoWrapper},
        Field{"ddp_timeout", &T::ddp_timeout, "", kSaid, kNoWrapper},
        Field{"fsdp", &T::fsdp, "", kRefused, kNothingToShard},
        Field{"fsdp_config", &T::fsdp_config, "", kRefused, kNothingToShard},
        Field{"fsdp_min_num_params", &T::fsdp_min_num_params, "", kRefused, kNothingToShard},
        Field{"fsdp_transformer_layer_cls_to_wrap", &T::fsdp_transformer_layer_cls_to_wrap, "", kRefused, kNothingToShard},
        Field{"deepspeed", &T::deepspeed, "", kRefused, kNothingToShard},
        Field{"parallelism_config", &T::parallelism_config, "", kRefused, kNothingToShard},
        Field{"accelerator_config", &T::accelerator_config, "", kSaid, kNoAccelerate},
        Field{"dispatch_batches", &T::dispatch_batches, "", kSaid, kNoAccelerate},
        Field{"split_batches", &T::split_batches, "", kSaid, kNoAccelerate},
        Field{"mp_parameters", &T::mp_parameters, "", kRefused, "SageMaker's model parallelism is not here. Leave it out."},
        Field{"ray_scope", &T::ray_scope, "", kSaid, "there is no hyper-parameter search."}};
  }
};

}  // namespace qlorapp
