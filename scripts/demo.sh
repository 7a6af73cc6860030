#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The main job, end to end, on the bundled model: measure, fine-tune, measure again, resume, load the adapter in PEFT.
#   sh scripts/demo.sh PROGRAM PYTHON FOLDER
set -eu
qlorapp=$1
python=$2
out=$3
model=examples/data/tiny-llama
held_out=examples/data/eval.jsonl
prompt='Mia, put the kite near the mill.'
steps=300
half=$((steps / 2))

title() { printf '\n\033[1m-- %s\033[0m\n' "$*"; }
show() {
  printf '   $ %s\n' "$*"
  "$@"
}
# Runs a command and says how much memory its process had at most.
measured() {
  printf '   $ %s\n' "$*"
  "$python" -c 'import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
print(f"peak memory of the process: {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024:.0f} MiB", flush=True)
sys.exit(code)' "$@"
}
train() {  # train OUTPUT [more options]: NF4 with double quantization, LoRA on all linear layers, checkpointing, accumulation
  folder=$1
  shift
  measured "$qlorapp" train --model "$model" --data examples/data/train.jsonl --eval_data "$held_out" --output "$folder" \
    --lora_r 16 --lora_alpha 32 --target_modules all-linear --learning_rate 5e-3 --warmup_steps 10 --max_steps $steps \
    --per_device_train_batch_size 8 --gradient_accumulation_steps 2 --gradient_checkpointing true \
    --assistant_only_loss true --logging_steps 20 --save_steps $half --seed 1 --dtype float32 "$@"
}

rm -rf "$out"
mkdir -p "$out"

title "Before: the base model tells stories, and has never seen an instruction"
show "$qlorapp" eval --model "$model" --data "$held_out" --assistant_only_loss true --dtype float32
show "$qlorapp" generate --model "$model" --prompt "$prompt"

title "Fine-tuning: 4-bit weights, LoRA on all linear layers, $steps steps"
train "$out/adapter"

title "After: instructions with things and places that were never trained together"
show "$qlorapp" eval --model "$model" --adapter "$out/adapter" --data "$held_out" --assistant_only_loss true --dtype float32 >"$out/after.txt" || { cat "$out/after.txt"; exit 1; }
cat "$out/after.txt"
show "$qlorapp" generate --model "$model" --adapter "$out/adapter" --prompt "$prompt"

title "Resume: the second half again, from checkpoint-$half"
train "$out/resumed" --resume_from_checkpoint "$out/adapter/checkpoint-$half"
if cmp -s "$out/adapter/adapter_model.safetensors" "$out/resumed/adapter_model.safetensors"; then
  echo "the resumed run ends in the same adapter, byte for byte"
else
  echo "the resumed run ends in another adapter" >&2
  exit 1
fi

title "The same adapter in PEFT"
show "$python" scripts/check_in_peft.py --model "$model" --adapter "$out/adapter" --data "$held_out" --report "$out/after.txt"

title "Done: the adapter is in $out/adapter"
ls -l "$out/adapter"
