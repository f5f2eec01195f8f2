// SPDX-License-Identifier: MIT

// Experts in slots: whatever slots of whatever ranks hold them, and however often, results and
// gradients have the same bits with sums of each choice; and a rank whose experts are all held by
// others, too, is not missed.

#include "exchange_case.hpp"
#include "support/mpi_test.hpp"
#include "support/test_device.hpp"
#include "support/transport_options.hpp"

#include <bellows/comm/expert_exchange.hpp>
#include <bellows/comm/mpi_interop.hpp>

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace bellows {
namespace {

using testing::ExchangeCase;
using testing::ExchangeInput;
using testing::held;
using testing::mixed;
using testing::world;
using Placement = std::vector<std::int32_t>;

struct PlacementCase {
    const char* name;
    DType dtype = DType::F32;
    ExchangeLayout layout = ExchangeLayout::ExpertMajor;
    bool low_latency = false, codes = false;
    int ranks_per_node = 0;
    bool exact = false; ///< sums along the tree over experts
};

void PrintTo(const PlacementCase& c, std::ostream* out) {
    *out << c.name;
}

constexpr std::uint64_t kExperts = 7, kTopK = 3, kHidden = 136, kSpare = 2;

class PlacementRig {
public:
    explicit PlacementRig(const PlacementCase& c)
        : c_(c), nodes_(c.ranks_per_node > 0 ? joined(c.ranks_per_node) : nullptr),
          device_(testing::make_device()),
          transport_(open_transport(ranks(), testing::transport_options(*device_, false))),
          thread_(std::make_unique<HostThread>(*device_, "network")),
          exchange_(
              std::make_unique<ExpertExchange>(*device_, ranks(), *transport_, *thread_, config())),
          handle_(exchange_->create_handle("batch")), input_(world().rank(), input_case(c.dtype)) {
        x_ = tensor(c.dtype, {input_.tokens, kHidden});
        ids_ = tensor(DType::I32, {input_.tokens, kTopK});
        weights_ = tensor(DType::F32, {input_.tokens, kTopK});
        out_ = tensor(c.dtype, {input_.tokens, kHidden});
        d_x_ = tensor(c.dtype, {input_.tokens, kHidden});
        d_weights_ = tensor(DType::F32, {input_.tokens, kTopK});
        results_ = tensor(c.dtype, {handle_->capacity(), kHidden});
        d_rows_ = tensor(DType::F32, {handle_->capacity()});
        upload(x_, stored(input_.x));
        upload(ids_, bytes_of(input_.ids));
        upload(weights_, bytes_of(input_.weights));
    }

    static std::uint64_t num_ranks() { return static_cast<std::uint64_t>(world().size()); }
    static std::uint64_t slots_per_rank() {
        return (kExperts + num_ranks() - 1) / num_ranks() + kSpare;
    }
    ExpertExchange& exchange() { return *exchange_; }

    /// All that comes back: sums and, where there is a way back, gradients of tokens and weights.
    std::vector<std::byte> run(const Placement& placement, std::uint64_t number = 0) {
        if (!placement.empty())
            exchange_->set_placement(placement, number);
        handle_->use_placement(number);
        exchange_->dispatch(*handle_, x_, ids_, weights_).wait();
        make_results(exchange_->placement(number));
        exchange_
            ->combine(*handle_, results_, out_,
                      CombineOptions{.weighted = !c_.low_latency, .bias = x_})
            .wait();
        std::vector<std::byte> all = download(out_);
        if (c_.low_latency)
            return all;
        exchange_->combine_backward(*handle_, x_).wait();
        exchange_->dispatch_backward(*handle_, results_, d_rows_, d_x_, false, d_weights_).wait();
        for (const TensorView& view : {d_x_, d_weights_}) {
            const std::vector<std::byte> more = download(view);
            all.insert(all.end(), more.begin(), more.end());
        }
        return all;
    }

    /// What out has to be, by the definition.
    std::vector<std::byte> expected_sums() const {
        std::vector<float> sums = input_.x;
        for (std::uint64_t i = 0; c_.exact && i < sums.size(); ++i)
            if (const auto sum = tree_sum(i / kHidden, i % kHidden, 0, std::bit_ceil(kExperts)))
                sums[i] += *sum;
        if (c_.exact)
            return stored(sums);
        for (std::uint64_t t = 0; t < input_.tokens; ++t)
            for (std::uint64_t k = 0; k < kTopK; ++k)
                if (const std::int32_t expert = input_.ids[t * kTopK + k]; expert >= 0)
                    for (std::uint64_t c = 0; c < kHidden; ++c) {
                        const float row = made(input_.x[t * kHidden + c], expert);
                        sums[t * kHidden + c] +=
                            held(c_.dtype, 0 + input_.weights[t * kTopK + k] * row);
                    }
        return stored(sums);
    }

    /// Of a token's choices among `count` experts from `first` on.
    std::optional<float> tree_sum(std::uint64_t token, std::uint64_t column, std::uint64_t first,
                                  std::uint64_t count) const {
        if (count > 1) {
            const auto low = tree_sum(token, column, first, count / 2),
                       high = tree_sum(token, column, first + count / 2, count / 2);
            return low && high ? std::optional(*low + *high) : low ? low : high;
        }
        for (std::uint64_t k = 0; k < kTopK; ++k)
            if (input_.ids[token * kTopK + k] == static_cast<std::int64_t>(first))
                return input_.weights[token * kTopK + k] *
                       made(input_.x[token * kHidden + column], static_cast<std::int32_t>(first));
        return std::nullopt;
    }

    /// As they would be on their own ranks, and to each slot that is left an expert that its rank
    /// does not have; some stay empty.
    static Placement shuffled(std::uint64_t seed, bool replicas) {
        const std::uint64_t slots = slots_per_rank(), ranks = num_ranks();
        Placement placement(ranks * slots, -1);
        std::vector<std::uint64_t> order(placement.size());
        std::iota(order.begin(), order.end(), 0);
        for (std::uint64_t i = order.size(); i > 1; --i)
            std::swap(order[i - 1], order[mixed(seed, 0, i) % i]);
        for (std::uint64_t expert = 0; expert < kExperts; ++expert)
            placement[order[expert]] = static_cast<std::int32_t>(expert);
        for (std::uint64_t i = kExperts; i < order.size() && replicas; ++i) {
            const auto rank =
                placement.begin() + static_cast<std::ptrdiff_t>(order[i] / slots * slots);
            const auto expert = static_cast<std::int32_t>(mixed(seed, 1, i) % kExperts);
            if (std::find(rank, rank + static_cast<std::ptrdiff_t>(slots), expert) ==
                rank + static_cast<std::ptrdiff_t>(slots))
                placement[order[i]] = expert;
        }
        return placement;
    }

private:
    World& ranks() const { return nodes_ ? *nodes_ : world(); }
    static std::unique_ptr<World> joined(int ranks_per_node) {
        WorldOptions options;
        options.ranks_per_node = ranks_per_node;
        return std::make_unique<World>(join_world(MPI_COMM_WORLD, options));
    }
    static ExchangeCase input_case(DType dtype) {
        ExchangeCase c;
        c.dtype = dtype;
        c.hidden = kHidden;
        c.experts = kExperts;
        c.top_k = kTopK;
        c.max_tokens = 40;
        c.exact = true; // fractions: their sums depend on the order
        return c;
    }
    ExchangeConfig config() const {
        ExchangeConfig config;
        config.num_experts = kExperts;
        config.slots_per_rank = slots_per_rank();
        config.placements = 2;
        config.top_k = kTopK;
        config.hidden = kHidden;
        config.max_tokens = input_case(c_.dtype).max_tokens;
        config.dtype = c_.dtype;
        config.layout = c_.layout;
        config.alignment = c_.layout == ExchangeLayout::ExpertMajor && !c_.low_latency ? 4 : 1;
        config.sums = c_.exact ? ExchangeSums::ExactPerChoice : ExchangeSums::PerChoice;
        if (c_.low_latency)
            config.mode = ExchangeMode::LowLatency;
        if (c_.codes)
            config.token_wire = DType::F8E4M3;
        return config;
    }
    float made(float x, std::int32_t expert) const {
        return held(c_.dtype, x * (1 + static_cast<float>(expert) / 3));
    }

    TensorView tensor(DType dtype, std::initializer_list<std::uint64_t> extents) {
        std::uint64_t elements = 1;
        for (const std::uint64_t extent : extents)
            elements *= extent;
        buffers_.push_back(std::make_unique<Buffer>(
            *device_, BufferDesc{.name = "tensor",
                                 .bytes = std::max<std::uint64_t>(elements * size_of(dtype), 16)}));
        return buffers_.back()->tensor(dtype, extents);
    }
    std::vector<std::byte> stored(const std::vector<float>& values) const {
        const std::uint64_t size = size_of(c_.dtype);
        std::vector<std::byte> bytes(values.size() * size);
        for (std::size_t i = 0; i < values.size(); ++i) {
            const std::uint32_t word = std::bit_cast<std::uint32_t>(held(c_.dtype, values[i])) >>
                                       (c_.dtype == DType::BF16 ? 16 : 0);
            std::memcpy(&bytes[i * size], &word, size);
        }
        return bytes;
    }
    template <class T>
    static std::vector<std::byte> bytes_of(const std::vector<T>& values) {
        const auto bytes = std::as_bytes(std::span(values));
        return {bytes.begin(), bytes.end()};
    }
    void upload(const TensorView& to, const std::vector<std::byte>& bytes) {
        if (!bytes.empty())
            device_->upload(to.buffer.sub(0, bytes.size()), std::span(bytes));
    }
    std::vector<std::byte> download(const TensorView& from) const {
        std::vector<std::byte> bytes(from.num_bytes());
        if (!bytes.empty())
            device_->download(from.buffer.sub(0, bytes.size()), std::span(bytes));
        return bytes;
    }
    template <class T>
    std::vector<T> words(const TensorView& from) const {
        const std::vector<std::byte> bytes = download(from);
        std::vector<T> values(bytes.size() / sizeof(T));
        std::memcpy(values.data(), bytes.data(), bytes.size());
        return values;
    }

    /// What each slot's expert makes of the rows that have come for it, and of their weights.
    void make_results(std::span<const std::int32_t> placement) {
        const TensorView rows = handle_->rows();
        const auto counts = words<std::uint32_t>(handle_->expert_counts());
        std::vector<std::uint32_t> offsets;
        if (!c_.low_latency)
            offsets = words<std::uint32_t>(handle_->expert_offsets());
        const std::uint64_t slots = exchange_->num_local_experts();
        std::vector<float> results(handle_->capacity() * kHidden), of_rows(handle_->capacity());
        std::vector<std::int32_t> places;
        std::uint64_t used = 0;
        for (std::uint64_t slot = 0; slot < slots; ++slot)
            used = std::max<std::uint64_t>(used, first_row(offsets, slot) + counts[slot]);
        if (c_.layout == ExchangeLayout::ExpertSlots && used > 0) {
            places.resize(used);
            device_->download(handle_->row_slots().buffer.sub(0, used * 4),
                              std::as_writable_bytes(std::span(places)));
        }
        // No more than has come: the memory is bound for that.
        std::uint64_t places_used = places.empty() ? used : 0;
        for (const std::int32_t place : places)
            places_used = std::max(places_used, static_cast<std::uint64_t>(place) / kTopK + 1);
        const std::uint64_t step = rows.stride[0] * size_of(rows.dtype);
        std::vector<std::byte> arrived(
            places_used == 0 ? 0 : (places_used - 1) * step + kHidden * size_of(rows.dtype));
        if (!arrived.empty())
            device_->download(rows.buffer.sub(0, arrived.size()), std::span(arrived));
        for (std::uint64_t slot = 0; slot < slots; ++slot) {
            const std::int32_t expert =
                placement[static_cast<std::uint64_t>(world().rank()) * slots + slot];
            EXPECT_TRUE(expert >= 0 || counts[slot] == 0);
            for (std::uint64_t i = 0; i < counts[slot]; ++i) {
                const std::uint64_t row = first_row(offsets, slot) + i;
                const std::uint64_t place =
                    places.empty() ? row : static_cast<std::uint64_t>(places[row]) / kTopK;
                const std::byte* const from = &arrived[place * step];
                for (std::uint64_t c = 0; c < kHidden; ++c)
                    results[row * kHidden + c] = made(element(from, c), expert);
                of_rows[row] = results[row * kHidden] + static_cast<float>(expert);
            }
        }
        upload(results_, stored(results));
        upload(d_rows_, bytes_of(of_rows));
    }
    std::uint64_t first_row(const std::vector<std::uint32_t>& offsets, std::uint64_t slot) const {
        return c_.low_latency ? slot * handle_->spacing() : offsets[slot];
    }
    /// Codes: a number for each, whatever it stands for.
    float element(const std::byte* row, std::uint64_t column) const {
        if (c_.codes)
            return static_cast<float>(row[column]) / 3;
        std::uint32_t bits = 0;
        std::memcpy(&bits, row + column * size_of(c_.dtype), size_of(c_.dtype));
        return std::bit_cast<float>(bits << (c_.dtype == DType::BF16 ? 16 : 0));
    }

    const PlacementCase c_;
    std::unique_ptr<World> nodes_;
    std::unique_ptr<Device> device_;
    std::unique_ptr<Transport> transport_;
    std::unique_ptr<HostThread> thread_;
    std::unique_ptr<ExpertExchange> exchange_;
    std::unique_ptr<ExchangeHandle> handle_;
    std::vector<std::unique_ptr<Buffer>> buffers_;
    ExchangeInput input_;
    TensorView x_, ids_, weights_, out_, d_x_, d_weights_, results_, d_rows_;
};

class ExpertPlacements : public ::testing::TestWithParam<PlacementCase> {};

TEST_P(ExpertPlacements, DoNotChangeABit) {
    PlacementRig rig(GetParam());
    const std::vector<std::byte> plain = rig.run({});
    if (!GetParam().codes) {
        const std::vector<std::byte> sums = rig.expected_sums();
        ALL_RANKS_TRUE(std::equal(sums.begin(), sums.end(), plain.begin()));
    }
    for (std::uint64_t seed = 0; seed < 4; ++seed)
        ALL_RANKS_TRUE(rig.run(PlacementRig::shuffled(seed, seed % 2 == 1), seed / 2) == plain);
    ALL_RANKS_TRUE(rig.run({}) == plain); // by the first table once more
}

INSTANTIATE_TEST_SUITE_P(
    All, ExpertPlacements,
    ::testing::Values(
        PlacementCase{"rows_f32"}, PlacementCase{"rows_bf16", DType::BF16},
        PlacementCase{"slots_f32", DType::F32, ExchangeLayout::ExpertSlots},
        PlacementCase{"codes_bf16", DType::BF16, ExchangeLayout::ExpertSlots, false, true},
        PlacementCase{"nodes_f32", DType::F32, ExchangeLayout::ExpertMajor, false, false, 2},
        PlacementCase{"low_latency_f32", DType::F32, ExchangeLayout::ExpertMajor, true},
        PlacementCase{"low_latency_bf16", DType::BF16, ExchangeLayout::ExpertMajor, true},
        PlacementCase{"low_latency_codes", DType::BF16, ExchangeLayout::ExpertMajor, true, true},
        PlacementCase{"exact_f32", DType::F32, ExchangeLayout::ExpertMajor, true, false, 0, true},
        PlacementCase{"exact_bf16", DType::BF16, ExchangeLayout::ExpertMajor, true, false, 0,
                      true}),
    [](const auto& of) { return std::string(of.param.name); });

// The last rank's experts are held by others, too: without it nothing changes for them.
TEST(ExpertReplicas, StandInForARankThatIsMasked) {
    if (world().size() < 3)
        GTEST_SKIP() << "needs three ranks";
    PlacementRig rig({"low latency", DType::F32, ExchangeLayout::ExpertMajor, true});
    const std::uint64_t slots = PlacementRig::slots_per_rank(), ranks = PlacementRig::num_ranks();
    Placement placement(ranks * slots, -1);
    // All experts on the ranks before the last one, in turn, and some of them there as well.
    std::vector<std::uint64_t> filled(ranks, 0);
    for (std::uint64_t expert = 0; expert < kExperts; ++expert) {
        const std::uint64_t rank = expert % (ranks - 1);
        placement[rank * slots + filled[rank]++] = static_cast<std::int32_t>(expert);
    }
    for (std::uint64_t slot = 0; slot < slots; ++slot)
        placement[(ranks - 1) * slots + slot] = static_cast<std::int32_t>(slot);
    const std::vector<std::byte> whole = rig.run(placement);
    const int last = world().size() - 1;
    for (int rank = 0; rank < last; ++rank)
        rig.exchange().mask_rank(world().rank() == last ? rank : last);
    const std::vector<std::byte> without = rig.run({});
    ALL_RANKS_TRUE(world().rank() == last || without == whole);
    for (int rank = 0; rank < last; ++rank)
        rig.exchange().unmask_rank(world().rank() == last ? rank : last);
    ALL_RANKS_TRUE(rig.run({}) == whole);
}

} // namespace
} // namespace bellows
