"""Real models as PyTorch modules, for the weights that get_models.py fetches.

Each function is an entry for a config: `entry = "scripts.torch_models:minilm_l6"` from the repository's root, or
"torch_models:minilm_l6" from this folder. Weights come from $TVMFLOW_MODELS/weights (default: .cache/models/weights).
"""

from __future__ import annotations

import json
import os
import struct
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

Entry = tuple[nn.Module, tuple[Tensor, ...], tuple[dict[int, str], ...]]
MODELS = Path(os.environ.get("TVMFLOW_MODELS") or Path(__file__).resolve().parents[1] / ".cache" / "models")


def minilm_l6() -> Entry:
    """all-MiniLM-L6-v2: token ids and mask [b, t] -> sentence embeddings [b, 384], of length 1."""
    ids = torch.arange(1000, 1032).reshape(2, 16)
    return (
        MiniLM(read_safetensors(weights("minilm_l6.safetensors"))).eval(),
        (ids, torch.ones_like(ids)),
        ({0: "b", 1: "t"}, {0: "b", 1: "t"}),
    )


def smollm2_135m(layers: int = 30) -> Entry:
    """SmolLM2-135M-Instruct, prefill without a cache: token ids [1, t] -> logits [1, t, 49152]."""
    return Llama(read_gguf(weights("smollm2.gguf")), layers).eval(), (torch.arange(100, 116)[None],), ({1: "t"},)


def smollm2_4layers() -> Entry:
    """The first 4 of SmolLM2's 30 layers."""
    return smollm2_135m(4)


def effnet_lite0() -> Entry:
    """EfficientNet-Lite0: images [b, 3, 224, 224] -> logits [b, 1000]."""
    return _from_pth(EfficientNetLite0(), "effnet_lite0.pth", (2, 3, 224, 224))


def crepe_tiny() -> Entry:
    """CREPE (tiny): windows of 1,024 samples [b, 1024] -> pitch activations [b, 360]."""
    return _from_pth(CrepeTiny(), "crepe_tiny.pth", (4, 1024))


def _from_pth(module: nn.Module, name: str, shape: tuple[int, ...]) -> Entry:
    module.load_state_dict(torch.load(weights(name), map_location="cpu", weights_only=True))
    return module.eval(), (torch.randn(shape, generator=torch.Generator().manual_seed(0)),), ({0: "b"},)


def weights(name: str) -> Path:
    """A weight file; FileNotFoundError says how to get it."""
    path = MODELS / "weights" / name
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run `python scripts/get_models.py {MODELS} {path.stem}`")
    return path


class BertLayer(nn.Module):
    """Self-attention and feed-forward, each followed by residual and LayerNorm."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.attended = (nn.Linear(width, width) for _ in range(4))
        self.inner, self.outer = nn.Linear(width, inner), nn.Linear(inner, width)
        self.attention_norm, self.output_norm = nn.LayerNorm(width, 1e-12), nn.LayerNorm(width, 1e-12)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        query, key, value = (
            layer(x).view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) / (width // self.heads) ** 0.5 + mask
        x = self.attention_norm(x + self.attended((scores.softmax(-1) @ value).transpose(1, 2).flatten(2)))
        return self.output_norm(x + self.outer(functional.gelu(self.inner(x))))


EMBEDDING_NAMES = {
    "words": "word_embeddings",
    "positions": "position_embeddings",
    "types": "token_type_embeddings",
    "norm": "LayerNorm",
}
LAYER_NAMES = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attended": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "inner": "intermediate.dense",
    "outer": "output.dense",
    "output_norm": "output.LayerNorm",
}


class MiniLM(nn.Module):
    """A BERT encoder with mean pooling; `state` uses the names of Hugging Face's BertModel."""

    def __init__(self, state: dict[str, Tensor], layers: int = 6, width: int = 384) -> None:
        super().__init__()
        self.words, self.positions, self.types = (nn.Embedding(size, width) for size in (30522, 512, 2))
        self.norm = nn.LayerNorm(width, 1e-12)
        self.layers = nn.ModuleList(BertLayer(width, 12, 4 * width) for _ in range(layers))
        names = {f"embeddings.{theirs}": ours for ours, theirs in EMBEDDING_NAMES.items()}
        for index in range(layers):
            names.update(
                {f"encoder.layer.{index}.{theirs}": f"layers.{index}.{ours}" for ours, theirs in LAYER_NAMES.items()}
            )
        self.load_state_dict(
            {
                f"{names[path]}.{kind}": value
                for key, value in state.items()
                for path, _, kind in [key.rpartition(".")]
                if path in names
            }
        )

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.norm(self.words(ids) + self.positions(torch.arange(ids.shape[1])) + self.types.weight[0])
        bias = (1.0 - mask[:, None, None, :].float()) * -10000.0
        for layer in self.layers:
            x = layer(x, bias)
        counted = mask[:, :, None].float()
        return functional.normalize((x * counted).sum(1) / counted.sum(1).clamp(min=1e-9), dim=-1)


