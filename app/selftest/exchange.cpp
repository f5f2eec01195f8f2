// SPDX-License-Identifier: MIT
// Expert exchange among the ranks of a world: what arrives, what comes back summed, and both
// backward passes, against what every rank can work out for all ranks on the host. Two handles are
// in flight and every job on the network's thread is delayed at random.
#include "app/selftest/rows.hpp"
#include "app/selftest/suite.hpp"
#include "verify/reference/fp8.hpp"

#include <bellows/comm/expert_exchange.hpp>

#include <algorithm>
#include <functional>
#include <memory>

namespace bellows::selftest {

namespace {

using namespace checks;

struct Case {
    const char* name;
    std::uint64_t experts, top_k, hidden;
    std::uint32_t alignment;
    DType dtype;
    int absent_percent;
    std::uint64_t (*tokens)(std::uint64_t rank);
    bool codes = false; ///< tokens and gradients travel to the experts as E4M3 with scales
};

const Case kCases[] = {
    {"even", 8, 2, 48, 1, DType::F32, 0, [](std::uint64_t) -> std::uint64_t { return 32; }},
    {"uneven, a rank without tokens", 7, 3, 40, 4, DType::F32, 15,
     [](std::uint64_t rank) -> std::uint64_t { return rank == 1 ? 0 : 13 + 8 * rank; }},
    {"one expert", 1, 1, 8, 1, DType::F32, 0, [](std::uint64_t) -> std::uint64_t { return 5; }},
    {"bf16, aligned", 16, 4, 64, 16, DType::BF16, 5,
     [](std::uint64_t rank) -> std::uint64_t { return 40 + rank; }},
    {"fp8 rows, aligned", 8, 4, 136, 16, DType::BF16, 5,
     [](std::uint64_t rank) -> std::uint64_t { return 24 + rank; }, true},
    {"fp8 rows to f32 results", 5, 2, 256, 1, DType::F32, 0,
     [](std::uint64_t rank) -> std::uint64_t { return 9 + 4 * rank; }, true},
};

/// What a rank hands in, the same wherever it is worked out.
struct Input {
    std::uint64_t tokens = 0;
    std::vector<float> x, d_out, weights;
    std::vector<float> x_there, d_out_there; ///< as the experts get them
    std::vector<std::int32_t> ids;
};

/// The values of rows' codes: E4M3 by blocks of 128 columns, power-of-two scales.
std::vector<float> through_codes(const std::vector<float>& rows, std::uint64_t columns) {
    constexpr auto kFormat = reference::Fp8Format::E4M3;
    std::vector<std::uint8_t> codes(rows.size());
    std::vector<float> values(rows.size());
    for (std::uint64_t row = 0; row < rows.size() / columns; ++row)
        for (std::uint64_t first = 0; first < columns; first += 128) {
            const std::uint64_t end = std::min(first + 128, columns);
            const float scale =
                reference::fp8_quantize_block(rows, columns, {row, row + 1, first, end}, kFormat,
                                              reference::Fp8Rule::PowerOfTwo, codes);
            for (std::uint64_t i = row * columns + first; i < row * columns + end; ++i)
                values[i] = static_cast<float>(reference::fp8_value(kFormat, codes[i]) *
                                               static_cast<double>(scale));
        }
    return values;
}

Input input_of(const Case& c, std::uint64_t rank, std::uint64_t handle) {
    Input in;
    in.tokens = c.tokens(rank);
    const std::uint64_t seed = 1000 * rank + 100 * handle;
    in.x = OpRig::random(c.dtype, in.tokens * c.hidden, seed + 1);
    in.d_out = OpRig::random(c.dtype, in.tokens * c.hidden, seed + 2);
    in.x_there = c.codes ? through_codes(in.x, c.hidden) : in.x;
    in.d_out_there = c.codes ? through_codes(in.d_out, c.hidden) : in.d_out;
    in.weights = reference::random_f32(in.tokens * c.top_k, seed + 3, 0, 1);
    reference::Random random(seed + 4);
    std::vector<std::int32_t> experts(c.experts);
    for (std::uint64_t t = 0; t < in.tokens; ++t) {
        for (std::size_t e = 0; e < experts.size(); ++e)
            experts[e] = static_cast<std::int32_t>(e);
        for (std::uint64_t k = 0; k < c.top_k; ++k) { // different experts of a token
            std::swap(experts[k], experts[k + random.below(c.experts - k)]);
            const bool absent = random.below(100) < static_cast<std::uint64_t>(c.absent_percent);
            in.ids.push_back(absent ? -1 : experts[k]);
        }
    }
    return in;
}

/// What this rank's stand-in for expert e multiplies rows with.
float factor_of(std::int32_t expert) {
    return 1 + static_cast<float>(expert) / 16;
}

float stored(float value, DType dtype) {
    return dtype == DType::BF16 ? reference::round_to_bf16(value) : value;
}

/// Where a received row comes from.
struct Origin {
    std::uint64_t rank, token, k;
    std::int32_t expert;
};

/// One handle of one rank: the device's side and the host's.
class Flight {
public:
    Flight(const Case& c, const OpRig& rig, ExpertExchange& exchange, std::uint64_t ranks,
           std::uint64_t rank, std::uint64_t number)
        : c_(c), rig_(rig), exchange_(exchange), rank_(rank),
          handle_(exchange.create_handle("handle " + std::to_string(number))) {
        for (std::uint64_t r = 0; r < ranks; ++r)
            inputs_.push_back(input_of(c, r, number));
        results_ = handle_->add_row_tensor("results", c.dtype, c.hidden);
        d_row_weights_ =
            handle_->add_row_tensor("row weights", DType::F32, 1).reshaped({handle_->capacity()});
        const Input& mine = inputs_[rank];
        x_ = rig.tensor(c.dtype, {mine.tokens, c.hidden}, mine.x);
        d_out_ = rig.tensor(c.dtype, {mine.tokens, c.hidden}, mine.d_out);
        ids_ = rig.tensor(DType::I32, {mine.tokens, c.top_k}, mine.ids);
        weights_ = rig.tensor(DType::F32, {mine.tokens, c.top_k}, mine.weights);
        out_ = rig.result(c.dtype, {mine.tokens, c.hidden});
        d_x_ = rig.result(c.dtype, {mine.tokens, c.hidden});
        d_weights_ = rig.result(DType::F32, {mine.tokens, c.top_k});
        place_rows();
    }

