#!/usr/bin/env bash
# From a fresh clone to a trained GPT: text, tokenizer, .bin/.idx, training on two ranks, evaluation
# of files the model has not seen, a sample, a loss curve. No download but the packages; about four
# minutes on two cores once those are installed. Each step is skipped when its result is there, so
# the script can be stopped and started again; remove runs/quickstart to begin anew.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

run=runs/quickstart
split=98,2,0       # of the files: training, validation, testing
seq_length=256
global_batch=8

began=$SECONDS
step() {
    printf '\n== %s (%d:%02d)\n' "$1" $(((SECONDS - began) / 60)) $(((SECONDS - began) % 60))
}

bash scripts/setup.sh
export PATH="$PWD/.venv/bin:$PATH"
began=$SECONDS
mkdir -p "$run"

step "1/6 corpus: the source of Python's standard library"
[ -s $run/corpus.jsonl ] || python scripts/build_corpus.py --output $run/corpus.jsonl

step "2/6 tokenizer: byte-level BPE, 8,192 tokens"
[ -s $run/tokenizer.json ] ||
    python scripts/train_tokenizer.py --input $run/corpus.jsonl --output $run/tokenizer.json

step "3/6 tokens: Megatron's .bin/.idx"
[ -s $run/corpus_text_document.idx ] ||
    python scripts/preprocess_data.py --input $run/corpus.jsonl --output-prefix $run/corpus \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model $run/tokenizer.json --append-eod
[ -s $run/held_out.json ] ||
    python scripts/quickstart_report.py measure --data-path $run/corpus_text_document \
        --tokenizer-model $run/tokenizer.json --split $split --seq-length $seq_length \
        --global-batch-size $global_batch --output $run/held_out.json
held_out_batches=$(python -c "import json; print(json.load(open('$run/held_out.json'))['batches'])")

step "4/6 training and evaluation: tensor parallel on 2 ranks, sequence parallel"
train=(
    python pretrain_gpt.py --nproc 2 --tensor-model-parallel-size 2 --sequence-parallel
    --num-layers 4 --hidden-size 256 --num-attention-heads 4
    --seq-length $seq_length --max-position-embeddings $seq_length
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0
    --data-path $run/corpus_text_document --split $split
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model $run/tokenizer.json
    --micro-batch-size 8 --global-batch-size $global_batch --train-iters 320
    --lr 3e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 20
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
    --eval-iters "$held_out_batches" --save $run/checkpoints --load $run/checkpoints
    --save-interval 100 --log-interval 10 --log-throughput --log-communication
    --metrics-file $run/metrics.jsonl
)
if [ ! -e $run/trained ]; then
    "${train[@]}" 2>&1 | tee $run/train.log
    sed -n '/^communication of rank 0/,$p' $run/train.log >$run/communication.txt
    touch $run/trained
fi

step "5/6 sample"
[ -s $run/sample.txt ] ||
    python scripts/generate.py --load $run/checkpoints --tokenizer-type HuggingFaceTokenizer \
        --tokenizer-model $run/tokenizer.json --prompt 'def ' --max-new-tokens 96 --seed 1 \
        >$run/sample.txt
cat $run/sample.txt

step "6/6 report"
[ -s $run/loss.png ] || python scripts/plot_loss.py $run/metrics.jsonl --output $run/loss.png
python scripts/quickstart_report.py report --run $run
cat <<END

to try next (source .venv/bin/activate first):
  python pretrain_gpt.py --mock-data
  python pretrain_gpt.py --nproc 4 --tensor-model-parallel-size 2 --sequence-parallel --mock-data
  python scripts/generate.py --load $run/checkpoints --tokenizer-type HuggingFaceTokenizer \\
      --tokenizer-model $run/tokenizer.json --prompt 'import os' --max-new-tokens 200
END
