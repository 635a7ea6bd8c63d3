"""A small transformer that learns to write Python, byte by byte, from the source of Python's own standard library.

No download: the text is on every host. It differs between Python versions, and the dataset's fingerprint tells
hosts with unlike ones apart at the door.
"""

import hashlib
import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from platform import python_version

import torch
from torch import nn
from torch.nn import functional as F

from worker import Job

FILES = """argparse ast calendar configparser csv dataclasses datetime decimal difflib doctest enum fractions functools
    inspect ipaddress locale mailbox optparse pathlib platform pydoc random shutil smtplib socket
    statistics subprocess tarfile textwrap threading tokenize traceback turtle typing uuid zipfile"""
KNOWN = {"3.11.7": "c0314bea4b69674b16af4ce9167d7d62d41caf27e561c5555314b54cc6e46d5d"}  # sha256 of the text
BYTES = 256


class TinyGPT(Job):
    """A byte-level language model of Python source."""

    @dataclass
    class Params:
        layers: int = 2
        heads: int = 4
        width: int = 64  # of the residual stream
        context: int = 64  # bytes that the model sees
        learning_rate: float = 3e-3  # at its peak
        warmup: float = 0.05  # share of the run

    def build_model(self):
        return GPT(self.params)

    def build_optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=self.params.learning_rate, betas=(0.9, 0.95))

    def build_scheduler(self, optimizer, total_steps):
        rise = max(1, int(self.params.warmup * total_steps))

        def factor(step):
            return (step + 1) / rise if step < rise else 0.5 * (1 + math.cos(math.pi * step / total_steps))

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def train_dataset(self):
        text = source_text()
        return Windows(text[: len(text) * 9 // 10], self.params.context)

    def eval_dataset(self):
        text = source_text()
        return Windows(text[len(text) * 9 // 10 :], self.params.context)

    def training_step(self, model, batch):
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def eval_step(self, model, batch):
        loss = self.training_step(model, batch)
        return {"loss": loss, "bits_per_byte": loss / math.log(2)}


class Windows(torch.utils.data.Dataset):
    """The text cut into pieces of context + 1 bytes; neighbours share one."""

    def __init__(self, text, context):
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self):
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index):
        start = index * self.context
        return self.bytes[start : start + self.context + 1].long()

    def fingerprint(self):
        return hashlib.sha256(self.bytes.numpy()).hexdigest()


class GPT(nn.Module):
    def __init__(self, params):
        super().__init__()
        width = params.width
        self.byte = nn.Embedding(BYTES, width)
        self.place = nn.Parameter(0.02 * torch.randn(params.context, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, params.heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(params.layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        self.head.weight = self.byte.weight  # tied: counted, sent and averaged once
        nn.init.normal_(self.byte.weight, std=0.02)

    def forward(self, x):  # (batch, time) bytes -> (batch, time, 256) scores
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        hidden = self.byte(x) + self.place[: x.shape[1]]
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(self.norm(hidden))


def source_text():
    """The chosen modules in a fixed order, as bytes."""
    library = Path(sysconfig.get_path("stdlib"))
    files = (library / f"{name}.py" for name in FILES.split())
    # What is one file in one Python is a package in another.
    text = b"".join((file if file.exists() else file.with_suffix("") / "__init__.py").read_bytes() for file in files)
    digest = hashlib.sha256(text).hexdigest()
    if KNOWN.get(python_version(), digest) != digest:
        raise ValueError(f"the standard library in {library} was edited: its text has sha256 {digest}")
    return text
