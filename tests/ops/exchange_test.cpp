// SPDX-License-Identifier: MIT
// The kernels of the expert exchange in every form that a device may choose: all of them write what
// the narrowest one writes, which the tests of the exchange itself compare with sums on the host.

#include "support/op_test.hpp"

#include <bellows/kernels/kernels.hpp>

#include <bit>

namespace bellows {
namespace {

using testing::OpTensor;

/// Constants of the kernels.
struct Form {
    std::uint32_t local_size, wide, at_once = 4, parts = 1;
    bool words64 = false; ///< of bf16
};

constexpr Form kUsual{8, 1};

class OpsExchange : public testing::OpTest {
protected:
    static constexpr std::uint32_t kTokens = 45, kTopK = 3, kExperts = 7, kRanks = 3, kColumns = 72,
                                   kLocalExperts = 3, kRecords = kTokens * kTopK,
                                   kPresent = kRecords - 2, kFirstOwn = 20, kOwn = 31,
                                   kOwnPlace = 7, kBlockSlots = 30, kBlocks = 5;
    static_assert((kBlocks - 1) * kBlockSlots < kTokens * kTopK &&
                  kTokens * kTopK < kBlocks * kBlockSlots);

    void SetUp() override {
        std::vector<std::int64_t> chosen;
        for (std::uint32_t slot = 0; slot < kTokens * kTopK; ++slot)
            chosen.push_back(slot % 5 == 0 ? -1
                                           : static_cast<std::int64_t>((slot * slot) % kExperts));
        ids_ = tensor(DType::I32, {kTokens, kTopK}, chosen);
        weights_ = tensor(DType::F32, {kTokens, kTopK}, random(DType::F32, kRecords, 2, 0.1, 1));
        rank_ids_ = result(DType::I32, {kTokens, kTopK});
        route_counts_ = result(DType::U32, {kBlocks, kRanks});
        loads_ = result(DType::U32, {kBlocks, kExperts});
        run([&](Recording& r) {
            r.dispatch(kernels::ExchangeRoute{.constants = {.local_size = 8,
                                                            .counters = kRanks + kExperts},
                                              .topk_ids = ids_.view.buffer,
                                              .token_count = ids_.view.buffer,
                                              .origins = ids_.view.buffer,
                                              .rank_ids = rank_ids_.view.buffer,
                                              .route_counts = route_counts_.view.buffer,
                                              .loads = loads_.view.buffer,
                                              .tokens = kTokens,
                                              .top_k = kTopK,
                                              .experts = kExperts,
                                              .ranks = kRanks,
                                              .ranks_per_member = 1,
                                              .num_origins = 1,
                                              .routes = kRanks,
                                              .blocks = kBlocks,
                                              .block_slots = kBlockSlots},
                       {3});
        });
        sent_ = placed(rank_ids_, kTokens, kRanks, 1, sent_tensors_);
        std::vector<std::int64_t> received;
        for (std::uint32_t slot = 0; slot < kRecords * kTopK; ++slot)
            received.push_back(slot % 3 == 0 && slot / kTopK < kPresent
                                   ? static_cast<std::int64_t>(slot / 3 % kLocalExperts)
                                   : -1);
        received_ = placed(tensor(DType::I32, {kRecords, kTopK}, received), kRecords, kLocalExperts,
                           8, received_tensors_);
        record_count_ = tensor(DType::U32, {1}, std::vector<std::int64_t>{kPresent});
    }

    /// The layout of `ids` and the tensors that hold it.
    static ops::MoeLayout placed(const OpTensor& ids, std::uint64_t tokens, std::uint64_t experts,
                                 std::uint32_t alignment, std::vector<OpTensor>& keep) {
        const std::uint64_t capacity = ops::moe_capacity(tokens, kTopK, experts, alignment);
        keep.clear();
        keep.push_back(result(DType::U32, {experts}));
        keep.push_back(result(DType::U32, {experts + 1}));
        keep.push_back(result(DType::I32, {capacity}));
        keep.push_back(result(DType::I32, {tokens, std::uint64_t{kTopK}}));
        const ops::MoeLayout layout{keep[0], keep[1], keep[2], keep[3], alignment};
        const Buffer scratch = workspace(ops::moe_layout_workspace_bytes(tokens, kTopK, experts));
        run([&](Recording& r) { ops::moe_layout(r, ids, layout, scratch.view()); });
        return layout;
    }

