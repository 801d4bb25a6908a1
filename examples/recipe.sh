#!/usr/bin/env bash
# The recipe of docs/recipe.md with three generations of drafters for a chat model, trained on its own answers, measured,
# exported and served, and studied. What is done is kept: the same command resumes after an interruption.
# usage: examples/recipe.sh TARGET GSM8K PROMPTS     Results are in runs/recipe; $SPECDEC_VLLM_PYTHON is a Python that has vLLM.
#   TARGET   directory of the chat model, as SmolLM2-135M-Instruct
#   GSM8K    train.jsonl of https://github.com/openai/grade-school-math
#   PROMPTS  folder of mt_bench.jsonl, humaneval.jsonl, gsm8k.jsonl and alpaca.jsonl, 80 prompts each
set -euo pipefail
[ $# -eq 3 ] || { sed -n 's/^# \{0,1\}//;2,7p' "$0" >&2; exit 2; }
run=runs/recipe
target=$run/target
dtype=bfloat16
export VLLM_CPU_KVCACHE_SPACE=3 # GiB; a vLLM without a GPU would ask for nearly all memory
mkdir -p $run
[ -e $target ] || ln -s "$(realpath "$1")" $target

step() { # step OUT COMMAND...: the command, unless it has made OUT already
  local out=$1
  shift
  [ -e "$out" ] || { printf '\n+ %s\n' "$*" && "$@"; }
}

kept() { # kept FILE COMMAND...: with what it printed in FILE, if it succeeded
  local file=$1
  shift
  "$@" 2>&1 | tee "$file.part" && mv "$file.part" "$file"
}

# 1. Is the target one that can be trained for, as it runs here? (a minute)
for each in bfloat16 float32; do
  step $run/doctor-$each.txt kept $run/doctor-$each.txt specdec doctor --config conf/chat.yaml --data.train "$2" --seconds 180 \
    --model.target.dtype $each
done

# 2. Its own answers, by vLLM: to questions of GSM8K, and to the last 40 instructions of Alpaca (step 5 asks the first ones)
if [ ! -e $run/answers_alpaca.jsonl ]; then
  tail -n 40 "$3/alpaca.jsonl" | python -c '
import json, sys
for line in sys.stdin:
    print(json.dumps({"messages": [{"role": "user", "content": json.loads(line)["turns"][0]}]}))' > $run/alpaca.jsonl
  PATH=$(dirname "$SPECDEC_VLLM_PYTHON"):$PATH vllm serve $target --dtype $dtype --port 8011 \
    --max-model-len 2048 --max-num-seqs 128 > $run/vllm.log 2>&1 &
  server=$!
  trap 'kill $server' EXIT
  until curl -sf http://127.0.0.1:8011/health; do kill -0 $server; sleep 2; done
  answer=(specdec regenerate --engine vllm --url http://127.0.0.1:8011 --max_new_tokens 256 --concurrency 128)
  step $run/answers.jsonl "${answer[@]}" --data "$2" --limit 3400 --out $run/answers.jsonl
  step $run/answers_alpaca.jsonl "${answer[@]}" --data $run/alpaca.jsonl --out $run/answers_alpaca.jsonl
  kill $server
  trap - EXIT
  wait $server || true # until its memory is free
fi

# 3. Features of all that any of the three reads, once
fit=(--config conf/chat.yaml --model.features Cached --model.features.directory $run/features)
step $run/features/index.json specdec cache --config conf/chat.yaml --out $run/features

# 4. Three drafters, of the same tokens in the same order
for name in eagle1 eagle3 eagle3_1; do
  size=8192
  [ $name != eagle1 ] || size=all # it drafts with the target's own head
  step $run/$name/DONE.json specdec fit "${fit[@]}" --config conf/train/$name.yaml --model.drafter.draft_vocab_size $size \
    --out $run/$name --ckpt_path auto
done

# 5. What they are worth on four suites, at temperature 0 and 1
for name in eagle1 eagle3 eagle3_1; do
  step $run/suites/$name/table.md specdec evaluate --target $target --target.dtype $dtype --drafter $run/$name/drafter \
    --suite mt_bench humaneval gsm8k alpaca --suite_dir "$3" --limit 20 --max_new_tokens 128 --shape chain:depth=4 \
    --batch_size 8 --compile false --plain false --out $run/suites/$name
done

# 6. Compiled, one prompt at a time, against plain decoding
for name in eagle1 eagle3 eagle3_1; do
  step $run/compiled/$name specdec evaluate --target $target --target.dtype $dtype --drafter $run/$name/drafter \
    --prompts "$3/gsm8k.jsonl" --limit 16 --max_new_tokens 128 --shape chain:depth=4 --out $run/compiled/$name
done

# 7. The checkpoints that vLLM serves, what vLLM makes of the last one, and what it gains
for name in eagle1 eagle3 eagle3_1; do
  step $run/served/$name specdec export --target $target --target.dtype $dtype --drafter $run/$name/drafter \
    --draft_tokens 4 --evaluation $run/suites/$name/*-t? --out $run/served/$name
done
step $run/parity specdec parity --target $target --drafter $run/eagle3_1/drafter --prompts "$3/gsm8k.jsonl" --engine vllm \
  --draft_tokens 4 --out $run/parity
step $run/bench specdec serve --target $target --target.dtype $dtype --drafter $run/served/eagle3_1 --draft_tokens 4 \
  --bench "$3/gsm8k.jsonl" --limit 32 --max_new_tokens 128 --concurrency 1 4 16 --out $run/bench

# 8. The studies of attention drift, whose cards come to runs/studies (two hours; robust_real has the trainings of drift_real)
[ -e $run/held_out.jsonl ] || head -n 24 "$3/gsm8k.jsonl" > $run/held_out.jsonl
specdec sweep conf/study/drift_real.yaml
mkdir -p runs/studies/robust_real
[ -e runs/studies/robust_real/fits ] || ln -s ../drift_real/fits runs/studies/robust_real/fits
specdec sweep conf/study/robust_real.yaml
