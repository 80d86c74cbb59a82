"""Measurements that need an accelerator: tests, steps beside others, the largest model, JAX, many micro-batches, shares
of the states there, few and many tokens. ``bench/on_gpu.sh`` runs them.

``python -m bench.gpu OUT_DIR [a] [b] [c] [d] [e] [f] [g] [h]`` needs no network. Each part ends within nine minutes.
Every result goes to ``OUT_DIR/results.jsonl`` as soon as it is there, so that a second call goes on where the first was
cut off.
"""
