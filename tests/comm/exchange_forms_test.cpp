// SPDX-License-Identifier: MIT

// Every form in which rows travel and arrive (both layouts; as they are, or quantised with either
// kind of scales; f32 and bf16; from device memory, or through the host in pieces as on GPUs), to
// the bit: what is received, where, for whom; what comes back from the experts' own memory and from
// the caller's; both gradients.

#include "reference/compare.hpp"
#include "support/mpi_test.hpp"
#include "support/test_device.hpp"

#include <bellows/comm/expert_exchange.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

namespace bellows {
namespace {

using testing::make_device;
using testing::world;

constexpr std::uint64_t kExperts = 7, kTopK = 3;
constexpr std::uint32_t kAlignment = 4;

struct Case {
    ExchangeLayout layout;
    DType dtype;
    bool codes;
    fp8::ScaleRule scales;
    std::uint64_t hidden;
    bool staged = false;   ///< copied between device and host, in small pieces
    bool over_mpi = false; ///< and not through memory that ranks share
    bool low_latency = false;
};

/// What a rank hands in, the same wherever it is worked out.
struct Input {
    Input(int rank, std::uint64_t hidden, bool low_latency)
        : tokens(rank == 1 ? 0 : 90 + 13 * static_cast<std::uint64_t>(rank)) {
        for (std::uint64_t i = 0; i < tokens * hidden; ++i) {
            const std::uint64_t mixed = (i * 2654435761u + static_cast<std::uint64_t>(rank)) >> 7;
            // Small whole numbers: sums have the same bits in every order.
            x.push_back(static_cast<float>(mixed % 31) - 15);
        }
        for (std::uint64_t t = 0; t < tokens; ++t)
            for (std::uint64_t k = 0; k < kTopK; ++k) {
                const bool absent = (t + k) % 5 == 0 || t % 11 == 3;
                ids.push_back(absent ? -1 : static_cast<std::int32_t>((t * t + 2 * k) % kExperts));
                // All different; or small and whole, as they are multiplied with.
                const std::uint64_t slot = t * kTopK + k;
                weights.push_back(low_latency ? static_cast<float>(1 + slot % 4)
                                              : static_cast<float>(slot) / 64);
            }
    }

    std::uint64_t tokens;
    std::vector<float> x, weights;
    std::vector<std::int32_t> ids;
};

/// A received row: the token and, in ExpertMajor, the choice that it is for; token < 0: padding.
struct Origin {
    int rank = 0;
    std::int64_t token = -1;
    std::uint64_t k = 0;
};

class Rig {
public:
    explicit Rig(const Case& c)
        : c_(c), device_(make_device()),
          transport_(open_transport(world(), {.share_memory = !c.over_mpi})),
          thread_(std::make_unique<HostThread>(*device_, "network")),
          exchange_(std::make_unique<ExpertExchange>(*device_, world(), *transport_, *thread_,
                                                     config_of(c))),
          handle_(exchange_->create_handle("batch")) {
        for (int rank = 0; rank < world().size(); ++rank)
            inputs_.emplace_back(rank, c.hidden, c.low_latency);
        x_ = tensor(c.dtype, {mine().tokens, c.hidden}, mine().x);
        ids_ = tensor(DType::I32, {mine().tokens, kTopK}, mine().ids);
        weights_ = tensor(DType::F32, {mine().tokens, kTopK}, mine().weights);
        out_ = tensor(c.dtype, {mine().tokens, c.hidden}, {});
        d_weights_ = tensor(DType::F32, {mine().tokens, kTopK}, {});
        place();
    }

    bool by_tokens() const { return c_.layout == ExchangeLayout::RankMajor; }
    const Input& mine() const { return inputs_[static_cast<std::size_t>(world().rank())]; }
    ExchangeHandle& handle() { return *handle_; }

    void dispatch() { exchange_->dispatch(*handle_, x_, ids_, weights_).wait(); }
    ExpertExchange& exchange() { return *exchange_; }
    const TensorView& x() const { return x_; }
    const TensorView& out() const { return out_; }
    const TensorView& ids() const { return ids_; }
    const TensorView& weights() const { return weights_; }

