// Runs an artifact of `tvmflow compile` from C++, with TVM's run time and tvm-ffi only:
//
//   run_artifact ARTIFACT_FOLDER [--runs N] NAME[:SHAPE]=FILE ...
//
// One FILE of raw little-endian values per input; SHAPE, e.g. 2x128, where the manifest leaves a size open. Prints per
// output its name, dtype, shape and values. For CPUs. It does not check, as Python's `tvmflow.load` does, that the files
// are undamaged and that this CPU has the features that they need.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/ffi/extra/module.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace ffi = tvm::ffi;
namespace json = tvm::ffi::json;
using ffi::Tensor;

namespace {

constexpr int64_t kFormatVersion = 1;
constexpr DLDevice kCpu{kDLCPU, 0};
constexpr int kPooled = 2;          // the allocator that keeps freed memory for the next call
constexpr size_t kAlignment = 64;   // what kernels may assume of an address

std::string Read(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw std::runtime_error(path + ": cannot be read");
  return {std::istreambuf_iterator<char>(stream), {}};
}

json::Object Field(const json::Object& object, const char* name) { return object[name].cast<json::Object>(); }
json::Array List(const json::Object& object, const char* name) { return object[name].cast<json::Array>(); }
std::string Text(const json::Object& object, const char* name) { return object[name].cast<ffi::String>(); }

std::vector<int64_t> Sizes(const std::string& text) {  // "2x128"
  std::vector<int64_t> sizes;
  for (size_t start = 0; start < text.size(); start = text.find('x', start) + 1) {
    sizes.push_back(std::stoll(text.substr(start)));
    if (text.find('x', start) == std::string::npos) break;
  }
  return sizes;
}

// The shape of an input or weight; `given` where the manifest names a dimension instead of a size.
std::vector<int64_t> Shape(const json::Object& spec, const std::vector<int64_t>& given) {
  std::vector<int64_t> shape;
  json::Array stated = List(spec, "shape");
  for (size_t axis = 0; axis < stated.size(); ++axis) {
    if (auto size = stated[axis].as<int64_t>()) {
      shape.push_back(*size);
    } else if (axis < given.size()) {
      shape.push_back(given[axis]);
    } else {
      throw std::runtime_error(Text(spec, "name") + ": state its shape, NAME:SHAPE=FILE");
    }
  }
  return shape;
}

struct AlignedMemory {
  void AllocData(DLTensor* tensor) {
    size_t size = ffi::GetDataSize(*tensor);
    tensor->data = std::aligned_alloc(kAlignment, (size + kAlignment) / kAlignment * kAlignment);
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

Tensor Input(const json::Object& spec, const std::map<std::string, std::string>& files) {
  std::string name = Text(spec, "name");
  for (const auto& [key, file] : files) {
    if (key.substr(0, key.rfind(':')) != name && key != name) continue;
    std::string sizes = key == name ? "" : key.substr(key.rfind(':') + 1);
    DLDataType dtype = ffi::StringToDLDataType(Text(spec, "dtype"));
    Tensor tensor = Tensor::FromNDAlloc(AlignedMemory(), ffi::Shape(Shape(spec, Sizes(sizes))), dtype, kCpu);
    std::string bytes = Read(file);
    if (bytes.size() != ffi::GetDataSize(tensor)) throw std::runtime_error(file + ": not as long as its input");
    std::copy(bytes.begin(), bytes.end(), static_cast<char*>(tensor.data_ptr()));
    return tensor;
  }
  throw std::runtime_error(name + ": missing; give " + name + "=FILE");
}

// The weights, which stand at 64-byte boundaries in the mapped file, in the order in which `main` takes them.
std::vector<Tensor> Constants(const std::string& path, const json::Array& entries) {
  std::vector<Tensor> tensors;
  if (entries.empty()) return tensors;
  int file = open(path.c_str(), O_RDONLY);
  struct stat info {};
  if (file < 0 || fstat(file, &info) != 0) throw std::runtime_error(path + ": cannot be opened");
  void* place = mmap(nullptr, info.st_size, PROT_READ, MAP_PRIVATE, file, 0);  // until the process ends
  close(file);
  if (place == MAP_FAILED) throw std::runtime_error(path + ": cannot be mapped");
  for (const ffi::Any& item : entries) {
    auto entry = item.cast<json::Object>();
    auto* shape = new std::vector<int64_t>(Shape(entry, {}));
    auto* managed = new DLManagedTensor{};
    managed->dl_tensor.data = static_cast<char*>(place) + entry["offset"].cast<int64_t>();
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
ffi::Module Machine(const ffi::Module& library) {
  ffi::Module machine = library->GetFunction("vm_load_executable").value()().cast<ffi::Module>();
  machine->GetFunction("vm_initialization").value()(static_cast<int>(kDLCPU), 0, kPooled);
  return machine;
}

// The outputs of `main`: one tensor, or a (nested) tuple of them.
void Flatten(const ffi::Any& result, std::vector<Tensor>* tensors) {
  if (auto tensor = result.as<Tensor>()) {
    tensors->push_back(*tensor);
    return;
  }
  for (const ffi::Any& item : result.cast<ffi::Array<ffi::Any>>()) Flatten(item, tensors);
}

template <typename T>
void PrintValues(const Tensor& tensor, const char* format) {
  for (int64_t index = 0; index < tensor.numel(); ++index) {
    std::printf(format, static_cast<const T*>(tensor.data_ptr())[index]);
  }
}

void Print(const json::Object& spec, const Tensor& tensor) {
  std::string dtype = Text(spec, "dtype");
  std::printf("%s %s [", Text(spec, "name").c_str(), dtype.c_str());
  for (int axis = 0; axis < tensor.ndim(); ++axis) std::printf("%s%ld", axis ? ", " : "", long(tensor.size(axis)));
  std::printf("]");
  if (dtype == "float32") PrintValues<float>(tensor, " %.9g");
  if (dtype == "float64") PrintValues<double>(tensor, " %.17g");
  if (dtype == "int32") PrintValues<int32_t>(tensor, " %d");
  if (dtype == "int64") PrintValues<int64_t>(tensor, " %ld");
  std::printf("\n");
}

int Run(const std::string& folder, int runs, const std::map<std::string, std::string>& files) {
  auto manifest = json::Parse(Read(folder + "/manifest.json")).cast<json::Object>();
  if (manifest["format_version"].cast<int64_t>() != kFormatVersion) throw std::runtime_error("another format version");
  json::Object target = Field(manifest, "target"), signature = Field(manifest, "signature");
  if (Text(target, "kind") != "llvm") throw std::runtime_error("built for a GPU");

  // TVM reads these when the first kernel starts threads.
  std::string threads = std::to_string(target["threads"].cast<int64_t>());
  setenv("TVM_NUM_THREADS", threads.c_str(), 0);
  setenv("TVM_BIND_THREADS", "0", 0);
  setenv("TVM_THREAD_POOL_SPIN_COUNT", "20000", 0);

  ffi::Module library = ffi::Module::LoadFromFile(folder + "/library.so");
  ffi::Function entry = Machine(library)->GetFunction("main").value();
  std::vector<ffi::AnyView> arguments;
  std::vector<Tensor> inputs;
  for (const ffi::Any& spec : List(signature, "inputs")) inputs.push_back(Input(spec.cast<json::Object>(), files));
  std::vector<Tensor> constants = Constants(folder + "/constants.bin", List(manifest, "constants"));
  arguments.insert(arguments.end(), inputs.begin(), inputs.end());
  arguments.insert(arguments.end(), constants.begin(), constants.end());

  std::vector<Tensor> outputs;
  for (int run = 0; run < runs; ++run) {
    outputs.clear();  // their memory goes back to the pool
    ffi::Any result;
    entry.CallPacked(arguments.data(), static_cast<int32_t>(arguments.size()), &result);
    Flatten(result, &outputs);
  }
  json::Array specs = List(signature, "outputs");
  for (size_t index = 0; index < outputs.size(); ++index) Print(specs[index].cast<json::Object>(), outputs[index]);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> words(argv + 1, argv + argc);
  std::map<std::string, std::string> files;
  std::string folder;
  int runs = 1;
  try {
    for (size_t index = 0; index < words.size(); ++index) {
      size_t equals = words[index].find('=');
      if (words[index] == "--runs" && index + 1 < words.size()) {
        runs = std::max(1, std::stoi(words[++index]));
      } else if (equals != std::string::npos) {
        files[words[index].substr(0, equals)] = words[index].substr(equals + 1);
      } else {
        folder = words[index];
      }
    }
    if (folder.empty()) throw std::runtime_error("run_artifact ARTIFACT_FOLDER [--runs N] NAME[:SHAPE]=FILE ...");
    return Run(folder, runs, files);
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 1;
  }
}
