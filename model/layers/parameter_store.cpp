// SPDX-License-Identifier: MIT
#include "parameter_store_impl.hpp"

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
    // A part may be one of many small parameters, or one of many of an embedding.
    struct Part {
        const ListedParameter* of;
        std::uint64_t first, count;
    };
    constexpr std::uint64_t kMost = std::uint64_t{1} << 20;
    std::vector<Part> parts;
    for (std::size_t i = begin; i < end; ++i)
        for (std::uint64_t at = 0, size = list[i].info.size(); at < size; at += kMost)
            parts.push_back({&list[i], at, std::min(kMost, size - at)});
    parallel_for(parts.size(), [&](std::size_t i) {
        const Part& part = parts[i];
        fill_initial_values(
            part.of->info, seed,
            std::span(values).subspan(part.of->first - first + part.first, part.count), part.first);
    });
    return values;
}

} // namespace

ParameterStore::Impl::Impl(Device& on, std::vector<ParameterInfo> mine, const WeightForms& kept_in,
                           MemorySource source)
    : device(on), forms(kept_in), list(std::move(mine)), memory(on, std::move(source)),
      parameters(parameters_of(list)), storage(on, list, forms, memory, parameters),
      copies(on, list, forms, memory, parameters) {
}

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

// What is not quantised, by blocks of many rows, passes by parts: an embedding may be large.
void ParameterStore::Impl::write(std::uint64_t first, std::span<const float> values) {
    const auto in_blocks = [&](const Parameter& parameter) {
        return parameter.first >= first && parameter.first < first + values.size() &&
               parameter.quantized;
    };
    const bool quantised = std::ranges::any_of(parameters, in_blocks);
    const std::uint64_t most = quantised ? values.size() : kInitialisedAtOnce;
    for (std::uint64_t at = 0; at < values.size(); at += most)
        write_part(first + at,
                   values.subspan(at, std::min<std::uint64_t>(most, values.size() - at)));
    make_copies(first, values.size());
}

ParameterStore::ParameterStore(Device& device, std::vector<ParameterInfo> mine, DType activation,
                               bool training, LinearPrecision linear, MemorySource memory,
                               LinearForms forms)
    : impl_(std::make_unique<Impl>(device, std::move(mine),
                                   WeightForms{activation, linear, training, std::move(forms)},
                                   std::move(memory))) {
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

bool ParameterStore::has_f32_scales() const noexcept {
    return impl_->copies.has_f32_scales();
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