    bool rows_arrived() const {
        return c_.codes ? codes_arrived() : values_arrived(handle_->rows());
    }
    bool gradients_arrived() {
        const bool ended = ends([&] { return exchange_->combine_backward(*handle_, x_); });
        return ended && values_arrived(handle_->d_results());
    }
    /// Whether a leg has ended when its time point is reached, even on a rank that gets nothing.
    bool ends(const std::function<TimePoint()>& leg) {
        const double before = exchange_->stats().seconds_waited;
        leg().wait();
        return exchange_->stats().seconds_waited > before;
    }
    bool told() const {
        std::vector<std::uint32_t> counts(exchange_->num_local_experts());
        std::vector<float> weights;
        std::vector<std::int32_t> experts;
        for (const Origin& row : rows_)
            for (std::uint64_t k = 0; k < kTopK; ++k) {
                const std::int32_t expert =
                    row.token < 0 || (!by_tokens() && k != row.k) ? -1 : local(row, k);
                experts.push_back(expert);
                if (expert >= 0)
                    ++counts[static_cast<std::size_t>(expert)];
                if (by_tokens() || k == 0)
                    weights.push_back(weight_of(row, by_tokens() ? k : row.k));
            }
        // Rows of RankMajor in low latency stand apart from each other.
        const auto at_places = [&]<class T>(const TensorView& view,
                                            const std::vector<T>& expected) {
            const std::uint64_t each = expected.size() / std::max<std::size_t>(rows_.size(), 1);
            std::vector<T> actual;
            for (const std::uint64_t place : places_) {
                const std::vector<T> row =
                    download<T>(view.buffer.sub(place * each * sizeof(T), each * sizeof(T)), each);
                actual.insert(actual.end(), row.begin(), row.end());
            }
            return actual == expected;
        };
        bool good = true;
        if (!by_tokens() || !c_.low_latency)
            good =
                download<std::uint32_t>(handle_->expert_counts().buffer, counts.size()) == counts;
        if (by_tokens() || !c_.low_latency)
            good = good && at_places(handle_->row_weights(), weights);
        if (by_tokens())
            good = good && at_places(handle_->row_experts(), experts);
        return good;
    }

    /// Rows that come back as they came: every token times the ranks, or experts, that it has.
    bool came_back(const TensorView& results, bool accumulate) {
        write_results(results);
        const bool ended =
            ends([&] { return exchange_->combine(*handle_, results, out_, accumulate); });
        return ended && summed(accumulate ? 2.0f : 1.0f);
    }
    bool gradients_came_back(const TensorView& results, const TensorView& d_row_weights) {
        write_results(results);
        std::vector<float> of_rows;
        for (const Origin& row : rows_)
            for (std::uint64_t k = 0; k < (by_tokens() ? kTopK : 1); ++k)
                of_rows.push_back(-2 * weight_of(row, by_tokens() ? k : row.k));
        upload(d_row_weights.buffer, of_rows);
        const bool ended = ends([&] {
            return exchange_->dispatch_backward(*handle_, results, d_row_weights, out_, false,
                                                d_weights_);
        });
        std::vector<float> expected = mine().weights;
        for (std::size_t i = 0; i < expected.size(); ++i)
            expected[i] *= mine().ids[i] < 0 ? 0 : -2;
        return ended && summed(1) &&
               download<float>(d_weights_.buffer, expected.size()) == expected;
    }

    TensorView caller_rows(DType dtype, std::uint64_t columns) {
        return tensor(dtype, {handle_->capacity(), columns}, {});
    }

private:
    static ExchangeConfig config_of(const Case& c) {
        ExchangeConfig config;
        config.num_experts = kExperts;
        config.top_k = kTopK;
        config.hidden = c.hidden;
        config.max_tokens = 90 + 13 * static_cast<std::uint64_t>(world().size());
        config.dtype = c.dtype;
        config.layout = c.layout;
        config.alignment = kAlignment;
        if (c.codes)
            config.token_wire = DType::F8E4M3;
        config.token_scales = c.scales;
        if (c.low_latency)
            config.mode = ExchangeMode::LowLatency;
        config.stage_always = c.staged;
        config.piece_bytes = c.staged ? 4096 : config.piece_bytes;
        return config;
    }

