"""What a library may call beside its own kernels, and why: the default of `[audit] allow`."""

from __future__ import annotations

# RUN_TIME are functions of TVM's run time: compiled code, part of every deployment.
# Pattern, with `*` for any text, -> reason. A name is one of the virtual machine's call table, of a function that a
# kernel asks TVM's run time for, of an undefined dynamic symbol, or of a shared library that is needed.
RUN_TIME = {
    "vm.builtin.*": "TVM's virtual machine: shapes, buffers, branches, tuples",
    "runtime.*": "TVM's run time: devices and the copies between them",
    "tvm.contrib.sort.*": "sort, argsort and top-k: compiled code of TVM's run time",
    "tvm.contrib.random.*": "random numbers: compiled code of TVM's run time",
}
ALLOWED = {
    **RUN_TIME,
    "__tvm_set_device": "chooses the GPU before a kernel is launched",
    "TVMFFI*": "TVM's C interface: calls, errors, tensors",
    "TVMBackend*": "TVM's run time: threads and workspace",
    "libc.so.*": "the C library",
    "libm.so.*": "the C library's mathematics, for float64",
    "libgcc_s.so.*": "the compiler's own support code",
    "libstdc++.so.*": "named by the C++ compiler that links",
    "ld-linux*.so.*": "the loader",
    "_ITM_*TMCloneTable": "weak symbols of the C compiler's start-up code",
    "__gmon_start__": "a weak symbol of the C compiler's start-up code",
    "__cxa_finalize": "the C library, at unloading",
}
