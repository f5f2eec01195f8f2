// SPDX-License-Identifier: MIT
// Experts' two dispatches for few rows (fp8/experts.hpp) against products by ids and SwiGLU, bit by
// bit: shared experts are those behind the others there.

#include "fp8/gemm_rig.hpp"

#include <bellows/fp8/experts.hpp>
#include <bellows/fp8/fused.hpp>

namespace bellows {
namespace {

using namespace testing;

struct Case {
    std::uint64_t tokens, top_k;
    std::uint32_t experts, shared;
    std::uint64_t hidden, ffn;
    int absent_percent = 0;
    std::uint64_t there = UINT64_MAX; ///< of the tokens
    ScaleRule rule = ScaleRule::PowerOfTwo;
};

constexpr auto kCases = std::to_array<Case>({
    {1, 2, 4, 0, 256, 128},
    {8, 6, 20, 2, 640, 384},
    {9, 2, 3, 1, 400, 256, 20},
    {70, 3, 5, 2, 264, 384, 5, UINT64_MAX,
     ScaleRule::F32}, // more rows of an expert than a part has
    {150, 1, 1, 1, 136, 128},
    {33, 4, 20, 3, 136, 128, 0, 21},
    {5, 2, 4, 1, 256, 128, 100},
});

class Fp8Experts : public Fp8GemmTest {
protected:
    static std::vector<float> part(const std::vector<float>& x, std::uint64_t from,
                                   std::uint64_t count) {
        const auto begin = x.begin() + static_cast<std::ptrdiff_t>(from);
        return {begin, begin + static_cast<std::ptrdiff_t>(count)};
    }

    /// Routed experts, and the last ones as one shared expert.
    struct Split {
        Input gate_up, down, shared_gate_up, shared_down;

        fp8::ExpertWeights weights(bool shared) const {
            fp8::ExpertWeights w{*gate_up.operand->quantized, *down.operand->quantized, {}, {}};
            if (shared) {
                w.shared_gate_up = *shared_gate_up.operand->quantized;
                w.shared_down = *shared_down.operand->quantized;
            }
            return w;
        }
    };
    static Split split(const Case& c, const std::vector<float>& gate_up,
                       const std::vector<float>& down) {
        const std::uint64_t up_size = 2 * c.ffn * c.hidden, half = c.ffn * c.hidden,
                            routed = c.experts, shared = c.shared;
        std::vector<float> gates, ups, downs(c.hidden * shared * c.ffn);
        for (std::uint64_t s = 0; s < shared; ++s) {
            const auto gate = part(gate_up, (routed + s) * up_size, half),
                       up = part(gate_up, (routed + s) * up_size + half, half);
            gates.insert(gates.end(), gate.begin(), gate.end());
            ups.insert(ups.end(), up.begin(), up.end());
            for (std::uint64_t i = 0; i < half; ++i)
                downs[i / c.ffn * shared * c.ffn + s * c.ffn + i % c.ffn] =
                    down[(routed + s) * half + i];
        }
        gates.insert(gates.end(), ups.begin(), ups.end());
        const Kind blocks = kind(Blocks::Blocks128);
        Split result{
            input(blocks, {routed, 2 * c.ffn, c.hidden}, part(gate_up, 0, routed * up_size)),
            input(blocks, {routed, c.hidden, c.ffn}, part(down, 0, routed * half)),
            {},
            {}};
        if (shared != 0) {
            result.shared_gate_up = input(blocks, {2 * shared * c.ffn, c.hidden}, gates);
            result.shared_down = input(blocks, {c.hidden, shared * c.ffn}, downs);
        }
        return result;
    }

    static Quantized rows_of(const Recipe& recipe, std::uint64_t rows, std::uint64_t columns,
                             Buffer& memory) {
        memory = workspace(fp8::quantized_bytes(recipe, {rows, columns}));
        return fp8::make_quantized(memory.view(), recipe, {rows, columns});
    }

    struct Results {
        std::vector<std::uint8_t> codes;
        std::vector<float> scales, results;
    };
    static Results read_all(const Quantized& hidden, const TensorView& results) {
        Results all{std::vector<std::uint8_t>(hidden.codes.num_elements()),
                    std::vector<float>(hidden.scales.num_elements()), read<float>(results)};
        device().download(hidden.codes.buffer.sub(0, all.codes.size()), all.codes);
        device().download(hidden.scales.buffer.sub(0, 4 * all.scales.size()), all.scales);
        return all;
    }

