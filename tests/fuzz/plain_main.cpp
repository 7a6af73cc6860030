// SPDX-License-Identifier: Apache-2.0
// For compilers without libFuzzer: runs the inputs of the corpus, and random changes of them for a number of seconds.
//
//     FUZZ_TARGET=manifest fuzz CORPUS-FOLDER [SECONDS]
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

void run(const std::string& input) { (void)LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size()); }

std::string changed(std::string input, const std::string& other, std::mt19937_64& random) {
  const auto below = [&](size_t end) { return static_cast<size_t>(random() % end); };
  for (size_t times = 1 + below(4); times > 0; --times) {
    const size_t at = below(input.size() + 1);
    switch (below(6)) {
      case 0:
        if (at < input.size()) input[at] = static_cast<char>(input[at] ^ (1 << below(8)));
        break;
      case 1:
        input.insert(at, 1, static_cast<char>(random()));
        break;
      case 2:
        input.erase(at, 1 + below(8));
        break;
      case 3:
        input.insert(at, other.substr(below(other.size() + 1), 1 + below(32)));
        break;
      case 4:
        input.insert(at, input.substr(below(input.size() + 1), 1 + below(32)));
        break;
      default:
        input.resize(at);
        break;
    }
  }
  return input;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  std::vector<std::string> corpus{""};
  for (const auto& entry : std::filesystem::directory_iterator(argv[1])) {
    std::ifstream file(entry.path(), std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  for (const std::string& input : corpus) run(input);
  const double seconds = argc > 2 ? std::atof(argv[2]) : 0;
  const auto begin = std::chrono::steady_clock::now();
  std::mt19937_64 random(1);
  int64_t count = 0;
  while (std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() < seconds) {
    for (int i = 0; i < 64; ++i, ++count) run(changed(corpus[random() % corpus.size()], corpus[random() % corpus.size()], random));
  }
  std::printf("%zu inputs of the corpus, %lld changes\n", corpus.size(), static_cast<long long>(count));
}
