// SPDX-License-Identifier: MIT
// Quantisation to FP8 by every recipe, the way back, and the ops that quantise what they compute:
// checks samples of each result, then times it, beside a copy loop of the same run. `--help` lists
// the options.

#include "fp8_quantize/workloads.hpp"
#include "support/program.hpp"

#include <bellows/base/error.hpp>

namespace bellows::bench {
namespace {

using fp8::Format;
using fp8::ScaleRule;

constexpr const char* kHelp =
    R"(bench_fp8_quantize: matrices to FP8 and back. quantize/BLOCKS: 1x128 and 128x1 and MX_1x32 of
activations, per_tensor (which reads them twice), 128x128 of weights; rows_and_columns: 1x128 and 128x1 from
one pass; requantize: 1x128 codes to 128x1, or (_decoded) to the values that those stand for; ..._transposed:
128x1 codes that stand [columns, rows]; transpose_codes: weights' codes [N, M] from [M, N]; rmsnorm, swiglu
(of gate and up, twice as wide, with a weight per row) and swiglu_dgrad quantise what they compute;
..._of_codes reads gate and up as FP8. GB/s counts each tensor once, read or written; "of peak" is the share of a
copy loop of the same run.

  --shapes MxN,...           activations, N a multiple of 128 (default 16384x7168; less on CPUs)
  --weights GxMxN,...        G experts' weights, M and N multiples of 128 (default 8x4096x7168; less on CPUs)
  --storage f32,bf16         of what is not FP8; both by default
  --formats e4m3,e5m2        e4m3 by default
  --rules power-of-two,f32   of scales; power-of-two by default
)";

/// The values of `option` that `all` has, by their names.
template <class T>
std::vector<T> choose(Arguments& arguments, const char* option, std::initializer_list<T> all) {
    const auto value = arguments.value(option);
    if (!value)
        return {*all.begin()};
    std::vector<T> chosen;
    for (const std::string& word : Arguments::split(*value)) {
        const auto found = std::find_if(all.begin(), all.end(),
                                        [&](T one) { return word == fp8::to_string(one); });
        if (found == all.end())
            throw Error(ErrorCode::InvalidArgument,
                        std::string(option) + ": unknown '" + word + "', see --help");
        chosen.push_back(*found);
    }
    return chosen;
}

class BenchFp8Quantize : public Program {
    std::string help() const override { return kHelp; }

    void take(Arguments& arguments) override {
        storage_ = arguments.storage("--storage");
        formats_ = choose(arguments, "--formats", {Format::E4M3, Format::E5M2});
        rules_ = choose(arguments, "--rules", {ScaleRule::PowerOfTwo, ScaleRule::F32});
        activations_ = shapes(arguments, "--shapes", "MxN");
        weights_ = shapes(arguments, "--weights", "GxMxN");
    }

    static std::optional<std::vector<QuantizeShape>>
    shapes(Arguments& arguments, const std::string& option, const std::string& form) {
        const auto lists = arguments.sizes(option, form);
        if (!lists)
            return std::nullopt;
        std::vector<QuantizeShape> shapes;
        for (const auto& v : *lists) {
            const bool batched = v.size() == 3;
            const QuantizeShape shape{batched ? v[0] : 1, v[v.size() - 2], v.back()};
            if (shape.columns % 128 != 0 || (batched && (shape.rows % 128 != 0 || v[0] < 2)))
                throw Error(ErrorCode::InvalidArgument,
                            option + ": " + name_of(shape) + " needs multiples of 128" +
                                (batched ? ", at least two of them" : " as columns"));
            shapes.push_back(shape);
        }
        return shapes;
    }

    void add(Device& device) override {
        copy_ = measure(device, copy_peak);
        const bool cpu = device.info().is_cpu;
        const std::vector<QuantizeShape> activations = {cpu ? QuantizeShape{1, 512, 2048}
                                                            : QuantizeShape{1, 16384, 7168}};
        const std::vector<QuantizeShape> weights = {cpu ? QuantizeShape{2, 512, 1024}
                                                        : QuantizeShape{8, 4096, 7168}};
        for (const Format format : formats_)
            for (const ScaleRule rule : rules_) {
                for (const QuantizeShape& shape : activations_.value_or(activations))
                    add_ops(device, shape, format, rule);
                for (const QuantizeShape& shape : weights_.value_or(weights))
                    add_ops(device, shape, format, rule);
            }
    }

    void add_ops(Device& device, const QuantizeShape& shape, Format format, ScaleRule rule) {
        for (const QuantizeOp& op : quantize_ops(shape, format, rule, storage_)) {
            const std::string name =
                op.name + "/" + name_of(shape) + (formats_.size() > 1 ? "/" : "") +
                (formats_.size() > 1 ? to_string(format) : "") + (rules_.size() > 1 ? "/" : "") +
                (rules_.size() > 1 ? to_string(rule) : "");
            add_benchmark(name, [this, &device, op](benchmark::State& state) {
                OpData data(device);
                run_workload(state, data, op.make(data), copy_);
            });
        }
    }

    std::vector<DType> storage_;
    std::vector<Format> formats_;
    std::vector<ScaleRule> rules_;
    std::optional<std::vector<QuantizeShape>> activations_, weights_;
    Ceiling copy_;
};

} // namespace
} // namespace bellows::bench

int main(int argc, char** argv) {
    bellows::bench::BenchFp8Quantize program;
    return program.run(argc, argv);
}