    static void check(const Case& c, DType storage) {
        SCOPED_TRACE(std::to_string(c.tokens) + " tokens, top " + std::to_string(c.top_k) + " of " +
                     std::to_string(c.experts) + " and " + std::to_string(c.shared) + ", " +
                     std::to_string(c.hidden) + " by " + std::to_string(c.ffn) + ", " +
                     to_string(storage));
        const std::uint64_t all = c.experts + c.shared, each = c.top_k + c.shared,
                            slots = c.tokens * each;
        const auto gate_up = random(DType::F32, all * 2 * c.ffn * c.hidden, 2),
                   down = random(DType::F32, all * c.hidden * c.ffn, 3);
        const Input whole_gate_up =
                        input(kind(Blocks::Blocks128), {all, 2 * c.ffn, c.hidden}, gate_up),
                    whole_down = input(kind(Blocks::Blocks128), {all, c.hidden, c.ffn}, down),
                    x = input(kind(Blocks::Rows128), {c.tokens, c.hidden}, 1);
        const Split parts = split(c, gate_up, down);
        const auto chosen = reference::random_indices(slots, 11, c.experts),
                   absent = reference::random_indices(slots, 12, 100);
        std::vector<std::int32_t> ids(slots);
        for (std::uint64_t s = 0; s < slots; ++s)
            ids[s] = s % each >= c.top_k ? static_cast<std::int32_t>(c.experts + s % each - c.top_k)
                     : absent[s] < c.absent_percent ? -1
                                                    : chosen[s];
        const OpTensor ids_t = tensor(DType::I32, {c.tokens, each}, ids),
                       count = tensor(DType::U32, {1},
                                      std::vector<std::uint32_t>{
                                          static_cast<std::uint32_t>(std::min(c.there, c.tokens))});
        const TensorView counted =
            c.there < c.tokens ? ids_t.view.with_row_count(count.view.buffer) : ids_t.view;
        Buffer wanted_memory, actual_memory;
        const Recipe recipe{Blocks::Rows128, Format::E4M3, c.rule};
        const Quantized wanted = rows_of(recipe, slots, c.ffn, wanted_memory),
                        actual = rows_of(recipe, slots, c.ffn, actual_memory);
        const OpTensor gate_up_rows = result(storage, {slots, 2 * c.ffn}),
                       wanted_results = padded(storage, {slots, c.hidden}),
                       actual_results = padded(storage, {slots, c.hidden});
        GroupedRows of_tokens = fp8::unlisted_rows(GroupLayout::by_ids(counted, all)),
                    of_slots = of_tokens;
        of_slots.slots_per_a_row = 1;
        const Buffer scratch =
            workspace(fp8::gemm_workspace_bytes(device(), *x.operand, *whole_gate_up.operand,
                                                of_tokens, way_.variant) +
                      fp8::gemm_workspace_bytes(device(), wanted, *whole_down.operand, of_slots,
                                                way_.variant));
        run([&](Recording& r) {
            fp8::m_grouped_gemm_nt_contiguous(r, *x.operand, *whole_gate_up.operand, gate_up_rows,
                                              of_tokens, false, scratch.view(), way_);
            fp8::swiglu(r, gate_up_rows, {}, wanted);
            fp8::m_grouped_gemm_nt_contiguous(r, wanted, *whole_down.operand, wanted_results,
                                              of_slots, false, scratch.view(), way_);
            const fp8::ExpertWeights weights = parts.weights(c.shared != 0);
            EXPECT_EQ(weights.shared(), c.shared);
            fp8::experts_hidden(r, *x.operand->quantized, weights, counted, actual,
                                storage == DType::BF16);
            fp8::experts_results(r, actual, weights, counted, actual_results);
        });
        const Results a = read_all(actual, actual_results), w = read_all(wanted, wanted_results);
        std::uint64_t codes = 0, scales = 0, values = 0, touched = 0;
        for (std::uint64_t s = 0; s < slots; ++s) {
            const bool there = ids[s] >= 0 && s / each < std::min(c.there, c.tokens);
            for (std::uint64_t i = 0; i < c.ffn && there; ++i)
                codes += a.codes[s * c.ffn + i] != w.codes[s * c.ffn + i];
            for (std::uint64_t i = 0; i < c.ffn / 128 && there; ++i)
                scales += a.scales[s * (c.ffn / 128) + i] != w.scales[s * (c.ffn / 128) + i];
            for (std::uint64_t i = 0; i < c.hidden; ++i) {
                const float value = a.results[s * c.hidden + i];
                values += there && value != w.results[s * c.hidden + i];
                touched += !there && !untouched(value);
            }
        }
        EXPECT_EQ(codes, 0u) << "of " << a.codes.size();
        EXPECT_EQ(scales, 0u) << "of " << a.scales.size();
        EXPECT_EQ(values, 0u) << "of " << a.results.size();
        EXPECT_EQ(touched, 0u) << "slots that are not here";
    }
};

TEST_F(Fp8Experts, HaveTheBitsOfProductsAndSwiglu) {
    if (!native())
        return; // the test below checks what is said then
    for (const Case& c : kCases)
        for (const DType storage : {DType::BF16, DType::F32})
            check(c, storage);
}

TEST_F(Fp8Experts, SayWhatIsAgainstThem) {
    const Case c{2, 2, 4, 1, 256, 128};
    const auto gate_up = random(DType::F32, 5 * 2 * c.ffn * c.hidden, 2),
               down = random(DType::F32, 5 * c.hidden * c.ffn, 3);
    const Split parts = split(c, gate_up, down);
    fp8::ExpertWeights weights = parts.weights(true);
    const std::string lacking = fp8::why_not_experts(device(), weights, 6);
    EXPECT_EQ(lacking, fp8::why_not(device(), fp8::Variant::Native));
    const Input x = input(kind(Blocks::Rows128), {c.tokens, c.hidden}, 1);
    const OpTensor ids = result(DType::I32, {c.tokens, 3}),
                   results = padded(DType::BF16, {6, c.hidden}, 8);
    Buffer memory;
    const Quantized hidden = rows_of(*kind(Blocks::Rows128).recipe, 6, c.ffn, memory);
    if (!lacking.empty()) {
        expect_refused(
            [&](Recording& r) {
                fp8::experts_hidden(r, *x.operand->quantized, weights, ids, hidden);
            },
            {"fp8::experts_hidden", lacking});
        return;
    }
    expect_refused(
        [&](Recording& r) {
            fp8::experts_hidden(r, *x.operand->quantized, weights, ids, *x.operand->quantized);
        },
        {"hidden is", "[6, 128]"});
    expect_refused(
        [&](Recording& r) {
            fp8::experts_results(r, hidden, weights, ids, results.view.rows(0, 5));
        },
        {"results are", "[6, 256]"});
    EXPECT_NE(fp8::why_not_experts(device(), weights, 5000), "");
    weights.shared_down.reset();
    EXPECT_NE(fp8::why_not_experts(device(), weights, 6), "");
}

} // namespace
} // namespace bellows