    TimePoint dispatch() { return exchange_.dispatch(*handle_, x_, ids_, weights_); }
    TimePoint combine() { return exchange_.combine(*handle_, results_, out_); }
    TimePoint combine_backward() { return exchange_.combine_backward(*handle_, d_out_); }
    TimePoint dispatch_backward() {
        return exchange_.dispatch_backward(*handle_, results_, d_row_weights_, d_x_, false,
                                           d_weights_);
    }

    void check_arrived(Check& check) const {
        if (exchange_.num_local_experts() > 0)
            check.exact("offsets", rig_.read<std::uint64_t>(handle_->expert_offsets()), starts_);
        std::vector<float> expected;
        for (const Origin& row : origins_)
            expected.push_back(inputs_[row.rank].weights[row.token * c_.top_k + row.k]);
        check.exact("row weights", scalars_of(handle_->row_weights()), expected);
        check.exact("dispatch", received(),
                    rows_from([](const Input& in) -> const auto& { return in.x_there; }));
    }

    /// Each row times its expert's factor, as the experts would leave it.
    void write_results(std::vector<float> values) const {
        for (std::size_t i = 0; i < values.size(); ++i)
            values[i] = stored(values[i] * factor_of(origins_[i / c_.hidden].expert), c_.dtype);
        write_rows(values);
    }
    /// Rows that have arrived, and their results' gradients.
    std::vector<float> received() const {
        return c_.codes ? rows_of(handle_->quantized_rows()) : rows_of(handle_->rows());
    }
    std::vector<float> received_gradients() const {
        return c_.codes ? rows_of(handle_->quantized_d_results()) : rows_of(handle_->d_results());
    }

    void check_combined(Check& check) const {
        check_sums(check, "combine", out_, inputs_[rank_].x_there);
    }

    void check_gradient_arrived(Check& check) const {
        check.exact("combine backward", received_gradients(),
                    rows_from([](const Input& in) -> const auto& { return in.d_out_there; }));
    }

    void write_row_weight_gradients() const {
        for (std::size_t i = 0; i < origins_.size(); ++i)
            rig_.write(d_row_weights_.rows(places_[i], 1),
                       std::vector<float>{weight_gradient(origins_[i])});
    }