class Llama(nn.Module):
    """A Llama decoder; `state` uses GGUF's names and its order of rows in q and k, so even and odd elements pair up."""

    def __init__(self, state: dict[str, Tensor], layers: int) -> None:
        super().__init__()
        self.layers, self.heads, self.groups, self.depth = layers, 9, 3, 64
        self.state = nn.ParameterDict(
            {
                name.replace(".", "_"): nn.Parameter(value, False)
                for name, value in state.items()
                if not name.startswith("blk.") or int(name.split(".")[1]) < layers
            }
        )
        self.register_buffer("frequencies", 1e5 ** (-torch.arange(0, self.depth, 2).float() / self.depth))

    def forward(self, ids: Tensor) -> Tensor:
        tokens = ids.shape[1]
        x = functional.embedding(ids, self.state["token_embd_weight"])
        positions = torch.arange(tokens)
        angles = positions.float()[:, None] * self.frequencies
        mask = torch.where(positions[:, None] >= positions[None], 0.0, -1e9)
        for index in range(self.layers):
            x = x + self.attention(_rms_norm(x, self.of(index, "attn_norm")), index, angles, mask)
            h = _rms_norm(x, self.of(index, "ffn_norm"))
            gate = functional.silu(h @ self.of(index, "ffn_gate").T)
            x = x + (gate * (h @ self.of(index, "ffn_up").T)) @ self.of(index, "ffn_down").T
        return _rms_norm(x, self.state["output_norm_weight"]) @ self.state["token_embd_weight"].T

    def attention(self, h: Tensor, index: int, angles: Tensor, mask: Tensor) -> Tensor:
        batch, tokens, _ = h.shape

        def heads(name: str, count: int) -> Tensor:
            return (h @ self.of(index, name).T).view(batch, tokens, count, self.depth).transpose(1, 2)

        query = _rotated(heads("attn_q", self.heads), angles)
        key = _rotated(heads("attn_k", self.groups), angles).repeat_interleave(self.heads // self.groups, 1)
        value = heads("attn_v", self.groups).repeat_interleave(self.heads // self.groups, 1)
        scores = query @ key.transpose(-1, -2) / self.depth**0.5 + mask
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2) @ self.of(index, "attn_output").T

    def of(self, index: int, name: str) -> Tensor:
        return self.state[f"blk_{index}_{name}_weight"]


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    even, odd, cos, sin = x[..., 0::2], x[..., 1::2], angles.cos(), angles.sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


class SameConv(nn.Conv2d):
    """A convolution without bias that pads as TensorFlow's SAME; square inputs."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(channels, out, kernel, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        size, kernel, stride = x.shape[-1], self.kernel_size[0], self.stride[0]
        pad = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        return super().forward(functional.pad(x, (pad // 2, pad - pad // 2) * 2) if pad else x)


_batch_norm = partial(nn.BatchNorm2d, eps=1e-3)


class InvertedBottleneck(nn.Module):
    """Expansion, depthwise convolution, projection; attributes are named as in the published weights."""

    def __init__(self, kernel: int, stride: int, expansion: int, channels: int, out: int) -> None:
        super().__init__()
        inner = channels * expansion
        self.residual, self.expands = stride == 1 and channels == out, expansion > 1
        if self.expands:
            self._expand_conv, self._bn0 = SameConv(channels, inner, 1), _batch_norm(inner)
        self._depthwise_conv, self._bn1 = SameConv(inner, inner, kernel, stride, inner), _batch_norm(inner)
        self._project_conv, self._bn2 = SameConv(inner, out, 1), _batch_norm(out)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        y = self._bn2(self._project_conv(functional.relu6(self._bn1(self._depthwise_conv(y)))))
        return x + y if self.residual else y


class EfficientNetLite0(nn.Module):
    # repeats, kernel, stride, expansion, channels in, channels out
    STAGES = (
        (1, 3, 1, 1, 32, 16),
        (2, 3, 2, 6, 16, 24),
        (2, 5, 2, 6, 24, 40),
        (3, 3, 2, 6, 40, 80),
        (3, 5, 1, 6, 80, 112),
        (4, 5, 2, 6, 112, 192),
        (1, 3, 1, 6, 192, 320),
    )

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem, self._bn0 = SameConv(3, 32, 3, 2), _batch_norm(32)
        self._blocks = nn.ModuleList(
            InvertedBottleneck(kernel, stride if first else 1, expansion, channels if first else out, out)
            for repeats, kernel, stride, expansion, channels, out in self.STAGES
            for first in [True] + [False] * (repeats - 1)
        )
        self._conv_head, self._bn1 = SameConv(320, 1280, 1), _batch_norm(1280)
        self._fc = nn.Linear(1280, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu6(self._bn0(self._conv_stem(x)))
        for block in self._blocks:
            x = block(x)
        return self._fc(functional.relu6(self._bn1(self._conv_head(x))).mean((2, 3)))


class CrepeTiny(nn.Module):
    """Six convolutions over time; the attributes have the names of the published weights."""

    def __init__(self) -> None:
        super().__init__()
        channels = (1, 128, 16, 16, 16, 32, 64)
        for i in range(6):
            kernel, stride = ((512, 1), (4, 1)) if i == 0 else ((64, 1), (1, 1))
            setattr(self, f"conv{i + 1}", nn.Conv2d(channels[i], channels[i + 1], kernel, stride))
            setattr(self, f"conv{i + 1}_BN", nn.BatchNorm2d(channels[i + 1], eps=0.0010000000474974513))
        self.classifier = nn.Linear(256, 360)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None, :, None]
        for i in range(6):
            x = functional.pad(x, (0, 0, 254, 254) if i == 0 else (0, 0, 31, 32))
            x = functional.relu(getattr(self, f"conv{i + 1}")(x))
            x = functional.max_pool2d(getattr(self, f"conv{i + 1}_BN")(x), (2, 1), (2, 1))
        return torch.sigmoid(self.classifier(x.permute(0, 2, 1, 3).reshape(-1, 256)))


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file: an 8-byte length, a JSON header, raw little-endian data."""
    dtypes = {"F32": np.float32, "I64": np.int64}
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(length))
    raw = np.fromfile(path, np.uint8, offset=8 + length)
    header.pop("__metadata__", None)
    return {
        name: torch.from_numpy(raw[slice(*entry["data_offsets"])].view(dtypes[entry["dtype"]]).copy()).reshape(
            entry["shape"]
        )
        for name, entry in header.items()
    }


