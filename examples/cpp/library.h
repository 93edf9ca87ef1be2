// One library of an artifact with its weights, by TVM's run time and tvm-ffi; and what reads a manifest.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/ffi/extra/module.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

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

inline const char* Mapped(const std::string& path) {
  int file = open(path.c_str(), O_RDONLY);
  struct stat info {};
  if (file < 0 || fstat(file, &info) != 0) throw std::runtime_error(path + ": cannot be opened");
  if (info.st_size == 0) {
    close(file);
    return nullptr;
  }
  void* place = mmap(nullptr, info.st_size, PROT_READ, MAP_PRIVATE, file, 0);  // until the process ends
  close(file);
  if (place == MAP_FAILED) throw std::runtime_error(path + ": cannot be mapped");
  return static_cast<const char*>(place);
}

// The weights, which stand at 64-byte boundaries in the mapped file, in the order in which `main` takes them.
inline std::vector<Tensor> Constants(const char* place, const json::Array& entries) {
  std::vector<Tensor> tensors;
  for (const ffi::Any& item : entries) {
    auto entry = item.cast<json::Object>();
    auto* shape = new std::vector<int64_t>;
    for (const ffi::Any& size : List(entry, "shape")) shape->push_back(size.cast<int64_t>());
    auto* managed = new DLManagedTensor{};
    managed->dl_tensor.data = const_cast<char*>(place) + entry["offset"].cast<int64_t>();
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
  // `weights` is where the file lies in memory that the manifest's constants point into.
  Library(const std::string& folder, const json::Object& manifest, const char* weights)
      : main_(Machine(ffi::Module::LoadFromFile(folder + "/library.so"))->GetFunction("main").value()),
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
