// What an artifact with buckets says of sizes: which bucket serves a request, what is padded and split, and what the
// sizes of outputs are. The same rules as in tvmflow/runtime/buckets.py; the standard library is all it needs.
#pragma once

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace buckets {

using Sizes = std::map<std::string, int64_t>;  // by dimension

// Computes a size that a signature states, e.g. "(width - 5) // 8 + 1": integers, names, + - * // %, min, max, brackets.
class Expression {
 public:
  static int64_t Value(const std::string& text, const Sizes& sizes) {
    Expression expression(text, sizes);
    int64_t value = expression.Sum();
    if (expression.at_ != text.size()) expression.Fail();
    return value;
  }

 private:
  Expression(const std::string& text, const Sizes& sizes) : text_(text), sizes_(sizes) {}

  int64_t Sum() {
    int64_t value = Product();
    while (true) {
      if (Taken("+")) {
        value += Product();
      } else if (Taken("-")) {
        value -= Product();
      } else {
        return value;
      }
    }
  }

  int64_t Product() {
    int64_t value = Factor();
    while (true) {
      if (Taken("//")) {
        value = Divided(value, Factor());
      } else if (Taken("*")) {
        value *= Factor();
      } else if (Taken("%")) {
        int64_t divisor = Factor();
        value -= Divided(value, divisor) * divisor;
      } else {
        return value;
      }
    }
  }

  int64_t Factor() {
    if (Taken("-")) return -Factor();
    if (Taken("(")) return Closed(Sum());
    std::string word;
    while (at_ < text_.size() && IsOfWord(text_[at_])) word += text_[at_++];
    if (word.empty()) Fail();
    if (std::isdigit(static_cast<unsigned char>(word[0]))) return Number(word);
    if ((word == "min" || word == "max") && Taken("(")) {
      int64_t value = Sum();
      while (Taken(",")) value = word == "min" ? std::min(value, Sum()) : std::max(value, Sum());
      return Closed(value);
    }
    auto found = sizes_.find(word);
    if (found == sizes_.end()) Fail();
    Skip();
    return found->second;
  }

  int64_t Number(const std::string& word) {
    size_t used = 0;
    int64_t value = std::stoll(word, &used);
    if (used != word.size()) Fail();
    Skip();
    return value;
  }

  int64_t Closed(int64_t value) {
    if (!Taken(")")) Fail();
    return value;
  }

  int64_t Divided(int64_t value, int64_t divisor) {  // rounded down, as `//` is, not towards zero
    if (divisor == 0) Fail();
    return value / divisor - ((value % divisor != 0) && ((value < 0) != (divisor < 0)));
  }

  bool Taken(const std::string& token) {
    Skip();
    if (text_.compare(at_, token.size(), token) != 0) return false;
    at_ += token.size();
    Skip();
    return true;
  }

  void Skip() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
  }

  static bool IsOfWord(char c) {  // letters beyond ASCII too
    return c == '_' || std::isalnum(static_cast<unsigned char>(c)) || (c & 0x80);
  }

  [[noreturn]] void Fail() const { throw std::runtime_error("`" + text_ + "` cannot be computed"); }

  const std::string& text_;
  const Sizes& sizes_;
  size_t at_ = 0;
};

// What the manifest says of padding one dimension.
struct Padding {
  std::string kind, reason;
  bool allowed;

  bool MayPad() const { return allowed || kind == "independent" || kind == "masked"; }
  bool MaySplit() const { return kind == "independent"; }
};

// A part of a request that one bucket serves: where it starts in the dimensions that are split, and its sizes.
struct Piece {
  size_t bucket;
  Sizes start, sizes;
};

class Chooser {
 public:
  Chooser(std::vector<Sizes> buckets, std::map<std::string, Padding> padding)
      : buckets_(std::move(buckets)), padding_(std::move(padding)) {}

  // The bucket with the fewest elements that fits; where none does, the largest takes as much as it holds of a
  // dimension whose rows are independent, and what is left is served likewise.
  std::vector<Piece> Pieces(const Sizes& sizes) const {
    for (const auto& [dim, size] : sizes) {
      if (size == 0 && !padding_.at(dim).MaySplit()) {
        throw std::runtime_error("`" + dim + "` is 0, which leaves nothing to compute with");
      }
    }
    std::vector<Piece> pieces;
    Serve(sizes, {}, &pieces);
    return pieces;
  }

