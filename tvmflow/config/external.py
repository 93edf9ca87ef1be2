"""What a library may call beside its own kernels, and why: the default of `[audit] allow`."""

from __future__ import annotations

# float64's functions, and those of float32 that TVM has no instructions or kernel for; C17, 7.12, and with an f.
MATHEMATICS = (
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "cbrt",
    "ceil",
    "copysign",
    "cos",
    "cosh",
    "erf",
    "erfc",
    "exp",
    "exp10",
    "exp2",
    "expm1",
    "fabs",
    "floor",
    "fma",
    "fmax",
    "fmin",
    "fmod",
    "hypot",
    "ldexp",
    "log",
    "log10",
    "log1p",
    "log2",
    "nearbyint",
    "nextafter",
    "pow",
    "remainder",
    "rint",
    "round",
    "roundeven",
    "sin",
    "sincos",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
)

# What the virtual machine's compiler calls; its others read files, call Python and keep state between runs.
VIRTUAL_MACHINE = (
    "alloc_*",
    "call_tir_dyn",
    "check_*",
    "copy",
    "cuda_graph.*",
    "ensure_zero_offset",
    "invoke_closure",
    "make_*",
    "match_*",
    "null_value",
    "read_if_cond",
    "reshape",
    "shape_of",
    "tensor_to_shape",
    "to_device",
    "tuple_*",
)

# Pattern, with `*` for any text and `|` between several, -> reason. A name is one of the virtual machine's call table,
# of a function that a kernel asks TVM's run time for, of an undefined dynamic symbol, or of a shared library needed.
RUN_TIME = {
    "|".join(
        f"vm.builtin.{name}" for name in VIRTUAL_MACHINE
    ): "TVM's virtual machine: shapes, buffers, branches, tuples",
    "runtime.TVMTensor*|runtime.Device_Stream*|runtime.GetDeviceAttr|runtime.TVMSetStream": (
        "TVM's run time: devices and the copies between them"
    ),
    "tvm.contrib.sort.*": "sort, argsort and top-k: compiled code of TVM's run time",
    "tvm.contrib.random.*": "random numbers: compiled code of TVM's run time",
}
ALLOWED = {
    **RUN_TIME,
    "__tvm_set_device": "chooses the GPU before a kernel is launched",
    "TVMFFI*": "TVM's C interface: calls, errors, tensors",
    "TVMBackend*": "TVM's run time: threads and workspace",
    "memcpy|memmove|memset": "the C library: copies and fills memory",
    "|".join(f"{name}|{name}f" for name in MATHEMATICS): "the C library's mathematics",
    "libc.so.*": "the C library",
    "libm.so.*": "the C library's mathematical functions",
    "libgcc_s.so.*": "the compiler's own support code",
    "libstdc++.so.*": "named by the C++ compiler that links",
    "ld-linux*.so.*": "the loader",
    "_ITM_*TMCloneTable": "weak symbols of the C compiler's start-up code",
    "__gmon_start__": "a weak symbol of the C compiler's start-up code",
    "__cxa_finalize": "the C library, at unloading",
}