    /// Values as they are stored.
    std::vector<std::byte> stored(DType dtype, const std::vector<float>& values) const {
        std::vector<std::byte> bytes(values.size() * size_of(dtype));
        for (std::size_t i = 0; i < values.size(); ++i) {
            const std::uint16_t half = reference::bf16_bits(values[i]);
            if (dtype == DType::BF16)
                std::memcpy(&bytes[2 * i], &half, 2);
            else
                std::memcpy(&bytes[4 * i], &values[i], 4);
        }
        return bytes;
    }
    template <class T>
    TensorView tensor(DType dtype, std::initializer_list<std::uint64_t> extents,
                      const std::vector<T>& values) {
        std::uint64_t elements = 1;
        for (const std::uint64_t extent : extents)
            elements *= extent;
        buffers_.push_back(std::make_unique<Buffer>(
            *device_, BufferDesc{.name = "tensor",
                                 .bytes = std::max<std::uint64_t>(elements * size_of(dtype), 16)}));
        if constexpr (std::is_same_v<T, float>) {
            const std::vector<std::byte> bytes = stored(dtype, values);
            upload(buffers_.back()->view(), bytes);
        } else {
            upload(buffers_.back()->view(), values);
        }
        return buffers_.back()->tensor(dtype, extents);
    }
    TensorView tensor(DType dtype, std::initializer_list<std::uint64_t> extents,
                      std::initializer_list<float>) {
        return tensor(dtype, extents, std::vector<float>());
    }
    template <class T>
    void upload(BufferView view, const std::vector<T>& values) {
        if (!values.empty())
            device_->upload(view.sub(0, values.size() * sizeof(T)), std::span(values));
    }
    template <class T>
    std::vector<T> download(BufferView view, std::uint64_t count) const {
        std::vector<T> values(count);
        if (count > 0)
            device_->download(view.sub(0, count * sizeof(T)),
                              std::as_writable_bytes(std::span(values)));
        return values;
    }
    /// The rows that are there, without what stands between them.
    std::vector<std::byte> rows_of(const TensorView& view) const {
        const std::uint64_t bytes = view.extent[1] * size_of(view.dtype),
                            step = view.stride[0] * size_of(view.dtype);
        if (rows_.empty())
            return {};
        const auto all = download<std::byte>(view.buffer, places_.back() * step + bytes);
        std::vector<std::byte> dense;
        for (const std::uint64_t row : places_)
            dense.insert(dense.end(), all.begin() + static_cast<std::ptrdiff_t>(row * step),
                         all.begin() + static_cast<std::ptrdiff_t>(row * step + bytes));
        return dense;
    }

public:
    /// The values of the rows' tokens into a tensor of this shape.
    void write_results(const TensorView& view) {
        const std::vector<std::byte> values = stored(view.dtype, expected_values());
        const std::uint64_t bytes = view.extent[1] * size_of(view.dtype),
                            step = view.stride[0] * size_of(view.dtype);
        for (std::size_t row = 0; row < rows_.size(); ++row)
            device_->upload(view.buffer.sub(places_[row] * step, bytes),
                            std::span(values).subspan(row * bytes, bytes));
    }
    bool summed(float times) const {
        std::vector<float> expected = mine().x;
        for (std::uint64_t t = 0; t < mine().tokens; ++t)
            for (std::uint64_t c = 0; c < c_.hidden; ++c)
                expected[t * c_.hidden + c] =
                    copies(t) == 0 ? 0 : expected[t * c_.hidden + c] * times * copies(t);
        const std::vector<std::byte> bytes = stored(c_.dtype, expected);
        return download<std::byte>(out_.buffer, bytes.size()) == bytes;
    }

private:
    std::vector<float> expected_values() const {
        std::vector<float> values;
        for (const Origin& row : rows_)
            for (std::uint64_t c = 0; c < c_.hidden; ++c)
                values.push_back(row.token < 0 ? 0 : of(row).x[at(row) * c_.hidden + c]);
        return values;
    }
    bool values_arrived(const TensorView& view) const {
        return rows_of(view) == stored(c_.dtype, expected_values());
    }
    bool codes_arrived() const {
        const fp8::Quantized rows = handle_->quantized_rows();
        std::vector<std::byte> codes, scales;
        for (const Origin& row : rows_)
            for (std::uint64_t first = 0; first < c_.hidden; first += 128) {
                const std::uint64_t end = std::min(first + 128, c_.hidden);
                float amax = 0;
                for (std::uint64_t c = first; c < end && row.token >= 0; ++c)
                    amax = std::max(amax, std::abs(of(row).x[at(row) * c_.hidden + c]));
                float scale = 0;
                if (row.token >= 0)
                    scale = fp8::block_scale(fp8::Format::E4M3, c_.scales, amax);
                for (std::uint64_t c = first; c < end; ++c)
                    codes.push_back(static_cast<std::byte>(
                        row.token < 0 ? 0
                                      : fp8::encode(fp8::Format::E4M3,
                                                    of(row).x[at(row) * c_.hidden + c] *
                                                        fp8::inverse_scale(c_.scales, scale))));
                const auto* bytes = reinterpret_cast<const std::byte*>(&scale);
                scales.insert(scales.end(), bytes, bytes + 4);
            }
        return rows_of(rows.codes) == codes && rows_of(rows.scales) == scales;
    }
    const Input& of(const Origin& row) const { return inputs_[static_cast<std::size_t>(row.rank)]; }
    static std::uint64_t at(const Origin& row) { return static_cast<std::uint64_t>(row.token); }
    /// The local expert of a choice of the row's token, -1 for none.
    std::int32_t local(const Origin& row, std::uint64_t k) const {
        const std::int32_t expert = of(row).ids[at(row) * kTopK + k];
        const auto first = static_cast<std::int32_t>(exchange_->first_local_expert());
        const auto count = static_cast<std::int32_t>(exchange_->num_local_experts());
        return expert >= first && expert < first + count ? expert - first : -1;
    }
    float weight_of(const Origin& row, std::uint64_t k) const {
        return row.token < 0 || local(row, k) < 0 ? 0 : of(row).weights[at(row) * kTopK + k];
    }
    /// Rows of a token of this rank, everywhere, or the sum of their weights.
    float copies(std::uint64_t token) const {
        float count = 0;
        std::vector<int> owners;
        for (std::uint64_t k = 0; k < kTopK; ++k)
            if (const std::int32_t id = mine().ids[token * kTopK + k]; id >= 0) {
                const int owner = exchange_->owner(static_cast<std::uint64_t>(id));
                const bool known = std::find(owners.begin(), owners.end(), owner) != owners.end();
                if (c_.low_latency && !by_tokens())
                    count += mine().weights[token * kTopK + k];
                else
                    count += by_tokens() && known ? 0.0f : 1.0f;
                owners.push_back(owner);
            }
        return count;
    }

