// SPDX-License-Identifier: MIT
#include "permute/permutation.hpp"

#include <algorithm>

namespace bellows::bench {

namespace {

/// Of each token top_k different experts.
std::vector<std::int32_t> choose(const PermuteShape& shape) {
    reference::Random random(2);
    std::vector<std::int32_t> chosen;
    for (std::uint64_t t = 0; t < shape.tokens; ++t) {
        const auto own = static_cast<std::ptrdiff_t>(chosen.size());
        while (chosen.size() < (t + 1) * shape.top_k) {
            const auto expert = static_cast<std::int32_t>(random.below(shape.experts));
            if (std::find(chosen.begin() + own, chosen.end(), expert) == chosen.end())
                chosen.push_back(expert);
        }
    }
    return chosen;
}

/// A permutation with its layout on the device.
struct Placed : Permutation {
    explicit Placed(const Permutation& p)
        : Permutation(p), rows_of(p.layout(shape.tokens, shape.experts, kRowAlignment)) {
        const BufferView scratch = layout_scratch(shape.tokens, shape.experts);
        run([&](Recording& r) { ops::moe_layout(r, ids, rows_of, scratch); });
    }

    TensorView make_rows() const {
        return data.empty(act, {rows_of.row_to_slot.extent[0], shape.hidden});
    }
    TensorView gathered_rows() const {
        const TensorView rows = make_rows();
        run([&](Recording& r) { ops::moe_gather(r, x, rows_of, {}, rows); });
        return rows;
    }
    std::vector<double> row_of_slot() const { return data.read(rows_of.slot_to_row); }