    template <class K>
    static typename K::Variant variant(DType act, const Form& form) {
        if constexpr (requires { K::Variant::bf16_words64; })
            if (form.words64)
                return K::Variant::bf16_words64;
        return act == DType::BF16 ? K::Variant::bf16 : K::Variant::f32;
    }
    /// Words of a record of kColumns elements: hidden, ids, weights, padded to 16 bytes.
    static std::uint32_t hidden_words(DType act) {
        return static_cast<std::uint32_t>(kColumns * size_of(act) / 4);
    }
    static std::uint32_t record_words(DType act) {
        return (hidden_words(act) + 2 * kTopK + 3) / 4 * 4;
    }
    static std::uint32_t units(const Form& form) { return kColumns / 4 / form.wide; }
    static std::uint32_t record_units(DType act, const Form& form) {
        return static_cast<std::uint32_t>(record_words(act) / size_of(act) / form.wide);
    }
    static OpTensor records(DType act) {
        return result(DType::U32, {kRecords, std::uint64_t{record_words(act)}});
    }

    std::vector<std::uint32_t> packed(DType act, const Form& form, bool routing) const {
        const OpTensor x = activations(act, kTokens, 1), to = records(act);
        run([&](Recording& r) {
            using K = kernels::ExchangePack;
            r.dispatch(K{.variant = variant<K>(act, form),
                         .constants = {form.local_size, form.wide, form.at_once},
                         .x = x.view.buffer,
                         .topk_ids = ids_.view.buffer,
                         .token_count = ids_.view.buffer,
                         .topk_weights = weights_.view.buffer,
                         .slot_to_row = sent_.slot_to_row.buffer,
                         .records = to.view.buffer,
                         .words = to.view.buffer,
                         .tokens = kTokens,
                         .units = units(form),
                         .x_units = units(form),
                         .top_k = kTopK,
                         .record_units = record_units(act, form),
                         .record_words = record_words(act),
                         .hidden_words = hidden_words(act),
                         .experts = kExperts,
                         .ranks = kRanks,
                         .ranks_per_member = 1,
                         .has_routing = routing ? 1u : 0u},
                       {11, form.parts});
        });
        return read<std::uint32_t>(to);
    }

    std::vector<std::uint32_t> gathered(DType act, const Form& form) const {
        const OpTensor from = filled_records(act);
        const std::uint64_t capacity = received_.row_to_slot.extent[0];
        const OpTensor rows = result(act, {capacity, std::uint64_t{kColumns}});
        run([&](Recording& r) {
            using K = kernels::ExchangeGather;
            r.dispatch(K{.variant = variant<K>(act, form),
                         .constants = {form.local_size, form.wide, form.at_once},
                         .records = from.view.buffer,
                         .row_to_slot = received_.row_to_slot.buffer,
                         .slot_to_row = received_.slot_to_row.buffer,
                         .row_count = received_.row_count(),
                         .record_count = record_count_.view.buffer,
                         .out_rows = rows.view.buffer,
                         .rows = static_cast<std::uint32_t>(capacity),
                         .num_records = kRecords,
                         .units = units(form),
                         .top_k = kTopK,
                         .record_units = record_units(act, form)},
                       {11, form.parts});
        });
        return bits(rows);
    }

    /// Own: of this rank's own tokens, which are kOwn records from kFirstOwn on and follow the
    /// others in what is returned, in the places in which they come back: from kOwnPlace on.
    std::vector<std::uint32_t> reduced(DType act, const Form& form, bool own = false) const {
        const OpTensor rows = activations(act, received_.row_to_slot.extent[0], 3),
                       scalars = tensor(DType::F32, {kRecords, std::uint64_t{kTopK}},
                                        random(DType::F32, kRecords * kTopK, 4)),
                       own_range = tensor(DType::U32, {3},
                                          std::vector<std::int64_t>{kFirstOwn, kOwn, kOwnPlace}),
                       to = records(act), own_to = records(act);
        run([&](Recording& r) {
            using K = kernels::ExchangeReduce;
            r.dispatch(K{.variant = variant<K>(act, form),
                         .constants = {form.local_size, form.wide},
                         .rows = rows.view.buffer,
                         .slot_to_row = received_.slot_to_row.buffer,
                         .slot_experts = received_.slot_to_row.buffer,
                         .slot_scalars = scalars.view.buffer,
                         .record_count = record_count_.view.buffer,
                         .records = to.view.buffer,
                         .words = to.view.buffer,
                         .own_range = own_range.view.buffer,
                         .own_records = own_to.view.buffer,
                         .own_words = own_to.view.buffer,
                         .num_records = kRecords,
                         .units = units(form),
                         .top_k = kTopK,
                         .record_units = record_units(act, form),
                         .record_words = record_words(act),
                         .hidden_words = hidden_words(act),
                         .has_scalars = 1,
                         .has_own = own ? 1u : 0u},
                       {11});
        });
        std::vector<std::uint32_t> all = read<std::uint32_t>(to);
        if (own)
            for (const std::uint32_t word : read<std::uint32_t>(own_to))
                all.push_back(word);
        return all;
    }

