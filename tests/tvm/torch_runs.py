"""Small PyTorch modules, what becomes of them compiled, and what eager PyTorch says. Runs in a process of its own."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from tvmflow.errors import TvmflowError
from tvmflow.frontend import torch as frontend
from tvmflow.pipeline import plan
from tvmflow.pipeline.context import Context

import numpy as np  # isort: skip
import tvm  # isort: skip  # after torch, as the frontend does
from tvm import relax  # isort: skip

INF, NAN = float("inf"), float("nan")
Made = tuple[Any, ...]


class Of(torch.nn.Module):
    """A module that computes `function`, with its parameters as inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        names = ", ".join(inspect.signature(function).parameters)
        space: dict[str, Any] = {}
        exec(f"def forward(self, {names}): return self.function({names})", space)
        self.forward = space["forward"].__get__(self)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole(high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def _written(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[0] = 1
    x[:, 1] += 2
    x[1:3, 2] = x[0:2, 0]
    x[x < 0] = 0
    return x.clamp_(max=3)


def _diagonal_write(x: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(10)
    square = torch.zeros(x.size(0), 11, 11)
    square[:, rows, rows + 1] = x
    return square


def _attention(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
    attend = functional.scaled_dot_product_attention
    return attend(x, x, x, is_causal=True), attend(x, x, x, attn_mask=mask > 0, scale=0.1)


def _pools(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    f = functional
    return (
        f.max_pool2d(x, 3, 2, 1, ceil_mode=True),
        f.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
        f.avg_pool2d(x, (2, 3), divisor_override=3, padding=1, ceil_mode=True),
        f.adaptive_avg_pool2d(x, 3),
        f.avg_pool1d(x[0], 2, 2, ceil_mode=True),
        f.max_pool2d(x[0], 2),
    )


def _resized(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    f = functional.interpolate
    return (
        f(x, size=(5, 7)),
        f(x, scale_factor=1.5),
        f(x, scale_factor=2),
        f(x, scale_factor=2.7, mode="bilinear"),
        f(x, size=(12, 12), mode="bilinear", align_corners=True),
        f(x, scale_factor=2, mode="bilinear"),
        f(x, size=(9, 3), mode="bicubic"),
        f(x, size=(3, 9), mode="bilinear", antialias=True),
    )


def _padded(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    f = functional.pad
    crop, edge = f(x, (-1, 2, 1, -1)), f(x, (1, 1), value=-INF)
    return crop, edge, f(x, (1, 1, 1, 1), mode="reflect"), f(x, (1, 1, 1, 0), mode="circular")


def _activations(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    f = functional
    return (
        torch.relu(x),
        x.clamp(0, 6),
        x.clamp(min=0),
        f.relu6(x),
        f.hardtanh(x),
        f.leaky_relu(x),
        f.elu(x, 0.5),
        f.celu(x, 2.0),
        f.selu(x),
        f.silu(x),
        f.hardswish(x),
        f.softplus(x),
        f.mish(x),
    )


NANS = torch.tensor([NAN, 1.0, -2.0, NAN, 0.3, -0.7])
VALUES: dict[str, Made] = {
    "activations keep NaN": (Of(_activations), (NANS,)),
    "maximum and minimum keep NaN": (
        Of(lambda x, y: (torch.maximum(x, y), torch.minimum(x, y), x.clamp(y, y + 1))),
        (NANS, NANS.flip(0)),
    ),
    "unlike dtypes": (
        Of(
            lambda i, x, h: (i * 2.5, i / 2, i + x, h * x, torch.where(i > 1, x, 0), i > 1.5, torch.cat([x, i]), i**0.5)
        ),
        (whole(5, 4), rand(4), rand(4).half()),
    ),
    "booleans": (
        Of(lambda a, b: (a + b, a * b, ~a, a == b, a < b, a.sum(), a.any(), a.all(0))),
        (rand(3, 4) > 0, rand(3, 4, seed=1) > 0),
    ),
    "alpha and beta": (
        Of(lambda x, y: (torch.add(x, y, alpha=2), torch.rsub(x, y, alpha=3), torch.addmm(x, x, y, beta=0.5, alpha=2))),
        (rand(3, 3), rand(3, 3, seed=1)),
    ),
    "division of negatives": (
        Of(lambda a, b: (a // b, a % b, torch.fmod(a, b), torch.div(a, b, rounding_mode="trunc"))),
        (torch.tensor([-7, 7, -7, 7]), torch.tensor([2, -2, -3, 3])),
    ),
    "integers and numbers": (
        Of(
            lambda i, u: (
                i // 3,
                i % 3,
                u // 3,
                u % 7,
                torch.div(i, 4, rounding_mode="trunc"),
                i**2,
                i**5,
                u**3,
                2**u,
                i << 3,
                i >> 2,
            )
        ),
        (torch.tensor([-7, 7, 2, -1]), torch.tensor([0, 3, 5, 2], dtype=torch.uint8)),
    ),
    "division of floats": (
        Of(lambda a, b: (a // b, a % b, torch.fmod(a, b))),
        (torch.tensor([-7.5, 7.5, 1.0]), torch.tensor([2, -2, 0.1])),
    ),
    "near zero and far off": (
        Of(lambda x: (torch.log1p(x) * 1e9, torch.expm1(x) * 1e9)),
        (torch.tensor([1e-9, -1e-9, 1e-4, -0.5, INF]),),
    ),
    "float64": (
        torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.Flatten(), torch.nn.Linear(27, 4)).double(),
        (rand(1, 2, 5, 5).double(),),
    ),
    "float16 is summed in float32": (
        Of(lambda x: (x.mean(1), x.sum(1), x.softmax(1), x @ x.T)),
        (torch.full((1, 8192), 2.0).half(),),
    ),
    "bfloat16 inside": (Of(lambda x: (x.bfloat16() @ x.bfloat16()).float()), (rand(8, 8),)),
    "reductions": (
        Of(
            lambda x: (
                torch.mean(x),
                x.mean((0, 2)),
                x.var(1),
                x.std(1, correction=0),
                x.amax(1),
                *x.max(2),
                *x.median(1),
                x.norm(p=3, dim=0),
                x.norm(p=INF, dim=1),
                x.prod(1),
                x.cumsum(1),
            )
        ),
        (rand(3, 4, 5),),
    ),
    "ties and order": (
        Of(lambda x: (x.argmax(1), *x.sort(1, descending=True), *x.topk(2, 1, largest=False))),
        (torch.tensor([[1.0, 3, 2, 5], [2, 9, 7, 1]]),),
    ),
    "slices and selects": (
        Of(lambda x: (x[-1], x[:, -2], x[1:, ::2], x[-2:], x[:100], x[2:1], x[:0].reshape(-1, 10), x.unbind(0)[0] * 2)),
        (rand(4, 5),),
    ),
    "index tensors": (
        Of(lambda x, i, j: (x[i], x[i - 4], x[:, i, j], x[i, :, j], x[i[:, None], j])),
        (rand(4, 4, 4), whole(4, 3), whole(4, 3, seed=1)),
    ),
    "assignment": (Of(_written), (rand(3, 4),)),
    "assignment to a diagonal": (Of(_diagonal_write), (rand(2, 10),)),
    "index_put and scatter": (
        Of(
            lambda x, i, v: (
                x.index_put((i,), v),
                x.index_put((i,), v, accumulate=True),
                x.scatter(0, i[:, None], 2.5),
                x.scatter_add(1, i[None].expand(2, 2), v),
                x.index_fill(0, i, 2.0),
            )
        ),
        (rand(3, 3), torch.tensor([0, 2]), rand(2, 3)),
    ),
    "masked_fill": (
        Of(lambda x, t: torch.softmax(x.masked_fill(t.eq(0).unsqueeze(1).expand(2, 4, 4), -1e9), -1)),
        (rand(2, 4, 4), torch.tensor([[1, 2, 0, 3], [0, 1, 1, 1]])),
    ),
    "views": (
        Of(
            lambda x: (
                x.reshape(-1),
                x.T,
                x.unflatten(0, (2, 2)),
                x.repeat(2, 1, 3),
                x.flip(0, 1),
                x.roll(1, 1),
                x.as_strided((2, 2), (1, 2)),
                x.diagonal(1),
                x.unfold(1, 2, 1),
                *x.split([1, 3]),
            )
        ),
        (rand(4, 3),),
    ),
    "made inside": (
        Of(lambda x: (x + torch.full((2,), -INF), torch.linspace(0, 1, 5), torch.eye(2) + x, torch.arange(0, 1, 0.25))),
        (rand(2),),
    ),
    "pools": (Of(_pools), (rand(1, 2, 7, 7),)),
    "resizing": (Of(_resized), (rand(1, 2, 6, 6),)),
    "padding": (Of(_padded), (rand(1, 2, 4, 4),)),
    "grid_sample": (
        Of(lambda x, g: functional.grid_sample(x, g, align_corners=False)),
        (rand(1, 2, 4, 4), rand(1, 3, 5, 2)),
    ),
    "attention": (Of(_attention), (rand(1, 2, 4, 8), rand(4, 4))),
    "transposed convolution": (torch.nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2), (rand(1, 4, 5, 5),)),
    "normalisations": (
        torch.nn.Sequential(
            torch.nn.BatchNorm2d(4),
            torch.nn.GroupNorm(2, 4, affine=False),
            torch.nn.InstanceNorm2d(4),
            torch.nn.LayerNorm(3, elementwise_affine=False),
        ).eval(),
        (rand(2, 4, 3, 3),),
    ),
    "LSTM": (torch.nn.LSTM(4, 5, bidirectional=True, batch_first=True).eval(), (rand(2, 2, 4),)),
}

# module, example inputs, dynamic shapes, sizes to fix and to run at
DYNAMIC: dict[str, Made] = {
    "sizes as numbers": (
        Of(lambda x: (x / x.shape[1], x.var(1), x[:, 1:], x[:, -1], x.view(x.shape[0], -1, 1))),
        (rand(3, 4),),
        ({0: "b", 1: "t"},),
        {"b": 1, "t": 7},
    ),
    "expand and slice": (
        Of(lambda x: x[:, 1:] * torch.arange(x.shape[1]).unsqueeze(0).expand(x.shape[0], -1)[:, :-1].to(x.dtype)),
        (rand(2, 7),),
        ({1: torch.export.Dim.AUTO},),
        {"x_dim1": 5},
    ),
    "image": (
        torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3, 2, 1),
            torch.nn.ReLU(),
            torch.nn.Upsample(scale_factor=2),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
        ),
        (rand(1, 3, 8, 8),),
        ({0: "b", 2: "h", 3: "w"},),
        {"b": 2, "h": 12, "w": 10},
    ),
    "attention": (
        Of(lambda q: functional.scaled_dot_product_attention(q, q, q, is_causal=True)),
        (rand(1, 2, 4, 8),),
        ({2: "t"},),
        {"t": 6},
    ),
    "last token": (
        Of(lambda x, n: x[torch.arange(x.shape[0]), n - 1]),
        (rand(3, 5, 2), whole(5, 3)),
        ({0: "b", 1: "t"}, {0: torch.export.Dim("b", min=1, max=64)}),
        {"b": 4, "t": 6},
    ),
}


def values(name: str) -> None:
    module, args = VALUES[name]
    half = any(arg.dtype == torch.float16 for arg in args) or "bfloat16" in name
    agree(source(module, args), {}, half)


def opened(mod: tvm.IRModule) -> tvm.IRModule:
    """An imported module as TVM's own pipeline can take it: without the marks of roundings that importers leave."""
    return plan.run(mod, plan.steps_of(Context("llvm"), "open"))


def dynamic(name: str) -> list[tuple[int | str, ...]]:
    """Agrees at the example's sizes, at others, and with the others fixed; returns the shapes of the inputs."""
    module, args, shapes, sizes = DYNAMIC[name]
    free = source(module, args, shapes)
    agree(frontend.resized(free, {}, sizes), {})
    model = frontend.load(free, {}, {})
    machine = relax.VirtualMachine(tvm.compile(opened(model.mod), "llvm"), tvm.cpu())
    for feed in (frontend.example_inputs(free), frontend.example_inputs(frontend.resized(free, {}, sizes))):
        compare(machine, model, free, feed)
    return [spec.shape for spec in model.signature.inputs]


def source(module: torch.nn.Module, args: Made, shapes: Made = ()) -> frontend.Source:
    from tvmflow.frontend.torch.source import source_of

    return source_of("entry", (module, args, *([shapes] if shapes else [])))


def agree(given: frontend.Source, dims: Mapping[str, int], half: bool = False) -> Any:
    model = frontend.load(given, {}, dims)
    machine = relax.VirtualMachine(tvm.compile(opened(model.mod), "llvm"), tvm.cpu())
    compare(machine, model, given, frontend.example_inputs(given), half)
    return model


def compare(machine: Any, model: Any, given: frontend.Source, feed: dict[str, Any], half: bool = False) -> None:
    result = machine["main"](*(tvm.runtime.tensor(feed[spec.name]) for spec in model.signature.inputs))
    got = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
    want = frontend.run_eager(given, [feed])[0]
    assert len(got) == len(want) == len(model.signature.outputs)
    for array, expected, spec in zip(got, want, model.signature.outputs, strict=True):
        assert array.numpy().dtype == expected.dtype == np.dtype(spec.dtype), spec
        tolerance = (1e-2, 1e-3) if half else (1e-5, 1e-5)
        np.testing.assert_allclose(array.numpy(), expected, *tolerance, err_msg=spec.name)


def all_of(kind: str, names: list[str], folder: str = "") -> dict[str, Any]:
    """Runs `kind` (a function of this module) on each name, in `folder`; what it returned, or its failure as text."""
    os.chdir(folder or ".")
    results: dict[str, Any] = {}
    for name in names:
        try:
            results[name] = globals()[kind](name)
        except TvmflowError as exc:
            results[name] = f"{type(exc).__name__}: {exc.message} | {exc.hint}"
        except AssertionError as exc:
            results[name] = str(exc)
    return results


class Masked(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0]


class Cache(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cache.add_(x) * 2


REFUSED: dict[str, Callable[[], Made]] = {
    "training": lambda: (torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Dropout()), (rand(2, 3, 4, 4),)),
    "random": lambda: (Of(lambda x: x + torch.randn(3)), (rand(3),)),
    "several": lambda: (Of(lambda x: torch.lgamma(x) + torch.erfinv(x) + torch.rand(3)), (rand(3),)),
    "sized by values": lambda: (Masked(), (rand(3),)),
    "complex": lambda: (Of(lambda x: torch.fft.rfft(x).abs()), (rand(4),)),
    "buffer": lambda: (Cache(), (rand(3),)),
    "input": lambda: (Of(lambda x: x.add_(1)), (rand(3),)),
    "positions": lambda: (Of(lambda x: functional.max_pool2d(x, 2, return_indices=True)), (rand(1, 1, 4, 4),)),
    "bfloat16 edge": lambda: (Of(lambda x: x.bfloat16()), (rand(3),)),
    "no tensor": lambda: (Of(lambda x: 3), (rand(3),)),
    "halves": lambda: (Of(lambda x: x[: x.shape[0] // 2] + x[(x.shape[0] + 1) // 2 :]), (rand(6),), ({0: "t"},)),
    "item": lambda: (Of(lambda x: x * x.sum().item()), (rand(3),)),
    "control flow": lambda: (Of(lambda x: x if x.sum() > 0 else -x), (rand(3),)),
    "two names": lambda: (Of(lambda x, y: x + y), (rand(3), rand(3)), ({0: "a"}, {0: "b"})),
    "fixed by the code": lambda: (Of(lambda x: x.view(2, 5)), (rand(10),), ({0: "n"},)),
    "own library": lambda: (Of(lambda x: torch.ops.tvmflow_test.relu(x)), (rand(3),)),
}


def refused(name: str) -> None:
    if name == "own library":
        torch.library.define("tvmflow_test::relu", "(Tensor x) -> Tensor")
        torch.library.impl("tvmflow_test::relu", "cpu", lambda x: x * 3)
        torch.library.register_fake("tvmflow_test::relu", torch.empty_like)
    frontend.load(source(*REFUSED[name]()), {}, {})


def entry(name: str) -> Any:
    """Loads an entry or a .pt2 file found in the working directory, compiles and compares; its signature.

    "name?dimension=3" fixes a dimension.
    """
    name, _, fixed = name.partition("?")
    given = frontend.load_program(Path(name)) if name.endswith(".pt2") else frontend.load_entry(name, Path())
    dims = {key: int(size) for key, _, size in [fixed.partition("=")] if key}
    return agree(frontend.resized(given, {}, dims), {}).signature


def save_program(path: str) -> None:
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 8), torch.nn.ReLU()).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    torch.export.save(torch.export.export(module, (rand(2, 3, 4),), dynamic_shapes=({0: batch},)), path)
