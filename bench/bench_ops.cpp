// SPDX-License-Identifier: MIT
// Every dense op but GEMM and the permutation of tokens: checks samples of its result against f64,
// then times it. Sizes are those of one layer of the demo model on CPU drivers, of v2-lite
// elsewhere; of packed attention, sequences of four documents; of grouped attention, 4 and 8 heads
// of queries to one of keys, there those of Llama-3-8B and Qwen3-30B-A3B. `--help` lists the
// options.

#include "ops/workloads.hpp"
#include "support/program.hpp"

#include <utility>

namespace bellows::bench {
namespace {

/// Which ceiling a rate is shown beside: what its work says is a copy loop, or an FMA loop of ops
/// with products; else a read loop, or the loop of the units that multiply bf16.
enum class Beside : std::uint8_t { Work, Read, Matrix };

struct Entry {
    const char* name;
    MakeWorkload* make;
    int part;
    bool by_storage; ///< f32 and bf16, else f32 only
    Beside beside = Beside::Work;
};

constexpr Entry kEntries[] = {
    {"router_forward", router, 0, false},
    {"router_dgrad", router, 1, false},
    {"expert_counts", router, 2, false},
    {"router_bias_update", router, 3, false},
    {"swiglu_forward", swiglu, 0, true},
    {"swiglu_dgrad", swiglu, 1, true},
    {"rmsnorm_forward", rmsnorm, 0, true},
    {"rmsnorm_dgrad", rmsnorm, 1, true},
    {"rmsnorm_wgrad", rmsnorm, 2, true},
    {"rope_forward", rope, 0, true},
    {"rope_dgrad", rope, 1, true},
    {"mla_keys_forward", mla_keys, 0, true},
    {"mla_keys_dgrad", mla_keys, 1, true},
    {"attention_forward", attention, 0, true},
    {"attention_dgrad", attention, 1, true},
    {"packed_attention_forward", packed_attention, 0, true},
    {"packed_attention_dgrad", packed_attention, 1, true},
    {"grouped_attention_4_forward", grouped_attention_4, 0, true},
    {"grouped_attention_4_dgrad", grouped_attention_4, 1, true},
    {"grouped_attention_8_forward", grouped_attention_8, 0, true},
    {"grouped_attention_8_dgrad", grouped_attention_8, 1, true},
    {"paged_attention_latent", paged_latent, 0, true, Beside::Read},
    {"paged_attention_latent_fp8", paged_latent, 1, true, Beside::Read},
    {"paged_attention_heads", paged_heads, 0, true, Beside::Read},
    {"paged_attention_latent_prompt", paged_latent, 2, true, Beside::Matrix},
    {"paged_attention_latent_fp8_prompt", paged_latent, 3, true, Beside::Matrix},
    {"paged_attention_heads_prompt", paged_heads, 1, true, Beside::Matrix},
    {"few_rows_projection_fp8", few_rows, 0, true},
    {"few_rows_swiglu_fp8", few_rows, 1, true},
    {"few_rows_experts_swiglu_fp8", few_rows_experts, 0, true},
    {"few_rows_experts_sum_fp8", few_rows_experts, 1, true},
    {"embedding_forward", embedding, 0, true},
    {"embedding_wgrad", embedding, 1, true},
    {"cross_entropy", cross_entropy, 0, true},
    {"add", elementwise, 0, true},
    {"cast", elementwise, 1, true},
    {"scale", elementwise, 2, true},
    {"copy", elementwise, 3, true},
    {"transpose", transpose, 0, true},
    {"sum_squares", reduction, 0, true},
    {"sum", reduction, 1, true},
    {"clip_coefficient", reduction, 2, false},
    {"adamw", adamw, 0, true},
};

/// Rows of the choice of tokens have a small vocabulary or a model's, and one sequence or a batch.
struct SampleShape {
    std::uint64_t rows, vocabulary;
};
constexpr SampleShape kSampleShapes[] = {{1, 512},    {16, 512},   {1, 32000},
                                         {16, 32000}, {1, 102400}, {64, 102400}};
constexpr std::pair<const char*, SampleKind> kSampleKinds[] = {
    {"likeliest", SampleKind::Likeliest}, {"plain", SampleKind::Plain}, {"cut", SampleKind::Cut}};

Sizes sizes_for(const Device& device) {
    if (device.info().is_cpu)
        return {1024, 256, 512, 512, 8, 32, 16, 32, 4096, 16, 4, 8, 32, 128, 8};
    return {8192, 4096, 2048, 1408, 16, 128, 64, 128, 102400, 64, 6, 32, 128, 512, 64};
}

class BenchOps : public Program {
public:
    std::string help() const override {
        return "bench_ops: every dense op but the products and the permutation of tokens, forward\n"
               "and backward. GB/s counts each tensor once, read or written; \"of peak\" is the "
               "share\n"
               "of a copy loop of the same run, for attention of an FMA loop; over a cache of a "
               "read loop,\n"
               "of parts of prompts in bf16 of the matrix units' loop.\n";
    }

    void add(Device& device) override {
        const Sizes sizes = sizes_for(device);
        copy_ = measure(device, copy_peak);
        fma_ = measure(device, fma_peak);
        read_ = measure(device, read_peak);
        matrix_ = measure(device, matrix_peak);
        for (const Entry& entry : kEntries)
            for (const DType dtype : {DType::F32, DType::BF16})
                if (dtype == DType::F32 || entry.by_storage)
                    add_benchmark(std::string(entry.name) + "/" + to_string(dtype),
                                  [this, &device, sizes, entry, dtype](benchmark::State& state) {
                                      OpData data(device);
                                      const Workload work =
                                          entry.make(data, sizes, dtype, entry.part);
                                      run_workload(state, data, work, ceiling(entry, dtype, work));
                                  });
        for (const auto& [name, kind] : kSampleKinds)
            for (const SampleShape& shape : kSampleShapes)
                add_benchmark("sample_" + std::string(name) + "/" + std::to_string(shape.rows) +
                                  "x" + std::to_string(shape.vocabulary),
                              [this, &device, kind, shape](benchmark::State& state) {
                                  OpData data(device);
                                  run_workload(state, data,
                                               sampling(data, kind, shape.rows, shape.vocabulary),
                                               copy_);
                              });
    }

private:
    const Ceiling& ceiling(const Entry& entry, DType dtype, const Workload& work) const {
        if (entry.beside == Beside::Read)
            return read_;
        if (entry.beside == Beside::Matrix && dtype == DType::BF16 && matrix_.rate > 0)
            return matrix_;
        return work.flops > 0 ? fma_ : copy_;
    }

    Ceiling copy_, fma_, read_, matrix_;
};

} // namespace
} // namespace bellows::bench

int main(int argc, char** argv) {
    bellows::bench::BenchOps program;
    return program.run(argc, argv);
}
