#!/usr/bin/env python3
"""Turns weights that get_models.py fetched into ONNX files: `convert_models.py DIR NAME`. Called by get_models.py."""

from __future__ import annotations

import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper


def from_torch(name: str, directory: Path) -> None:
    """Exports the entry `name` of torch_models; weights over 100 MB go into a file beside it."""
    import torch
    import torch_models

    module, inputs, axes = getattr(torch_models, name)()
    shapes = tuple(dict.fromkeys(named, torch.export.Dim.DYNAMIC) for named in axes)
    parameters = list(module.forward.__code__.co_varnames[1 : 1 + len(inputs)])
    program = torch.onnx.export(
        module, inputs, dynamo=True, dynamic_shapes=shapes, input_names=parameters, opset_version=18, verbose=False
    )
    size_bytes = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())

    def save(path: Path) -> None:
        program.save(str(path), external_data=size_bytes > 100_000_000)

    _save_all(name, directory, save)


def effnet_fp16(name: str, directory: Path) -> None:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = convert_float_to_float16(onnx.load(_effnet(directory)), keep_io_types=False)
    _save_all(name, directory, lambda path: onnx.save(model, path))


def effnet_qdq(name: str, directory: Path) -> None:
    """int8 weights per channel, uint8 activations, calibrated on four images of seeded noise."""
    from onnxruntime import quantization

    class Noise(quantization.CalibrationDataReader):  # type: ignore[misc] # onnxruntime carries no types
        def __init__(self) -> None:
            self.images = iter(
                [np.random.default_rng(seed).standard_normal((1, 3, 224, 224)).astype(np.float32) for seed in range(4)]
            )

        def get_next(self) -> dict[str, Any] | None:
            image = next(self.images, None)
            return None if image is None else {"x": image}

    source = _effnet(directory)
    _save_all(
        name,
        directory,
        lambda path: quantization.quantize_static(
            source,
            path,
            Noise(),
            quant_format=quantization.QuantFormat.QDQ,
            per_channel=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
        ),
    )


def realesr(name: str, directory: Path) -> None:
    """Real-ESRGAN animevideov3 x4: 18 convolutions with PReLU between, pixel shuffle, plus the enlarged input."""
    dtype = np.float16 if name.endswith("fp16") else np.float32
    raw = (directory / "weights" / "realesr.bin").read_bytes()
    nodes, constants, x, position = [], [], "x", 0
    for i, (channels, out) in enumerate([(3, 64)] + [(64, 64)] * 16 + [(64, 48)]):
        # ncnn: a tag, float16 weights padded to 4 bytes, float32 bias; then PReLU's float32 slopes
        if struct.unpack_from("<I", raw, position)[0] != 0x01306B47:
            raise ValueError(f"realesr.bin: no float16 weights at byte {position}")
        count = channels * out * 9
        weight = np.frombuffer(raw, np.float16, count, position + 4).reshape(out, channels, 3, 3)
        position += 4 + (2 * count + 3) // 4 * 4
        bias = np.frombuffer(raw, np.float32, out, position)
        position += 4 * out
        constants += [(f"weight{i}", weight), (f"bias{i}", bias)]
        nodes.append(
            helper.make_node(
                "Conv", [x, f"weight{i}", f"bias{i}"], [f"conv{i}"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]
            )
        )
        x = f"conv{i}"
        if i < 17:
            slope = np.frombuffer(raw, np.float32, out, position).reshape(out, 1, 1)
            position += 4 * out
            constants.append((f"slope{i}", slope))
            nodes.append(helper.make_node("PRelu", [x, f"slope{i}"], [f"prelu{i}"]))
            x = f"prelu{i}"
    nodes += [
        helper.make_node("DepthToSpace", [x], ["detail"], blocksize=4, mode="CRD"),
        helper.make_node(
            "Resize",
            ["x", "", "scales"],
            ["enlarged"],
            mode="nearest",
            nearest_mode="floor",
            coordinate_transformation_mode="asymmetric",
        ),
        helper.make_node("Add", ["detail", "enlarged"], ["y"]),
    ]
    weights = [numpy_helper.from_array(np.ascontiguousarray(value.astype(dtype)), key) for key, value in constants]
    scales = numpy_helper.from_array(np.array([1, 1, 4, 4], np.float32), "scales")
    kind = TensorProto.FLOAT16 if dtype == np.float16 else TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "realesr_animevideov3_x4",
        [helper.make_tensor_value_info("x", kind, ["n", 3, "h", "w"])],
        [helper.make_tensor_value_info("y", kind, ["n", 3, None, None])],
        [*weights, scales],
    )
    _checked_save(name, directory, helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))


