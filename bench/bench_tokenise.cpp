// SPDX-License-Identifier: MIT
// How fast a text becomes the file of tokens that a training run maps, beside the sentencepiece
// library alone (for its models), which encodes the same text line by line on one thread. Seconds
// are the processor's, so that other work on the machine does not count; the tokenizer is read
// before.
//
//   bench_tokenise MODEL TEXT [THREADS]
#include <bellows/base/error.hpp>
#include <bellows/text/corpus.hpp>

#include <sentencepiece_processor.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include <sys/resource.h>

namespace {

using Clock = std::chrono::steady_clock;

struct Usage {
    double processor_seconds;
    double peak_mib;
};

Usage usage() {
    rusage now{};
    getrusage(RUSAGE_SELF, &now);
    const auto seconds = [](const timeval& time) {
        return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
    };
    return {seconds(now.ru_utime) + seconds(now.ru_stime),
            static_cast<double>(now.ru_maxrss) / 1024};
}

/// Runs `work`, which returns the number of tokens, and prints a row.
void measure(const char* what, std::uint64_t text_bytes,
             const std::function<std::uint64_t()>& work) {
    const double before = usage().processor_seconds;
    const auto start = Clock::now();
    const std::uint64_t tokens = work();
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    const Usage after = usage();
    const double processor = after.processor_seconds - before;
    std::printf(
        "%-24s %8.2f s %8.2f s of a core %8.2f MB/s per core %12llu tokens, peak %.0f MiB\n", what,
        seconds, processor, static_cast<double>(text_bytes) / processor / 1e6,
        static_cast<unsigned long long>(tokens), after.peak_mib);
    std::fflush(stdout);
}

std::uint64_t library_alone(const std::string& model, const std::filesystem::path& text) {
    sentencepiece::SentencePieceProcessor pieces;
    if (!pieces.Load(model).ok()) {
        throw bellows::Error(bellows::ErrorCode::Corrupt, model + " is no model");
    }
    std::ifstream lines(text, std::ios::binary);
    std::uint64_t tokens = 0;
    std::vector<int> ids;
    for (std::string line; std::getline(lines, line);) {
        (void)pieces.Encode(line, &ids);
        tokens += ids.size();
    }
    return tokens;
}

int run(const std::string& model, const std::filesystem::path& path, unsigned threads) {
    const bellows::TextFiles text = bellows::find_text(std::span(&path, 1));
    const std::filesystem::path file =
        std::filesystem::temp_directory_path() / "bench-tokenise.bin";
    const auto tokenizer = bellows::Tokenizer::from_name(model);
    measure("file of tokens", text.bytes(), [&] {
        return bellows::Corpus::make(file, text, tokenizer, {.threads = threads, .progress = {}})
            .num_tokens();
    });
    std::filesystem::remove(file);
    if (model.ends_with(".model")) {
        measure("the library alone", text.bytes(), [&] { return library_alone(model, path); });
    }
    return 0;
}

} // namespace

int main(int argc, char** argv) {
    if (argc < 3 || argc > 4) {
        std::fprintf(stderr, "bench_tokenise MODEL TEXT [THREADS]\n");
        return 2;
    }
    try {
        return run(argv[1], argv[2],
                   argc > 3 ? static_cast<unsigned>(std::strtoul(argv[3], nullptr, 10)) : 0);
    } catch (const bellows::Error& error) {
        std::fprintf(stderr, "bench_tokenise: %s\n", error.what());
        return 2;
    }
}
