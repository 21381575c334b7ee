"""The training of examples/train_gpt.py in one process, with nothing parallel."""

from __future__ import annotations

from functools import cache

import numpy as np

import mpimesh as mm
from mpimesh import nn, optim

STEPS, WARMUP, RATE, CLIP, DECAY, SEED, CONTEXT, ROWS = 4, 1, 3e-3, 0.5, 0.3, 3, 11, 6
OPTIONS = (
    f"--steps {STEPS} --warmup {WARMUP} --lr {RATE} --clip {CLIP} --weight-decay {DECAY} "
    f"--batch-size {ROWS} --layers 2 --features 18 --heads 3 --context {CONTEXT} --dtype float64 "
    f"--sample 12 --seed {SEED}"
).split()
"""Neither heads, features nor places of a sequence can be dealt evenly to two ranks."""

EVALUATED_ROWS = 128


def whole_model(*, tied: bool = False, dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        mm.parallel.gpt_layers(
            256, 18, 2, 3, max_tokens=CONTEXT, rotary=True, tied=tied, dropout=dropout
        )
    )


@cache
def trained_alone(
    *, tied: bool = False, dropout: float = 0.0, accumulate: int = 1
) -> tuple[list[float], float, dict[str, np.ndarray]]:
    """Losses of the steps, the loss held out after them, and the state.

    Without dropout a batch may be cut anyhow. With it each part draws its own masks.
    """
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    data = np.frombuffer(text, np.uint8)
    size = len(data) - len(data) // 10
    model = whole_model(tied=tied, dropout=dropout)
    model.materialize(seed=SEED, dtype=np.float64)
    # Norms and biases, which have one axis, do not decay.
    optimizers = [
        optim.AdamW(
            [one for one in model.parameters() if (len(one.shape) > 1) == decays],
            betas=(0.9, 0.99),
            weight_decay=DECAY if decays else 0.0,
        )
        for decays in (True, False)
    ]
    losses: list[float] = []
    # One step of warm-up, then a cosine from 1 down to 0.1.
    for step, share in zip(range(1, STEPS + 1), (1, 0.775, 0.325, 0.1), strict=True):
        starts = np.random.default_rng([SEED, step]).integers(0, size - CONTEXT, ROWS)
        windows = np.array([data[start : start + CONTEXT + 1] for start in starts], np.int64)
        model.zero_grad()
        loss = 0.0
        for part, rows in enumerate(np.array_split(windows, accumulate)):
            ctx = nn.Context(step=(step - 1) * accumulate + part)
            y = model(rows[:, :-1], ctx)
            value, dy = nn.cross_entropy.value_and_grad(y, rows[:, 1:], denominator=ROWS)
            model.backward(dy, ctx)
            loss += value
        optim.clip_grad_norm(model.parameters(), CLIP)
        for optimizer in optimizers:
            optimizer.lr = RATE * share
            optimizer.step()
        losses.append(loss)
    held_out = data[size:]
    starts = np.linspace(0, len(held_out) - CONTEXT - 1, EVALUATED_ROWS).astype(int)
    windows = np.array([held_out[start : start + CONTEXT + 1] for start in starts], np.int64)
    # Without a context: dropout is the identity.
    return losses, nn.cross_entropy(model(windows[:, :-1]), windows[:, 1:]), model.state_dict()
