#!/usr/bin/env bash
# Train a small byte-level LLaMA three ways on the embedded corpus, on two CPU processes, and compare.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 ACCELERATE_USE_CPU=true

for scheme in residual mhc block_attnres; do
  accelerate launch --config_file recipes/accelerate/cpu.yaml recipes/train.py \
    --model_type llama \
    --config_overrides hidden_size=128,intermediate_size=352,num_hidden_layers=8,num_attention_heads=4,num_key_value_heads=4 \
    --scheme "$scheme" --output_dir "runs/$scheme" \
    --block_size 256 --per_device_train_batch_size 2 --max_train_steps 250 --eval_steps 50 --max_eval_samples 40 \
    --learning_rate 3e-3 --lr_scheduler_type cosine --num_warmup_steps 20 --weight_decay 0.1
done
python recipes/report.py runs/residual runs/mhc runs/block_attnres --output runs/comparison.png
