// SPDX-License-Identifier: MIT
#include "bf16_upload.hpp"
#include "row_pieces.hpp"
#include "weight_copies.hpp"
#include "weight_storage.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/parallel.hpp>
#include <bellows/engine/ops.hpp>
#include <bellows/model/parameter_store.hpp>
#include <bellows/shape/sharded_ranges.hpp>

#include <algorithm>
#include <span>
#include <utility>

namespace bellows {

namespace {

/// The parameters of the list; their views are still empty.
std::vector<Parameter> parameters_of(const ParameterList& list) {
    std::vector<Parameter> parameters(list.size());
    for (std::size_t i = 0; i < list.size(); ++i) {
        parameters[i].info = list[i].info;
        parameters[i].first = list[i].first;
    }
    return parameters;
}

/// The initial values of parameters [begin, end), which stand side by side. The padding is zero.
std::vector<float> initial_elements(const ParameterList& list, std::size_t begin, std::size_t end,
                                    std::uint64_t seed) {
    const std::uint64_t first = list[begin].first;
    const ListedParameter& last = list[end - 1];
    std::vector<float> values(last.first + stored_elements(last.info) - first, 0.0f);
    parallel_for(end - begin, [&](std::size_t i) {
        const ListedParameter& parameter = list[begin + i];
        fill_initial_values(
            parameter.info, seed,
            std::span(values).subspan(parameter.first - first, parameter.info.size()));
    });
    return values;
}

} // namespace

struct ParameterStore::Impl {
    Impl(Device& on, std::vector<ParameterInfo> mine, const WeightForms& kept_in,
         MemorySource source)
        : device(on), forms(kept_in), list(std::move(mine)), memory(on, std::move(source)),
          parameters(parameters_of(list)), storage(on, list, forms, memory, parameters),
          copies(on, list, forms, memory, parameters) {}

    /// Elements from `first` on, whole parameters of one range.
    void write(std::uint64_t first, std::span<const float> values);
    /// The same without copies for products, and of one parameter a part where it is divisible.
    void write_part(std::uint64_t first, std::span<const float> values);
    void make_copies(std::uint64_t first, std::uint64_t count);
    /// A parameter of more elements than are set at once.
    void load_large(const ListedParameter& parameter, const RowSource& source,
                    const MasterSink& masters,
                    const std::function<void(std::uint64_t)>& on_progress);

    /// Whether layers read of them what is bf16 and nothing else.
    bool only_bf16(std::size_t begin, std::size_t end) const;
    void load_bf16(std::size_t begin, std::size_t end, const Bf16RowSource& source,
                   Bf16Upload& upload);

