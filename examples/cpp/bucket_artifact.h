// An artifact with buckets: a library per bucket, the weights of all of them once. Any sizes that buckets serve are
// padded, split and cut as in tvmflow/runtime/bucket_session.py.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>

#include "buckets.h"
#include "library.h"

// A shape as a signature states it: per axis a size, a dimension, or what it is computed from.
using Stated = std::vector<std::string>;
using Places = std::vector<int64_t>;  // per axis

inline Stated StatedShape(const json::Object& spec) {
  Stated texts;
  for (const ffi::Any& size : List(spec, "shape")) {
    auto number = size.as<int64_t>();
    texts.push_back(number ? std::to_string(*number) : std::string(size.cast<ffi::String>()));
  }
  return texts;
}

inline std::vector<int64_t> Computed(const Stated& shape, const buckets::Sizes& sizes) {
  std::vector<int64_t> computed;
  for (const std::string& text : shape) computed.push_back(buckets::Expression::Value(text, sizes));
  return computed;
}

// Where a piece starts in a tensor: in the dimensions that are split at its own place, else at 0.
inline Places Start(const Stated& shape, const buckets::Piece& piece) {
  Places start;
  for (const std::string& text : shape) start.push_back(piece.start.count(text) ? piece.start.at(text) : 0);
  return start;
}

inline int64_t ItemSize(const Tensor& tensor) { return (tensor.dtype().bits + 7) / 8; }

inline char* At(const Tensor& tensor, const Places& places) {
  int64_t index = 0;
  for (int axis = 0; axis < tensor.ndim(); ++axis) index = index * tensor.size(axis) + places[axis];
  return static_cast<char*>(tensor.data_ptr()) + index * ItemSize(tensor);
}

// Copies as much as `sizes` say from some place of a tensor to some place of another.
inline void Copy(const Tensor& from, Places source, const Tensor& to, Places target, const std::vector<int64_t>& sizes,
                 size_t axis = 0) {
  if (axis + 1 >= sizes.size()) {
    int64_t count = sizes.empty() ? 1 : sizes.back();
    std::memcpy(At(to, target), At(from, source), count * ItemSize(from));
    return;
  }
  for (int64_t row = 0; row < sizes[axis]; ++row, ++source[axis], ++target[axis]) {
    Copy(from, source, to, target, sizes, axis + 1);
  }
}

template <typename T>
void FillAs(const Tensor& tensor, double value) {
  std::fill_n(static_cast<T*>(tensor.data_ptr()), tensor.numel(), static_cast<T>(value));
}

inline void Fill(const Tensor& tensor, double value) {
  static const std::map<std::string, std::function<void(const Tensor&, double)>> kinds = {
      {"float32", FillAs<float>},   {"float64", FillAs<double>},   {"bool", FillAs<bool>},
      {"int8", FillAs<int8_t>},     {"int16", FillAs<int16_t>},    {"int32", FillAs<int32_t>},
      {"int64", FillAs<int64_t>},   {"uint8", FillAs<uint8_t>},    {"uint16", FillAs<uint16_t>},
      {"uint32", FillAs<uint32_t>}, {"uint64", FillAs<uint64_t>},
#ifdef __FLT16_MAX__
      {"float16", FillAs<_Float16>},
#endif
  };
  std::string dtype = ffi::DLDataTypeToString(tensor.dtype());
  if (value == 0) {
    std::memset(tensor.data_ptr(), 0, ffi::GetDataSize(tensor));
  } else if (kinds.count(dtype)) {
    kinds.at(dtype)(tensor, value);
  } else {
    throw std::runtime_error("cannot pad " + dtype + " with other than 0");
  }
}

class BucketArtifact {
 public:
  BucketArtifact(const Folder& folder, const json::Object& manifest)
      : buckets_(Buckets(manifest)), chooser_(buckets_, Paddings(manifest)) {
    Bytes weights = folder.Map("constants.bin");
    for (const ffi::Any& bucket : List(manifest, "buckets")) {
      std::string place = Text(bucket.cast<json::Object>(), "folder");
      auto own = json::Parse(folder.Read(place + "/manifest.json")).cast<json::Object>();
      libraries_.emplace_back(folder, place + "/library.so", own, weights);
    }
    json::Object pad = Field(manifest, "pad"), signature = Field(manifest, "signature");
    for (const ffi::Any& item : List(signature, "inputs")) {
      auto spec = item.cast<json::Object>();
      std::string name = Text(spec, "name");
      inputs_.push_back({name, StatedShape(spec), {}, pad.count(name) ? pad[name].cast<double>() : 0});
    }
    for (const ffi::Any& item : List(signature, "outputs")) {
      auto spec = item.cast<json::Object>();
      outputs_.push_back({Text(spec, "name"), StatedShape(spec), ffi::StringToDLDataType(Text(spec, "dtype")), 0});
    }
  }

