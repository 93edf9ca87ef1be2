// Runs an artifact of `tvmflow compile` from C++, with TVM's run time and tvm-ffi only:
//
//   run_artifact ARTIFACT_FOLDER [--runs N] NAME[:SHAPE]=FILE ...
//
// One FILE of raw little-endian values per input; SHAPE, e.g. 2x128, where the manifest leaves a size open. With buckets
// (bucket_artifact.h), requests are padded, split and cut as Python's session does it. Prints per output its name, dtype,
// shape and values. For CPUs. It does not check, as Python's `tvmflow.load` does, that the files are undamaged and that
// this CPU has the features that they need.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <iostream>
#include <map>

#include "bucket_artifact.h"
#include "library.h"

namespace {

std::vector<int64_t> Sizes(const std::string& text) {  // "2x128"
  std::vector<int64_t> sizes;
  for (size_t start = 0; start < text.size(); start = text.find('x', start) + 1) {
    sizes.push_back(std::stoll(text.substr(start)));
    if (text.find('x', start) == std::string::npos) break;
  }
  return sizes;
}

// The shape of an input; `given` where the manifest names a dimension instead of a size.
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

Tensor Input(const json::Object& spec, const std::map<std::string, std::string>& files) {
  std::string name = Text(spec, "name");
  for (const auto& [key, file] : files) {
    if (key.substr(0, key.rfind(':')) != name && key != name) continue;
    std::string sizes = key == name ? "" : key.substr(key.rfind(':') + 1);
    DLDataType dtype = ffi::StringToDLDataType(Text(spec, "dtype"));
    std::vector<int64_t> given = Sizes(sizes), shape = Shape(spec, given);
    if (!given.empty() && given != shape) throw std::runtime_error(name + ": " + sizes + " does not fit its shape");
    Tensor tensor = Empty(shape, dtype);
    std::string bytes = Read(file);
    if (bytes.size() != ffi::GetDataSize(tensor)) throw std::runtime_error(file + ": not as long as its input");
    std::copy(bytes.begin(), bytes.end(), static_cast<char*>(tensor.data_ptr()));
    return tensor;
  }
  throw std::runtime_error(name + ": missing; give " + name + "=FILE");
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

int Run(const std::string& path, int runs, const std::map<std::string, std::string>& files) {
  const Folder folder(path);
  auto manifest = json::Parse(folder.Read("manifest.json")).cast<json::Object>();
  if (manifest["format_version"].cast<int64_t>() != kFormatVersion) throw std::runtime_error("another format version");
  json::Object target = Field(manifest, "target"), signature = Field(manifest, "signature");
  if (Text(target, "kind") != "llvm") throw std::runtime_error("built for a GPU");

  // TVM reads these when the first kernel starts threads.
  std::string threads = std::to_string(target["threads"].cast<int64_t>());
  setenv("TVM_NUM_THREADS", threads.c_str(), 0);
  setenv("TVM_BIND_THREADS", "0", 0);
  setenv("TVM_THREAD_POOL_SPIN_COUNT", "20000", 0);

  std::function<std::vector<Tensor>(const std::vector<Tensor>&)> run;
  if (manifest.count("buckets")) {
    run = [artifact = BucketArtifact(folder, manifest)](const auto& inputs) { return artifact.Run(inputs); };
  } else {
    Library library(folder, "library.so", manifest, folder.Map("constants.bin"));
    run = [library](const auto& inputs) { return library.Run(inputs); };
  }
  std::vector<Tensor> inputs, outputs;
  for (const ffi::Any& spec : List(signature, "inputs")) inputs.push_back(Input(spec.cast<json::Object>(), files));
  for (int count = 0; count < runs; ++count) {
    outputs.clear();  // their memory goes back to the pool
    outputs = run(inputs);
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