def resnet50(name: str, directory: Path) -> None:
    """ResNet-50 as in onnx's light_resnet50, with seeded random weights, scaled so that values stay in range."""
    model = onnx.load(Path(onnx.__file__).parent / "backend/test/data/light/light_resnet50.onnx")
    graph, rng = model.graph, np.random.default_rng(0)
    shapes = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    roles = {}
    for node in graph.node:
        if node.op_type == "BatchNormalization":
            roles.update(zip(node.input[1:], ("scale", "bias", "mean", "var"), strict=True))
    kept, weights = [], []
    for node in graph.node:
        if node.op_type != "ConstantOfShape":
            kept.append(node)
            continue
        shape = tuple(int(size) for size in shapes[node.input[0]])
        values = _random_weights(rng, roles.get(node.output[0]), shape)
        weights.append(numpy_helper.from_array(values.astype(np.float32), node.output[0]))
    used = {value for node in kept for value in node.input}
    weights += [tensor for tensor in graph.initializer if tensor.name in used]
    known = {tensor.name for tensor in weights}
    inputs = [value for value in graph.input if value.name in used and value.name not in known]
    for field, values in ((graph.node, kept), (graph.initializer, weights), (graph.input, inputs)):
        del field[:]
        field.extend(values)
    model.ir_version = 8
    _checked_save(name, directory, model)


def _random_weights(rng: np.random.Generator, role: str | None, shape: tuple[int, ...]) -> Any:
    if role == "var":
        return rng.uniform(0.9, 1.1, shape)
    if role == "scale":
        return rng.uniform(0.3, 0.6, shape)
    if role in ("bias", "mean") or len(shape) == 1:
        return rng.normal(0, 0.05, shape)
    return rng.normal(0, (2 / np.prod(shape[1:])) ** 0.5, shape)


def _effnet(directory: Path) -> Path:
    path = directory / "onnx" / "effnet_lite0.onnx"
    if not path.exists():
        from_torch("effnet_lite0", directory)
    return path


def _checked_save(name: str, directory: Path, model: ModelProto) -> None:
    onnx.checker.check_model(model)
    _save_all(name, directory, lambda path: onnx.save(model, path))


def _save_all(name: str, directory: Path, save: Callable[[Path], object]) -> None:
    """Writes beside the target and moves into place, data before the model, so that no half file is ever seen."""
    folder = directory / "onnx"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        save(Path(scratch) / f"{name}.onnx")
        for part in sorted(Path(scratch).iterdir(), key=lambda path: path.suffix == ".onnx"):
            part.replace(folder / part.name)


CONVERTERS: dict[str, Callable[[str, Path], None]] = {
    "resnet50": resnet50,
    "realesr_fp32": realesr,
    "realesr_fp16": realesr,
    "effnet_lite0_fp16": effnet_fp16,
    "effnet_lite0_qdq": effnet_qdq,
    **dict.fromkeys(("minilm_l6", "smollm2_135m", "smollm2_4layers", "effnet_lite0", "crepe_tiny"), from_torch),
}

if __name__ == "__main__":
    CONVERTERS[sys.argv[2]](sys.argv[2], Path(sys.argv[1]))