    std::vector<std::uint32_t> combined(DType act, const Form& form, bool accumulate) const {
        const OpTensor from = filled_records(act), out = activations(act, kTokens, 5),
                       scalars = result(DType::F32, {kTokens, std::uint64_t{kTopK}});
        run([&](Recording& r) {
            using K = kernels::ExchangeCombine;
            r.dispatch(K{.variant = variant<K>(act, form),
                         .constants = {form.local_size, form.wide},
                         .records = from.view.buffer,
                         .words = from.view.buffer,
                         .slot_to_row = sent_.slot_to_row.buffer,
                         .topk_ids = ids_.view.buffer,
                         .token_count = ids_.view.buffer,
                         .first_bias = out.view.buffer,
                         .second_bias = out.view.buffer,
                         .out_tokens = out.view.buffer,
                         .scalars = scalars.view.buffer,
                         .tokens = kTokens,
                         .units = units(form),
                         .out_units = units(form),
                         .top_k = kTopK,
                         .record_units = record_units(act, form),
                         .record_words = record_words(act),
                         .hidden_words = hidden_words(act),
                         .experts = kExperts,
                         .ranks = kRanks,
                         .ranks_per_member = 1,
                         .biases = 0,
                         .has_scalars = 1,
                         .accumulate = accumulate ? 1u : 0u},
                       {11});
        });
        std::vector<std::uint32_t> all = bits(out);
        for (const std::uint32_t word : bits(scalars))
            all.push_back(word);
        return all;
    }

    static OpTensor activations(DType act, std::uint64_t rows, std::uint64_t seed) {
        return tensor(act, {rows, std::uint64_t{kColumns}}, random(act, rows * kColumns, seed));
    }
    /// Records whose every word is a small number in either storage.
    static OpTensor filled_records(DType act) {
        const std::uint64_t count = kRecords * record_words(act);
        std::vector<std::int64_t> words;
        for (std::uint64_t i = 0; i < count; ++i)
            words.push_back(
                static_cast<std::int64_t>(0x3F803F80u + (i * 2654435761u >> 8) % 0x400000u));
        return tensor(DType::U32, {kRecords, std::uint64_t{record_words(act)}}, words);
    }
    static std::vector<std::uint32_t> bits(const TensorView& view) {
        std::vector<std::uint32_t> words;
        for (const float value : read(view))
            words.push_back(std::bit_cast<std::uint32_t>(value));
        return words;
    }

    /// Calls make(act, form) for the forms and compares; `spreads`: forms of spreading, too.
    template <class Make>
    static void compare(bool spreads, const Make& make) {
        for (const DType act : {DType::F32, DType::BF16}) {
            const auto expected = make(act, kUsual);
            std::vector<Form> forms = {{32, 1}, {64, 2}, {8, 2}};
            if (spreads)
                forms.insert(forms.end(), {{8, 1, 1, 3}, {32, 1, 7}, {64, 2, 4, 2}, {8, 2, 2, 2}});
            if (device().has_feature("int64"))
                forms.insert(forms.end(), {{8, 2, 4, 1, true}, {64, 2, 4, 1, true}});
            for (const Form& form : forms) {
                if (form.wide == 2 && act == DType::F32)
                    continue;
                SCOPED_TRACE(std::string(to_string(act)) + ", " + std::to_string(form.local_size) +
                             " invocations, wide " + std::to_string(form.wide) + ", at once " +
                             std::to_string(form.at_once) + ", parts " +
                             std::to_string(form.parts) +
                             (form.words64 ? ", in words of 64 bits" : ""));
                EXPECT_EQ(make(act, form), expected);
            }
        }
    }

    /// How many of each block's ids fall to each of `count`: [blocks, count].
    static std::vector<std::uint32_t> counts_of(const OpTensor& ids, std::uint64_t count,
                                                std::uint64_t blocks, std::uint64_t block_slots) {
        std::vector<std::uint32_t> counts(blocks * count);
        const auto all = read<std::int32_t>(ids);
        for (std::size_t slot = 0; slot < all.size(); ++slot)
            if (all[slot] >= 0)
                ++counts[slot / block_slots * count + static_cast<std::size_t>(all[slot])];
        return counts;
    }

