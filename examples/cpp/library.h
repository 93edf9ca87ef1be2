// One library of an artifact with its weights, by TVM's run time and tvm-ffi; and what reads a manifest.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/ffi/extra/module.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "folder.h"

namespace ffi = tvm::ffi;
namespace json = tvm::ffi::json;
using ffi::Tensor;

constexpr int64_t kFormatVersion = 1;
constexpr DLDevice kCpu{kDLCPU, 0};
constexpr int kPooled = 2;          // the allocator that keeps freed memory for the next call
constexpr size_t kAlignment = 64;   // what kernels may assume of an address

inline std::string Read(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw std::runtime_error(path + ": cannot be read");
  return {std::istreambuf_iterator<char>(stream), {}};
}

inline json::Object Field(const json::Object& object, const char* name) { return object[name].cast<json::Object>(); }
inline json::Array List(const json::Object& object, const char* name) { return object[name].cast<json::Array>(); }
inline std::string Text(const json::Object& object, const char* name) { return object[name].cast<ffi::String>(); }

struct AlignedMemory {
  void AllocData(DLTensor* tensor) {
    size_t size = ffi::GetDataSize(*tensor);
    tensor->data = std::aligned_alloc(kAlignment, (size + kAlignment) / kAlignment * kAlignment);
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

inline Tensor Empty(const std::vector<int64_t>& shape, DLDataType dtype) {
  return Tensor::FromNDAlloc(AlignedMemory(), ffi::Shape(shape), dtype, kCpu);
}

// The weights, which stand at 64-byte boundaries in the mapped file, in the order in which `main` takes them.
inline std::vector<Tensor> Constants(const Bytes& weights, const json::Array& entries) {
  std::vector<Tensor> tensors;
  for (const ffi::Any& item : entries) {
    auto entry = item.cast<json::Object>();
    auto* shape = new std::vector<int64_t>;
    for (const ffi::Any& size : List(entry, "shape")) shape->push_back(size.cast<int64_t>());
    auto* managed = new DLManagedTensor{};
    int64_t offset = entry["offset"].cast<int64_t>();
    managed->dl_tensor.data = const_cast<char*>(weights.data) + offset;
    managed->dl_tensor.device = kCpu;
    managed->dl_tensor.ndim = static_cast<int>(shape->size());
    managed->dl_tensor.dtype = ffi::StringToDLDataType(Text(entry, "dtype"));
    managed->dl_tensor.shape = shape->data();
    managed->manager_ctx = shape;
    managed->deleter = [](DLManagedTensor* self) {
      delete static_cast<std::vector<int64_t>*>(self->manager_ctx);
      delete self;
    };
    tensors.push_back(Tensor::FromDLPack(managed));
    size_t size = ffi::GetDataSize(tensors.back());
    if (offset < 0 || size > weights.size || static_cast<size_t>(offset) > weights.size - size) {
      throw std::runtime_error("manifest.json: constants do not lie within constants.bin");
    }
  }
  return tensors;
}

// A machine runs one call at a time: threads that run at once need one each; the library and weights they share.
inline ffi::Module Machine(const ffi::Module& library) {
  ffi::Module machine = library->GetFunction("vm_load_executable").value()().cast<ffi::Module>();
  machine->GetFunction("vm_initialization").value()(static_cast<int>(kDLCPU), 0, kPooled);
  return machine;
}

// The outputs of `main`: one tensor, or a (nested) tuple of them.
inline void Flatten(const ffi::Any& result, std::vector<Tensor>* tensors) {
  if (auto tensor = result.as<Tensor>()) {
    tensors->push_back(*tensor);
    return;
  }
  for (const ffi::Any& item : result.cast<ffi::Array<ffi::Any>>()) Flatten(item, tensors);
}

// A loaded library, which runs one call at a time.
class Library {
 public:
  // The library in `folder` at `place`; `weights` is the file that the manifest's constants point into.
  Library(const Folder& folder, const std::string& place, const json::Object& manifest, const Bytes& weights)
      : main_(Machine(LoadByContent(folder.Read(place), place))->GetFunction("main").value()),
        constants_(Constants(weights, List(manifest, "constants"))) {}

  std::vector<Tensor> Run(const std::vector<Tensor>& inputs) const {
    std::vector<ffi::AnyView> arguments(inputs.begin(), inputs.end());
    arguments.insert(arguments.end(), constants_.begin(), constants_.end());
    ffi::Any result;
    main_.CallPacked(arguments.data(), static_cast<int32_t>(arguments.size()), &result);
    std::vector<Tensor> outputs;
    Flatten(result, &outputs);
    return outputs;
  }

 private:
  ffi::Function main_;
  std::vector<Tensor> constants_;
};