    void place() {
        const auto tokens = [&](const auto& each) {
            for (int rank = 0; rank < world().size(); ++rank)
                for (std::uint64_t t = 0; t < inputs_[static_cast<std::size_t>(rank)].tokens; ++t)
                    each(Origin{rank, static_cast<std::int64_t>(t), 0});
        };
        if (by_tokens()) {
            tokens([&](const Origin& row) {
                for (std::uint64_t k = 0; k < kTopK; ++k)
                    if (local(row, k) >= 0) {
                        places_.push_back(c_.low_latency ? static_cast<std::uint64_t>(row.rank) *
                                                                   exchange_->config().max_tokens +
                                                               static_cast<std::uint64_t>(row.token)
                                                         : rows_.size());
                        rows_.push_back(row);
                        return;
                    }
            });
            return;
        }
        for (std::uint64_t e = 0; e < exchange_->num_local_experts(); ++e) {
            std::uint64_t place = c_.low_latency ? e * handle_->spacing() : rows_.size();
            const auto add = [&](const Origin& row) {
                rows_.push_back(row);
                places_.push_back(place++);
            };
            tokens([&](Origin row) {
                for (row.k = 0; row.k < kTopK; ++row.k)
                    if (local(row, row.k) == static_cast<std::int32_t>(e))
                        add(row);
            });
            while (!c_.low_latency && rows_.size() % kAlignment != 0)
                add({});
        }
    }

