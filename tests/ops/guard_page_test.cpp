// SPDX-License-Identifier: MIT
// Ops touch nothing behind their tensors: every operand ends at a page that may not be touched. On
// a CPU driver a kernel that does ends the program (lavapipe of Mesa 26 runs the loads of some
// loops once more than the loop, see shaders/include/common.glsl); on a GPU the tests only run the
// ops. Numbers are the op tables' business.

#include "engine/ops/paged_form.hpp"
#include "support/compare.hpp"
#include "support/guard_pages.hpp"

#include <bellows/base/rounding.hpp>
#include <bellows/engine/attention.hpp>
#include <bellows/engine/gemm.hpp>
#include <bellows/engine/gemm_plan.hpp>
#include <bellows/engine/ops.hpp>
#include <bellows/engine/paged_attention.hpp>
#include <bellows/engine/sampling.hpp>
#include <bellows/kernels/kernels.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <numeric>
#include <span>
#include <vector>

namespace bellows {
namespace {

class GuardPages : public testing::GuardPagesTest {
protected:
    BufferView bytes(std::uint64_t size) {
        return guarded(size, std::max<std::uint64_t>(size, 16)).view;
    }

    /// Random values of [-1, 1) in f32 and bf16, of [0, below) in integers.
    TensorView tensor(DType dtype, std::initializer_list<std::uint64_t> extents,
                      std::uint64_t below = 1) {
        std::uint64_t elements = 1;
        for (const std::uint64_t extent : extents)
            elements *= extent;
        const BufferView memory = bytes(elements * size_of(dtype));
        test::Random random(++seed_);
        std::vector<std::byte> values(memory.bytes);
        for (std::uint64_t i = 0; i < elements; ++i) {
            const auto number = static_cast<float>(random.uniform(-1, 1));
            const auto integer = static_cast<std::uint32_t>(random.below(below));
            const std::uint16_t half = test::bf16_bits(number);
            std::byte* to = values.data() + i * size_of(dtype);
            if (dtype == DType::F32)
                std::memcpy(to, &number, 4);
            else if (dtype == DType::BF16)
                std::memcpy(to, &half, 2);
            else
                std::memcpy(to, &integer, 4);
        }
        device_->upload(memory, std::span<const std::byte>(values));
        return TensorView::contiguous(memory, dtype, extents);
    }
};

TEST_F(GuardPages, MemoryBehindATensorIsReallyGuarded) {
    if (!own_.is_cpu)
        return; // a GPU does not fault like a CPU
    const auto guarded = own_.guarded(64);
    guarded.bytes[63] = std::byte{1};
    EXPECT_DEATH(guarded.bytes[64] = std::byte{1}, "");
}

TEST_F(GuardPages, Products) {
    struct Shape {
        std::uint64_t m, n, k;
    };
    for (const Shape& s : {Shape{33, 48, 72}, Shape{40, 48, 37}, Shape{136, 45, 40}})
        for (const DType act : {DType::F32, DType::BF16}) {
            const std::uint64_t batch = 2;
            const TensorView a = tensor(act, {batch, s.m, s.k}),
                             at = tensor(act, {batch, s.k, s.m});
            const TensorView b = tensor(act, {batch, s.n, s.k}),
                             bt = tensor(act, {batch, s.k, s.n});
            const TensorView d = tensor(DType::F32, {batch, s.m, s.n});
            for (const GemmClass& numerics : gemm_classes(*device_)) {
                if (!numerics.why_not.empty())
                    continue;
                use_gemm_class(*device_, numerics.name);
                run([&](Recording& r) {
                    for (const bool accumulate : {false, true}) {
                        ops::gemm_nt(r, a, b, d, accumulate);
                        ops::gemm_nn(r, a, bt, d, accumulate);
                        ops::gemm_tn(r, at, bt, d, accumulate);
                    }
                });
            }
        }
}

TEST_F(GuardPages, GroupedProducts) {
    const std::vector<std::uint32_t> starts = {0, 5, 5, 72, 73};
    const std::uint64_t groups = starts.size() - 1, rows = starts.back();
    const TensorView offsets = tensor(DType::U32, {groups + 1});
    device_->upload(offsets.buffer, std::as_bytes(std::span(starts)));
    for (const std::uint64_t n : {48u, 200u})
        for (const DType act : {DType::F32, DType::BF16}) {
            const std::uint64_t k = 56;
            const TensorView x = tensor(act, {rows, k}), y = tensor(act, {rows, n});
            const TensorView w = tensor(act, {groups, n, k}), wt = tensor(act, {groups, k, n});
            const TensorView dw = tensor(DType::F32, {groups, n, k});
            const BufferView list = bytes(ops::group_tiles_bytes(*device_, rows, groups));
            for (const GemmClass& numerics : gemm_classes(*device_)) {
                if (!numerics.why_not.empty())
                    continue;
                use_gemm_class(*device_, numerics.name);
                run([&](Recording& r) {
                    const auto tiles = ops::make_group_tiles(r, offsets, rows, {n, 0, 0, 0}, list);
                    ops::grouped_gemm_nt(r, x, w, y, tiles);
                    ops::grouped_gemm_nn(r, x, wt, y, tiles);
                    ops::grouped_gemm_tn(r, y, x, dw, offsets, true);
                });
            }
        }
}

TEST_F(GuardPages, Sampling) {
    for (const std::uint64_t vocabulary : {5u, 2048u, 2051u})
        for (const std::uint64_t rows : {1u, 3u}) {
            const TensorView logits = tensor(DType::F32, {rows, div_up(vocabulary, 4) * 4});
            TensorView used = logits;
            used.extent[1] = vocabulary;
            std::vector<ops::SampleSettings> settings(rows);
            for (ops::SampleSettings& s : settings)
                s = {.top_p = 0.9f, .top_k = 4, .history_count = 3, .bias_count = 2};
            settings.back().temperature = 0;
            const TensorView settings_t = tensor(DType::U32, {rows, sizeof(settings[0]) / 4});
            device_->upload(settings_t.buffer, std::as_bytes(std::span(settings)));
            const ops::SampleBatch batch{.logits = used,
                                         .settings = settings_t,
                                         .history = tensor(DType::U32, {3, 2}, 9),
                                         .biases = tensor(DType::U32, {2, 2}, 9),
                                         .allowed = tensor(DType::U32, {div_up(vocabulary, 32)}, 9),
                                         .tokens = tensor(DType::U32, {rows}),
                                         .log_probs = tensor(DType::F32, {rows}),
                                         .top_tokens = tensor(DType::U32, {rows, 5}),
                                         .top_log_probs = tensor(DType::F32, {rows, 5})};
            const BufferView workspace = bytes(ops::sample_workspace_bytes(rows, vocabulary));
            run([&](Recording& r) { ops::sample(r, batch, workspace); });
        }
}

TEST_F(GuardPages, Router) {
    for (const std::uint64_t tokens : {1u, 37u})
        for (const std::uint64_t experts : {8u, 64u, 256u}) {
            const TensorView logits = tensor(DType::F32, {tokens, experts});
            const TensorView bias = tensor(DType::F32, {experts});
            const TensorView scores = tensor(DType::F32, {tokens, experts});
            const TensorView ids = tensor(DType::I32, {tokens, 4});
            const TensorView weights = tensor(DType::F32, {tokens, 4});
            const TensorView counts = tensor(DType::U32, {experts});
            const TensorView d_logits = tensor(DType::F32, {tokens, experts});
            const TensorView kept = tensor(DType::I32, {tokens, 4});
            for (const std::uint32_t groups : {1u, 4u})
                run([&](Recording& r) {
                    const ops::RouterOptions options{
                        .score = groups == 1 ? ops::RouterOptions::Score::Softmax
                                             : ops::RouterOptions::Score::Sigmoid,
                        .groups = groups,
                        .group_top_k = groups == 1 ? 1u : 2u};
                    ops::router_forward(r, logits, bias, scores, ids, weights, options);
                    ops::router_dgrad(r, weights, ids, scores, logits, options);
                    ops::expert_counts(r, ids, counts, false);
                    const TensorView runs =
                        TensorView::contiguous(counts.buffer, DType::U32, {1, experts});
                    ops::expert_counts(r, ids, runs, false);
                    ops::router_dgrad(r, weights, ids, scores, logits, options, {runs, 0.5f});
                    ops::router_bias_update(r, counts, bias, 0.1f);
                    const ops::BalanceCounts counted{
                        .of_scores = groups == 1, .devices = groups, .tokens = true};
                    const TensorView wide = tensor(DType::U32, {1, counted.columns(experts)});
                    ops::balance_counts(r, scores, ids, wide, counted);
                    ops::router_capacity(r, scores, ids, kept, groups, tokens);
                    ops::router_dgrad(r, weights, ids, scores, d_logits, options,
                                      {wide, 0.5f, 0.5f, 0.5f, counted}, {logits, 0.1f});
                });
        }
}

TEST_F(GuardPages, MoePermutation) {
    for (const std::uint64_t tokens : {1u, 5u, 70u})
        for (const DType act : {DType::F32, DType::BF16}) {
            const std::uint64_t experts = 8, top_k = 2, columns = 64;
            const std::uint64_t capacity = ops::moe_capacity(tokens, top_k, experts, 4);
            const TensorView ids = tensor(DType::I32, {tokens, top_k}, experts + 1);
            const ops::MoeLayout layout{.counts = tensor(DType::U32, {experts}),
                                        .offsets = tensor(DType::U32, {experts + 1}),
                                        .row_to_slot = tensor(DType::I32, {capacity}),
                                        .slot_to_row = tensor(DType::I32, {tokens, top_k}),
                                        .alignment = 4};
            const BufferView workspace =
                bytes(ops::moe_layout_workspace_bytes(tokens, top_k, experts));
            const TensorView x = tensor(act, {tokens, columns});
            const TensorView weights = tensor(DType::F32, {tokens, top_k});
            const TensorView rows = tensor(act, {capacity, columns});
            const TensorView values = tensor(DType::F32, {capacity});
            run([&](Recording& r) {
                ops::moe_layout(r, ids, layout, workspace,
                                {.slot_values = weights, .row_values = values});
                ops::moe_gather(r, x, layout, weights, rows);
                ops::moe_unpermute(r, rows, layout, weights, x, true);
                ops::moe_weights_dgrad(r, rows, layout, x, weights);
                ops::moe_scalars_to_rows(r, weights, layout, values);
                ops::moe_scalars_to_slots(r, values, layout, weights);
            });
        }
}

TEST_F(GuardPages, ReturnedScalarsOfACombine) {
    const std::uint32_t tokens = 5, top_k = 3, columns = 64, experts = 6;
    const std::uint32_t record_words = columns + 2 * 4; // hidden, ids, weights, padded
    const BufferView records = bytes(std::uint64_t{tokens} * record_words * 4);
    const TensorView ids = tensor(DType::I32, {tokens, top_k}, experts);
    const TensorView rows = tensor(DType::I32, {tokens, top_k}, tokens);
    const TensorView out = tensor(DType::F32, {tokens, columns});
    const TensorView scalars = tensor(DType::F32, {tokens, top_k});
    for (const std::uint32_t local_size : {8u, 64u})
        run([&](Recording& r) {
            r.fill(records, 0);
            r.dispatch(kernels::ExchangeCombine{.variant = kernels::ExchangeCombine::Variant::f32,
                                                .constants = {.local_size = local_size},
                                                .records = records,
                                                .words = records,
                                                .slot_to_row = rows.buffer,
                                                .topk_ids = ids.buffer,
                                                .token_count = ids.buffer,
                                                .first_bias = out.buffer,
                                                .second_bias = out.buffer,
                                                .out_tokens = out.buffer,
                                                .scalars = scalars.buffer,
                                                .tokens = tokens,
                                                .units = columns / 4,
                                                .out_units = columns / 4,
                                                .top_k = top_k,
                                                .record_units = record_words / 4,
                                                .record_words = record_words,
                                                .hidden_words = columns,
                                                .experts = experts,
                                                .ranks = 2,
                                                .ranks_per_member = 1,
                                                .biases = 0,
                                                .has_scalars = 1,
                                                .accumulate = 0},
                       {.x = tokens});
        });
}

TEST_F(GuardPages, NormsAndSwiglu) {
    for (const std::uint64_t rows : {1u, 3u, 130u})
        for (const DType act : {DType::F32, DType::BF16}) {
            const std::uint64_t columns = 32;
            const TensorView x = tensor(act, {rows, columns}), y = tensor(act, {rows, columns});
            const TensorView gain = tensor(DType::F32, {columns});
            const TensorView inv_rms = tensor(DType::F32, {rows});
            const TensorView d_gain = tensor(DType::F32, {columns});
            const BufferView workspace = bytes(ops::rmsnorm_wgrad_workspace_bytes(rows, columns));
            const TensorView gate_up = tensor(act, {rows, 2 * columns});
            const TensorView weight = tensor(DType::F32, {rows});
            const TensorView d_weight = tensor(DType::F32, {rows});
            const TensorView none = tensor(DType::U32, {1}); // 0 rows
            run([&](Recording& r) {
                ops::rmsnorm_forward(r, x, gain, y, inv_rms, 1e-6f);
                ops::rmsnorm_wgrad(r, y, x, inv_rms, d_gain, true, workspace);
                ops::rmsnorm_dgrad(r, y, x, gain, inv_rms, y, false);
                ops::swiglu_forward(r, gate_up, weight, y);
                ops::swiglu_dgrad(r, y, gate_up, weight, gate_up, d_weight);
                ops::swiglu_forward(r, gate_up.with_row_count(none.buffer), weight, y);
                ops::swiglu_dgrad(r, y, gate_up.with_row_count(none.buffer), weight, gate_up,
                                  d_weight);
            });
        }
}

TEST_F(GuardPages, AttentionAndRotation) {
    for (const std::uint64_t seq : {1u, 9u, 40u})
        for (const DType act : {DType::F32, DType::BF16}) {
            const std::uint64_t tokens = 2 * seq, heads = 2, qk = 48, value = 32, rope = 16;
            const TensorView q = tensor(act, {tokens, heads, qk}),
                             k = tensor(act, {tokens, heads, qk});
            const TensorView v = tensor(act, {tokens, heads, value});
            const TensorView o = tensor(act, {tokens, heads, value});
            const TensorView lse = tensor(DType::F32, {tokens, heads});
            const ops::AttentionGradients d{.dq = tensor(act, {tokens, heads, qk}),
                                            .dk = tensor(act, {tokens, heads, qk}),
                                            .dv = tensor(act, {tokens, heads, value})};
            const BufferView workspace = bytes(ops::attention_dgrad_workspace_bytes(tokens, heads));
            const TensorView documents = tensor(DType::U32, {tokens, 2}); // of five tokens
            std::vector<std::uint32_t> ends;
            for (std::uint64_t token = 0; token < tokens; ++token) {
                const std::uint64_t begin = token % seq / 5 * 5;
                ends.push_back(static_cast<std::uint32_t>(begin));
                ends.push_back(static_cast<std::uint32_t>(std::min(begin + 5, seq)));
            }
            device_->upload(documents.buffer, std::as_bytes(std::span(ends)));
            const TensorView table = tensor(DType::F32, {seq, rope / 2, 2});
            const TensorView up = tensor(act, {tokens, heads, qk - rope});
            const TensorView k_rope = tensor(act, {tokens, rope});
            run([&](Recording& r) {
                ops::AttentionOptions options{.seq = seq, .scale = 0.125f};
                ops::attention_forward(r, q, k, v, o, lse, options);
                ops::attention_dgrad(r, o, q, k, v, o, lse, d, options, workspace);
                options.documents = documents;
                ops::attention_forward(r, q, k, v, o, lse, options);
                ops::attention_dgrad(r, o, q, k, v, o, lse, d, options, workspace);
                ops::rope_forward(r, k_rope, table, k_rope, seq);
                ops::rope_dgrad(r, k_rope, table, k_rope, seq);
                ops::mla_keys_forward(r, up, k_rope, k);
                ops::mla_keys_dgrad(r, k, up, k_rope);
                ops::copy(r, q, k, true);
            });
        }
}

TEST_F(GuardPages, PagedCache) {
    const std::uint64_t blocks = 3, heads = 6, tokens = blocks * ops::kCacheBlock;
    const std::vector<std::uint32_t> table{2, 0, 1}, pair{0, 1};
    std::vector<std::uint32_t> all(tokens);
    std::iota(all.begin(), all.end(), 0u);
    const auto words = [&](const std::vector<std::uint32_t>& values,
                           std::initializer_list<std::uint64_t> extents) {
        const TensorView view = tensor(DType::U32, extents);
        device_->upload(view.buffer, std::as_bytes(std::span(values)));
        return view;
    };
    const std::vector<ops::PagedQueries> queries{{3, 192, 0}, {2, 0, 0}, {1, 65, 0}};
    const std::uint64_t rows = 6;
    std::string units; // the class that has such
    for (const GemmClass& c : gemm_classes(*device_))
        if (c.why_not.empty() && c.units != GemmClass::Units::None)
            units = c.name;
    enum class Form { Lanes, Shared, Units };
    for (const Form form : {Form::Lanes, Form::Shared, Form::Units})
        for (const DType stored : {DType::F32, DType::BF16, DType::F8E4M3}) {
            const DType act = stored == DType::F32 ? DType::F32 : DType::BF16;
            if (form == Form::Units && units.empty())
                continue;
            use_gemm_class(*device_, form == Form::Units ? units : "f32-sequential");
            ops::share_paged_entries(*device_, form == Form::Shared);
            const ops::PagedPlan plan = ops::plan_paged_attention(queries, 2, 2);
            const ops::PagedWork work{.capacity = {rows, plan.num_items(), plan.partials},
                                      .items = words(plan.items, {plan.items.size()}),
                                      .rows = words(plan.rows, {rows, ops::PagedPlan::kRowWords}),
                                      .tables = words(table, {1, blocks})};
            const TensorView places = words(all, {tokens}), pairs = words(pair, {1, 2});
            const TensorView lse = tensor(DType::F32, {rows, heads});
            const BufferView workspace =
                bytes(ops::paged_attention_workspace_bytes(work.capacity, heads, 128));
            const ops::CacheShape latents{
                .dtype = stored, .latent = 128, .rope = 32}; // whole entries in any type
            const ops::PagedCache cache{latents, blocks, bytes(ops::cache_bytes(latents, blocks))};
            const TensorView latent = tensor(act, {tokens, 128}), key = tensor(act, {tokens, 32}),
                             kv = tensor(act, {tokens, 160}), gain = tensor(act, {128}),
                             turns = tensor(DType::F32, {tokens, 16, 2}),
                             q = tensor(act, {rows, heads, 160}),
                             o = tensor(act, {rows, heads, 128});
            run([&](Recording& r) {
                ops::cache_append_latent(r, cache, latent, key, places);
                ops::cache_append_normalised_latent(r, cache, kv, gain, 1e-5F, turns, places,
                                                    places);
                ops::cache_copy_blocks(r, cache, pairs);
                ops::cache_gather_latent(r, cache, places, latent, key);
                ops::paged_attention(r, q, cache, work, o, lse, 0.125f, workspace);
            });
            EXPECT_EQ(ops::paged_matrix_tile(*device_, latents, act).has_value(),
                      form == Form::Units && stored != DType::F32);
            if (stored == DType::F8E4M3)
                continue;
            const ops::CacheShape of_heads{.form = ops::CacheShape::Form::Heads,
                                           .dtype = stored,
                                           .kv_heads = 2,
                                           .qk_dim = 48,
                                           .v_dim = 16};
            const ops::PagedCache second{of_heads, blocks,
                                         bytes(ops::cache_bytes(of_heads, blocks))};
            const TensorView keys = tensor(act, {tokens, 2, 48}),
                             values = tensor(act, {tokens, 2, 16}),
                             q2 = tensor(act, {rows, heads, 48}),
                             o2 = tensor(act, {rows, heads, 16}),
                             angles = tensor(DType::F32, {tokens, 24, 2});
            run([&](Recording& r) {
                ops::rope_at(r, keys, angles, places, keys);
                ops::cache_append_heads(r, second, keys, values, places);
                ops::cache_append_rotated_heads(r, second, keys, values, angles, places, places);
                ops::cache_gather_heads(r, second, places, keys, values);
                ops::paged_attention(r, q2, second, work, o2, {}, 0.125f, workspace);
            });
        }
    use_gemm_class(*device_, "");
}

TEST_F(GuardPages, EmbeddingAndLoss) {
    for (const std::uint64_t tokens : {1u, 6u, 90u}) {
        const std::uint64_t vocab = 12, columns = 64;
        const std::uint64_t aligned = (tokens + 3) / 4 * 4; // ids are read by four
        const TensorView ids = tensor(DType::U32, {aligned}, vocab).rows(0, tokens);
        const TensorView table = tensor(DType::F32, {vocab, columns});
        const TensorView d_table = tensor(DType::F32, {vocab, columns});
        const TensorView embedded = tensor(DType::F32, {tokens, columns});
        const BufferView workspace =
            bytes((ops::embedding_wgrad_workspace_bytes(tokens) + 15) / 16 * 16);
        const TensorView logits = tensor(DType::F32, {tokens, vocab});
        const TensorView targets = tensor(DType::U32, {tokens}, vocab);
        const TensorView loss = tensor(DType::F32, {tokens});
        run([&](Recording& r) {
            ops::embedding_forward(r, ids, table, embedded);
            ops::embedding_wgrad(r, ids, embedded, d_table, false, workspace);
            ops::cross_entropy(r, logits, targets, loss, logits, 0.5f);
        });
    }
}

TEST_F(GuardPages, Transposition) {
    for (const DType dtype : {DType::F32, DType::BF16}) {
        const TensorView x = tensor(dtype, {3, 36, 68}), y = tensor(dtype, {3, 68, 36});
        const TensorView wide = tensor(dtype, {4, 204}), tall = tensor(dtype, {204, 4});
        run([&](Recording& r) {
            ops::transpose(r, x, y);
            ops::transpose(r, wide, tall);
            ops::transpose(r, tall, wide);
        });
    }
}

TEST_F(GuardPages, OptimiserAndReductions) {
    for (const std::uint64_t count : {4u, 4096u, 4100u, 20'000u}) {
        const TensorView weight = tensor(DType::F32, {count}),
                         gradient = tensor(DType::F32, {count});
        const TensorView m = tensor(DType::BF16, {count}), v = tensor(DType::F32, {count});
        const TensorView v16 = tensor(DType::BF16, {count}), copy = tensor(DType::BF16, {count});
        const TensorView scalars = tensor(DType::F32, {3}), clip = tensor(DType::F32, {2});
        const TensorView partials = tensor(DType::F32, {ops::num_partials(count)});
        const BufferView workspace =
            bytes(ops::sum_pairs_workspace_bytes(ops::num_partials(count)));
        run([&](Recording& r) {
            ops::sum_squares_partials(r, gradient, partials);
            ops::sum_pairs(r, partials, clip, workspace);
            ops::clip_coefficient(r, clip, clip, 1.0f);
            ops::adamw(r, weight, gradient, m, v16, copy, scalars, clip, {});
            ops::adamw(r, weight, gradient, v, weight, {}, scalars, {}, {});
            ops::cast(r, weight, copy);
            ops::add(r, m, v16, copy);
            ops::scale(r, weight, v, 2);
            ops::copy_bytes(r, weight.buffer, v.buffer);
        });
    }
}

} // namespace
} // namespace bellows
