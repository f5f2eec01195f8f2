// SPDX-License-Identifier: MIT
#include <bellows/serve/language_model.hpp>

#include "model_source.hpp"

#include <bellows/base/error.hpp>
#include <bellows/comm/message.hpp>
#include <bellows/model/stage.hpp>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>

namespace bellows {

struct LanguageModel::Impl {
    Impl(const DeviceOptions& device_options, const std::filesystem::path& path,
         const LanguageModelOptions& options);
    /// [seq, vocabulary]; valid until the next call. Tokens beyond the text are zeros, which
    /// causality hides from it.
    std::span<const float> forward(std::span<const std::uint32_t> text);
    std::span<const float> row(std::span<const float> logits, std::uint64_t index) const {
        return logits.subspan(index * model.vocabulary, model.vocabulary);
    }

    ModelSource source;
    const ModelConfig& model;
    TrainingShape shape;
    std::chrono::milliseconds timeout;
    World world;
    std::unique_ptr<Device> device;
    std::unique_ptr<Transport> transport;
    HostThread thread;
    ParameterStore parameters;
    std::optional<ExpertExchange> exchange;
    std::optional<Stage> stage;
};

LanguageModel::Impl::Impl(const DeviceOptions& device_options, const std::filesystem::path& path,
                          const LanguageModelOptions& options)
    : source(path, options.precision), model(source.model()), shape(source.shape()),
      timeout(options.timeout), world(World::single()), device(Device::create(device_options)),
      transport(open_transport(world)), thread(*device, "exchange"),
      parameters(source.load(*device, false, options.on_progress, {})) {
    if (options.seq > 0)
        shape.seq = options.seq;
    shape.eplb_every = shape.eplb_slots = 0; // experts stand where they stand
    if (model.moe_layers() > 0)
        exchange.emplace(*device, world, *transport, thread,
                         exchange_config(model, shape, {}, 0, 0, shape.seq));
    StageDesc desc;
    desc.config = model;
    desc.seq = shape.seq;
    desc.training = false;
    stage.emplace(desc, parameters, exchange ? &*exchange : nullptr);
}

std::span<const float> LanguageModel::Impl::forward(std::span<const std::uint32_t> text) {
    const auto tokens = stage->token_buffer(0).mapped_as<std::uint32_t>();
    std::fill(tokens.begin(), tokens.end(), 0u);
    std::copy(text.begin(), text.end(), tokens.begin());
    for (const Node* node : stage->nodes(0, NodeKind::Forward))
        node->submit({});
    device->wait_idle(timeout);
    return stage->logits_buffer(0).mapped_as<const float>();
}

LanguageModel::LanguageModel(const DeviceOptions& device, const std::filesystem::path& checkpoint,
                             const LanguageModelOptions& options)
    : impl_(std::make_unique<Impl>(device, checkpoint, options)) {
}
LanguageModel::~LanguageModel() = default;

std::vector<float> LanguageModel::next(std::span<const std::uint32_t> text) {
    const std::uint64_t used = std::min<std::uint64_t>(text.size(), impl_->shape.seq);
    if (used == 0)
        throw Error(ErrorCode::InvalidArgument, "there is no text that a token could follow");
    const auto row = impl_->row(impl_->forward(text.last(used)), used - 1);
    return {row.begin(), row.end()};
}

double LanguageModel::loss(std::span<const std::uint32_t> tokens) {
    const std::uint64_t seq = impl_->shape.seq;
    if (tokens.size() != seq + 1)
        throw Error(ErrorCode::InvalidArgument, "a loss needs " + std::to_string(seq + 1) +
                                                    " tokens, not " +
                                                    std::to_string(tokens.size()));
    const auto logits = impl_->forward(tokens.first(seq));
    double sum = 0;
    for (std::uint64_t i = 0; i < seq; ++i) {
        const auto row = impl_->row(logits, i);
        const double greatest = *std::max_element(row.begin(), row.end());
        double total = 0;
        for (const float logit : row)
            total += std::exp(logit - greatest);
        sum += greatest + std::log(total) - row[tokens[i + 1]];
    }
    return sum / static_cast<double>(seq);
}

MemoryReport LanguageModel::memory_report() const {
    return impl_->device->memory_report();
}

} // namespace bellows
