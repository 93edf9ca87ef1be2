// Runs a library that `tvmflow compile` made, once, with TVM's run time alone: no Python, no compiler.
//
//     run LIBRARY PLAN INPUTS CONSTANTS OUTPUTS
//
// PLAN says what `main` takes, one argument a line and in order: the file it lies in, the byte where it starts
// there, its dtype and its sizes. The weights come behind the inputs, as manifest.json lists them.
//
//     inputs 0 float32 2 3 16 16
//     constants 64 float32 8 10
//
// The bytes of the outputs go to OUTPUTS, one behind the other; standard output gets a line of dtype and sizes for
// each ("float32 2 10"). TVM_NUM_THREADS says how many threads to use: TVM itself assumes hyper-threads and takes
// half of the cores.

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/extra/module.h>

#include <cstdlib>
#include <exception>
#include <fstream>
#include <iostream>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace ffi = tvm::ffi;

constexpr size_t kAlignment = 64;    // bytes; what the kernels may assume of a buffer's address
constexpr int kPooledAllocator = 2;  // AllocatorType::kPooled of tvm/runtime/memory/memory_manager.h
constexpr DLDevice kCpu{kDLCPU, 0};

struct AlignedMemory {
  void AllocData(DLTensor* tensor) {
    const size_t size = ffi::GetDataSize(*tensor);
    // aligned_alloc wants a multiple of the alignment, and an empty tensor still needs an address.
    tensor->data = std::aligned_alloc(kAlignment, (size / kAlignment + 1) * kAlignment);
    if (tensor->data == nullptr) throw std::bad_alloc();
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

std::ifstream Open(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return file;
}

ffi::Tensor ReadTensor(std::ifstream& file, std::streamoff offset, const std::string& dtype,
                       const std::vector<int64_t>& shape) {
  ffi::Tensor tensor = ffi::Tensor::FromNDAlloc(AlignedMemory(), ffi::ShapeView(shape.data(), shape.size()),
                                                ffi::StringToDLDataType(dtype), kCpu);
  file.seekg(offset);
  const auto size = static_cast<std::streamsize>(ffi::GetDataSize(tensor));
  if (!file.read(static_cast<char*>(tensor.data_ptr()), size)) throw std::runtime_error("a tensor's file is too short");
  return tensor;
}

std::vector<ffi::Tensor> ReadArguments(std::ifstream plan, std::ifstream inputs, std::ifstream constants) {
  std::vector<ffi::Tensor> arguments;
  for (std::string line; std::getline(plan, line);) {
    std::istringstream words(line);
    std::string place, dtype;
    std::streamoff offset = 0;
    if (!(words >> place >> offset >> dtype) || (place != "inputs" && place != "constants")) {
      throw std::runtime_error("cannot read this line of the plan: " + line);
    }
    std::vector<int64_t> shape;
    for (int64_t size; words >> size;) shape.push_back(size);
    arguments.push_back(ReadTensor(place == "inputs" ? inputs : constants, offset, dtype, shape));
  }
  return arguments;
}

// A library holds kernels and the byte code that calls them; the virtual machine runs that byte code.
ffi::Module LoadVirtualMachine(const std::string& library) {
  ffi::Module module = ffi::Module::LoadFromFile(library);
  ffi::Module vm = module->GetFunction("vm_load_executable").value()().cast<ffi::Module>();
  vm->GetFunction("vm_initialization").value()(static_cast<int>(kCpu.device_type), kCpu.device_id, kPooledAllocator);
  return vm;
}

// `main` returns one tensor, or a (nested) array of them.
void WriteOutputs(const ffi::Any& result, std::ofstream& file) {
  if (auto items = result.as<ffi::Array<ffi::Any>>()) {
    for (const ffi::Any& item : *items) WriteOutputs(item, file);
    return;
  }
  ffi::Tensor tensor = result.cast<ffi::Tensor>();
  file.write(static_cast<const char*>(tensor.data_ptr()) + tensor.byte_offset(),
             static_cast<std::streamsize>(ffi::GetDataSize(tensor)));
  std::cout << std::string(ffi::DLDataTypeToString(tensor.dtype()));
  for (int64_t size : tensor.shape()) std::cout << ' ' << size;
  std::cout << '\n';
}

int main(int argc, char** argv) try {
  if (argc != 6) throw std::runtime_error("usage: run LIBRARY PLAN INPUTS CONSTANTS OUTPUTS");
  std::vector<ffi::Tensor> arguments = ReadArguments(Open(argv[2]), Open(argv[3]), Open(argv[4]));
  ffi::Module vm = LoadVirtualMachine(argv[1]);
  // How many arguments there are is only known now, so they are handed over packed: views that own nothing.
  std::vector<ffi::AnyView> views(arguments.begin(), arguments.end());
  ffi::Any result;
  vm->GetFunction("main").value().CallPacked(views.data(), static_cast<int32_t>(views.size()), &result);
  std::ofstream outputs(argv[5], std::ios::binary);
  outputs.exceptions(std::ios::failbit | std::ios::badbit);
  WriteOutputs(result, outputs);
  outputs.close();
  return EXIT_SUCCESS;
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << '\n';
  return EXIT_FAILURE;
}