    OpTensor ids_, rank_ids_, route_counts_, loads_;

private:
    OpTensor weights_, record_count_;
    ops::MoeLayout sent_, received_;
    std::vector<OpTensor> sent_tensors_, received_tensors_;
};

TEST_F(OpsExchange, EveryFormPacksTheSame) {
    for (const bool routing : {false, true})
        compare(true, [&](DType act, const Form& form) { return packed(act, form, routing); });
}

TEST_F(OpsExchange, RoutesAndLoadsAreCountedByBlocks) {
    EXPECT_EQ(read<std::uint32_t>(route_counts_),
              counts_of(rank_ids_, kRanks, kBlocks, kBlockSlots));
    EXPECT_EQ(read<std::uint32_t>(loads_), counts_of(ids_, kExperts, kBlocks, kBlockSlots));
}

TEST_F(OpsExchange, ReceivedChoicesAreCountedByBlocks) {
    const std::uint32_t kHidden = 4, kWords = kHidden + 2 * kTopK, kFirst = 2, kThere = 40;
    std::vector<std::int64_t> words(std::size_t{kTokens} * kWords, 1);
    std::vector<std::uint32_t> counts(std::size_t{kBlocks} * kLocalExperts);
    std::vector<std::int32_t> expected;
    for (std::uint32_t slot = 0; slot < kThere * kTopK; ++slot) {
        const std::uint32_t id = slot % 7 == 3 ? 0xFFFFFFFF : slot * slot % kExperts;
        const bool here = id - kFirst < kLocalExperts;
        words[slot / kTopK * kWords + kHidden + slot % kTopK] = static_cast<std::int32_t>(id);
        expected.push_back(here ? static_cast<std::int32_t>(id - kFirst) : -1);
        counts[slot / kBlockSlots * kLocalExperts + (here ? id - kFirst : 0)] += here ? 1 : 0;
    }
    const OpTensor records = tensor(DType::I32, {kTokens, kWords}, words),
                   there = tensor(DType::U32, {1}, std::vector<std::int64_t>{kThere}),
                   ids = result(DType::I32, {kTokens, kTopK}),
                   weights = result(DType::F32, {kTokens, kTopK}),
                   counted = result(DType::U32, {kBlocks, kLocalExperts});
    run([&](Recording& r) {
        r.dispatch(
            kernels::ExchangeUnpack{.constants = {.local_size = 8, .counters = kLocalExperts},
                                    .words = records.view.buffer,
                                    .record_count = there.view.buffer,
                                    .topk_ids = ids.view.buffer,
                                    .topk_weights = weights.view.buffer,
                                    .expert_counts = counted.view.buffer,
                                    .records = kTokens,
                                    .top_k = kTopK,
                                    .record_words = kWords,
                                    .hidden_words = kHidden,
                                    .first = kFirst,
                                    .experts = kLocalExperts,
                                    .blocks = kBlocks,
                                    .block_slots = kBlockSlots},
            {2});
    });
    auto made = read<std::int32_t>(ids);
    made.resize(expected.size());
    EXPECT_EQ(made, expected);
    EXPECT_EQ(read<std::uint32_t>(counted), counts);
}

TEST_F(OpsExchange, EveryFormGathersTheSame) {
    compare(true, [&](DType act, const Form& form) { return gathered(act, form); });
}

TEST_F(OpsExchange, EveryFormReducesTheSame) {
    compare(false, [&](DType act, const Form& form) { return reduced(act, form); });
}

TEST_F(OpsExchange, OwnRecordsAreReducedToTheirPlaces) {
    compare(false, [&](DType act, const Form& form) { return reduced(act, form, true); });
    for (const DType act : {DType::F32, DType::BF16}) {
        const std::vector<std::uint32_t> whole = reduced(act, kUsual),
                                         apart = reduced(act, kUsual, true);
        const std::uint64_t words = record_words(act), written = hidden_words(act) + kTopK;
        const auto record = [&](const std::vector<std::uint32_t>& of, std::uint64_t at) {
            const auto first = of.begin() + static_cast<std::ptrdiff_t>(at * words);
            return std::vector<std::uint32_t>(first, first + static_cast<std::ptrdiff_t>(written));
        };
        for (std::uint64_t at = 0; at < kPresent; ++at) {
            const bool own = at >= kFirstOwn && at < kFirstOwn + kOwn;
            EXPECT_EQ(record(apart, own ? kRecords + kOwnPlace + at - kFirstOwn : at),
                      record(whole, at))
                << at;
            if (own) {
                EXPECT_NE(record(apart, at), record(whole, at)) << at;
            }
        }
    }
}

TEST_F(OpsExchange, EveryFormCombinesTheSame) {
    for (const bool accumulate : {false, true})
        compare(false,
                [&](DType act, const Form& form) { return combined(act, form, accumulate); });
}

} // namespace
} // namespace bellows