    ops::MoeLayout rows_of;
};

std::string check_layout(const Permutation& p, const ops::MoeLayout& layout) {
    const auto row = p.data.read(layout.slot_to_row), slot_of = p.data.read(layout.row_to_slot);
    const auto first = p.data.read(layout.offsets), count = p.data.read(layout.counts);
    for (std::uint64_t slot = 0; slot < p.chosen.size(); ++slot) {
        const auto e = static_cast<std::uint64_t>(p.chosen[slot]);
        const bool inside = row[slot] >= first[e] && row[slot] < first[e] + count[e];
        if (!inside || slot_of[static_cast<std::uint64_t>(row[slot])] != static_cast<double>(slot))
            return "slot " + std::to_string(slot) + " stands in row " + std::to_string(row[slot]);
    }
    return "";
}

/// The first row and the last that no slot has are zeros.
std::string check_padding(const Placed& p, const TensorView& rows) {
    const auto slot = p.data.read(p.rows_of.row_to_slot);
    const auto end = slot.begin() + static_cast<std::ptrdiff_t>(p.num_rows(p.rows_of)),
               first = std::find(slot.begin(), end, -1.0);
    if (first == end)
        return "";
    const auto last =
        std::prev(std::find(std::make_reverse_iterator(end), slot.rend(), -1.0).base());
    for (const auto& padding : {first, last})
        if (std::string wrong = p.compare_row(
                "padding", rows, static_cast<std::uint64_t>(padding - slot.begin()), 0, 0);
            !wrong.empty())
            return wrong;
    return "";
}

Workload gather_rows(const Permutation& tokens, bool weighted) {
    const Placed p(tokens);
    const TensorView rows = p.make_rows(), weights = weighted ? p.weights : TensorView{};
    const auto verify = [=]() -> std::string {
        const auto row = p.row_of_slot();
        for (const std::uint64_t t : samples(p.shape.tokens))
            for (std::uint64_t slot = t * p.shape.top_k; slot < (t + 1) * p.shape.top_k; ++slot)
                if (const std::string wrong =
                        p.compare_row("row", rows, static_cast<std::uint64_t>(row[slot]),
                                      weighted ? p.factors[slot] : 1, t);
                    !wrong.empty())
                    return wrong;
        return check_padding(p, rows);
    };
    return {[=](Recording& r) { ops::moe_gather(r, p.x, p.rows_of, weights, rows); }, verify,
            bytes_of({p.x, p.rows_of.row_to_slot, weights}) + p.row_bytes(p.rows_of), 0};
}

/// Gathered and summed back, a token is itself times the sum of its weights.
Workload sum_rows(const Permutation& tokens, bool weighted) {
    const Placed p(tokens);
    const TensorView rows = p.gathered_rows(), weights = weighted ? p.weights : TensorView{},
                     y = p.data.empty(p.act, {p.shape.tokens, p.shape.hidden});
    const auto verify = [=]() -> std::string {
        for (const std::uint64_t t : samples(p.shape.tokens)) {
            double sum = 0;
            for (std::uint64_t slot = t * p.shape.top_k; slot < (t + 1) * p.shape.top_k; ++slot)
                sum += weighted ? p.factors[slot] : 1;
            if (const std::string wrong = p.compare_row("y", y, t, sum, t); !wrong.empty())
                return wrong;
        }
        return "";
    };
    return {[=](Recording& r) { ops::moe_unpermute(r, rows, p.rows_of, weights, y, false); },
            verify, p.slot_bytes() + bytes_of({p.rows_of.slot_to_row, weights, y}), 0};
}

Workload layout(const Permutation& p) {
    const ops::MoeLayout made = p.layout(p.shape.tokens, p.shape.experts, kRowAlignment);
    const BufferView scratch = p.layout_scratch(p.shape.tokens, p.shape.experts);
    return {[=](Recording& r) { ops::moe_layout(r, p.ids, made, scratch); },
            [=] { return check_layout(p, made); },
            bytes_of({p.ids, made.slot_to_row, made.row_to_slot}), 0};
}

Workload weights_dgrad(const Permutation& tokens) {
    const Placed p(tokens);
    const TensorView rows = p.gathered_rows(),
                     d_weights = p.data.empty(DType::F32, {p.shape.tokens, p.shape.top_k});
    const auto verify = [=]() -> std::string {
        const auto actual = p.data.read(d_weights);
        for (const std::uint64_t t : samples(p.shape.tokens)) {
            double squares = 0;
            for (const double value : p.row(p.x, t))
                squares += value * value;
            for (std::uint64_t slot = t * p.shape.top_k; slot < (t + 1) * p.shape.top_k; ++slot)
                if (const std::string wrong =
                        compare("d_weight", slot, actual[slot], squares, 1e-4);
                    !wrong.empty())
                    return wrong;
        }
        return "";
    };
    return {[=](Recording& r) { ops::moe_weights_dgrad(r, rows, p.rows_of, p.x, d_weights); },
            verify, p.slot_bytes() + bytes_of({p.x, p.rows_of.slot_to_row, d_weights}), 0};
}

Workload scalars_to_rows(const Permutation& tokens) {
    const Placed p(tokens);
    const TensorView values = p.data.empty(DType::F32, {p.rows_of.row_to_slot.extent[0]});
    const auto verify = [=]() -> std::string {
        const auto row = p.row_of_slot(), actual = p.data.read(values);
        for (std::uint64_t slot = 0; slot < row.size(); ++slot)
            if (const auto at = static_cast<std::uint64_t>(row[slot]);
                actual[at] != p.factors[slot])
                return compare("row_value", at, actual[at], p.factors[slot], 0);
        return "";
    };
    return {[=](Recording& r) { ops::moe_scalars_to_rows(r, p.weights, p.rows_of, values); },
            verify, bytes_of({p.weights, p.rows_of.row_to_slot, values}), 0};
}

Workload scalars_to_slots(const Permutation& tokens) {
    const Placed p(tokens);
    const TensorView rows = p.data.random(DType::F32, {p.rows_of.row_to_slot.extent[0]}),
                     values = p.data.empty(DType::F32, {p.shape.tokens, p.shape.top_k});
    const auto verify = [=]() -> std::string {
        const auto row = p.row_of_slot(), from = p.data.read(rows), actual = p.data.read(values);
        for (std::uint64_t slot = 0; slot < row.size(); ++slot)
            if (const double expected = from[static_cast<std::uint64_t>(row[slot])];
                actual[slot] != expected)
                return compare("slot_value", slot, actual[slot], expected, 0);
        return "";
    };
    return {[=](Recording& r) { ops::moe_scalars_to_slots(r, rows, p.rows_of, values); }, verify,
            bytes_of({rows, p.rows_of.slot_to_row, values}), 0};
}

constexpr PermuteOp kOps[] = {
    {"moe_layout", layout, false},
    {"moe_gather", [](const Permutation& p) { return gather_rows(p, false); }, true},
    {"moe_gather_dgrad", [](const Permutation& p) { return sum_rows(p, false); }, true},
    {"moe_unpermute", [](const Permutation& p) { return sum_rows(p, true); }, true},
    {"moe_unpermute_dgrad", [](const Permutation& p) { return gather_rows(p, true); }, true},
    {"moe_weights_dgrad", weights_dgrad, true},
    {"moe_scalars_to_rows", scalars_to_rows, false},
    {"moe_scalars_to_slots", scalars_to_slots, false},
    {"exchange_pack", exchange_pack, true},
    {"exchange_unpack", exchange_unpack, false},
    {"exchange_gather", exchange_gather, true},
    {"exchange_reduce", exchange_reduce, true},
    {"exchange_combine", exchange_combine, true},
};

} // namespace

std::span<const PermuteOp> permute_ops() {
    return kOps;
}

std::string name_of(const PermuteShape& s) {
    return std::to_string(s.tokens) + "x" + std::to_string(s.hidden) + "x" +
           std::to_string(s.experts) + "x" + std::to_string(s.top_k);
}

Permutation::Permutation(OpData& d, const PermuteShape& s, DType a)
    : data(d), shape(s), act(a), x(d.random(a, {s.tokens, s.hidden})),
      ids(d.empty(DType::I32, {s.tokens, s.top_k})),
      weights(d.random(DType::F32, {s.tokens, s.top_k}, 0, 1)), factors(d.read(weights)) {
    const std::vector<std::int32_t> experts = choose(s);
    d.device().upload(ids.buffer.sub(0, experts.size() * 4),
                      std::span<const std::int32_t>(experts));
    chosen.assign(experts.begin(), experts.end());
}

double Permutation::slot_bytes() const {
    return static_cast<double>(shape.tokens * shape.top_k * shape.hidden * size_of(act));
}

std::uint64_t Permutation::num_rows(const ops::MoeLayout& layout) const {
    return static_cast<std::uint64_t>(data.read(layout.offsets).back());
}

double Permutation::row_bytes(const ops::MoeLayout& layout) const {
    return static_cast<double>(num_rows(layout) * shape.hidden * size_of(act));
}

ops::MoeLayout Permutation::layout(std::uint64_t tokens, std::uint64_t experts,
                                   std::uint32_t alignment) const {
    const std::uint64_t capacity = ops::moe_capacity(tokens, shape.top_k, experts, alignment);
    return {.counts = data.empty(DType::U32, {experts}),
            .offsets = data.empty(DType::U32, {experts + 1}),
            .row_to_slot = data.empty(DType::I32, {capacity}),
            .slot_to_row = data.empty(DType::I32, {tokens, shape.top_k}),
            .alignment = alignment};
}

BufferView Permutation::layout_scratch(std::uint64_t tokens, std::uint64_t experts) const {
    return data.bytes(ops::moe_layout_workspace_bytes(tokens, shape.top_k, experts));
}

void Permutation::run(const std::function<void(Recording&)>& record) const {
    Recording recording(data.device(), QueueRole::Compute, "prepare");
    record(recording);
    data.device().submit(recording).wait();
}

std::vector<double> Permutation::row(const TensorView& rows, std::uint64_t index) const {
    return data.read(ops::slice(rows, 0, index, 1));
}

std::string Permutation::compare_row(const char* what, const TensorView& rows, std::uint64_t index,
                                     double factor, std::uint64_t token) const {
    const auto actual = row(rows, index), from = row(x, token);
    for (std::uint64_t c = 0; c < from.size(); ++c)
        if (const std::string wrong = compare(what, index * shape.hidden + c, actual[c],
                                              factor * from[c], tolerance(act), 0.01);
            !wrong.empty())
            return wrong;
    return "";
}

} // namespace bellows::bench
