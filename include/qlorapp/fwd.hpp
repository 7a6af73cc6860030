// SPDX-License-Identifier: Apache-2.0
/// Declares the library's classes. For headers that name them in pointers and references; no header of torch is included.
#pragma once

namespace qlorapp {

class Error;
class ValueError;
class TypeError;
class FormatError;
class IoError;
class OutOfMemoryError;

class Quantizer;
struct QuantizedTensor;
class LoraLinear;
class LoraLinearModule;
template <class Block>
class CheckpointedBlock;
class GradScaler;
class Accumulator;

struct LoraConfig;
class AdapterArena;
class AdapterRegistry;
struct Batch;
class CausalLM;
class StepSettings;
struct MemorySettings;

class AdamW;
struct Schedule;
struct StepReport;
struct TrainState;
struct TrainingArguments;
class Trainer;
struct TrainerCallbacks;

}  // namespace qlorapp