 private:
  void Serve(const Sizes& sizes, const Sizes& start, std::vector<Piece>* pieces) const {
    int64_t best = -1;
    for (size_t index = 0; index < buckets_.size(); ++index) {
      if (Misfits(index, sizes).empty() && (best < 0 || Elements(index) < Elements(best))) best = int64_t(index);
    }
    if (best >= 0) {
      pieces->push_back({size_t(best), start, sizes});
      return;
    }
    auto [dim, held] = Divided(sizes);
    int64_t begin = start.count(dim) ? start.at(dim) : 0;
    for (int64_t first = 0; first < sizes.at(dim); first += held) {
      Sizes part = sizes, place = start;
      part[dim] = std::min(held, sizes.at(dim) - first);
      place[dim] = begin + first;
      Serve(part, place, pieces);
    }
  }

  // The dimensions for which a request does not fit a bucket, even if it is padded.
  std::vector<std::string> Misfits(size_t index, const Sizes& sizes) const {
    std::vector<std::string> dims;
    for (const auto& [dim, size] : sizes) {
      int64_t held = buckets_[index].at(dim);
      if (size > held || (size < held && !padding_.at(dim).MayPad())) dims.push_back(dim);
    }
    return dims;
  }

  // The dimension to split, and how much of it the first part holds.
  std::pair<std::string, int64_t> Divided(const Sizes& sizes) const {
    for (const auto& [dim, size] : sizes) {
      const Sizes* best = nullptr;
      for (size_t index = 0; index < buckets_.size(); ++index) {
        const Sizes& held = buckets_[index];
        if (!Splits(dim, held, sizes) || !AllSplit(index, sizes)) continue;
        bool larger = !best || held.at(dim) > best->at(dim);
        if (larger || (held.at(dim) == best->at(dim) && Elements(held) < Elements(*best))) best = &held;
      }
      if (best) return {dim, best->at(dim)};
    }
    throw std::runtime_error("no bucket fits " + Shown(sizes) + ": " + Reason(sizes));
  }

  bool AllSplit(size_t index, const Sizes& sizes) const {
    std::vector<std::string> dims = Misfits(index, sizes);
    return std::all_of(dims.begin(), dims.end(),
                       [&](const std::string& dim) { return Splits(dim, buckets_[index], sizes); });
  }

  bool Splits(const std::string& dim, const Sizes& held, const Sizes& sizes) const {
    return padding_.at(dim).MaySplit() && sizes.at(dim) > held.at(dim);
  }

  std::string Reason(const Sizes& sizes) const {
    for (const auto& [dim, size] : sizes) {
      std::set<int64_t> held;
      for (const Sizes& bucket : buckets_) held.insert(bucket.at(dim));
      const Padding& padding = padding_.at(dim);
      if (!padding.MayPad() && !held.count(size)) {
        std::string list;
        for (int64_t one : held) list += (list.empty() ? "" : ", ") + std::to_string(one);
        return "`" + dim + "` cannot be padded (" + padding.reason + "); give one of [" + list +
               "], or allow it with [shapes] allow_padding";
      }
      if (size > *held.rbegin() && !padding.MaySplit()) {
        return "`" + dim + "` = " + std::to_string(size) + " is above the largest bucket, " +
               std::to_string(*held.rbegin()) + ", and cannot be split, because its positions depend on each other";
      }
    }
    return "there is no bucket for this combination";
  }

  int64_t Elements(size_t index) const { return Elements(buckets_[index]); }

  static int64_t Elements(const Sizes& held) {
    int64_t elements = 1;
    for (const auto& [dim, size] : held) elements *= size;
    return elements;
  }

  static std::string Shown(const Sizes& sizes) {
    std::string text;
    for (const auto& [dim, size] : sizes) text += (text.empty() ? "" : ", ") + dim + " = " + std::to_string(size);
    return text;
  }

  std::vector<Sizes> buckets_;
  std::map<std::string, Padding> padding_;
};

}  // namespace buckets
