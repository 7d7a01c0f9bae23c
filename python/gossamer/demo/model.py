"""A small byte-level GPT: what `gossamer demo` trains.

Pre-norm, learned positions, 1.07 M parameters. It knows nothing of ranks or of Gossamer."""

import torch
from torch import nn
from torch.nn import functional as F

CONTEXT, WIDTH, HEADS, LAYERS = 64, 128, 4, 5


class Block(nn.Module):
    """Attention to earlier bytes, then a perceptron; both add to the stream x[batch, time, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH))
        self.join = nn.Linear(WIDTH, WIDTH)
        hidden = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU()
        self.think = nn.Sequential(*hidden, nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.look(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads  # each [batch, head, time, width / heads]
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).flatten(-2))
        return x + self.think(x)


class GPT(nn.Module):
    """Predicts each byte from those before it; forward(text[batch, context + 1]) is the mean loss in nats."""

    def __init__(self) -> None:
        super().__init__()
        self.byte, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        blocks = (Block() for _ in range(LAYERS))
        self.predict = nn.Sequential(*blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        scores = self.predict(self.byte(text[:, :-1]) + self.position.weight)
        return F.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())
