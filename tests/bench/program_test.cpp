// SPDX-License-Identifier: MIT
// Benchmark programs refuse what they do not know, and a wrong result is a failed row and exit
// code 1, not a time.

#include "support/json_file.hpp"
#include "support/op_bench.hpp"
#include "support/program.hpp"
#include "support/temporary_folder.hpp"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

namespace bellows::bench {
namespace {

/// Times the tripling of four numbers, and checks it against `factor`.
Workload tripling(OpData& data, double factor) {
    const TensorView x = data.values({4}, {1, 2, 3, 4}), y = data.empty(DType::F32, {4});
    return {[=](Recording& r) { ops::scale(r, x, y, 3); },
            [=, &data] { return compare("y", 3, data.read(y)[3], factor * 4, 1e-6); }, 32, 4};
}

class Tripling : public Program {
    std::string help() const override { return "triples\n"; }
    void add(Device& device) override {
        ceiling_ = measure(device, [](Device&) { return Ceiling{"trial", "GB/s", 1e-9}; });
        for (const double factor : {3.0, 4.0})
            add_benchmark(factor == 3 ? "right" : "wrong",
                          [this, &device, factor](benchmark::State& state) {
                              OpData data(device);
                              run_workload(state, data, tripling(data, factor), ceiling_);
                          });
        add_benchmark("impossible", [](benchmark::State&) {
            throw Error(ErrorCode::Unsupported, "not on this device");
        });
    }
    Ceiling ceiling_;
};

struct Outcome {
    int code;
    std::string out, err;
};

Outcome run(std::vector<std::string> words) {
    words.insert(words.begin(), "bench_tripling");
    std::vector<char*> argv;
    for (std::string& word : words)
        argv.push_back(word.data());
    ::testing::internal::CaptureStdout();
    ::testing::internal::CaptureStderr();
    const int code = Tripling().run(static_cast<int>(argv.size()), argv.data());
    return {code, ::testing::internal::GetCapturedStdout(),
            ::testing::internal::GetCapturedStderr()};
}

bool has(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

TEST(BenchProgram, ARightResultIsTimed) {
    const Outcome outcome = run({"--filter", "right", "--seconds", "0.001"});
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_TRUE(has(outcome.out, "GFLOPS")) << outcome.out;
    EXPECT_TRUE(has(outcome.out, "right ")) << outcome.out;
    EXPECT_TRUE(has(outcome.out, "trial_peak: ")) << outcome.out;
    EXPECT_TRUE(has(outcome.out, " % trial")) << outcome.out;
    EXPECT_TRUE(has(outcome.out, "min-max")) << outcome.out;
    EXPECT_FALSE(has(outcome.out, "FAILED")) << outcome.out;
}

TEST(BenchProgram, AWrongResultFails) {
    const Outcome outcome = run({"--filter", "right|wrong", "--seconds", "0.001"});
    EXPECT_EQ(outcome.code, 1);
    EXPECT_TRUE(has(outcome.out, "FAILED: wrong result: y[3] is 12")) << outcome.out;
    EXPECT_TRUE(has(outcome.out, "right ")) << outcome.out;
}

TEST(BenchProgram, AnErrorFailsItsRowAlone) {
    const Outcome outcome = run({"--filter", "right|impossible", "--seconds", "0.001"});
    EXPECT_EQ(outcome.code, 1);
    EXPECT_TRUE(has(outcome.out, "not on this device")) << outcome.out;
    EXPECT_TRUE(has(outcome.out, "right ")) << outcome.out;
}

TEST(BenchProgram, UnknownOptionsAndNamesAreRefused) {
    EXPECT_EQ(run({"--filter", "right", "--fast"}).code, 2);
    EXPECT_EQ(run({"--filter", "nothing of this name"}).code, 2);
    EXPECT_EQ(run({"--seconds"}).code, 2);
    EXPECT_EQ(run({"--seconds", "soon"}).code, 2);
    EXPECT_EQ(run({"--repeats", "0"}).code, 2);
    EXPECT_EQ(run({"--filter", "("}).code, 2);
    EXPECT_EQ(run({"--device", "no such device"}).code, 3);
    const Outcome help = run({"--help"});
    EXPECT_EQ(help.code, 0);
    EXPECT_TRUE(has(help.out, "triples") && has(help.out, "--json")) << help.out;
}

TEST(BenchProgram, ShapesAndStorage) {
    const char* words[] = {"bench",  "--shapes", "2x30,400x5", "--none", "none",
                           "--zero", "2x0",      "--storage",  "bf16"};
    Arguments arguments(9, const_cast<char**>(words));
    using Lists = std::vector<std::vector<std::uint64_t>>;
    EXPECT_EQ(arguments.sizes("--shapes", "MxN"), (Lists{{2, 30}, {400, 5}}));
    EXPECT_EQ(arguments.sizes("--zero", "MxN", 0), (Lists{{2, 0}}));
    EXPECT_EQ(arguments.sizes("--none", "MxN"), Lists{});
    EXPECT_EQ(arguments.sizes("--absent", "MxN"), std::nullopt);
    EXPECT_EQ(arguments.storage("--storage"), std::vector{DType::BF16});
    EXPECT_EQ(arguments.storage("--storage"), (std::vector{DType::F32, DType::BF16}));
    EXPECT_EQ(arguments.rest().size(), 1u);
    for (const char* wrong : {"2", "2x3x4", "2x", "x2", "", "2x0", "2x-3", "2x3,", "2x3 ", "axb"}) {
        const char* line[] = {"bench", "--shapes", wrong, "--storage", wrong};
        Arguments refused(5, const_cast<char**>(line));
        EXPECT_THROW(refused.sizes("--shapes", "MxN"), Error) << wrong;
        EXPECT_THROW(refused.storage("--storage"), Error) << wrong;
    }
}

TEST(BenchProgram, ResultsInJson) {
    const TemporaryFolder folder;
    const std::string file = folder.path() / "results.json";
    EXPECT_EQ(run({"--filter", "right", "--seconds", "0.001", "--json", file}).code, 0);
    std::ostringstream text;
    text << std::ifstream(file).rdbuf();
    for (const char* key : {"device", "driver", "vulkan", "bellows", "compiler", "trial_peak",
                            "GB/s", "GFLOPS", "of_trial_peak", "min_us", "max_us", "build"})
        EXPECT_TRUE(has(text.str(), "\"" + std::string(key) + "\": ")) << key << text.str();
    EXPECT_EQ(has(text.str(), "\"library_build_type\": \"release\""), build_type() == "Release")
        << text.str();
    EXPECT_TRUE(has(text.str(), "\"name\": \"right/iterations:1/manual_time\"")) << text.str();
}

} // namespace
} // namespace bellows::bench