    Case c_;
    std::unique_ptr<Device> device_;
    std::unique_ptr<Transport> transport_;
    std::unique_ptr<HostThread> thread_;
    std::unique_ptr<ExpertExchange> exchange_;
    std::unique_ptr<ExchangeHandle> handle_;
    std::vector<std::unique_ptr<Buffer>> buffers_;
    std::vector<Input> inputs_; ///< of every rank
    std::vector<Origin> rows_;
    std::vector<std::uint64_t> places_; ///< of rows_ in tensors
    TensorView x_, ids_, weights_, out_, d_weights_;
};

class ExchangeForms : public ::testing::TestWithParam<Case> {};
class LowLatencyForms : public ::testing::TestWithParam<Case> {};

TEST_P(ExchangeForms, ThereAndBackAndBothGradients) {
    Rig rig(GetParam());
    const DType dtype = GetParam().dtype;
    const TensorView results = rig.caller_rows(dtype, GetParam().hidden),
                     d_row_weights = rig.caller_rows(DType::F32, rig.by_tokens() ? kTopK : 1);
    const TensorView d_weights =
        rig.by_tokens() ? d_row_weights : d_row_weights.reshaped({rig.handle().capacity()});
    for (int round = 0; round < 2; ++round) {
        rig.dispatch();
        ALL_RANKS_TRUE(rig.rows_arrived());
        ALL_RANKS_TRUE(rig.told());
        ALL_RANKS_TRUE(rig.came_back(results, false));
        if (rig.by_tokens())
            ALL_RANKS_TRUE(rig.came_back(rig.handle().results(), true));
        ALL_RANKS_TRUE(rig.gradients_arrived());
        ALL_RANKS_TRUE(!rig.by_tokens() || rig.rows_arrived()); // they are still there
        ALL_RANKS_TRUE(rig.gradients_came_back(results, d_weights));
        if (rig.by_tokens())
            ALL_RANKS_TRUE(rig.gradients_came_back(rig.handle().results(), d_weights));
    }
}

// Two handles: while one's tokens are with their experts, the other's are on their way.
TEST_P(LowLatencyForms, StepsFlyUnderEachOther) {
    Rig rig(GetParam());
    const std::unique_ptr<ExchangeHandle> other = rig.exchange().create_handle("other");
    const TensorView results = rig.by_tokens()
                                   ? rig.handle().results()
                                   : rig.caller_rows(GetParam().dtype, GetParam().hidden);
    const TensorView other_results = rig.by_tokens() ? other->results() : results;
    rig.dispatch();
    ALL_RANKS_TRUE(rig.rows_arrived());
    ALL_RANKS_TRUE(rig.told());
    ALL_RANKS_TRUE(rig.came_back(results, false));
    const auto send = [&](ExchangeHandle& handle) {
        return rig.exchange().dispatch_send(handle, rig.x(), rig.ids(), rig.weights());
    };
    for (int round = 0; round < 3; ++round) {
        ExchangeHook first = send(rig.handle()), second = send(*other);
        first().wait();
        ALL_RANKS_TRUE(rig.rows_arrived());
        ExchangeHook back = rig.exchange().combine_send(rig.handle(), results, rig.out());
        second();
        back().wait();
        ALL_RANKS_TRUE(rig.summed(1));
        rig.write_results(other_results);
        rig.exchange().combine(*other, other_results, rig.out()).wait();
        ALL_RANKS_TRUE(rig.summed(1));
    }
}

std::vector<Case> all_cases() {
    std::vector<Case> cases;
    for (const ExchangeLayout layout : {ExchangeLayout::ExpertMajor, ExchangeLayout::RankMajor})
        for (const DType dtype : {DType::F32, DType::BF16}) {
            cases.push_back({layout, dtype, false, fp8::ScaleRule::PowerOfTwo, 40});
            cases.push_back({layout, dtype, true, fp8::ScaleRule::PowerOfTwo, 264});
            cases.push_back({layout, dtype, true, fp8::ScaleRule::F32, 40});
            const bool codes = layout == ExchangeLayout::RankMajor;
            for (const bool over_mpi : {false, true})
                cases.push_back(
                    {layout, dtype, codes, fp8::ScaleRule::PowerOfTwo, 264, true, over_mpi});
        }
    return cases;
}

std::vector<Case> low_latency_cases() {
    std::vector<Case> cases;
    for (const ExchangeLayout layout : {ExchangeLayout::ExpertMajor, ExchangeLayout::RankMajor})
        for (const DType dtype : {DType::F32, DType::BF16})
            for (const bool codes : {false, true})
                for (const bool staged : {false, true})
                    cases.push_back({layout, dtype, codes, fp8::ScaleRule::PowerOfTwo, 264, staged,
                                     false, true});
    return cases;
}

std::string name_of(const ::testing::TestParamInfo<Case>& info) {
    const Case& c = info.param;
    std::string name = c.layout == ExchangeLayout::RankMajor ? "RankMajor" : "ExpertMajor";
    if (c.low_latency)
        name += "LowLatency";
    name += c.dtype == DType::BF16 ? "Bf16" : "F32";
    if (c.codes)
        name += c.scales == fp8::ScaleRule::F32 ? "CodesF32Scales" : "Codes";
    if (c.staged)
        name += c.over_mpi ? "StagedOverMpi" : "Staged";
    return name;
}

INSTANTIATE_TEST_SUITE_P(All, ExchangeForms, ::testing::ValuesIn(all_cases()), name_of);
INSTANTIATE_TEST_SUITE_P(All, LowLatencyForms, ::testing::ValuesIn(low_latency_cases()), name_of);

ErrorCode code_of(const std::function<void()>& call) {
    try {
        call();
    } catch (const Error& error) {
        return error.code();
    }
    return ErrorCode::Internal;
}

TEST(ExchangeFormsAlone, WhatALayoutDoesNotHaveIsRefused) {
    const Case expert{ExchangeLayout::ExpertMajor, DType::F32, false, {}, 40};
    const Case rank{ExchangeLayout::RankMajor, DType::F32, true, {}, 40};
    Rig by_expert(expert), by_rank(rank);
    const auto refused = [](const auto& call) {
        return code_of([&] { static_cast<void>(call()); }) == ErrorCode::InvalidArgument;
    };
    EXPECT_TRUE(refused([&] { return by_expert.handle().results(); }));
    EXPECT_TRUE(refused([&] { return by_expert.handle().row_experts(); }));
    EXPECT_TRUE(refused([&] { return by_expert.handle().quantized_rows(); }));
    EXPECT_TRUE(refused([&] { return by_rank.handle().expert_offsets(); }));
    EXPECT_TRUE(refused([&] { return by_rank.handle().spacing(); }));
    Case fast = expert;
    fast.low_latency = true;
    Rig low_latency(fast);
    EXPECT_TRUE(refused([&] { return low_latency.handle().row_weights(); }));
    EXPECT_TRUE(refused([&] { return low_latency.handle().d_results(); }));
    EXPECT_TRUE(refused([&] { return low_latency.handle().expert_offsets(); }));
    EXPECT_TRUE(
        refused([&] { return low_latency.handle().add_row_tensor("more", DType::F32, 8); }));
    EXPECT_EQ(by_rank.handle().rows().dtype, DType::F8E4M3);
    EXPECT_EQ(by_rank.handle().quantized_rows().recipe.rule, fp8::ScaleRule::PowerOfTwo);
}

} // namespace
} // namespace bellows