    void check_returned(Check& check) const {
        check_sums(check, "dispatch backward", d_x_, inputs_[rank_].d_out_there);
        const Input& mine = inputs_[rank_];
        std::vector<float> expected;
        for (std::size_t i = 0; i < mine.ids.size(); ++i)
            expected.push_back(mine.ids[i] < 0 ? 0
                                               : weight_gradient({rank_, i / c_.top_k, i % c_.top_k,
                                                                  mine.ids[i]}));
        check.exact("gradient of the weights", rig_.read(d_weights_), expected);
    }

private:
    void place_rows() {
        const auto first = static_cast<std::int64_t>(exchange_.first_local_expert());
        const auto local = static_cast<std::int64_t>(exchange_.num_local_experts());
        starts_.push_back(0);
        for (std::int64_t e = first; e < first + local; ++e) {
            std::uint64_t place = starts_.back();
            for (std::uint64_t r = 0; r < inputs_.size(); ++r)
                for (std::size_t i = 0; i < inputs_[r].ids.size(); ++i)
                    if (inputs_[r].ids[i] == e) {
                        origins_.push_back(
                            {r, i / c_.top_k, i % c_.top_k, static_cast<std::int32_t>(e)});
                        places_.push_back(place++);
                    }
            starts_.push_back((place + c_.alignment - 1) / c_.alignment * c_.alignment);
        }
    }

    float weight_gradient(const Origin& row) const {
        return inputs_[row.rank].weights[row.token * c_.top_k + row.k] *
               static_cast<float>(row.expert + 2);
    }

    /// Present rows, without the padding between experts.
    std::vector<float> rows_of(const TensorView& view) const {
        std::vector<float> values;
        if (origins_.empty())
            return values;
        const auto all = rig_.read(view.rows(0, starts_.back()));
        for (const std::uint64_t place : places_)
            for (std::uint64_t i = 0; i < c_.hidden; ++i)
                values.push_back(all[place * c_.hidden + i]);
        return values;
    }
    /// The same of codes, as what they stand for.
    std::vector<float> rows_of(const fp8::Quantized& rows) const {
        std::vector<float> values;
        if (origins_.empty())
            return values;
        const std::uint64_t count = starts_.back(), stride = rows.codes.stride[0];
        std::vector<std::uint8_t> codes((count - 1) * stride + c_.hidden);
        rig_.device().download({rows.codes.buffer.resource, rows.codes.buffer.offset, codes.size()},
                               std::span<std::uint8_t>(codes));
        const auto scales = rig_.read(rows.scales.rows(0, count));
        const std::uint64_t each = rows.scales.extent[1];
        for (const std::uint64_t place : places_)
            for (std::uint64_t i = 0; i < c_.hidden; ++i)
                values.push_back(static_cast<float>(
                    reference::fp8_value(reference::Fp8Format::E4M3, codes[place * stride + i]) *
                    static_cast<double>(scales[place * each + i / 128])));
        return values;
    }
    std::vector<float> scalars_of(const TensorView& view) const {
        std::vector<float> values;
        if (origins_.empty())
            return values;
        const auto all = rig_.read(view.rows(0, starts_.back()));
        for (const std::uint64_t place : places_)
            values.push_back(all[place]);
        return values;
    }
    void write_rows(const std::vector<float>& values) const {
        if (origins_.empty())
            return;
        std::vector<float> all(starts_.back() * c_.hidden, 0.0f);
        for (std::size_t i = 0; i < values.size(); ++i)
            all[places_[i / c_.hidden] * c_.hidden + i % c_.hidden] = values[i];
        rig_.write(results_.rows(0, starts_.back()), all);
    }
    template <class Of>
    std::vector<float> rows_from(Of of) const {
        std::vector<float> values;
        for (const Origin& row : origins_) {
            const std::vector<float>& all = of(inputs_[row.rank]);
            const auto begin = all.begin() + static_cast<std::ptrdiff_t>(row.token * c_.hidden);
            values.insert(values.end(), begin, begin + static_cast<std::ptrdiff_t>(c_.hidden));
        }
        return values;
    }

