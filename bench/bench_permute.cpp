// SPDX-License-Identifier: MIT
// The ops that move tokens to their experts' rows and back, inside a rank and at both ends of an
// exchange: checks samples of each result, then times it, beside a copy loop of the same run.
// `--help` lists the options.

#include "permute/permutation.hpp"
#include "support/program.hpp"

#include <bellows/base/error.hpp>

namespace bellows::bench {
namespace {

constexpr const char* kHelp =
    R"(bench_permute: tokens to their experts' rows and back, forward and backward: inside a rank (moe_*) and
what the exchange of a group of 8 ranks does on the device (exchange_*), without sending. GB/s counts
each tensor once, read or written, although gathers read a token once per expert, and with the rows of
padding that they clear; "of peak" is the share of a copy loop of the same run.

  --shapes TxHxExK,...       T tokens of H elements, each to K of E experts; E a multiple of 8
                             (default 4096x7168x256x8, DeepSeek-V3's, and 4096x2048x128x8; less on CPUs)
  --storage f32,bf16         of tokens and rows; both by default
)";

class BenchPermute : public Program {
    std::string help() const override { return kHelp; }

    void take(Arguments& arguments) override {
        storage_ = arguments.storage("--storage");
        const auto lists = arguments.sizes("--shapes", "TxHxExK");
        if (!lists)
            return;
        shapes_.emplace();
        for (const auto& v : *lists) {
            const PermuteShape shape{v[0], v[1], v[2], v[3]};
            if (shape.hidden % 8 != 0 || shape.experts % kExchangeRanks != 0 ||
                shape.top_k > shape.experts)
                throw Error(ErrorCode::InvalidArgument,
                            "--shapes: " + name_of(shape) +
                                " needs H and E that are multiples of 8, and K at most E");
            shapes_->push_back(shape);
        }
    }

    void add(Device& device) override {
        copy_ = measure(device, copy_peak);
        const std::vector<PermuteShape> usual =
            device.info().is_cpu
                ? std::vector<PermuteShape>{{512, 4096, 32, 8}}
                : std::vector<PermuteShape>{{4096, 7168, 256, 8}, {4096, 2048, 128, 8}};
        for (const PermuteShape& shape : shapes_.value_or(usual))
            for (const PermuteOp& op : permute_ops())
                for (const DType act : storage_)
                    if (op.by_storage || act == storage_.front())
                        add_op(device, shape, op, act);
    }

    void add_op(Device& device, const PermuteShape& shape, const PermuteOp& op, DType act) {
        const std::string name = std::string(op.name) + "/" + name_of(shape) +
                                 (op.by_storage ? std::string("/") + to_string(act) : "");
        add_benchmark(name, [this, &device, shape, op, act](benchmark::State& state) {
            OpData data(device);
            run_workload(state, data, op.make(Permutation(data, shape, act)), copy_);
        });
    }

    std::optional<std::vector<PermuteShape>> shapes_;
    std::vector<DType> storage_;
    Ceiling copy_;
};

} // namespace
} // namespace bellows::bench

int main(int argc, char** argv) {
    bellows::bench::BenchPermute program;
    return program.run(argc, argv);
}