    Device& device;
    WeightForms forms;
    ParameterList list;
    WeightMemory memory;
    std::vector<Parameter> parameters; ///< with views of what `storage` and `copies` hold
    WeightStorage storage;
    WeightCopies copies;
};

void ParameterStore::Impl::write_part(std::uint64_t first, std::span<const float> values) {
    const std::uint64_t count = values.size();
    TensorView f32 = storage.f32_weights(first, count);
    Buffer passing;
    if (!f32.buffer) {
        passing = Buffer(device, {.name = "weights on their way",
                                  .bytes = std::max<std::uint64_t>(count * 4, 16),
                                  .category = MemoryCategory::Scratch});
        f32 = passing.tensor(DType::F32, {count});
    }
    device.upload(f32.buffer, values);
    Recording recording(device, QueueRole::Compute, "copies of weights");
    for (const Bf16Run& run : storage.bf16_runs(first, count))
        if (run.weights.buffer)
            ops::cast(recording, f32.rows(run.first - first, run.count), run.weights);
    copies.quantize(recording, first, f32);
    if (recording.num_operations() > 0)
        device.submit(recording).wait();
}

void ParameterStore::Impl::make_copies(std::uint64_t first, std::uint64_t count) {
    Recording recording(device, QueueRole::Compute, "copies of weights");
    copies.make_copies(recording, first, count);
    if (recording.num_operations() > 0)
        device.submit(recording).wait();
}

void ParameterStore::Impl::write(std::uint64_t first, std::span<const float> values) {
    write_part(first, values);
    make_copies(first, values.size());
}

void ParameterStore::Impl::load_large(const ListedParameter& parameter, const RowSource& source,
                                      const MasterSink& masters,
                                      const std::function<void(std::uint64_t)>& on_progress) {
    const ParameterInfo& info = parameter.info;
    const std::uint64_t rows = info.shape.front(), columns = info.size() / rows;
    const std::uint64_t step =
        std::max<std::uint64_t>(kInitialisedAtOnce / columns / kScaleRows, 1) * kScaleRows;
    std::vector<float> values;
    for (std::uint64_t row = 0; row < rows; row += step) {
        const std::uint64_t count = std::min(step, rows - row);
        const std::uint64_t padding = row + count < rows ? 0 : stored_elements(info) - info.size();
        values.resize(count * columns + padding);
        std::fill(values.end() - static_cast<std::ptrdiff_t>(padding), values.end(), 0.0f);
        std::vector<RowPiece<float>> pieces;
        add_pieces(pieces, info, row, count, std::span(values).first(count * columns));
        fill(pieces, source);
        const std::uint64_t first = parameter.first + row * columns;
        write_part(first, values);
        if (masters)
            masters(first, values);
        if (on_progress)
            on_progress(first + values.size());
    }
    make_copies(parameter.first, info.size());
}

bool ParameterStore::Impl::only_bf16(std::size_t begin, std::size_t end) const {
    for (std::size_t i = begin; i < end; ++i)
        if (forms.training || forms.in_f32(list[i].info) || !forms.in_bf16(list[i].info))
            return false;
    return true;
}

void ParameterStore::Impl::load_bf16(std::size_t begin, std::size_t end,
                                     const Bf16RowSource& source, Bf16Upload& upload) {
    const auto send = [&](std::uint64_t first, std::uint64_t count, const auto& add) {
        const std::span<std::uint16_t> values = upload.next(count);
        std::vector<RowPiece<std::uint16_t>> pieces;
        add(pieces, values);
        fill(pieces, source);
        upload.send(storage.bf16_runs(first, count).front().weights);
    };
    const ParameterInfo& only = list[begin].info;
    const std::uint64_t rows = only.shape.front(), columns = only.size() / rows;
    if (only.size() > kInitialisedAtOnce) { // it is alone
        const std::uint64_t step = std::max<std::uint64_t>(kInitialisedAtOnce / columns, 1);
        for (std::uint64_t row = 0; row < rows; row += step) {
            const std::uint64_t count = std::min(step, rows - row);
            send(list[begin].first + row * columns, count * columns,
                 [&](auto& pieces, auto values) { add_pieces(pieces, only, row, count, values); });
        }
        return;
    }
    const std::uint64_t first = list[begin].first;
    const ListedParameter& last = list[end - 1];
    send(first, last.first + stored_elements(last.info) - first, [&](auto& pieces, auto values) {
        for (std::size_t i = begin; i < end; ++i) {
            const ParameterInfo& info = list[i].info;
            const auto mine = values.subspan(list[i].first - first, stored_elements(info));
            std::ranges::fill(mine.subspan(info.size()), std::uint16_t{0});
            add_pieces(pieces, info, 0, info.shape.front(), mine.first(info.size()));
        }
    });
}

ParameterStore::ParameterStore(Device& device, std::vector<ParameterInfo> mine, DType activation,
                               bool training, LinearPrecision linear, MemorySource memory)
    : impl_(std::make_unique<Impl>(device, std::move(mine),
                                   WeightForms{activation, linear, training}, std::move(memory))) {
}

ParameterStore::~ParameterStore() = default;
ParameterStore::ParameterStore(ParameterStore&&) noexcept = default;
ParameterStore& ParameterStore::operator=(ParameterStore&&) noexcept = default;

Device& ParameterStore::device() const noexcept {
    return impl_->device;
}

DType ParameterStore::activation() const noexcept {
    return impl_->forms.activation;
}

LinearPrecision ParameterStore::linear_precision() const noexcept {
    return impl_->forms.linear;
}

bool ParameterStore::training() const noexcept {
    return impl_->forms.training;
}

void ParameterStore::use_products(const fp8::Choice& choice) {
    impl_->copies.use_products(choice);
}

const fp8::Choice& ParameterStore::products() const noexcept {
    return impl_->copies.products();
}

const ParameterList& ParameterStore::list() const noexcept {
    return impl_->list;
}

const std::vector<Parameter>& ParameterStore::all() const noexcept {
    return impl_->parameters;
}

const Parameter& ParameterStore::at(const std::string& name) const {
    return impl_->parameters[impl_->list.index_of(name)];
}

Parameter ParameterStore::experts(std::uint64_t layer, const std::string& matrix) const {
    return impl_->copies.experts(impl_->list.first_expert(layer, matrix));
}

TensorView ParameterStore::f32_weights(std::uint64_t first, std::uint64_t count) const {
    return impl_->storage.f32_weights(first, count);
}

std::vector<Bf16Run> ParameterStore::bf16_runs(std::uint64_t first, std::uint64_t count) const {
    return impl_->storage.bf16_runs(first, count);
}

const TensorView& ParameterStore::flat_gradients() const noexcept {
    return impl_->storage.gradients();
}

void ParameterStore::load(const RowSource& source, const MasterSink& masters,
                          const std::function<void(std::uint64_t elements)>& on_progress,
                          const Bf16RowSource& bf16) {
    const ParameterList& list = impl_->list;
    Bf16Upload upload(impl_->device, bf16 ? std::min(kInitialisedAtOnce, num_elements()) : 0);
    for (std::size_t begin = 0, end = 0; begin < list.size(); begin = end) {
        end = list.end_of_run(begin, kInitialisedAtOnce);
        const std::uint64_t first = list[begin].first;
        if (bf16 && !masters && impl_->only_bf16(begin, end)) {
            impl_->load_bf16(begin, end, bf16, upload);
            if (on_progress)
                on_progress(list[end - 1].first + stored_elements(list[end - 1].info));
            continue;
        }
        if (list[begin].info.size() > kInitialisedAtOnce && list[begin].info.shape.size() == 2) {
            impl_->load_large(list[begin], source, masters, on_progress);
            continue;
        }
        const ListedParameter& last = list[end - 1];
        std::vector<float> values(last.first + stored_elements(last.info) - first, 0.0f);
        std::vector<RowPiece<float>> pieces;
        for (std::size_t i = begin; i < end; ++i)
            add_pieces(pieces, list[i].info, 0, list[i].info.shape.front(),
                       std::span(values).subspan(list[i].first - first, list[i].info.size()));
        fill(pieces, source);
        impl_->write(first, values);
        if (masters)
            masters(first, values);
        if (on_progress)
            on_progress(first + values.size());
    }
    upload.wait();
}

void ParameterStore::initialise(std::uint64_t seed, const MasterSink& masters) {
    const ParameterList& list = impl_->list;
    for (std::size_t begin = 0, end = 0; begin < list.size(); begin = end) {
        end = list.end_of_run(begin, kInitialisedAtOnce);
        const std::vector<float> values = initial_elements(list, begin, end, seed);
        impl_->write(list[begin].first, values);
        if (masters)
            masters(list[begin].first, values);
    }
    if (training())
        clear_gradients().wait();
}

void ParameterStore::quantize(Recording& recording, std::uint64_t first,
                              const TensorView& masters) const {
    impl_->copies.quantize(recording, first, masters);
}

void ParameterStore::make_copies(Recording& recording, std::uint64_t first,
                                 std::uint64_t count) const {
    impl_->copies.make_copies(recording, first, count);
}

std::vector<SentCopy> ParameterStore::sent_copies(std::uint64_t first,
                                                  std::span<const std::uint64_t> shares) const {
    std::vector<std::uint64_t> ends{first}; // of the parts before each, and of all
    for (const std::uint64_t share : shares)
        ends.push_back(ends.back() + share);
    std::vector<SentCopy> copies;
    impl_->storage.add_sent_copies(copies, ends);
    impl_->copies.add_sent_copies(copies, ends);
    return copies;
}

void ParameterStore::upload(const std::string& name, std::span<const float> values) {
    const Parameter& parameter = at(name);
    if (values.size() != parameter.info.size())
        throw Error(ErrorCode::InvalidArgument,
                    name + " has " + std::to_string(parameter.info.size()) + " elements, not " +
                        std::to_string(values.size()));
    impl_->write(parameter.first, values);
}

std::vector<float> ParameterStore::download(const std::string& name) const {
    const Parameter& parameter = at(name);
    if (!parameter.weight.buffer)
        throw Error(ErrorCode::InvalidArgument,
                    name + " is not kept in f32; whoever trains it has its master weight");
    std::vector<float> values(parameter.info.size());
    impl_->device.download(parameter.weight.buffer, std::span<float>(values));
    return values;
}

std::vector<float> ParameterStore::download_gradient(const std::string& name) const {
    const Parameter& parameter = at(name);
    if (!parameter.gradient.buffer)
        throw Error(ErrorCode::InvalidArgument, name + " has no gradient: it is not trained");
    std::vector<float> values(parameter.info.size());
    impl_->device.download(parameter.gradient.buffer, std::span<float>(values));
    return values;
}

TimePoint ParameterStore::clear_gradients() {
    return impl_->storage.clear_gradients();
}

} // namespace bellows