    /// actual[t] is the sum of what the token's experts made of it. Sums are f32; in bf16 each
    /// rank's part is rounded on the wire and the result once more.
    void check_sums(Check& check, const char* part, const OpTensor& actual,
                    const std::vector<float>& values) const {
        const Input& mine = inputs_[rank_];
        std::vector<double> expected(values.size(), 0), magnitudes(values.size(), 0);
        for (std::size_t i = 0; i < values.size(); ++i)
            for (std::uint64_t k = 0; k < c_.top_k; ++k)
                if (const auto id = mine.ids[i / c_.hidden * c_.top_k + k]; id >= 0) {
                    const double term = stored(values[i] * factor_of(id), c_.dtype);
                    expected[i] += term;
                    magnitudes[i] += std::abs(term);
                }
        const double roundings =
            c_.dtype == DType::BF16
                ? 1.01 * reference::kBf16Epsilon * static_cast<double>(inputs_.size() + 1)
                : 0;
        const double relative =
            roundings + 2 * static_cast<double>(c_.top_k + 1) * reference::kF32Epsilon;
        check.elements(part, rig_.read(actual), expected, {mine.tokens, c_.hidden},
                       [&](std::size_t i, double) { return relative * magnitudes[i] + 1e-37; });
    }

    const Case& c_;
    const OpRig& rig_;
    ExpertExchange& exchange_;
    std::uint64_t rank_;
    std::unique_ptr<ExchangeHandle> handle_;
    std::vector<Input> inputs_; ///< of every rank
    std::vector<Origin> origins_;
    std::vector<std::uint64_t> places_; ///< row of each origin
    std::vector<std::uint64_t> starts_; ///< of each local expert, and the end
    TensorView results_, d_row_weights_;
    OpTensor x_, d_out_, ids_, weights_, out_, d_x_, d_weights_;
};

void check_case(Check& check, const Case& c, World& world, Device& device, Transport& transport) {
    const auto ranks = static_cast<std::uint64_t>(world.size());
    const auto rank = static_cast<std::uint64_t>(world.rank());
    check.begin_case(c.name);
    const OpRig rig(device);
    HostThread thread(device, "exchange");
    thread.delay_jobs(std::chrono::microseconds(500), 7 + rank);
    std::uint64_t most = 1;
    for (std::uint64_t r = 0; r < ranks; ++r)
        most = std::max(most, c.tokens(r));
    ExchangeConfig config{.num_experts = c.experts,
                          .top_k = c.top_k,
                          .hidden = c.hidden,
                          .max_tokens = most,
                          .dtype = c.dtype,
                          .alignment = c.alignment};
    if (c.codes)
        config.token_wire = config.gradient_wire = DType::F8E4M3;
    ExpertExchange exchange(device, world, transport, thread, config);
    Flight first(c, rig, exchange, ranks, rank, 0), second(c, rig, exchange, ranks, rank, 1);
    const auto both = [&](TimePoint (Flight::*call)()) {
        TimePoint a = (first.*call)(), b = (second.*call)();
        a.wait();
        b.wait();
    };
    both(&Flight::dispatch);
    for (const Flight* flight : {&first, &second}) {
        flight->check_arrived(check);
        flight->write_results(flight->received());
    }
    both(&Flight::combine);
    for (const Flight* flight : {&first, &second})
        flight->check_combined(check);
    both(&Flight::combine_backward);
    for (const Flight* flight : {&first, &second}) {
        flight->check_gradient_arrived(check);
        flight->write_results(flight->received_gradients());
        flight->write_row_weight_gradients();
    }
    both(&Flight::dispatch_backward);
    for (const Flight* flight : {&first, &second})
        flight->check_returned(check);
    device.wait_idle(); // the last sends may still be on their way
}

} // namespace

std::vector<Row> check_exchange(World& world, const DeviceOptions& options,
                                const std::string& fault) {
    const auto transport = open_transport(world);
    const auto device = Device::create(options);
    std::vector<Row> rows;
    const auto add = [&](const std::string& name, const std::function<bool(const Case&)>& wanted) {
        rows.push_back(run_row(
            "exchange", name_with_ranks(name, world), fault,
            [&](Check& check) {
                for (const Case& c : kCases)
                    if (wanted(c))
                        check_case(check, c, world, *device, *transport);
            },
            world.size() > 1));
    };
    for (const DType dtype : {DType::F32, DType::BF16})
        add(with_storage("dispatch and combine", dtype),
            [=](const Case& c) { return !c.codes && c.dtype == dtype; });
    add("dispatch and combine fp8", &Case::codes);
    return worst_of_ranks(world, std::move(rows));
}

} // namespace bellows::selftest
