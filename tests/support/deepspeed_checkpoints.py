"""The model and the cases of the checkpoints in tests/fixtures/deepspeed/."""

CASES = {
    "stage1-bf16-1": (1, 1, {"bf16": {"enabled": True}}),
    "stage2-fp16-2": (2, 2, {"fp16": {"enabled": True, "initial_scale_power": 4}}),
    "stage3-bf16-2": (3, 2, {"bf16": {"enabled": True}}),
}
"""Stage, ranks, and the rest of the configuration."""


def model():
    """A tied weight, a frozen parameter, a buffer, and sizes that the ranks do not divide."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(7, 3)
            self.frozen = torch.nn.Linear(3, 5)
            self.back = torch.nn.Linear(5, 3)
            self.norm = torch.nn.LayerNorm(3)
            self.register_buffer("offset", torch.arange(3) / 3)
            self.head = torch.nn.Linear(3, 7, bias=False)
            self.head.weight = self.embedding.weight
            self.frozen.requires_grad_(False)

        def forward(self, ids):
            x = self.embedding(ids)
            x = x + self.offset.to(x.dtype)
            return self.head(self.norm(self.back(torch.tanh(self.frozen(x)))))

    torch.manual_seed(0)
    return Model()
