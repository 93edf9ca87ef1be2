// Answers lines of standard input with examples/cpp/buckets.h: "size EXPRESSION; DIM=SIZE ..." with the value, and
// "pieces DIM=SIZE ...; DIM:KIND:ALLOWED ...; DIM=SIZE ..., DIM=SIZE ..." (request; padding; buckets) with the pieces.
#include "../../examples/cpp/buckets.h"

#include <iostream>
#include <sstream>

using namespace buckets;

std::vector<std::string> Split(const std::string& text, char at) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, at);) {
    if (!part.empty()) parts.push_back(part);
  }
  return parts;
}

Sizes SizesOf(const std::string& text) {
  Sizes sizes;
  for (const std::string& word : Split(text, ' ')) {
    sizes[word.substr(0, word.find('='))] = std::stoll(word.substr(word.find('=') + 1));
  }
  return sizes;
}

std::string Shown(const Sizes& sizes) {
  std::string text;
  for (const auto& [dim, size] : sizes) text += " " + dim + "=" + std::to_string(size);
  return text;
}

std::string Answer(const std::string& line) {
  std::vector<std::string> parts = Split(line.substr(line.find(' ') + 1), ';');
  if (line.rfind("size", 0) == 0) return std::to_string(Expression::Value(parts[0], SizesOf(parts[1])));
  std::map<std::string, Padding> padding;
  for (const std::string& word : Split(parts[1], ' ')) {
    std::vector<std::string> fields = Split(word, ':');
    padding[fields[0]] = {fields[1], "seen", fields[2] == "1"};
  }
  std::vector<Sizes> buckets;
  for (const std::string& bucket : Split(parts[2], ',')) buckets.push_back(SizesOf(bucket));
  std::string answer;
  for (const Piece& piece : Chooser(buckets, padding).Pieces(SizesOf(parts[0]))) {
    answer += std::to_string(piece.bucket) + " from" + Shown(piece.start) + " of" + Shown(piece.sizes) + "; ";
  }
  return answer;
}

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    try {
      std::cout << Answer(line) << "\n";
    } catch (const std::exception& error) {
      std::cout << error.what() << "\n";
    }
  }
}