  // The outputs for inputs of any sizes that buckets serve; throws for others.
  std::vector<Tensor> Run(const std::vector<Tensor>& inputs) const {
    buckets::Sizes sizes = SizesOf(inputs);
    std::vector<buckets::Piece> pieces = chooser_.Pieces(sizes);
    std::vector<Tensor> wholes;
    for (const Spec& spec : outputs_) wholes.push_back(Empty(Checked(spec, sizes), spec.dtype));
    for (const buckets::Piece& piece : pieces) {
      std::vector<Tensor> parts;
      for (size_t index = 0; index < inputs.size(); ++index) parts.push_back(Part(inputs_[index], inputs[index], piece));
      std::vector<Tensor> results = libraries_[piece.bucket].Run(parts);
      for (size_t index = 0; index < results.size(); ++index) {
        const Stated& shape = outputs_[index].shape;
        Copy(results[index], Places(shape.size()), wholes[index], Start(shape, piece), Computed(shape, piece.sizes));
      }
    }
    return wholes;
  }

 private:
  struct Spec {
    std::string name;
    Stated shape;
    DLDataType dtype;  // of an output
    double pad;        // of an input
  };

  static std::vector<buckets::Sizes> Buckets(const json::Object& manifest) {
    std::vector<buckets::Sizes> all;
    for (const ffi::Any& bucket : List(manifest, "buckets")) {
      buckets::Sizes sizes;
      for (const auto& [dim, size] : Field(bucket.cast<json::Object>(), "dims")) {
        sizes[dim.cast<ffi::String>()] = size.cast<int64_t>();
      }
      all.push_back(sizes);
    }
    return all;
  }

  static std::map<std::string, buckets::Padding> Paddings(const json::Object& manifest) {
    std::map<std::string, buckets::Padding> all;
    for (const auto& [dim, item] : Field(manifest, "padding")) {
      auto stated = item.cast<json::Object>();
      all[dim.cast<ffi::String>()] = {Text(stated, "kind"), Text(stated, "reason"), stated["allowed"].cast<bool>()};
    }
    return all;
  }

  buckets::Sizes SizesOf(const std::vector<Tensor>& inputs) const {
    buckets::Sizes sizes;
    std::map<std::string, std::string> origins;
    for (size_t index = 0; index < inputs.size(); ++index) {
      const auto& [name, shape, dtype, pad] = inputs_[index];
      for (size_t axis = 0; axis < shape.size(); ++axis) {
        if (!buckets_[0].count(shape[axis])) continue;
        int64_t size = inputs[index].size(axis), known = sizes.emplace(shape[axis], size).first->second;
        origins.emplace(shape[axis], "`" + name + "` axis " + std::to_string(axis));
        if (size != known) {
          throw std::runtime_error("inputs do not fit: `" + name + "`: axis " + std::to_string(axis) + " has size " +
                                   std::to_string(size) + ", expected " + std::to_string(known) + " (" +
                                   origins[shape[axis]] + ")");
        }
      }
    }
    return sizes;
  }

  static std::vector<int64_t> Checked(const Spec& output, const buckets::Sizes& sizes) {
    std::vector<int64_t> shape = Computed(output.shape, sizes);
    for (size_t axis = 0; axis < shape.size(); ++axis) {
      if (shape[axis] < 0) {
        throw std::runtime_error("output `" + output.name + "` would have the size " + output.shape[axis] + " = " +
                                 std::to_string(shape[axis]));
      }
    }
    return shape;
  }

  // A piece of one input, padded to its bucket.
  Tensor Part(const Spec& spec, const Tensor& whole, const buckets::Piece& piece) const {
    Tensor part = Empty(Computed(spec.shape, buckets_[piece.bucket]), whole.dtype());
    Fill(part, spec.pad);
    Copy(whole, Start(spec.shape, piece), part, Places(spec.shape.size()), Computed(spec.shape, piece.sizes));
    return part;
  }

  std::vector<buckets::Sizes> buckets_;
  buckets::Chooser chooser_;
  std::vector<Library> libraries_;
  std::vector<Spec> inputs_, outputs_;
};