def read_gguf(path: Path) -> dict[str, Tensor]:
    """All tensors of a GGUF file in float32; the types F32, Q4_1 and Q8_0 of the GGUF specification."""
    with path.open("rb") as file:
        _, _, tensors, entries = struct.unpack("<IIQQ", file.read(24))
        for _ in range(entries):
            _gguf_text(file)
            _gguf_value(file, struct.unpack("<I", file.read(4))[0])
        infos = []
        for _ in range(tensors):
            name, rank = _gguf_text(file), struct.unpack("<I", file.read(4))[0]
            shape = struct.unpack(f"<{rank}Q", file.read(8 * rank))[::-1]
            infos.append((name, shape, *struct.unpack("<IQ", file.read(12))))
        start = (file.tell() + 31) // 32 * 32
    raw = np.memmap(path, np.uint8, "r")
    return {
        name: torch.from_numpy(_gguf_floats(raw[start + offset :], kind, int(np.prod(shape))).reshape(shape))
        for name, shape, kind, offset in infos
    }


def _gguf_text(file: BinaryIO) -> str:
    return file.read(struct.unpack("<Q", file.read(8))[0]).decode("utf-8", "replace")


def _gguf_value(file: BinaryIO, kind: int) -> Any:
    if kind == 8:
        return _gguf_text(file)
    if kind == 9:
        item, length = struct.unpack("<IQ", file.read(12))
        return [_gguf_value(file, item) for _ in range(length)]
    layout = "<" + "BbHhIif?--Qqd"[kind]
    return struct.unpack(layout, file.read(struct.calcsize(layout)))[0]


def _gguf_floats(raw: Any, kind: int, count: int) -> Any:
    if kind == 0:  # F32
        return raw[: 4 * count].view(np.float32).copy()
    if kind == 3:  # Q4_1: per 32 values a scale, a minimum (both float16) and 16 bytes of two values each
        blocks = raw[: count // 32 * 20].reshape(-1, 20)
        scale, minimum = (blocks[:, i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
        values = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], 1)
        return values.astype(np.float32) * scale + minimum
    if kind == 8:  # Q8_0: per 32 values a scale (float16) and 32 int8
        blocks = raw[: count // 32 * 34].reshape(-1, 34)
        scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        return blocks[:, 2:].copy().view(np.int8) * scale
    raise ValueError(f"GGUF tensor type {kind} is not one of F32, Q4_1, Q8_0")
