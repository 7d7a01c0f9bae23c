"""A small byte-level GPT: the model of `gossamer demo`, `gossamer bench train` and the lab.

It has pre-norm, learned positions, and 1.07 M parameters by default. It knows nothing of ranks or of Gossamer.
"""

import torch
from torch import nn
from torch.nn import functional as F

CONTEXT, WIDTH, HEADS, LAYERS = 64, 128, 4, 5


class Block(nn.Module):
    """Attention to earlier bytes, then a perceptron. Both add to x [batch, time, width]."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm: nn.Module = nn.LayerNorm(width)
        self.mlp_norm: nn.Module = nn.LayerNorm(width)
        self.query_key_value: nn.Module = nn.Linear(width, 3 * width)
        self.project: nn.Module = nn.Linear(width, width)
        self.mlp: nn.Module = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [batch, head, time, width / heads]
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Predicts each byte from the bytes before it. forward(text [batch, context + 1]) returns the mean loss in nats."""

    def __init__(
        self, *, context: int = CONTEXT, width: int = WIDTH, heads: int = HEADS, layers: int = LAYERS
    ) -> None:
        super().__init__()
        self.byte: nn.Embedding = nn.Embedding(256, width)
        self.position: nn.Embedding = nn.Embedding(context, width)
        self.blocks: nn.Module = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head: nn.Module = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.byte(text[:, :-1]) + self.position.weight)
        return F.cross_entropy(self.head(x).flatten(0, 1), text[:, 1:].flatten())
